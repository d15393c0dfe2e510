"""Parts of a page that follow the system by themselves, and what is shown while there is nothing to show."""

from collections.abc import Callable
from functools import wraps

import streamlit as st

from dashboard.store import Unavailable
from dashboard.window import Window

PARTS = "parts"  # in the session: how many parts the page has so far


def follow(window: Window | None, part: Callable[[], None]) -> None:
    """Draw a part of the page now, and again as often as its window is worth it; trouble is told in its place.

    That there is no database at all is told once a page, by its first part.
    """
    every = 5.0 if window is None else window.refresh
    number = st.session_state.get(PARTS, 0)
    st.session_state[PARTS] = number + 1

    @wraps(part)
    def guarded() -> None:
        try:
            part()
        except Unavailable as trouble:
            if trouble.away and number:
                return
            st.error(f"**No data:** {trouble}", icon=":material/cloud_off:")
            st.markdown(trouble.remedy)

    st.fragment(guarded, run_every=every or None)()


def nothing(what: str, remedy: str) -> None:
    """Say that something is empty, and how it would not be."""
    st.info(f"{what}\n\n{remedy}", icon=":material/info:")
