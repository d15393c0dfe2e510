"""Data for the pages: SQL queries with the read-only role; explanations, answers and pipelines from the running system.

All visitors share a pool of connections, and results are cached for a moment. Each SQL statement is one file of `sql/`. No other module
of the dashboard uses SQL.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from http.client import HTTPConnection, HTTPException
from math import inf
from os import dup
from pathlib import Path
from socket import SHUT_RDWR, socket
from threading import Lock, Semaphore, Thread, Timer
from time import monotonic
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import pandas as pd
import psycopg
import streamlit as st
from psycopg.types.numeric import FloatLoader
from psycopg_pool import ConnectionPool, PoolTimeout
from streamlit.runtime.scriptrunner import add_script_run_ctx

from bus.durability import weaknesses
from bus.login import SystemAddress
from bus.subjects import WITHOUT_APP
from dashboard import formats
from dashboard.serve import FAILURES, STATEMENTS, log_directory, system_address
from dashboard.window import Window
from infaas.answers import Answer
from infaas.blocking import Infaas, connect_blocking
from infaas.connecting import read_endpoints
from infaas.errors import BadInput, InfaasError, NotConnected, Refused, Timeout

Result = TypeVar("Result")
SQL = Path(__file__).parent / "sql"
CONNECT_S = 2.0  # to wait for a connection; after a failure nobody tries again for so long
MAX_STATEMENT_MS = 20_000  # for one statement
CONNECTIONS = 4
_beside = Semaphore(
    CONNECTIONS - 2
)  # statements that are read ahead at a time: there is a connection for who asks, and one for the next visitor
APPS = ("app", "name")  # columns that may hold an app's name
FLOATS = (700, 701, 1700)  # the codes of PostgreSQL's float4, float8 and numeric
CACHE_S, CACHE_LONG_S = 1.9, 55.0  # for so long, a result is served from the cache to all visitors
MAX_CACHED = 400  # results
SOON_S = 0.5  # that a page waits for an answer which it can do without
ASK_S = 60.0  # for the answer to a query, which may have to wait for a model to be loaded


class NoData(Exception):
    """There is no result. The text says why. remedy: what to do, in Markdown. away: the database cannot be reached at all."""

    def __init__(self, why: str, remedy: str, *, away: bool = False) -> None:
        super().__init__(why)
        self.remedy = remedy
        self.away = away


def query(name: str, **parameters: Any) -> pd.DataFrame:
    """The result of `sql/<name>.sql`, at most 2 s old. Times are aware, in UTC. Raises NoData."""
    return _fresh(_dsn(), name, parameters)


def history(name: str, window: Window, **parameters: Any) -> pd.DataFrame:
    """The result of `sql/<name>.sql` for a window. For a long or past window it may be a minute old. Raises NoData."""
    read = _past if window.long or not window.refresh else _fresh
    return read(_dsn(), name, {**window.parameters, **parameters})


def ahead(window: Window, *names: str) -> None:
    """Begin to read these `history` of a long window, which the page asks for one after the other: some beside each other take half the time."""
    if window.long:
        for name in names:
            thread = Thread(target=_begin, args=(name, window), daemon=True)
            add_script_run_ctx(thread)
            thread.start()


def _begin(name: str, window: Window) -> None:
    with _beside, suppress(NoData):  # who asks for it hears of it
        history(name, window)


@st.cache_data(ttl=CACHE_S, max_entries=MAX_CACHED, show_spinner=False)
def _fresh(dsn: str, name: str, parameters: dict[str, Any]) -> pd.DataFrame:
    return _read(dsn, name, parameters)


@st.cache_data(ttl=CACHE_LONG_S, max_entries=MAX_CACHED, show_spinner=False)
def _past(dsn: str, name: str, parameters: dict[str, Any]) -> pd.DataFrame:
    return _read(dsn, name, parameters, whole=b"LIMIT" not in statement(name))


def _read(dsn: str, name: str, parameters: dict[str, Any], *, whole: bool = False) -> pd.DataFrame:
    with STATEMENTS.labels(name).time(), FAILURES.labels(name).count_exceptions():
        return _read_now(dsn, name, parameters, whole)


@contextmanager
def _ahead(connection: psycopg.Connection[Any], whole: bool) -> Iterator[None]:
    """Where the whole of a past or long window is asked for, rows are read ahead, as a bitmap scan does: from a disk in a third of the time."""
    with connection.transaction() if whole else nullcontext():
        if whole:
            connection.execute("SET LOCAL enable_indexscan = off")
        yield


def _read_now(dsn: str, name: str, parameters: dict[str, Any], whole: bool) -> pd.DataFrame:
    since, why = _unreachable.get(dsn, (-inf, ""))
    if monotonic() - since < CONNECT_S:
        raise NoData(why, _START_DATABASE, away=True)
    try:
        # The server ends long statements. The time limit here is for a server that does not respond at all.
        limit = MAX_STATEMENT_MS / 1000 + CONNECT_S
        with _pool(dsn).connection() as connection, _time_limit(connection, limit), _ahead(connection, whole):
            cursor = connection.execute(statement(name), parameters)
            columns = cursor.description or ()
            frame = pd.DataFrame(cursor.fetchall(), columns=[column.name for column in columns])
    except psycopg.errors.QueryCanceled:
        raise NoData(
            f"the database did not answer within {MAX_STATEMENT_MS / 1000:.0f} s", "Choose a shorter range of time."
        ) from None
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, psycopg.errors.InvalidSchemaName) as error:
        raise NoData(_line(error), _PREPARE) from None
    except psycopg.OperationalError as error:
        why = f"the database does not answer: {_line(error)}"
        if isinstance(error, PoolTimeout):
            # the pool would retry ever more rarely; a new pool connects at once and reports the reason
            _pool.clear(dsn)
            why = "the database does not answer, or is too busy to take one more connection"
        _unreachable[dsn] = monotonic(), why
        raise NoData(why, _START_DATABASE, away=True) from None
    except psycopg.Error as error:
        raise NoData(_line(error), _START_DATABASE) from None
    for column in columns:
        if column.name in APPS:
            frame[column.name] = frame[column.name].replace(WITHOUT_APP, formats.BY_MODEL)
        elif column.type_display == "timestamptz":
            frame[column.name] = pd.to_datetime(frame[column.name], utc=True)
        elif (
            column.type_code in FLOATS
        ):  # pandas cannot tell the type if all values are NULL; charts would take them for text
            frame[column.name] = frame[column.name].astype(float)
    return frame


_START_DATABASE = (
    "`infaas doctor` finds out what is missing. Start the system with `infaas up`; the database's log is in `logs/` of its data"
    " directory. This page goes on by itself once there is an answer."
)
_START_SYSTEM = "`infaas doctor` finds out what is missing. Start the system with `infaas up`."
_PREPARE = "The database has another version's schema, or none: start the system again with `infaas up`, or see docs/sql.md (Roles and set-up)."


def _dsn() -> str:
    try:
        return system_address().sql
    except NotConnected as error:
        raise NoData(str(error), _START_DATABASE, away=True) from None


_unreachable: dict[str, tuple[float, str]] = {}  # DSN: since when the database cannot be reached, and why


@cache
def statement(name: str) -> bytes:
    """The SQL of this name."""
    return (SQL / f"{name}.sql").read_bytes()


@st.cache_resource(max_entries=2, show_spinner=False, on_release=lambda pool: pool.close(timeout=0))
def _pool(dsn: str) -> ConnectionPool:
    """The connections of all visitors. Raises OperationalError at once if none can be made."""
    psycopg.connect(dsn, connect_timeout=2).close()
    limits = (
        f"-c default_transaction_read_only=on -c statement_timeout={MAX_STATEMENT_MS} -c timezone=UTC -c work_mem=32MB"
    )
    return ConnectionPool(
        dsn,
        min_size=1,
        max_size=CONNECTIONS,
        open=True,
        timeout=CONNECT_S,
        max_idle=120.0,
        check=_check,
        configure=lambda connection: connection.adapters.register_loader("numeric", FloatLoader),
        name="dashboard",
        kwargs={"autocommit": True, "application_name": "infaas dashboard", "connect_timeout": 5, "options": limits},
    )


def _check(connection: psycopg.Connection[Any]) -> None:
    """Check that a connection of the pool still works. Raises OperationalError."""
    with _time_limit(connection, CONNECT_S / 2):
        ConnectionPool.check_connection(connection)


@contextmanager
def _time_limit(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Close the connection after so many seconds; whoever waits for it gets an OperationalError.

    Otherwise a server that hangs, or a broken network, would block a page for as long as TCP retries.
    """

    def close_line() -> None:
        with suppress(OSError, psycopg.Error), socket(fileno=dup(connection.fileno())) as line:
            line.shutdown(SHUT_RDWR)

    timer = Timer(seconds, close_line)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


