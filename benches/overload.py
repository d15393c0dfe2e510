"""Goodput beyond saturation, and how late refusals are: `python benches/overload.py [--seconds S] [--rounds N] [--data-dir DIR --app APP] [--refusals [--light]]`.

Saturation is what a closed loop of 32 gets answered without any latency objective. Then, in turn with it, an open loop of Poisson
arrivals at 0.9, 1.5 and 3 times that rate, with a latency objective: goodput is what was answered in time, wanted at 1.5 times
at least 0.9 of saturation. And two levels of `priority` at the same time, 0.35 of the rate with 1 and the rest with 9, at 0.9 and
2 times saturation: attainment by level, wanted at 2 times at least 0.95 of the first one. All queries name the app's variant with
the most throughput. Without --data-dir on a system of its own, with one CPU instance of a small convolutional network and the
autoscaler off, so that the capacity stays what it is.

`--refusals`: a system of its own with one dispatcher and then with two, 2 and 4 times saturation, objectives of 100 and 300 ms, over the bus and over
HTTP with as many connections as that takes. Wanted: none later than 100 ms after its deadline, counted from when the query was written to the socket.
What the generator itself may have added is told apart (`generator.Refusals`). `--light`: of a network that takes microseconds, so that the way to it is
what is beyond saturation.
"""

import os
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import rig
from gateway import request

from infaas.demo.program import DemoSystem
from tests.support.models import tiny_models

TIMES = (0.9, 1.5, 3.0)
LEVELS = {1: 0.35, 9: 0.65}  # share of the rate by priority
LEVEL_TIMES = (0.9, 2.0)
SETTINGS = '[autoscaler]\npolicy = "off"\n[registrar]\nthreads = [1]\nmax_batches = [{batch}]\n[dispatcher]\ncount = {dispatchers}\n'
APP = "overload"
OBJECTIVES = (100.0, 300.0)  # ms
BEYOND = (2.0, 4.0)  # times saturation
MOST_CONNECTIONS = 950  # the gateway takes 1,000
COLUMNS = [
    "dispatchers",
    "over",
    "times",
    "objective",
    "carried/s",
    "sent/s",
    "refused",
    "late",
    "late outside",
    "worst",
    "worst outside",
    "own",
]


def register(own: DemoSystem, light: bool = False) -> None:
    """A network that takes some milliseconds an item, or microseconds, one variant of it."""
    model, validation = rig.MODEL, rig.VALIDATION
    if not light:
        x = np.random.default_rng(0).normal(size=(64, 1, 28, 28)).astype("f4")
        model, validation = own.data_dir / "convnet.onnx", own.data_dir / "validation.npz"
        model.write_bytes(tiny_models.convnet())
        np.savez(validation, x=x, y=rig.session(model).run(None, {"x": x})[0].argmax(axis=1))
    rig.cli(own.data_dir, "register", str(model), "--validation", str(validation), "--app", APP, "--model", APP)


def measure(data_dir: Path, app: str, seconds: float, rounds: int, latency_ms: float) -> None:
    best = max(rig.cli(data_dir, "variants", "--app", app), key=lambda item: item["saturation_qps"])["variant"]
    print(f"{app} on {best}", flush=True)

    def bench(*options: str) -> Any:
        return rig.cli(data_dir, "bench", "--app", app, "--variant", best, "--seconds", str(seconds), *options)

    def saturate() -> float:
        found: float = bench("--closed", "32")["throughput_qps"]
        return found

    def bench_levels(rate: float) -> dict[int, Any]:
        """All levels at the same time; what a command prints, by level."""
        with ThreadPoolExecutor(len(LEVELS)) as pool:
            runs = {
                level: pool.submit(
                    bench, "--rate", f"{share * rate:.1f}", "--latency-ms", f"{latency_ms:g}", "--priority", str(level)
                )
                for level, share in LEVELS.items()
            }
            return {level: run.result() for level, run in runs.items()}

    attained: dict[tuple[float, int], list[float]] = {(times, level): [] for times in LEVEL_TIMES for level in LEVELS}
    goodputs: dict[float, list[float]] = {times: [] for times in TIMES}
    for number in range(rounds):
        before = saturate()
        print(
            f"round {number + 1}: saturation {before:.0f} queries/s, load average {os.getloadavg()[0]:.1f}", flush=True
        )
        for times in TIMES:
            seen = bench("--rate", f"{times * before:.1f}", "--latency-ms", f"{latency_ms:g}")
            after = saturate()
            saturation, before = (before + after) / 2.0, after  # neighbours come and go: what it was around that time
            goodput = seen["slo_attainment"] * seen["offered"] / seen["seconds"]
            goodputs[times].append(goodput / saturation)
            print(
                f"  {times:4.1f} x: {goodput:7.0f} in time/s = {goodput / saturation:.2f} of saturation; p99 "
                f"{seen['p99_ms'] or 0:.0f} ms; refused {seen['refusals'] or 0}, missed {seen['missed'] or 0}; "
                f"sent up to {seen['late_send_p99_ms'] or 0:.1f} ms late (p99)",
                flush=True,
            )
        for times in LEVEL_TIMES:
            found = bench_levels(times * before)
            for level, seen in found.items():
                attained[times, level].append(seen["slo_attainment"])
            shown = ", ".join(f"priority {level}: {seen['slo_attainment']:.3f}" for level, seen in found.items())
            print(f"  {times:4.1f} x: in time of {shown}", flush=True)
    for (times, level), shares in attained.items():
        print(f"{times:4.1f} x saturation, priority {level}: {statistics.median(shares):.3f} in time")
    for times, ratios in goodputs.items():
        print(f"{times:4.1f} x saturation, within {latency_ms:g} ms: {statistics.median(ratios):.2f} of saturation")


