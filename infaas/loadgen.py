"""Load on a running system, for `infaas bench` and benches/: a closed or an open loop.

An open loop never waits for answers. The latency of each query counts from the time at which it was due, even if it was sent later. So
slow answers do not lower the load (no coordinated omission). The report also tells how late the generator itself sent.
"""

import asyncio
import itertools
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from bus.codec import DECODE_ERRORS
from infaas.client import Client
from infaas.errors import InfaasError, NotConnected, Timeout
from infaas.queries import Prepared

Times = NDArray[np.float64]
Apps = NDArray[np.int64]

MAX_QUERIES = 20_000_000  # of one run
BURST = 256  # queries that are sent before replies are read
MAX_WAITING = 20_000  # queries in flight; further ones are not sent and count as failed


class _Error(Struct, gc=False):
    code: str = ""


class _Head(Struct, gc=False):
    """The fields of a reply that a load generator reads. The outputs are not decoded."""

    variant: str = ""
    accuracy: float | None = None
    cost: float = 0.0
    missed: list[str] = []
    error: _Error | None = None


_head = msgspec.msgpack.Decoder(_Head).decode


class AppReport(Struct, kw_only=True):
    """One app's part of a run."""

    offered: int
    answered: int
    slo_attainment: float
    p99_ms: float | None


class LoadReport(Struct, kw_only=True):
    """The results of a run. Latencies in ms at the client, to the reply: from the due time (open loop) or the sending (closed loop).

    app: names, separated by commas. apps: the results of each app. slo_attainment: share of all queries that were answered within
    latency_ms (that were answered, without latency_ms). effective_accuracy: mean accuracy of the answers in time. cost_per_1000: US$
    per 1,000 answered items. late_send_*: delay of the generator itself, from the due time to the sending.
    """

    app: str
    mode: str
    seconds: float
    offered: int
    answered: int
    refused: int
    failed: int
    throughput_qps: float
    mean_ms: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    latency_ms: float | None
    slo_attainment: float
    effective_accuracy: float | None
    cost_per_1000: float | None
    refusals: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    variants: dict[str, int] = field(default_factory=dict)
    late_send_p99_ms: float | None = None
    late_send_max_ms: float | None = None
    resent: int = 0
    apps: dict[str, AppReport] = field(default_factory=dict)


class _AppCounts:
    """The counts of one app."""

    def __init__(self, prepared: Sequence[Prepared]) -> None:
        self.turn = itertools.cycle(prepared)
        self.offered = self.in_time = 0
        self.latencies = array("d")

    def report(self) -> AppReport:
        return AppReport(
            offered=self.offered,
            answered=len(self.latencies),
            slo_attainment=self.in_time / self.offered if self.offered else 0.0,
            p99_ms=1000 * float(np.percentile(self.latencies, 99)) if self.latencies else None,
        )


def in_shares(shares: Sequence[float], rng: np.random.Generator) -> Iterator[int]:
    """Endless random numbers of apps, by the apps' shares."""
    while True:
        yield from rng.choice(len(shares), 1024, p=shares).tolist()


