"""The dashboard: what runs, what it costs and why. It reads the database with the read-only role."""

from importlib.util import find_spec

NEEDS = "the dashboard needs the extra `dashboard`: pip install 'infaas[dashboard]'"


def can_show() -> bool:
    """Whether Streamlit is installed, which most of its code needs."""
    return find_spec("streamlit") is not None
