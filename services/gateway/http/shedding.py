"""Refuses a query that the gateway itself cannot get through in time, before a task and the middlewares are made for it.

A request costs the gateway half a millisecond, and its refusal by what is behind no less. So beyond saturation the loop's turns grow, and what waits in
sockets is older than its objective before it is read. A refusal here costs a tenth of that.

What is in the way is measured (`Turns`): how long a query may have waited in its socket, and what those take that were read before it, there and back.
Nothing is refused here while the turns are short, nor a query without an objective, or of an app with a default output.
"""

import re
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.routing import Match, Route

from services.gateway.edge import BEHIND, GatewayService
from services.gateway.errors import RequestFailed
from services.gateway.http.access import AccessControl, Right
from services.gateway.http.bodies import BodyBuffer, JsonReply

QUERIES = ("/infer", "/predict", "/classify")  # ends of paths that change nothing
SHARE = 0.8  # of a query's objective that its way may take: the rest is for the system behind
SHORT_S = 0.005  # of a turn, and of a way, that is no reason to refuse anything
SEVERAL = 8  # requests from which on a turn is measured: fewer are no burden, or another's large body is
TYPICAL_S = 0.0005  # of a request, until a turn is measured: the first flood of a gateway is not admitted as a whole
TURNS = 5  # so many of the last ones say what a request takes: their median, since now and then a process stands still
_TIMES = re.compile(rb'"(latency_ms|timeout)"\s*:\s*"?(\d+\.?\d*(?:[eE][-+]?\d+)?)')
_BROWSERS = frozenset({b"origin", b"sec-fetch-site"})  # a page may not be told, or needs the headers of CORS

ErrorReply = Callable[[RequestFailed], JsonReply]  # a failure in a dialect's form


class Turns:
    """How long a request needs to get through the loop, measured from turn to turn. clock: seconds.

    In a turn, uvloop first reads each socket that has something, then runs what that made ready. A callback put there by the first read runs before
    the tasks of the requests: it marks the end of the reads. Put there again, it marks those of the next turn, and the loop does not wait in between.
    What is read in a turn came after the reads of the turn before had begun: it would have been read then.

    admitted, refused: requests of this turn.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.admitted = self.refused = 0
        self._began: float | None = None  # when this turn's reads began; None: there were none yet
        self._before: float | None = None  # when those of the turn before began; None: the loop may have waited since
        self._ran: float | None = None  # when what that turn had made ready began to run
        self._running = 0  # requests admitted in it, where they are what it ran
        self._marked = False  # the mark is put
        self._each = deque((TYPICAL_S,), TURNS)  # s that the last turns ran, by the requests admitted in them
        self._takes = TYPICAL_S  # s that a request takes

    def read(self, loop: AbstractEventLoop) -> None:
        """A socket has something."""
        if self._began is None:
            self._began = self._clock()
            if not self._marked:
                self._marked = True
                loop.call_soon(self._mark, loop)

    def waited(self) -> float:
        """Seconds for which a request that is read now may have been in its socket; 0 where the loop may have waited for it."""
        since = self._before
        if since is None:
            if self.admitted < SEVERAL or self._began is None:
                return 0.0
            since = self._began
        return self._clock() - since

    def way(self) -> float:
        """The same, and what those take that were admitted before it in this turn: it waits for them now, and its answer for theirs."""
        return self.waited() + 2.0 * self._takes * self.admitted

    def _mark(self, loop: AbstractEventLoop) -> None:
        """The reads of a turn are over."""
        now = self._clock()
        began = now if self._began is None else self._began
        ran = 0.0 if self._ran is None else began - self._ran
        if self._running:
            self._each.append(ran / self._running)
            self._takes = sorted(self._each)[len(self._each) // 2]
        several = self.admitted >= SEVERAL or self.refused
        if several or ran > SHORT_S:
            self._before, self._ran = began, now
            self._running = self.admitted if several else 0
            loop.call_soon(self._mark, loop)
        else:
            self._before = self._ran = None
            self._running = 0
            self._marked = False
        self._began, self.admitted, self.refused = None, 0, 0


class QueryRoute(NamedTuple):
    """A route that takes queries. protocol: the dialect's name in metrics. failed: the form of its errors."""

    route: Route
    protocol: str
    failed: ErrorReply


class Shedding:
    """The decision, for all connections of a server."""

    def __init__(self, routes: Iterable[QueryRoute], service: GatewayService, access: AccessControl) -> None:
        self.turns = Turns()
        self._routes = [(each, each.failed(BEHIND)) for each in routes]
        self._service = service
        self._access = access

    def refusal(self, scope: dict[str, Any], body: BodyBuffer, *, stays: bool) -> bytes | None:
        """The whole reply to a request that has come whole and is not to be started; None: it is. stays: its connection serves more requests."""
        way = self.turns.way()
        if way < SHORT_S or not scope["path"].endswith(QUERIES) or not self._may_be_told(scope["headers"]):
            return None
        found = self._asked(scope)
        if found is None:
            return None
        app, protocol, reply = found
        record = self._service.catalog.app(app)
        if record is None or record.default_output is not None:
            return None
        objective_ms = objective_of(bytes(body), record.latency_ms)
        if objective_ms is None or 1000.0 * way <= SHARE * objective_ms:
            return None
        self.turns.refused += 1
        self._service.shed(record.app, protocol, objective_ms)
        self._service.counts.ended(protocol, str(reply.status), 0.0, len(body), len(reply.body))
        return _whole(reply, stays=stays)

    def _asked(self, scope: dict[str, Any]) -> tuple[str, str, JsonReply] | None:
        """The app that a query names, its protocol, and that protocol's refusal; None: it is no query, or names none."""
        for (route, protocol, _), reply in self._routes:
            match, child = route.matches(scope)
            if match is Match.FULL:
                app = app_of({**scope, **child})
                return None if app is None else (app, protocol, reply)
        return None

    def _may_be_told(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the checks behind this door would let the request pass, and its body can be read."""
        credential = None
        for name, value in headers:
            if name == b"content-encoding" or name in _BROWSERS:
                return False
            if name == b"authorization":
                credential = value.decode("latin-1")
        return self._access.free(Right.QUERY) or not self._access.verdict(Right.QUERY, credential)[0]


def app_of(scope: Any) -> str | None:
    """The app that a query's path asks for, which may not exist."""
    named = scope["path_params"]
    name: str = named.get("app") or named.get("model") or Request(scope).query_params.get("model_name", "")
    return name.partition(".")[0] or None


def objective_of(body: bytes, of_app: float | None) -> float | None:
    """The most ms that a query may take: what its parameters say, else its app's objective, and no more than its timeout. None: there is no limit."""
    own = {name: float(value) for name, value in _TIMES.findall(body)}
    timeout = own.get(b"timeout", 0.0) / 1000.0
    return min(filter(None, (own.get(b"latency_ms", of_app), timeout)), default=None)


@lru_cache(32)
def _whole(reply: JsonReply, *, stays: bool) -> bytes:
    """A reply's bytes, as the server would send them."""
    more = {**(reply.headers or {}), **({} if stays else {"connection": "close"})}
    lines = "".join(f"{name.lower()}: {value}\r\n" for name, value in more.items())
    head = (
        f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(reply.body)}\r\n{lines}\r\n"
    )
    return head.encode("latin-1") + reply.body