@st.cache_resource(max_entries=2, show_spinner=False, on_release=lambda client: client.close())
def _client(nats: str, prefix: str) -> Infaas:
    return connect_blocking(nats, prefix=prefix, timeout=2.0)


@st.cache_data(ttl=1.0, max_entries=100, show_spinner=False)
def _explanation(nats: str, prefix: str, app: str, needs: dict[str, Any]) -> dict[str, Any]:
    return _client(nats, prefix).explain(app, **needs)


@st.cache_data(ttl=CACHE_S, max_entries=100, show_spinner=False)
def _pipelines(nats: str, prefix: str) -> list[dict[str, Any]]:
    return _client(nats, prefix).pipelines()


def explain(app: str, needs: dict[str, Any]) -> dict[str, Any]:
    """The decision that a query would get now (`infaas.Client.explain`). Sends no query. Raises Refused, NoData."""
    return _ask(_explanation, app, needs)


class _Aside(Generic[Result]):
    """The last answer to a question that may take seconds: a page shows what is known. A thread asks again, `every` s after an answer.

    nothing: what is known of a system that has not answered yet.
    """

    def __init__(self, ask: Callable[[], Result], nothing: Result, every: float) -> None:
        self._ask, self._nothing, self._every = ask, nothing, every
        self._of: SystemAddress | None = None
        self._known, self._due = nothing, -inf
        self._lock = Lock()

    def __call__(self) -> Result:
        with suppress(NotConnected):
            of = system_address()
            thread = Thread(target=self._find, args=(of,), daemon=True)
            with self._lock:
                if self._of != of:
                    self._of, self._known, self._due = of, self._nothing, -inf
                if asks := monotonic() >= self._due:
                    self._due = inf
            if asks:
                thread.start()
                thread.join(SOON_S)
        return self._known

    def _find(self, of: SystemAddress) -> None:
        found = self._nothing
        try:
            with suppress(NoData, Refused):  # pages that need an answer say so
                found = self._ask()
        finally:
            with self._lock:
                if of == self._of:
                    self._known, self._due = found, monotonic() + self._every


