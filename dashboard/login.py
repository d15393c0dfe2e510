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


def admit() -> None:
    """Let the visitor through, or show what there is to do and end the page here."""
    try:
        if "auth" not in st.secrets:
            return
        allow = list(st.secrets.get("allow", []))
    except StreamlitSecretNotFoundError:
        return
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
