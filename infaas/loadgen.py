"""Load on a running system, for `infaas bench` and benches/: closed loop, or open loop counted from the intended send time.

An open loop never waits for answers, and a query that could not be sent on time has been waiting since it should have
been: slow answers are not hidden by sending less (no coordinated omission). The generator's own lateness is reported.
"""

import asyncio
import itertools
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, field

from bus.codec import DECODE_ERRORS
from infaas.arrivals import MOST, Times
from infaas.client import Client
from infaas.errors import InfaasError, NotConnected, Timeout
from infaas.queries import Prepared

BURST = 256  # sendings before replies get a turn
MOST_WAITING = 20_000  # open queries; what comes on top is not sent and counts as failed


class _Error(Struct, gc=False):
    code: str = ""


class _Head(Struct, gc=False):
    """What a load generator reads of a reply; the outputs are skipped undecoded."""

    variant: str = ""
    accuracy: float | None = None
    cost: float = 0.0
    missed: list[str] = []
    error: _Error | None = None


_head = msgspec.msgpack.Decoder(_Head).decode


class Report(Struct, kw_only=True):
    """What a run showed. Latencies in ms: from the intended (open loop) or actual (closed) sending to the reply, at the client.

    slo_attainment: answers within latency_ms (all answers when none was asked) over all offered. effective_accuracy: mean
    measured accuracy of the answers in time. cost_per_1000: US$ per 1,000 items answered. late_send_*: how much later than
    intended the generator itself sent.
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


class Generator:
    """One run of prepared queries, sent in turn (all with the same requirements). warmup: seconds at the start that are sent but not counted. items: in each query."""

    def __init__(self, client: Client, prepared: Sequence[Prepared], *, items: int = 1, warmup: float = 0.0) -> None:
        self._client = client
        self._prepared = itertools.cycle(prepared)
        self._first = first = prepared[0]
        self._items = items
        self._warmup = warmup
        self._latencies = array("d")
        self._lateness = array("d")
        self._in_time = 0
        self._accuracy = 0.0
        self._rated = 0
        self._cost = 0.0
        self._offered = 0
        self._waiting = 0
        self._refusals: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._variants: Counter[str] = Counter()
        self._limit = float("inf") if first.latency_ms is None else first.latency_ms / 1000

    async def closed(self, clients: int, seconds: float) -> Report:
        """`clients` queries under way all the time, each followed by the next as soon as its reply is there."""
        resent = self._client.resent
        self._begin(seconds)
        for _ in range(clients):
            self._send(time.monotonic(), self._settled_closed)
        await self._finished
        return self._report(f"closed loop of {clients}", seconds, resent)

    async def open(self, times: Times, seconds: float, kind: str) -> Report:
        """One query at each of `times` (seconds from now), whatever the answers do."""
        resent = self._client.resent
        self._begin(seconds)
        self._times = times.tolist()
        self._next = 0
        self._pump()
        await self._finished
        return self._report(f"open loop, {kind}, {len(times) / seconds:.1f}/s", seconds, resent)

    # -- the run

    def _begin(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._start = self._last = time.monotonic()
        self._counted = self._start + self._warmup
        self._end = self._start + seconds
        self._ended = False

    def _pump(self) -> None:
        """Send what is due, then sleep until the next."""
        times, start = self._times, self._start
        due = time.monotonic() - start
        last = min(self._next + BURST, len(times))
        while self._next < last and times[self._next] <= due and not self._ended:
            intended = start + times[self._next]
            self._next += 1
            if intended >= self._counted:
                self._lateness.append(time.monotonic() - intended)
            self._send(intended, self._settled)
        if self._next == len(times) or self._ended:
            self._stop_sending()
        elif times[self._next] <= due:
            self._loop.call_soon(self._pump)
        else:
            self._loop.call_later(start + times[self._next] - time.monotonic(), self._pump)

    def _send(self, intended: float, settled: Any) -> None:
        counted = intended >= self._counted
        self._offered += counted
        if self._waiting >= MOST_WAITING:
            self._failures["not_sent"] += counted
            return
        self._waiting += 1
        try:
            self._client.send(next(self._prepared), partial(settled, intended))
        except InfaasError as error:
            self._waiting -= 1
            self._failures[_name(error)] += counted
            self._ended = self._ended or isinstance(error, NotConnected)

    def _settled_closed(self, intended: float, reply: bytes | InfaasError) -> None:
        self._settled(intended, reply)
        now = self._last
        if now < self._end and self._offered < MOST and not self._ended:
            self._send(now, self._settled_closed)
        else:
            self._stop_sending()

    def _settled(self, intended: float, reply: bytes | InfaasError) -> None:
        self._last = now = time.monotonic()
        self._waiting -= 1
        if intended >= self._counted:
            self._count(now - intended, reply)
        if self._ended:
            self._check_finished()

    def _count(self, took: float, reply: bytes | InfaasError) -> None:
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
        self._latencies.append(took)
        self._cost += head.cost
        self._variants[head.variant] += 1
        for what in head.missed:
            self._missed[what] += 1
        if took <= self._limit and "latency" not in head.missed:
            self._in_time += 1
            if head.accuracy is not None:
                self._accuracy += head.accuracy
                self._rated += 1

    def _stop_sending(self) -> None:
        self._ended = True
        self._check_finished()

    def _check_finished(self) -> None:
        if self._ended and self._waiting == 0 and not self._finished.done():
            self._finished.set_result(None)

    # -- what it showed

    def _report(self, mode: str, seconds: float, resent: int) -> Report:
        answered = len(self._latencies)
        refused, failed = self._refusals.total(), self._failures.total()
        measured = max(seconds - self._warmup, self._last - self._counted)
        latencies = 1000 * np.frombuffer(self._latencies) if answered else None
        p50, p95, p99 = (None,) * 3 if latencies is None else map(float, np.percentile(latencies, [50, 95, 99]))
        late = 1000 * np.frombuffer(self._lateness) if self._lateness else None
        return Report(
            app=self._first.subject.rpartition(".")[2],
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
            latency_ms=self._first.latency_ms,
            slo_attainment=self._in_time / self._offered if self._offered else 0.0,
            effective_accuracy=self._accuracy / self._rated if self._rated else None,
            cost_per_1000=1000 * self._cost / (answered * self._items) if answered else None,
            refusals=dict(self._refusals.most_common()),
            failures=dict((+self._failures).most_common()),
            missed=dict(self._missed.most_common()),
            variants=dict(self._variants.most_common()),
            late_send_p99_ms=None if late is None else float(np.percentile(late, 99)),
            late_send_max_ms=None if late is None else float(late.max()),
            resent=self._client.resent - resent,
        )


def _name(error: Exception) -> str:
    if isinstance(error, Timeout):
        return "timeout"
    return "not_connected" if isinstance(error, NotConnected) else "not_sent"
