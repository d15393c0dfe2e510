"""The dashboard's start page: access, and the list of pages."""

from pathlib import Path

import streamlit as st

from dashboard.login import require_access, show_logout

HERE = Path(__file__).parent
PAGES = (
    ("overview", "Overview", ":material/monitoring:"),
    ("variants", "Variants", ":material/account_tree:"),
    ("workers", "Workers", ":material/dns:"),
    ("cost", "Cost", ":material/payments:"),
    ("slo", "SLO", ":material/timer:"),
    ("applications", "Applications", ":material/apps:"),
    ("members", "Members", ":material/groups:"),
    ("pipelines", "Pipelines", ":material/schema:"),
    ("shadow", "Shadow", ":material/compare_arrows:"),
    ("explain", "Explain", ":material/quiz:"),
    ("jobs", "Jobs", ":material/stacks:"),
)

st.set_page_config(page_title="INFaaS", page_icon=HERE / "icon.svg", layout="wide")
# Parts that refresh themselves stay as they are meanwhile.
st.html(
    "<style>.stMainBlockContainer {padding-top: 4.2rem; padding-bottom: 3rem} .stStatusWidget {display: none}"
    " [data-stale=true] {opacity: 1 !important; transition: none !important}</style>"
)
require_access()
st.navigation(
    [
        st.Page(HERE / "views" / f"{file}.py", title=title, icon=icon, url_path=file, default=not number)
        for number, (file, title, icon) in enumerate(PAGES)
    ],
    position="top",
).run()
show_logout()
