"""What the generators of one protocol each share: requests in a closed or an open loop, checked now and then, and one JSON line in the end."""

import argparse
import asyncio
import json
import math
import re
import resource
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import uvloop

CHECKED = 32  # one reply in so many is compared
WARM_UP_S = 1.0
PATIENCE_S = 5.0  # after the end of an open loop, for what is still under way
IN_TIME_S = 0.1  # beyond its deadline within which a refusal is in time
LOOK_S = 0.001  # between looks at how late a generator itself is
FULL = 200_000  # bytes of one read, from which on more may have waited
_NUMBERS = re.compile(rb"\[([-+0-9.eE,\s]+)\]")


class Refusals:
    """When refusals came, of queries that may take `latency_s`, counted from when they were written.

    The generator's own loop may be late: whatever it reads came after the time before, when its socket was empty. Both are counted, from when it is read and from then.
    """

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._looked = (0.0, 0.0)  # the looks before
        self._behind = False
        self.count = self.late = self.late_outside = 0
        self.worst = self.worst_outside = self.own = -math.inf
        self._look()

    def _look(self) -> None:
        if not self._behind:
            self._looked = (self._looked[1], time.perf_counter())
        asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def read(self, size: int) -> None:
        """So many bytes came at once."""
        self._behind = size >= FULL

    def came(self, sent: float) -> None:
        """A refusal of a query that was written then."""
        now, due = time.perf_counter(), sent + self._latency_s
        outside = max(sent, self._looked[0]) - due
        self.count += 1
        self.late += now - due > IN_TIME_S
        self.late_outside += outside > IN_TIME_S
        self.worst, self.worst_outside = max(self.worst, now - due), max(self.worst_outside, outside)
        self.own = max(self.own, now - self._looked[0])

    def report(self) -> dict[str, float]:
        """worst: s after the deadline in ms; `outside`: without what the generator itself may have added, of which `own_ms` is the most."""
        found = {"worst_ms": self.worst, "worst_outside_ms": self.worst_outside, "own_ms": self.own}
        counts = {"refused": self.count, "refused_late": self.late, "refused_late_outside": self.late_outside}
        return counts | {name: 1000 * max(seconds, -1.0) for name, seconds in found.items()}


