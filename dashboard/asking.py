"""Asks the running system itself, over the bus, through the client library: for what is not in the database."""

from typing import Any

import streamlit as st

from dashboard.place import endpoints
from dashboard.store import Unavailable
from infaas.blocking import Infaas, connect_blocking
from infaas.errors import InfaasError, NotConnected, Refused, Timeout

_START = "`infaas doctor` finds out what is missing. Start the system with `infaas up`."


@st.cache_resource(max_entries=2, show_spinner=False, on_release=lambda client: client.close())
def _client(nats: str, prefix: str) -> Infaas:
    return connect_blocking(nats, prefix=prefix, timeout=2.0)


@st.cache_data(ttl=1.0, max_entries=100, show_spinner=False)
def _explanation(nats: str, prefix: str, app: str, needs: dict[str, Any]) -> dict[str, Any]:
    return _client(nats, prefix).explain(app, **needs)


def explain(app: str, needs: dict[str, Any]) -> dict[str, Any]:
    """The decision that a query would get now, see `infaas.Client.explain`; raises Refused, Unavailable. Sends no query."""
    try:
        place = endpoints()
        return _explanation(place.nats, place.prefix, app, needs)
    except Refused:
        raise
    except NotConnected as error:
        raise Unavailable(str(error), _START) from None
    except Timeout as error:
        raise Unavailable(f"no dispatcher answered: {error}", _START) from None
    except InfaasError as error:
        raise Unavailable(str(error), _START) from None
