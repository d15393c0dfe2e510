"""What the generators of one protocol each share: requests in a closed loop, checked now and then, and one JSON line in the end."""

import argparse
import asyncio
import json
import resource
import time
from collections.abc import Callable

import numpy as np
import uvloop

CHECKED = 32  # one reply in so many is compared
WARM_UP_S = 1.0


class Run:
    """What all connections share. requests: whole; expected: the class that each answer must name, -1: not looked at."""

    def __init__(self, requests: list[bytes], expected: list[int], classes: int) -> None:
        self.requests, self.expected, self.classes = requests, expected, classes
        self.sent = self.wrong = 0
        self.last = 0.0
        self.errors: dict[str, int] = {}
        self.latencies: list[float] = []
        self.measuring = self.over = False

    def next(self) -> int:
        """The number of the request that is to be sent now."""
        number = self.sent % len(self.requests)
        self.sent += 1
        return number

    def took(self, began: float) -> None:
        """A reply came."""
        if self.measuring:
            self.last = time.perf_counter()
            self.latencies.append(self.last - began)

    def failed(self, name: str) -> None:
        self.errors[name] = self.errors.get(name, 0) + 1

    def check(self, number: int, scores: bytes) -> None:
        """Compare a reply's raw scores with what they must say."""
        if self.expected[number] >= 0:
            self.wrong += int(np.frombuffer(scores, "<f4").argmax()) != self.expected[number]

    def report(self, began: float) -> str:
        found = np.array(self.latencies) * 1000
        used = resource.getrusage(resource.RUSAGE_SELF)
        return json.dumps(
            {
                "rate": len(found) / (self.last - began),
                "p50_ms": float(np.percentile(found, 50)),
                "p99_ms": float(np.percentile(found, 99)),
                "answered": len(found),
                "errors": self.errors,
                "wrong": self.wrong,
                "generator_cpu_s": used.ru_utime + used.ru_stime,
            }
        )


Begin = Callable[[Run, str, int, int, asyncio.TaskGroup], None]  # host, port, number: starts one connection


async def _main(options: argparse.Namespace, begin: Begin) -> None:
    with np.load(options.requests) as stored:
        requests = [row.tobytes() for row in stored["requests"]]
        run = Run(requests, stored["expected"].tolist(), int(stored["classes"]))
    async with asyncio.TaskGroup() as group:
        for number in range(options.closed):
            begin(run, options.host, options.port, number, group)
        await asyncio.sleep(WARM_UP_S)
        began = time.perf_counter()
        run.measuring = True
        await asyncio.sleep(options.seconds)
        run.measuring = False
        run.over = True
    print(run.report(began))


def generate(description: str, begin: Begin) -> None:
    """The generator's command."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("requests")
    parser.add_argument("--closed", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    uvloop.run(_main(parser.parse_args(), begin))
