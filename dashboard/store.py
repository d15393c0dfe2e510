"""Asks the database, as the read-only role: a pool that all visitors share, and answers that are kept for a moment.

The statements are the files of `sql/`, one each, known by their names: nothing else in the dashboard speaks SQL.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from math import inf
from os import dup
from pathlib import Path
from socket import SHUT_RDWR, socket
from threading import Timer
from time import monotonic
from typing import Any

import pandas as pd
import psycopg
import streamlit as st
from psycopg.types.numeric import FloatLoader
from psycopg_pool import ConnectionPool, PoolTimeout

from dashboard.window import Window
from infaas.blocking import Infaas, connect_blocking
from infaas.connecting import SystemAddress, locate
from infaas.errors import InfaasError, NotConnected, Refused, Timeout

SQL = Path(__file__).parent / "sql"
PATIENCE = 2.0  # s to wait for a connection, and for which nobody tries again once there was none
LONGEST = 20_000  # ms that one statement may take
FLOATS = (700, 701, 1700)  # the codes of PostgreSQL's float4, float8 and numeric
KEPT, KEPT_LONG = 1.9, 55.0  # s; what is asked again sooner is answered from memory, whoever asks
MOST_KEPT = 400  # answers


class NoData(Exception):
    """There is no answer. The text says why; remedy: what to do about it, in Markdown; away: the whole database, not this answer."""

    def __init__(self, why: str, remedy: str, *, away: bool = False) -> None:
        super().__init__(why)
        self.remedy = remedy
        self.away = away


def ask(name: str, **parameters: Any) -> pd.DataFrame:
    """The answer to `sql/<name>.sql` as it was at most 2 s ago; raises NoData. Times are aware, in UTC."""
    return _fresh(_dsn(), name, parameters)


def history(name: str, window: Window, **parameters: Any) -> pd.DataFrame:
    """The same for a part of the past; of a long one, or one that is over, it may be a minute old."""
    answer = _settled if window.long or not window.refresh else _fresh
    return answer(_dsn(), name, {**window.parameters, **parameters})


@st.cache_data(ttl=KEPT, max_entries=MOST_KEPT, show_spinner=False)
def _fresh(dsn: str, name: str, parameters: dict[str, Any]) -> pd.DataFrame:
    return _read(dsn, name, parameters)


@st.cache_data(ttl=KEPT_LONG, max_entries=MOST_KEPT, show_spinner=False)
def _settled(dsn: str, name: str, parameters: dict[str, Any]) -> pd.DataFrame:
    return _read(dsn, name, parameters)


def _read(dsn: str, name: str, parameters: dict[str, Any]) -> pd.DataFrame:
    since, why = _down.get(dsn, (-inf, ""))
    if monotonic() - since < PATIENCE:
        raise NoData(why, _START, away=True)
    try:
        # The server ends what takes too long; the rest is patience with one that has gone silent.
        with _pool(dsn).connection() as connection, _no_longer(connection, LONGEST / 1000 + PATIENCE):
            cursor = connection.execute(statement(name), parameters)
            columns = cursor.description or ()
            frame = pd.DataFrame(cursor.fetchall(), columns=[column.name for column in columns])
    except psycopg.errors.QueryCanceled:
        raise NoData(
            f"the database did not answer within {LONGEST / 1000:.0f} s", "Choose a shorter range of time."
        ) from None
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, psycopg.errors.InvalidSchemaName) as error:
        raise NoData(_line(error), _PREPARE) from None
    except psycopg.OperationalError as error:
        why = f"the database does not answer: {_line(error)}"
        if isinstance(error, PoolTimeout):
            _pool.clear(
                dsn
            )  # it would try again less and less often; a new one does so at once, and knows why it fails
            why = "the database does not answer, or is too busy to take one more connection"
        _down[dsn] = monotonic(), why
        raise NoData(why, _START, away=True) from None
    except psycopg.Error as error:
        raise NoData(_line(error), _START) from None
    for column in columns:
        if column.type_display == "timestamptz":
            frame[column.name] = pd.to_datetime(frame[column.name], utc=True)
        elif column.type_code in FLOATS:  # which pandas cannot see where all are NULL; charts then took them for texts
            frame[column.name] = frame[column.name].astype(float)
    return frame


_START = (
    "`infaas doctor` finds out what is missing. Start the system with `infaas up`; the database's log is in `logs/` of its data"
    " directory. This page goes on by itself once there is an answer."
)
_PREPARE = "The database has another version's schema, or none: start the system again with `infaas up`, or see docs/sql.md (Roles and set-up)."


def _dsn() -> str:
    try:
        return endpoints().sql
    except NotConnected as error:
        raise NoData(str(error), _START, away=True) from None


_down: dict[str, tuple[float, str]] = {}  # since when which database has been away, and why


@cache
def statement(name: str) -> bytes:
    """The SQL of this name."""
    return (SQL / f"{name}.sql").read_bytes()


@st.cache_resource(max_entries=2, show_spinner=False, on_release=lambda pool: pool.close(timeout=0))
def _pool(dsn: str) -> ConnectionPool:
    """All visitors' connections; raises OperationalError at once where none can be had."""
    psycopg.connect(dsn, connect_timeout=2).close()
    limits = f"-c default_transaction_read_only=on -c statement_timeout={LONGEST} -c timezone=UTC"
    return ConnectionPool(
        dsn,
        min_size=1,
        max_size=4,
        open=True,
        timeout=PATIENCE,
        max_idle=120.0,
        check=_check,
        configure=lambda connection: connection.adapters.register_loader("numeric", FloatLoader),
        name="dashboard",
        kwargs={
            "autocommit": True,
            "application_name": "infaas dashboard",
            "connect_timeout": 5,
            "options": limits,
        },
    )