# -- how late refusals are


class Doors:
    """Both ways to a system, and what the generators send there: one item a query, by way and objective."""

    def __init__(self, own: DemoSystem, x: np.ndarray) -> None:
        self._nats = own.urls["nats"]
        self._place = own.data_dir.parent
        self._host, _, self._port = own.urls["gateway"].removeprefix("http://").rpartition(":")
        for latency_ms in (0.0, *OBJECTIVES):
            needs = {"latency_ms": latency_ms} if latency_ms else {}
            rig.bodies(self._file("bus", latency_ms), x, **needs)
            whole = [request(self._host, row[None], raw=True, app=APP, **needs) for row in x]
            rig.requests(self._file("http", latency_ms), whole)

    def _file(self, way: str, latency_ms: float) -> Path:
        return self._place / f"{way}-{latency_ms:g}.npz"

    def ask(self, way: str, latency_ms: float, *options: str) -> dict[str, Any]:
        """One run of the generator. latency_ms: 0: no objective."""
        table = self._file(way, latency_ms)
        if way == "bus":
            return rig.generate("nats", self._nats, f"infaas.query.{APP}", table, *options)
        return rig.generate("http", self._host, self._port, table, *options)


def refusals(own: DemoSystem, dispatchers: int, x: np.ndarray, seconds: float) -> None:
    doors = Doors(own, x)
    for way in ("bus", "http"):
        for times in BEYOND:
            for latency_ms in OBJECTIVES:
                carried = doors.ask(way, 0.0, "--closed", "32", "--seconds", "3")["rate"]
                rate = times * carried
                options = ["--rate", f"{rate:.1f}", "--latency-ms", f"{latency_ms:g}", "--seconds", f"{seconds:g}"]
                if way == "http":
                    options += ["--closed", str(min(MOST_CONNECTIONS, 32 + int(rate * (latency_ms / 1000 + 0.3))))]
                seen = doors.ask(way, latency_ms, *options)
                figures = (seen["refused"], seen["refused_late"], seen["refused_late_outside"])
                took = (seen["worst_ms"], seen["worst_outside_ms"], seen["own_ms"])
                load = (f"{latency_ms:g} ms", f"{carried:.0f}", f"{rate:.0f}")
                cells = (dispatchers, way, f"{times:g}", *load, *figures, *(f"{one:.0f} ms" for one in took))
                print(f"| {' | '.join(map(str, cells))} |  {seen['errors']}, load {os.getloadavg()[0]:.1f}", flush=True)


@contextmanager
def own_system(*, batch: int = 8, dispatchers: int = 1, light: bool = False) -> Iterator[DemoSystem]:
    """A system with the app."""
    with rig.system(SETTINGS.format(batch=batch, dispatchers=dispatchers)) as own:
        register(own, light)
        yield own


def main() -> None:
    parser = rig.parser(__doc__, seconds=4.0, rounds=3)
    parser.add_argument("--latency-ms", type=float, default=250.0)
    parser.add_argument("--data-dir", type=Path, help="a running system, instead of one of its own")
    parser.add_argument("--app", default=APP)
    parser.add_argument("--refusals", action="store_true", help="how late refusals are")
    parser.add_argument("--light", action="store_true", help="of a network that takes microseconds")
    parser.add_argument("--dispatchers", type=int, nargs="+", default=[1, 2], help="with --refusals")
    given = parser.parse_args()
    if given.data_dir is not None:
        measure(given.data_dir, given.app, given.seconds, given.rounds, given.latency_ms)
        return
    if not given.refusals:
        with own_system() as own:
            measure(own.data_dir, APP, given.seconds, given.rounds, given.latency_ms)
        return
    shape = (64, 64) if given.light else (16, 1, 28, 28)
    x = np.random.default_rng(0).normal(size=shape).astype("f4")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for dispatchers in given.dispatchers:
        with own_system(dispatchers=dispatchers, light=given.light) as own:
            refusals(own, dispatchers, x, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
