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
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import rig
from msgspec import Struct
from proof import network
from proof.choices import Chosen, Policy, choose, parse
from proof.load import Sent, send
from proof.records import Action, Records, read
from proof.shape import FLUCTUATING, arrivals, compressed
from proof.systems import APP, register, settings
from proof.table import compared, table
from proof.timeline import Figures, Line, figures, line

import infaas
from infaas.demo.program import DemoSystem
from infaas.errors import InfaasError

SETTLE = 6.0  # s after the load until everything is in SQL
STEPS = 120  # of the time line


class Run(Struct, frozen=True, kw_only=True):
    """What became of one policy. outcomes: of its queries, by SQL. others_cpus: CPUs that other programs kept busy meanwhile."""

    policy: str
    choice: Chosen | None
    figures: Figures
    line: Line
    actions: list[Action]
    outcomes: dict[str, int]
    others_cpus: float


class Report(Struct, frozen=True, kw_only=True):
    """One invocation. seconds: of each load; hardware: of each variant."""

    simulated: str
    seconds: float
    compress: float
    seed: int
    latency_ms: float
    accuracy: float
    hardware: dict[str, str]
    runs: list[Run]


async def serve(
    data_dir: Path, policy: Policy, choice: Chosen | None, options: argparse.Namespace
) -> tuple[list[Sent], Records, float]:
    """One policy: warm up at the valley's rate, then the load; returns every query's end, what SQL holds, and how many CPUs others used."""
    own = DemoSystem(data_dir, settings=settings(policy.base, options.simulate, choice))
    since = time.time()
    needs = {"latency_ms": options.latency_ms, "accuracy": options.accuracy}
    points = compressed(FLUCTUATING, options.compress)
    try:
        await own.start()
        async with infaas.connect(data_dir=data_dir) as client:
            await send(client, APP, arrivals([(0, 4), (options.warmup, 4)], options.seed + 1), **needs)
            others = rig.Others()
            start, sent = await send(client, APP, arrivals(points, options.seed), **needs)
            busy = others.cpus()
        until = start + points[-1][0]
        await asyncio.sleep(max(0.0, until - time.time()) + SETTLE)
        return sent, read(own.urls["sql"], since=since, start=start, until=time.time()), busy
    finally:
        own.stop()


async def bench(options: argparse.Namespace) -> Report:
    """Every policy in turn; with --out, what there is so far is kept after each."""
    runs: list[Run] = []
    hardware: dict[str, str] = {}
    seconds, slo_s = FLUCTUATING[-1][0] / options.compress, options.latency_ms / 1000
    peak = max(rate for _, rate in FLUCTUATING)
    needs = {"latency_ms": options.latency_ms, "accuracy": options.accuracy, "cores": os.cpu_count() or 1}

    def made(runs: list[Run]) -> Report:
        return Report(
            simulated="GPU and Inferentia: times by a synthetic profile, prices of the paper; the CPU is real",
            seconds=seconds,
            compress=options.compress,
            seed=options.seed,
            latency_ms=options.latency_ms,
            accuracy=options.accuracy,
            hardware=hardware,
            runs=runs,
        )

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
        choices = [choose(policy, variants, peak, **needs) for policy in options.policies]
        for policy, choice in zip(options.policies, choices, strict=True):
            chosen = f", by choice {choice.instances} x {choice.variant}" if choice else ""
            rig.say(f"{policy.name}{chosen}: {seconds:.0f} s of load")
            sent, records, busy = await serve(data_dir, policy, choice, options)
            hardware |= records.hardware
            run = Run(
                policy=policy.name,
                choice=choice,
                figures=figures(sent, records, seconds, slo_s),
                line=line(sent, records, seconds, slo_s, seconds / STEPS),
                actions=records.actions,
                outcomes=records.outcomes,
                others_cpus=busy,
            )
            runs.append(run)
            keep(made(runs), options.out)
            for action in run.actions:
                rig.say(
                    f"  {action.at:7.2f} s  {action.scaler:10} {action.action:9} {action.variant} x {action.count}: {action.reason}"
                )
    return made(runs)


def show(report: Report) -> None:
    of = {run.policy: run.figures for run in report.runs}
    busy = ", ".join(f"{run.others_cpus:.2f} ({run.policy})" for run in report.runs)
    print(
        f"\n{report.simulated}.\n\n{table(of, report.hardware)}\n\n{compared(of)}\n\nCPUs that other programs used: {busy}"
    )


def policies(text: str) -> list[Policy]:
    try:
        return [parse(name.strip()) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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
    parser.add_argument("--policies", type=policies, default=policies("infaas,static,replicate"))
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
        report = msgspec.json.decode(options.again.read_bytes(), type=Report)
        show(report)
        draw(report, options.out or options.again.parent)
        return
    try:
        report = asyncio.run(bench(options))
    except (InfaasError, ValueError) as error:
        sys.exit(str(error))
    if options.json:
        print(msgspec.json.encode(report).decode())
    else:
        show(report)
    if options.out is not None:
        draw(report, options.out)


def keep(report: Report, directory: Path | None) -> None:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "fluctuating.json").write_bytes(msgspec.json.encode(report))


def draw(report: Report, directory: Path) -> None:
    """The picture, where matplotlib is installed."""
    try:
        from proof.plot import picture
    except ModuleNotFoundError as error:
        print(f"no picture: {error.name} is not installed (pip install 'infaas[plot]', or matplotlib)", file=sys.stderr)
        return
    path = directory / "fluctuating.png"
    picture(report, path)
    print(f"picture: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