def _check(connection: psycopg.Connection[Any]) -> None:
    """Whether a connection of the pool still leads to somebody; raises OperationalError."""
    with _no_longer(connection, PATIENCE / 2):
        ConnectionPool.check_connection(connection)


@contextmanager
def _no_longer(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """What waits longer for this connection gets an OperationalError: a server that hangs, or a network that swallows everything,
    would else be waited for as long as TCP hopes.
    """

    def hang_up() -> None:
        with suppress(OSError, psycopg.Error), socket(fileno=dup(connection.fileno())) as line:
            line.shutdown(SHUT_RDWR)

    timer = Timer(seconds, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# -- Where the dashboard finds its system: told by whoever serves it, else as the commands find one.

_told: list[SystemAddress] = []


def tell(endpoints: SystemAddress | None) -> None:
    """Say where the system is, for the whole process; None: look for it again at every question."""
    _told[:] = [] if endpoints is None else [endpoints]


def endpoints() -> SystemAddress:
    """Where the system is; raises NotConnected when a data directory is named and nothing runs there."""
    return _told[0] if _told else locate()


# -- Asks the running system itself, over the bus, through the client library: for what is not in the database.

_START_ASKING = "`infaas doctor` finds out what is missing. Start the system with `infaas up`."


@st.cache_resource(max_entries=2, show_spinner=False, on_release=lambda client: client.close())
def _client(nats: str, prefix: str) -> Infaas:
    return connect_blocking(nats, prefix=prefix, timeout=2.0)


@st.cache_data(ttl=1.0, max_entries=100, show_spinner=False)
def _explanation(nats: str, prefix: str, app: str, needs: dict[str, Any]) -> dict[str, Any]:
    return _client(nats, prefix).explain(app, **needs)


def explain(app: str, needs: dict[str, Any]) -> dict[str, Any]:
    """The decision that a query would get now, see `infaas.Client.explain`; raises Refused, NoData. Sends no query."""
    try:
        place = endpoints()
        return _explanation(place.nats, place.prefix, app, needs)
    except Refused:
        raise
    except NotConnected as error:
        raise NoData(str(error), _START_ASKING) from None
    except Timeout as error:
        raise NoData(f"no dispatcher answered: {error}", _START_ASKING) from None
    except InfaasError as error:
        raise NoData(str(error), _START_ASKING) from None
