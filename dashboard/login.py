"""Who may see the dashboard: everybody who reaches it, or who logs in with OpenID Connect where that is configured."""

from collections.abc import Sequence

import streamlit as st
from streamlit.errors import StreamlitSecretNotFoundError


def allowed(email: str | None, allow: Sequence[str]) -> bool:
    """Whether this address may look. allow: addresses, or @domain; empty: everybody."""
    if not allow:
        return True
    address = (email or "").strip().lower()
    return any(address == each.lower() or (each.startswith("@") and address.endswith(each.lower())) for each in allow)


_required: list[bool] = []


def require() -> None:
    """From now on nobody gets in without logging in, whatever else is or is not configured."""
    _required.append(True)


def admit() -> None:
    """Let the visitor through, or show what there is to do and end the page here."""
    if not _configured():
        if _required:
            st.error("Logging in is required and not configured: see docs/dashboard.md.")
            st.stop()
        return
    allow = list(st.secrets.get("allow", []))
    if not st.user.get("is_logged_in", False):
        st.title("INFaaS", anchor=False)
        st.write("This dashboard is for people who are known here.")
        st.button("Log in", type="primary", on_click=st.login)
        st.stop()
    email = st.user.get("email") if st.user.get("email_verified", True) else None
    if not allowed(str(email) if email else None, allow):
        st.error(f"{email or 'This account'} may not see this dashboard: ask its operator (dashboard.allow).")
        st.button("Log out", on_click=st.logout)
        st.stop()


def leave() -> None:
    """For whoever is logged in: as whom, and a way out."""
    if _configured():
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption(f"Logged in as {st.user.get('email') or st.user.get('name') or 'somebody without a name'}.")
            st.button("Log out", on_click=st.logout, type="tertiary")


def _configured() -> bool:
    try:
        return "auth" in st.secrets
    except StreamlitSecretNotFoundError:
        return False
