"""Refuses a query that the gateway itself cannot get through in time, before a task is made for it.

A request costs the gateway half a millisecond, and its refusal by what is behind no less. So beyond saturation the loop's turns grow, and what waits in
sockets is older than its objective before it is read. A refusal here costs a tenth of that.

What is in the way is measured (`Turns`): how long a query may have waited in its socket, and what those take that were read before it, there and back.
Nothing is refused here while the turns are short, nor a query without an objective, or of an app with a default output.
"""

import re
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable

from services.gateway.edge import GatewayService
from services.gateway.http.messages import HttpRequest, app_of

SHARE = 0.8  # of a query's objective that its way may take: the rest is for the system behind
SHORT_S = 0.005  # of a turn, and of a way, that is no reason to refuse anything
SEVERAL = 8  # requests from which on a turn is measured: fewer are no burden, or another's large body is
TYPICAL_S = 0.0005  # of a request, until a turn is measured: the first flood of a gateway is not admitted as a whole
TURNS = 5  # so many of the last ones say what a request takes: their median, since now and then a process stands still
_TIMES = re.compile(rb'"(latency_ms|timeout)"\s*:\s*"?(\d+\.?\d*(?:[eE][-+]?\d+)?)')
_UNREAD = frozenset({b"content-encoding", b"origin", b"sec-fetch-site"})  # it must be inflated; a page of others asks


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


class Shedding:
    """The decision, for all connections of a server."""

    def __init__(self, service: GatewayService) -> None:
        self.turns = Turns()
        self._service = service

    def refuses(self, request: HttpRequest, protocol: str) -> bool:
        """Whether a query that has come whole is not to be started: `BEHIND` is its reply. protocol: of its route. The checks before have let it pass."""
        way = self.turns.way()
        if way < SHORT_S or not _UNREAD.isdisjoint(request.headers):
            return False
        record = self._service.catalog.app(app_of(request) or "")
        if record is None or record.default_output is not None:
            return False
        objective_ms = objective_of(request.body, record.latency_ms)
        if objective_ms is None or 1000.0 * way <= SHARE * objective_ms:
            return False
        self.turns.refused += 1
        self._service.shed(record.app, protocol, objective_ms)
        return True


def objective_of(body: bytes, of_app: float | None) -> float | None:
    """The most ms that a query may take: what its parameters say, else its app's objective, and no more than its timeout. None: there is no limit."""
    own = {name: float(value) for name, value in _TIMES.findall(body)}
    timeout = own.get(b"timeout", 0.0) / 1000.0
    return min(filter(None, (own.get(b"latency_ms", of_app), timeout)), default=None)