@partial(_Aside, nothing=list[str](), every=5.0)
def not_ready() -> list[str]:
    """What the system on this machine says that it lacks (`/readyz`, docs/metrics.md). Empty if it lacks nothing or cannot be asked."""
    try:
        page = urlsplit(read_endpoints(log_directory().parent).metrics or "")
        connection = HTTPConnection(page.hostname or "", page.port, timeout=CONNECT_S)
        try:
            connection.request("GET", "/readyz")
            told = json.loads(connection.getresponse().read(65_536))
        finally:
            connection.close()
        return [str(each) for each in told.get("missing", [])]
    except (InfaasError, OSError, HTTPException, ValueError, AttributeError):
        return []


def ask(app: str, inputs: Any, needs: dict[str, Any], traceparent: str) -> Answer:
    """Send one query and wait for its answer. traceparent: W3C trace context. Raises Refused, BadInput, NoData."""

    def send(nats: str, prefix: str) -> Answer:
        answer: Answer = _client(nats, prefix).query(app, inputs, timeout=ASK_S, traceparent=traceparent, **needs)
        return answer

    return _ask(send)


def classes_of(app: str) -> list[str]:
    """The names of the app's classes, in the order of its scores; empty: there are none. Raises Refused, NoData."""
    rows = _ask(lambda nats, prefix: _client(nats, prefix).apps(app=app))
    return list(rows[0].get("labels", [])) if rows else []


@partial(_Aside, nothing=dict[str, str](), every=5.0)
def unserved() -> dict[str, str]:
    """The apps that nobody can serve, and why (`infaas.Client.apps`)."""
    rows = _ask(lambda nats, prefix: _client(nats, prefix).apps())
    return {row["app"]: row["unserved"] for row in rows if row.get("unserved")}


@partial(_Aside, nothing=list[str](), every=CACHE_LONG_S)
def weaknesses_of_nats() -> list[str]:
    """What a NATS server of the user's own may lose, as it says itself."""
    address = system_address()
    return [weak.text for weak in weaknesses(address.nats, address.monitoring) if weak.certain]


def cancel_registration(registration: str) -> None:
    """Stop a registration, or dismiss a failed one (`infaas.Client.cancel_registration`). Raises Refused, NoData."""
    _ask(lambda nats, prefix: _client(nats, prefix).cancel_registration(registration))


def pipelines() -> list[dict[str, Any]]:
    """The pipelines with their graphs and plans, and how each stage is served now (`infaas.Client.pipelines`). Raises Refused, NoData."""
    return _ask(_pipelines)


@partial(_Aside, nothing=list[dict[str, Any]](), every=CACHE_S)
def known_pipelines() -> list[dict[str, Any]]:
    """`pipelines`, as far as known."""
    return pipelines()


@partial(_Aside, nothing=list[dict[str, Any]](), every=CACHE_S)
def releases() -> list[dict[str, Any]]:
    """The last release of each app, with what was counted of it (`infaas.Client.releases`)."""
    return _ask(lambda nats, prefix: _client(nats, prefix).releases())


def _ask(what: Callable[..., Result], *asked: Any) -> Result:
    try:
        address = system_address()
        return what(address.nats, address.prefix, *asked)
    except (Refused, BadInput):
        raise
    except NotConnected as error:
        raise NoData(str(error), _START_SYSTEM) from None
    except Timeout as error:
        raise NoData(f"no dispatcher answered: {error}", _START_SYSTEM) from None
    except InfaasError as error:
        raise NoData(str(error), _START_SYSTEM) from None
