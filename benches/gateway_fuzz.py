"""A gateway under fire: `python benches/gateway_fuzz.py [--mutants N]`.

Starts a system with the digits' app. Then every case of tests/support/gateways/abuse.py three times, the quickest reply counted, bodies just below the limit
of size that would become gigabytes, and N mutants of good requests, 60 at a time. Tells what took longer than 100 ms, and how long a good query takes alone,
beside 60 mutants and afterwards. That all is refused rightly, and in little memory, tests/live/test_gateway_abuse.py and test_gateway_fuzz.py hold.
"""

import asyncio
import random
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import rig

from infaas.demo import digits
from tests.support.gateways.abuse import INFER, Abuse, everything, heavy, mutant, tensor
from tests.support.gateways.gateway_process import Gate

MOST_MS = 100.0
SLOWEST = 5  # that are shown
TIMES = "[gateway]\nhead_timeout_s = 1.0\nbody_timeout_s = 1.0\n"


async def good(gate: Gate) -> float:
    """Milliseconds of a query that is answered."""
    began = time.perf_counter()
    reply = await gate.ask("POST", INFER, tensor())
    assert reply.status == 200, reply
    return 1000 * (time.perf_counter() - began)


async def cases(gate: Gate, found: Iterable[Abuse], times: int) -> dict[str, float]:
    """Milliseconds by case, each some times; the quickest counts."""
    took: dict[str, float] = {}
    for abuse in found:
        for _ in range(times):
            began = time.perf_counter()
            replies = await gate.say(abuse.data)
            took[abuse.name] = min(took.get(abuse.name, float("inf")), 1000 * (time.perf_counter() - began))
            if not replies or replies[0].status not in abuse.fine:
                print(f"WRONG {abuse.name}: {replies[:1]}")
    return took


async def fire(gate: Gate, mutants: int) -> None:
    chance = random.Random(1)

    async def quiet() -> float:
        return median([await good(gate) for _ in range(50)])

    alone = await quiet()
    for name, abuses, times in (("abuse", everything(), 3), ("heavy", heavy(), 1)):
        took = await cases(gate, abuses, times)
        print(
            f"{name}: {len(took)} cases, median {median(took.values()):.1f} ms, slowest (wanted <= {MOST_MS:g} of abuse):"
        )
        for case, ms in sorted(took.items(), key=lambda pair: -pair[1])[:SLOWEST]:
            print(f"  {ms:7.1f} ms  {case}")
    beside = []
    for _ in range(max(mutants // 60, 1)):
        lot = [gate.say(mutant(chance), replies=4, done=1.5) for _ in range(60)]
        *_, took_ms = await asyncio.gather(*lot, good(gate))
        beside.append(took_ms)
    print(f"a good query: {alone:.1f} ms alone, {median(beside):.1f} beside 60 mutants, {await quiet():.1f} afterwards")


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--mutants", type=int, default=3000)
    options = parser.parse_args()
    with rig.system(TIMES) as own:
        validation = digits.save_validation(own.data_dir.parent / "validation.npz")
        asyncio.run(rig.prepare(own.data_dir, "digits", digits.models()["logreg"], validation))
        port = int(own.urls["gateway"].rpartition(":")[2])
        process: Any = rig.part_of(own, "gateway")
        asyncio.run(fire(Gate(port, 0, process, own.data_dir / "up.err"), options.mutants))


if __name__ == "__main__":
    main()
