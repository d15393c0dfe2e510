"""The dashboard's start page: access, and the pages in groups."""

from pathlib import Path

import streamlit as st

from dashboard.login import require_access, show_logout
from dashboard.widgets import SCREEN, take_arrival

HERE = Path(__file__).parent
PAGES = {  # by group: file, title, icon
    "": (("overview", "Overview", ":material/monitoring:"),),
    "Queries": (
        ("try_query", "Try a query", ":material/play_circle:"),
        ("queries", "Recent queries", ":material/list_alt:"),
        ("explain", "Explain", ":material/quiz:"),
        ("slo", "SLO", ":material/timer:"),
    ),
    "Applications": (
        ("applications", "Applications", ":material/apps:"),
        ("registrations", "Registrations", ":material/upload_file:"),
        ("members", "Members", ":material/groups:"),
        ("pipelines", "Pipelines", ":material/schema:"),
        ("jobs", "Jobs", ":material/stacks:"),
    ),
    "System": (
        ("variants", "Variants", ":material/account_tree:"),
        ("workers", "Workers", ":material/dns:"),
        ("cost", "Cost", ":material/payments:"),
        ("shadow", "Shadow", ":material/compare_arrows:"),
        ("logs", "Logs", ":material/article:"),
    ),
}

st.set_page_config(page_title="INFaaS", page_icon=HERE / "icon.svg", layout="wide")
# Parts that refresh themselves stay as they are meanwhile.
st.html(
    "<style>.stMainBlockContainer {padding-top: 4.2rem; padding-bottom: 3rem} .stStatusWidget {display: none}"
    " [data-stale=true] {opacity: 1 !important; transition: none !important}"
    f" .stVerticalBlock.st-key-{SCREEN} {{flex: none; height: max(25rem, 100dvh - 28rem)}}</style>"
)
require_access()
pages = {
    group: [
        st.Page(HERE / "views" / f"{file}.py", title=title, icon=icon, url_path=file) for file, title, icon in members
    ]
    for group, members in PAGES.items()
}


def start() -> None:
    """The address without a page leads to Overview, which has one of its own."""
    st.switch_page(pages[""][0], query_params=st.query_params.to_dict())


first = st.Page(start, title="INFaaS", default=True, visibility="hidden")
chosen = st.navigation({**pages, "": [*pages[""], first]}, position="top")
take_arrival()
chosen.run()
show_logout()
st.html(f"<script>{(HERE / 'hover.js').read_text()}</script>", unsafe_allow_javascript=True)
