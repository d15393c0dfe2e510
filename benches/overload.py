"""Goodput beyond saturation: `python benches/overload.py [--seconds S] [--rounds N] [--data-dir DIR --app APP]`.

Saturation is what a closed loop of 32 gets answered without any latency objective. Then, in turn with it, an open loop of Poisson
arrivals at 0.9, 1.5 and 3 times that rate, with a latency objective: goodput is what was answered in time, wanted at 1.5 times
at least 0.9 of saturation. And two levels of `priority` at the same time, 0.35 of the rate with 1 and the rest with 9, at 0.9 and
2 times saturation: attainment by level, wanted at 2 times at least 0.95 of the first one. All queries name the app's variant with
the most throughput. Without --data-dir on a system of its own, with one CPU instance of a small convolutional network and the
autoscaler off, so that the capacity stays what it is.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import rig

from infaas.demo.system import command, environment
from tests.support.models import tiny_models

TIMES = (0.9, 1.5, 3.0)
LEVELS = {1: 0.35, 9: 0.65}  # share of the rate by priority
LEVEL_TIMES = (0.9, 2.0)
SETTINGS = '[autoscaler]\npolicy = "off"\n[registrar]\nthreads = [1]\nmax_batches = [8]\n'
APP = "overload"


def say(*arguments: str) -> Any:
    """What a command prints as JSON."""
    done = subprocess.run(
        command(*arguments, "--json"), capture_output=True, text=True, check=False, env=environment(os.environ)
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip())
    return json.loads(done.stdout)


def register(data_dir: Path) -> None:
    """A network that takes some milliseconds an item, one variant of it."""
    import onnxruntime

    x = np.random.default_rng(0).normal(size=(64, 1, 28, 28)).astype("f4")
    model = tiny_models.convnet()
    scores = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    (data_dir / "convnet.onnx").write_bytes(model)
    np.savez(data_dir / "validation.npz", x=x, y=scores.argmax(axis=1))
    files = (str(data_dir / "convnet.onnx"), "--validation", str(data_dir / "validation.npz"))
    say("register", *files, "--app", APP, "--model", APP, "--data-dir", str(data_dir))


def measure(data_dir: Path, app: str, seconds: float, rounds: int, latency_ms: float) -> None:
    items = say("variants", "--app", app, "--data-dir", str(data_dir))
    items = items if isinstance(items, list) else items["items"]
    best = max(items, key=lambda item: item["saturation_qps"])["variant"]
    print(f"{app} on {best}", flush=True)

    def bench(*options: str) -> Any:
        shared = ("--app", app, "--variant", best, "--data-dir", str(data_dir), "--seconds", str(seconds))
        return say("bench", *shared, *options)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=250.0)
    parser.add_argument("--data-dir", type=Path, help="a running system, instead of one of its own")
    parser.add_argument("--app", default=APP)
    given = parser.parse_args()
    if given.data_dir is not None:
        measure(given.data_dir, given.app, given.seconds, given.rounds, given.latency_ms)
        return
    import asyncio

    with rig.system(SETTINGS) as own:
        asyncio.run(own.start())
        register(own.data_dir)
        measure(own.data_dir, APP, given.seconds, given.rounds, given.latency_ms)


if __name__ == "__main__":
    sys.exit(main())