class Generator:
    """One run. prepared: the queries of each app, sent in turn, all with the same requirements.

    warmup: seconds at the start in which queries are sent but not counted. items: items in each query.
    """

    def __init__(
        self, client: Client, prepared: Mapping[str, Sequence[Prepared]], *, items: int = 1, warmup: float = 0.0
    ) -> None:
        self._client = client
        self._names = tuple(prepared)
        self._parts = [_AppCounts(queries) for queries in prepared.values()]
        self._items = items
        self._warmup = warmup
        self._lateness = array("d")
        self._accuracy = 0.0
        self._rated = 0
        self._cost = 0.0
        self._offered = 0
        self._waiting = 0
        self._refusals: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._variants: Counter[str] = Counter()
        self._latency_ms = next(iter(prepared.values()))[0].latency_ms
        self._limit = float("inf") if self._latency_ms is None else self._latency_ms / 1000

    async def closed(self, clients: int, seconds: float, which: Iterator[int] | None = None) -> LoadReport:
        """Keep `clients` queries in flight: each reply is followed by the next query.

        which: endless numbers of apps, one for each query; None: always the first app.
        """
        resent = self._client.resent
        self._which = itertools.repeat(0) if which is None else which
        self._begin(seconds)
        for _ in range(clients):
            self._send(time.monotonic(), next(self._which), self._settled_closed)
        await self._finished
        return self._report(f"closed loop of {clients}", seconds, resent)

    async def open(self, arrivals: Iterable[tuple[Times, Apps]], seconds: float, kind: str) -> LoadReport:
        """Send one query at each of the times, however slow the answers are.

        arrivals: chunks of times (seconds from now, ascending), each with the numbers of the apps to query.
        """
        resent = self._client.resent
        self._chunks = iter(arrivals)
        self._times: list[float] = []
        self._apps: list[int] = []
        self._next = self._due = 0
        self._begin(seconds)
        self._pump()
        await self._finished
        return self._report(f"open loop, {kind}, {self._due / seconds:.1f}/s", seconds, resent)

    def so_far(self) -> tuple[float, int, int, int]:
        """Seconds of the measurement, and the queries sent, answered, and answered in time in it. Seconds below 0: it warms up."""
        answered = sum(len(part.latencies) for part in self._parts)
        return time.monotonic() - self._counted, self._offered, answered, sum(part.in_time for part in self._parts)

    # -- the run

    def _begin(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._start = self._last = time.monotonic()
        self._counted = self._start + self._warmup
        self._end = self._start + seconds
        self._ended = False

    def _pump(self) -> None:
        """Send the queries that are due, and come back for the next one."""
        start = self._start
        due = time.monotonic() - start
        last = self._due + BURST
        while self._more() and self._due < last and self._times[self._next] <= due and not self._ended:
            intended = start + self._times[self._next]
            app = self._apps[self._next]
            self._next += 1
            self._due += 1
            if intended >= self._counted:
                self._lateness.append(time.monotonic() - intended)
            self._send(intended, app, self._settled)
        if self._ended or not self._more():
            self._stop_sending()
        elif self._times[self._next] <= due:
            self._loop.call_soon(self._pump)
        else:
            self._loop.call_later(start + self._times[self._next] - time.monotonic(), self._pump)

    def _more(self) -> bool:
        """Whether there is a next arrival. Fetches its chunk if needed."""
        while self._next == len(self._times):
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            self._times, self._apps, self._next = chunk[0].tolist(), chunk[1].tolist(), 0
        return True

    def _send(self, intended: float, app: int, settled: Any) -> None:
        counted = intended >= self._counted
        part = self._parts[app]
        self._offered += counted
        part.offered += counted
        if self._waiting >= MAX_WAITING:
            self._failures["not_sent"] += counted
            return
        self._waiting += 1
        try:
            self._client.send(next(part.turn), partial(settled, intended, part))
        except InfaasError as error:
            self._waiting -= 1
            self._failures[_name(error)] += counted
            self._ended = self._ended or isinstance(error, NotConnected)

    def _settled_closed(self, intended: float, part: _AppCounts, reply: bytes | InfaasError) -> None:
        self._settled(intended, part, reply)
        now = self._last
        if now < self._end and self._offered < MAX_QUERIES and not self._ended:
            self._send(now, next(self._which), self._settled_closed)
        else:
            self._stop_sending()

    def _settled(self, intended: float, part: _AppCounts, reply: bytes | InfaasError) -> None:
        self._last = now = time.monotonic()
        self._waiting -= 1
        if intended >= self._counted:
            self._count(now - intended, part, reply)
        if self._ended:
            self._check_finished()

    def _count(self, took: float, part: _AppCounts, reply: bytes | InfaasError) -> None:
        if isinstance(reply, InfaasError):
            self._failures[_name(reply)] += 1
            return
        try:
            head = _head(reply)
        except DECODE_ERRORS:
            self._failures["bad_reply"] += 1
            return
        if head.error is not None:
            self._refusals[head.error.code] += 1
            return
        part.latencies.append(took)
        self._cost += head.cost
        self._variants[head.variant] += 1
        for what in head.missed:
            self._missed[what] += 1
        if took <= self._limit and "latency" not in head.missed:
            part.in_time += 1
            if head.accuracy is not None:
                self._accuracy += head.accuracy
                self._rated += 1

    def _stop_sending(self) -> None:
        self._ended = True
        self._check_finished()

    def _check_finished(self) -> None:
        if self._ended and self._waiting == 0 and not self._finished.done():
            self._finished.set_result(None)

    # -- the report

    def _report(self, mode: str, seconds: float, resent: int) -> LoadReport:
        answered = sum(len(part.latencies) for part in self._parts)
        refused, failed = self._refusals.total(), self._failures.total()
        measured = max(seconds - self._warmup, self._last - self._counted)
        latencies = 1000 * np.concatenate([np.array(part.latencies) for part in self._parts]) if answered else None
        p50, p95, p99 = (None,) * 3 if latencies is None else map(float, np.percentile(latencies, [50, 95, 99]))
        late = 1000 * np.frombuffer(self._lateness) if self._lateness else None
        return LoadReport(
            app=",".join(self._names),
            mode=mode,
            seconds=measured,
            offered=self._offered,
            answered=answered,
            refused=refused,
            failed=failed,
            throughput_qps=answered / measured,
            mean_ms=None if latencies is None else float(latencies.mean()),
            p50_ms=p50,
            p95_ms=p95,
            p99_ms=p99,
            max_ms=None if latencies is None else float(latencies.max()),
            latency_ms=self._latency_ms,
            slo_attainment=sum(part.in_time for part in self._parts) / self._offered if self._offered else 0.0,
            effective_accuracy=self._accuracy / self._rated if self._rated else None,
            cost_per_1000=1000 * self._cost / (answered * self._items) if answered else None,
            refusals=dict(self._refusals.most_common()),
            failures=dict((+self._failures).most_common()),
            missed=dict(self._missed.most_common()),
            variants=dict(self._variants.most_common()),
            late_send_p99_ms=None if late is None else float(np.percentile(late, 99)),
            late_send_max_ms=None if late is None else float(late.max()),
            resent=self._client.resent - resent,
            apps={name: part.report() for name, part in zip(self._names, self._parts, strict=True)},
        )


def _name(error: Exception) -> str:
    if isinstance(error, Timeout):
        return "timeout"
    return "not_connected" if isinstance(error, NotConnected) else "not_sent"