class Run:
    """What all connections share. requests: whole; expected: the class that each answer must name, -1: not looked at."""

    def __init__(
        self, requests: list[bytes], expected: list[int], classes: int, *, as_json: bool = False, paced: bool = False
    ) -> None:
        self.requests, self.expected, self.classes = requests, expected, classes
        self.as_json, self.paced = as_json, paced
        self.sent = self.wrong = self.answered = 0
        self.last = 0.0
        self.errors: dict[str, int] = {}
        self.latencies: list[float] = []
        self.refusals: Refusals | None = None
        self.measuring = self.over = False
        self.since = 0.0  # what was due before does not count
        self._due: deque[float] = deque()
        self._idle: list[Callable[[float], None]] = []

    def next(self) -> int:
        """The number of the request that is to be sent now."""
        number = self.sent % len(self.requests)
        self.sent += 1
        return number

    def free(self, send: Callable[[float], None]) -> None:
        """A connection can send. Closed loop: now; open loop: as soon as a request is due."""
        if self.over or not self.paced:
            send(time.perf_counter())
        elif self._due:
            send(self._due.popleft())
        else:
            self._idle.append(send)

    async def pace(self, rate: float, seconds: float) -> float:
        """Poisson arrivals, after the warm-up for so many seconds; returns the generator's own lateness, the 99th percentile in ms."""
        gaps = np.random.default_rng(0).exponential(1 / rate, int(2 * rate * (WARM_UP_S + seconds)) + 100)
        began = time.perf_counter()
        self.since = began + WARM_UP_S
        late = []
        for due in (began + np.cumsum(gaps)).tolist():
            if due > self.since + seconds:
                break
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            late.append(time.perf_counter() - due)
            if self._idle:
                self._idle.pop()(due)
            else:
                self._due.append(due)
        return float(np.percentile(late or [0.0], 99)) * 1000

    async def rest(self) -> None:
        """Wait for what is under way; what does not come is an error."""
        end = time.perf_counter() + PATIENCE_S
        while (left := self.sent + len(self._due) - self.answered) and time.perf_counter() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if left:
            self.errors["unanswered"] = left

    def hang_up(self) -> None:
        """It is over: connections close, those that wait for a reply after it."""
        self.over = True
        for send in self._idle:
            send(0.0)

    def took(self, began: float) -> None:
        """A reply came."""
        self.answered += 1
        if self.measuring and began >= self.since:
            self.last = time.perf_counter()
            self.latencies.append(self.last - began)

    def failed(self, name: str) -> None:
        self.errors[name] = self.errors.get(name, 0) + 1

    def check(self, number: int, body: bytes) -> None:
        """Compare a reply's scores with what they must say: its last bytes, or the last list of numbers in JSON."""
        if self.expected[number] < 0:
            return
        if self.as_json:
            lists = _NUMBERS.findall(body)
            scores = np.fromstring(lists[-1].decode(), sep=",") if lists else np.zeros(1)
        else:
            scores = np.frombuffer(body[-4 * self.classes :], "<f4")
        self.wrong += len(scores) != self.classes or int(scores.argmax()) != self.expected[number]

    def report(self, began: float, late: float) -> str:
        """The line that is printed. Raises SystemExit if no answer came."""
        if not self.latencies:
            raise SystemExit(f"no answer within the time: {self.errors}")
        found = np.array(self.latencies) * 1000
        used = resource.getrusage(resource.RUSAGE_SELF)
        return json.dumps(
            {
                "rate": len(found) / (self.last - began),
                "p50_ms": float(np.percentile(found, 50)),
                "p99_ms": float(np.percentile(found, 99)),
                "answered": len(found),
                "answered_all": self.answered,
                "errors": self.errors,
                "wrong": self.wrong,
                "late_p99_ms": late,
                "generator_cpu_s": used.ru_utime + used.ru_stime,
            }
            | (self.refusals.report() if self.refusals else {})
        )


Begin = Callable[[Run, str, int, int, asyncio.TaskGroup], None]  # host, port, number: starts one connection


async def _main(options: argparse.Namespace, begin: Begin) -> None:
    with np.load(options.requests) as stored:
        requests = [row.tobytes() for row in stored["requests"]]
        run = Run(
            requests,
            stored["expected"].tolist(),
            int(stored["classes"]),
            as_json=options.json,
            paced=options.rate > 0,
        )
    late = 0.0
    run.refusals = Refusals(options.latency_ms / 1000) if options.latency_ms else None
    async with asyncio.TaskGroup() as group:
        for number in range(options.closed):
            begin(run, options.host, options.port, number, group)
        if run.paced:
            run.measuring = True
            late = await run.pace(options.rate, options.seconds)
            await run.rest()
            began = run.since
        else:
            await asyncio.sleep(WARM_UP_S)
            began = time.perf_counter()
            run.measuring = True
            await asyncio.sleep(options.seconds)
        run.measuring = False
        run.hang_up()
    print(run.report(began, late))


def generate(description: str, begin: Begin, *, paced: bool = False) -> None:
    """The generator's command. paced: it can send in an open loop, too."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("requests")
    parser.add_argument("--closed", type=int, default=8, help="connections, each with one request under way")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", action="store_true", help="replies are JSON: scores are their last list of numbers")
    parser.set_defaults(rate=0.0, latency_ms=0.0)
    if paced:
        parser.add_argument("--rate", type=float, default=0.0, help="open loop at so many requests a second")
        parser.add_argument(
            "--latency-ms", type=float, default=0.0, help="of these requests: say how late refusals are"
        )
    uvloop.run(_main(parser.parse_args(), begin))
