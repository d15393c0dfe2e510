"""How long other variants take to answer after a threefold step in load: `python benches/step.py [--rounds N]`.

Two systems use one data directory and the network of proof/network.py. 18 queries/s, evenly spaced, go to one real CPU instance, which
carries 23/s (two cores carry two instances). Then 54/s come. In the first system, a simulated Inferentia instance is already loaded; it
costs more per query, so it is the second choice. The autoscaler is off, and it should answer within 250 ms. In the second
system, nothing else is loaded and the autoscaler is on; another variant should answer within its load time and 1 s. Times are
those of replies.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import rig
from proof.load import Sent, send
from proof.systems import APP, register, settings

import infaas
from infaas.demo.digits import UNSEEN, load
from infaas.errors import InfaasError

DEVICES = {"gpu": 1, "inferentia": 1}
DEAR = {"inferentia": 2.0, "gpu": 60.0}  # US$ per hour
LOW, HIGH = 18.0, 54.0
NEEDS: dict[str, Any] = {"latency_ms": 150.0, "accuracy": 0.95}
BEFORE = 3.0  # s at the low rate
PATIENCE = 60.0  # s until a system is as a round begins


def spaced(rate: float, start: float, end: float) -> list[float]:
    """Times with equal gaps."""
    return [start + i / rate for i in range(round((end - start) * rate))]


async def step(client: infaas.Client, after: float) -> list[Sent]:
    """One step, `after` seconds at the high rate; times count from the step."""
    times = [*spaced(LOW, 0.0, BEFORE), *spaced(HIGH, BEFORE, BEFORE + after)]
    _, sent = await send(client, APP, times, **NEEDS)
    return sent


def first_other(sent: list[Sent]) -> tuple[float, str]:
    """Seconds from the step to the first reply by another variant than the one that had the load before, and its name."""
    main = Counter(one.variant for one in sent if one.at < BEFORE and not one.code).most_common(1)[0][0]
    others = [one for one in sent if one.at >= BEFORE and not one.code and one.variant != main]
    if not others:
        raise InfaasError("no other variant answered")
    first = min(others, key=lambda one: one.at + one.took)
    return first.at + first.took - BEFORE, first.variant


async def until_only_cpu(client: infaas.Client) -> None:
    """A light load until one CPU instance alone is loaded, and Active."""
    for _ in range(round(PATIENCE)):
        await send(client, APP, spaced(4.0, 0.0, 1.0), **NEEDS)
        found = [(one["hardware"], one["state"]) for one in await instances(client)]
        if found == [("cpu", "Active")]:
            return
    raise InfaasError(f"after {PATIENCE:.0f} s still: {found}")


async def instances(client: infaas.Client) -> list[dict[str, Any]]:
    """What is loaded or on its way."""
    kinds = {one["variant"]: one["hardware"] for one in await client.variants(app=APP)}
    return [
        {**one, "hardware": kinds.get(one["variant"], "")}
        for worker in await client.workers()
        for one in worker["instances"]
    ]


async def reactions(
    data_dir: Path,
    text: str,
    begin: Callable[[infaas.Client], Awaitable[object]],
    after: float,
    rounds: int,
    each: bool,
) -> list[tuple[float, str]]:
    """(seconds from the step to the first answer by another variant, its name) of each round. begin: before the first round, or before each."""
    own = rig.DemoSystem(data_dir, settings=text)
    found = []
    try:
        await own.start()
        async with infaas.connect(data_dir=data_dir) as client:
            for number in range(rounds):
                if each or number == 0:
                    await begin(client)
                if not each:
                    await asyncio.sleep(2.0)
                found.append(first_other(await step(client, after)))
    finally:
        own.stop()
    return found


async def bench(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="infaas-bench-", ignore_cleanup_errors=True) as directory:
        data_dir = options.data_dir or Path(directory) / "data"
        variants = await register(data_dir, DEVICES)
        load_s = {one["variant"]: one["load_ms"] / 1000 for one in variants}

        async def both(client: infaas.Client) -> None:
            for kind in ("cpu", "inferentia"):
                name = next(one["variant"] for one in variants if one["hardware"] == kind)
                await client.query(APP, load(UNSEEN).x[:1], variant=name, latency_ms=20_000.0)

        beside = await reactions(data_dir, settings("off", DEVICES, prices=DEAR), both, 2.0, options.rounds, False)
        longest = max(load_s.values()) + 2.0
        fresh = await reactions(data_dir, settings("infaas", DEVICES), until_only_cpu, longest, options.rounds, True)
    return {
        "simulated": "Inferentia and GPU",
        "loaded_ms": [1000 * seconds for seconds, _ in beside],
        "new_s": [took for took, _ in fresh],
        "new_load_s": [load_s[variant] for _, variant in fresh],
        "new_over_load_s": [took - load_s[variant] for took, variant in fresh],
    }


def main() -> None:
    parser = rig.parser(__doc__, rounds=5)
    parser.add_argument(
        "--data-dir", type=Path, help="the system's directory: kept, and what is registered there used again"
    )
    options = parser.parse_args()
    found = asyncio.run(bench(options))
    each = ", ".join(f"{ms:.0f}" for ms in found["loaded_ms"])
    print(f"loaded beside:  {statistics.median(found['loaded_ms']):6.0f} ms   wanted: at most 250   (each: {each})")
    each = ", ".join(f"{s:.2f}" for s in found["new_over_load_s"])
    print(
        f"newly loaded:   load time + {statistics.median(found['new_over_load_s']):.2f} s   wanted: at most + 1   (each: {each})"
    )
    print(f"{found['simulated']} simulated, the CPU real; {rig.HERE.name}/step.py, {len(found['new_s'])} steps each")


if __name__ == "__main__":
    main()
