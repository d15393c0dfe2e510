"""Who may see the dashboard: everybody, or with OpenID Connect configured, everybody who logs in and is allowed."""

from collections.abc import Sequence

import streamlit as st
from streamlit.errors import StreamlitSecretNotFoundError


def allowed(email: str | None, allow: Sequence[str]) -> bool:
    """Whether this e-mail address may see the dashboard. allow: addresses and @domains; empty: everybody."""
    if not allow:
        return True
    address = (email or "").strip().lower()
    return any(address == each.lower() or (each.startswith("@") and address.endswith(each.lower())) for each in allow)


_required: list[bool] = []


def set_login_required() -> None:
    """Require a login from now on. Without a configured login, nobody gets in."""
    _required.append(True)


def require_access() -> None:
    """Let the visitor see the page, or show how to log in and end the page."""
    if not _configured():
        if _required:
            st.error("A login is required but not configured: see docs/dashboard.md.")
            st.stop()
        return
    allow = list(st.secrets.get("allow", []))
    if not st.user.get("is_logged_in", False):
        st.title("INFaaS", anchor=False)
        st.write("Log in to see this dashboard.")
        st.button("Log in", type="primary", on_click=st.login)
        st.stop()
    email = st.user.get("email") if st.user.get("email_verified", True) else None
    if not allowed(str(email) if email else None, allow):
        st.error(f"{email or 'This account'} may not see this dashboard: ask its operator (dashboard.allow).")
        st.button("Log out", on_click=st.logout)
        st.stop()


def show_logout() -> None:
    """Show who is logged in, and a button to log out."""
    if _configured():
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption(f"Logged in as {st.user.get('email') or st.user.get('name') or 'an unnamed user'}.")
            st.button("Log out", on_click=st.logout, type="tertiary")


def _configured() -> bool:
    try:
        return "auth" in st.secrets
    except StreamlitSecretNotFoundError:
        return False
