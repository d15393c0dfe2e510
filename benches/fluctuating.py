"""The paper's fluctuating load on the whole system, under INFaaS and under its baselines:
`python benches/fluctuating.py [--compress 3] [--policies infaas,static,replicate] [--out DIR] [--json]`.

One system after the other on one data directory: `infaas up` with its own nats-server and PostgreSQL, one worker whose CPU is real and
whose GPU and Inferentia chip are simulated, and a network that takes about 45 ms an item on one CPU thread (proof/network.py),
registered once. Each policy gets the same queries at the same times (Poisson, 4 to 80 a second) with a latency objective and an
accuracy floor. What happened comes from the generator and, by SQL, from the system. `static` and `replicate` serve what a developer
who knows profiles and peak would have chosen; `static@gpu` and `replicate@gpu` one who considers only GPUs.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rig
from numpy.typing import NDArray
from proof import network
from proof.choices import Chosen, choose
from proof.load import send
from proof.records import compared, read, result, table
from proof.systems import APP, register, settings

import infaas
from infaas.errors import InfaasError

SETTLE = 6.0  # s after the load until everything is in SQL
SIMULATED = "GPU and Inferentia: times by a synthetic profile, prices of the paper; the CPU is real"
# INFaaS (Romero et al.), Figure 6c: (second, queries/s), straight lines between them; a rise and a fall take a second.
FLUCTUATING = ((0, 4), (60, 4), (61, 80), (90, 80), (91, 4), (150, 4), (151, 80), (180, 80), (181, 4), (240, 4))
Points = Sequence[tuple[float, float]]


def arrivals(points: Points, seed: int) -> NDArray[np.float64]:
    """Seconds at which queries set out: Poisson with the rate of the moment (by thinning); the same for a seed."""
    rng = np.random.default_rng(seed)
    seconds, rates = zip(*points, strict=True)
    count = rng.poisson(max(rates) * seconds[-1])
    times = np.sort(rng.random(count)) * seconds[-1]
    return times[rng.random(count) * max(rates) < np.interp(times, seconds, rates)]


async def serve(data_dir: Path, policy: str, choice: Chosen | None, options: argparse.Namespace) -> dict[str, Any]:
    """One policy: warm up at the valley's rate, then the load; returns what became of it, by its queries and by SQL."""
    own = rig.DemoSystem(data_dir, settings=settings(policy.partition("@")[0], options.simulate, choice))
    since = time.time()
    needs = {"latency_ms": options.latency_ms, "accuracy": options.accuracy}
    points = [(second / options.compress, rate) for second, rate in FLUCTUATING]
    seconds = points[-1][0]
    try:
        await own.start()
        async with infaas.connect(data_dir=data_dir) as client:
            await send(client, APP, arrivals([(0, 4), (options.warmup, 4)], options.seed + 1), **needs)
            others = rig.Others()
            start, sent = await send(client, APP, arrivals(points, options.seed), **needs)
            busy = others.cpus()
        await asyncio.sleep(max(0.0, start + seconds - time.time()) + SETTLE)
        records = read(own.urls["sql"], since=since, start=start, until=time.time())
    finally:
        own.stop()
    for one in records.actions.itertuples():
        rig.say(f"  {one.at:7.2f} s  {one.scaler:10} {one.action:9} {one.variant} x {one.count}: {one.reason}")
    found = result(policy, sent, records, seconds, options.latency_ms / 1000)
    return found | {"others_cpus": busy, "choice": choice}


async def bench(options: argparse.Namespace) -> dict[str, Any]:
    """Every policy in turn; with --out, what there is so far is kept after each."""
    title = (
        f"Fluctuating load, 4 to 80 queries/s, within {options.latency_ms:g} ms and accuracy ≥ {options.accuracy:g}; "
        "real CPU, simulated GPU and Inferentia"
    )
    report: dict[str, Any] = {
        "title": title,
        "simulated": SIMULATED,
        "compress": options.compress,
        "seed": options.seed,
    }
    report["policies"] = []
    needs = {"latency_ms": options.latency_ms, "accuracy": options.accuracy, "cores": os.cpu_count() or 1}
    with tempfile.TemporaryDirectory(prefix="infaas-bench-", ignore_cleanup_errors=True) as directory:
        data_dir = options.data_dir or Path(directory) / "data"
        rig.say("making and registering the network: one to two minutes")
        variants = await register(data_dir, options.simulate, options.views)
        for one in variants:
            kind = f"{'simulated ' * one['simulated']}{one['hardware']}"
            rig.say(
                f"  {one['variant']} ({kind}): {one['latency_ms']:.1f} ms, at most {one['saturation_qps']:.0f}/s, loads in"
                f" {one['load_ms'] / 1000:.2f} s, accuracy {one['accuracy']:.3f}, US$ {one['price_per_hour']:.3f}/h"
            )
        peak = max(rate for _, rate in FLUCTUATING)
        choices = {policy: choose(policy, variants, peak, **needs) for policy in options.policies.split(",")}
        for policy, choice in choices.items():
            rig.say(f"{policy}{f', by choice {choice.instances} x {choice.variant}' if choice else ''}")
            report["policies"].append(await serve(data_dir, policy, choice, options))
            if options.out is not None:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / "fluctuating.json").write_text(json.dumps(report))
    return report


def show(report: dict[str, Any]) -> None:
    print(f"\n{report['simulated']}.\n\n{table(report['policies'])}\n\n{compared(report['policies'])}")


def devices(text: str) -> dict[str, int]:
    found = {"gpu": 0, "inferentia": 0}
    for pair in text.split(","):
        kind, _, count = pair.partition("=")
        if kind not in found or not count.isdecimal():
            raise argparse.ArgumentTypeError(f"write gpu=1,inferentia=1, not {text!r}")
        found[kind] = int(count)
    return found


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--compress", type=float, default=3.0, help="the paper's 240 s in so many times less")
    parser.add_argument("--policies", default="infaas,static,replicate")
    parser.add_argument(
        "--out", type=Path, help="directory for fluctuating.png (needs matplotlib) and fluctuating.json"
    )
    parser.add_argument(
        "--data-dir", type=Path, help="the system's directory: kept, and what is registered there used again"
    )
    parser.add_argument("--simulate", type=devices, default=devices("gpu=1,inferentia=1"))
    parser.add_argument("--latency-ms", type=float, default=250.0)
    parser.add_argument("--accuracy", type=float, default=0.95)
    parser.add_argument("--views", type=int, default=network.VIEWS, help="odd; an item takes 5 ms times its square")
    parser.add_argument("--warmup", type=float, default=15.0, help="s at 4 queries/s before the load, not counted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--from", dest="again", type=Path, help="a fluctuating.json: show and draw that run again")
    options = parser.parse_args()
    if options.again is not None:
        report = json.loads(options.again.read_text())
        options.out = options.out or options.again.parent
    else:
        try:
            report = asyncio.run(bench(options))
        except (InfaasError, ValueError) as error:
            sys.exit(str(error))
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    if options.out is not None:
        draw(report, options.out / "fluctuating.png")


def draw(report: dict[str, Any], path: Path) -> None:
    """The picture, where matplotlib is installed."""
    try:
        from services.simulation import plot
    except ModuleNotFoundError as error:
        rig.say(f"no picture: {error.name} is not installed (pip install 'infaas[plot]', or matplotlib)")
        return
    plot.draw(report, path)
    rig.say(f"picture: {path}")


if __name__ == "__main__":
    main()
