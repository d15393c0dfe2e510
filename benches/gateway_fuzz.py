"""A gateway under fire: `python benches/gateway_fuzz.py [--examples N] [--mutants N] [--json]`.

Starts a system with the digits' app. Then every case of tests/support/gateways/abuse.py three times, the quickest reply counted; bodies just below the limit of size that
would become gigabytes; N mutants of good requests, 60 at a time; and N generated requests of every operation in the OpenAPI document
(schemathesis), right and wrong ones. Tells what was not refused rightly, what took longer than 100 ms, what the gateway's
memory grew to meanwhile and by afterwards, and how long a good query takes while 60 mutants are at work.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import rig

from infaas.demo import digits
from tests.live import test_gateway_fuzz as fuzz
from tests.support.gateways.abuse import INFER, MUTANTS_MAY, Abuse, everything, heavy, mutant, tensor
from tests.support.gateways.gateway_process import Gate

MOST_MS = 100.0
MOST_MB = 64.0
LOOK = 0.005  # s between looks at memory
TIMES = "[gateway]\nhead_timeout_s = 1.0\nbody_timeout_s = 1.0\n"


class Watch:
    """The peak of a gateway's memory, in MB over what it was."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.before = gate.resident_mb()
        self.peak = 0.0
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.peak = max(self.peak, self._gate.resident_mb() - self.before)
            await asyncio.sleep(LOOK)

    def end(self) -> dict[str, float]:
        self._task.cancel()
        return {"peak_mb": self.peak, "left_mb": self._gate.resident_mb() - self.before}


async def good(gate: Gate) -> float:
    """Milliseconds of a query that is answered."""
    for _ in range(100):
        began = time.perf_counter()
        reply = await gate.ask("POST", INFER, tensor())
        if reply.status == 200:
            return 1000 * (time.perf_counter() - began)
        await asyncio.sleep(0.2)
    raise RuntimeError(f"no answer: {reply}")


async def cases(gate: Gate, found: Iterator[Abuse], times: int) -> dict[str, Any]:
    """Each some times; the quickest counts."""
    watch = Watch(gate)
    took: dict[str, float] = {}
    wrong: dict[str, str] = {}
    for abuse in found:
        best = float("inf")
        for _ in range(times):
            began = time.perf_counter()
            replies = await gate.say(abuse.data)
            best = min(best, 1000 * (time.perf_counter() - began))
        status = replies[0].status if replies else 0
        if status not in abuse.fine:
            wrong[abuse.name] = f"{status} {replies[0].body[:100] if replies else b''!r}"
        took[abuse.name] = best
    slow = {name: ms for name, ms in took.items() if ms > MOST_MS}
    return {
        "cases": len(took),
        "median_ms": statistics.median(took.values()),
        "slowest": dict(sorted(took.items(), key=lambda pair: -pair[1])[:5]),
        "slow": slow,
        "wrong": wrong,
        **watch.end(),
    }


async def mutants(gate: Gate, count: int) -> dict[str, Any]:
    """Some at a time, and a good query beside each lot."""
    chance = random.Random(1)
    watch = Watch(gate)
    statuses: Counter[int] = Counter()
    wrong: dict[str, str] = {}
    beside = []

    async def one() -> None:
        sent = mutant(chance)
        for reply in await gate.say(sent, replies=4, done=1.5):
            statuses[reply.status] += 1
            if reply.status not in MUTANTS_MAY:
                wrong[repr(sent[:200])] = f"{reply.status} {reply.body[:200]!r}"

    for _ in range(max(count // 60, 1)):
        *_, took = await asyncio.gather(*(one() for _ in range(60)), good(gate))
        beside.append(took)
    told = {str(status): number for status, number in sorted(statuses.items())}
    return {"statuses": told, "wrong": wrong, "good_ms": statistics.median(beside), **watch.end()}


def generated(gate: Gate, examples: int) -> str:
    """What schemathesis finds; empty: nothing."""
    fuzz.EXAMPLES = examples
    try:
        fuzz.test_every_operation_takes_whatever_comes(gate)
    except AssertionError as error:
        return str(error)
    return ""


async def quiet(gate: Gate) -> float:
    """Milliseconds of a good query while nothing else goes on; the median of 50."""
    return statistics.median([await good(gate) for _ in range(50)])


async def fire(gate: Gate, options: argparse.Namespace) -> dict[str, Any]:
    alone = await quiet(gate)
    return {
        "alone_ms": alone,
        "abuse": await cases(gate, everything(), 3),
        "heavy": await cases(gate, heavy(), 1),
        "mutants": await mutants(gate, options.mutants),
        "after_ms": await quiet(gate),
    }


def report(found: dict[str, Any]) -> None:
    for name in ("abuse", "heavy"):
        one = found[name]
        print(f"{name}: {one['cases']} cases, median {one['median_ms']:.1f} ms, slowest:")
        for case, ms in one["slowest"].items():
            print(f"  {ms:7.1f} ms  {case}")
        print(f"  memory: {one['peak_mb']:+.1f} MB at the peak, {one['left_mb']:+.1f} MB afterwards")
    print(f"above {MOST_MS:g} ms: {found['abuse']['slow'] or 'none'}")
    one = found["mutants"]
    print(
        f"mutants: {one['statuses']}; memory {one['peak_mb']:+.1f} MB, {one['left_mb']:+.1f} MB afterwards (wanted < {MOST_MB:g})"
    )
    print(
        f"a good query: {found['alone_ms']:.1f} ms alone, {one['good_ms']:.1f} beside 60 mutants, {found['after_ms']:.1f} afterwards"
    )
    for name in ("abuse", "heavy", "mutants"):
        for case, told in found[name]["wrong"].items():
            print(f"WRONG {case}: {told}")
    print(f"schemathesis: {found['schemathesis'] or 'nothing found'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A gateway under fire.")
    parser.add_argument("--examples", type=int, default=50, help="of each operation, in each of schemathesis's modes")
    parser.add_argument("--mutants", type=int, default=3000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with rig.system(TIMES) as own:
        validation = digits.save_validation(own.data_dir.parent / "validation.npz")
        asyncio.run(rig.prepare(own.data_dir, "digits", digits.models()["logreg"], validation))
        port = int(own.urls["gateway"].rpartition(":")[2])
        (pid,) = [pid for pid in rig.children(own.pid) if rig.kind(pid) == "gateway"]
        process: Any = SimpleNamespace(pid=pid)  # a child of `infaas up`, not ours
        gate = Gate(port, 0, process, own.data_dir / "up.err")
        found = asyncio.run(fire(gate, options))
        found["schemathesis"] = generated(gate, options.examples)
    if options.json:
        print(json.dumps(found))
    else:
        report(found)


if __name__ == "__main__":
    main()
