"""A high priority beside long batches: `python benches/priority.py [--only container|onnx] [--dispatchers N ...] [--seconds S]`.

An item takes 40 ms, so that a batch of the low priority could fill the objective of 500 ms. 10 evenly spaced queries a second of priority 1, alone
and then beside 50 of priority 9, which is more than twice the capacity: how many of each are in time, and why others are refused. Wanted: all of
priority 1. In turn for a user's own process (`infaas container`), which waits, and for an ONNX model, which computes on one core; with each number of
dispatchers, which share the queries. Each is a system of its own with one instance and the autoscaler off.
"""

import asyncio
import subprocess
import sys
import timeit
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import rig
from overload import SETTINGS

import infaas
from infaas.demo.program import command
from infaas.errors import Refused
from tests.support.models import tiny_models

ITEM_S = 0.040
LATENCY_MS = 500.0
RATES = {1: 10.0, 9: 50.0}  # queries/s by priority
APP = "priority"
CLASS = """
import timeit


class Each:
    def predict_batch(self, inputs):
        time.sleep({seconds} * len(inputs["x"]))
        return {{"scores": -inputs["x"].reshape(len(inputs["x"]), -1)[:, :4]}}
"""


def pictures(labels: Any) -> dict[str, Any]:
    """A validation set that this model is right about. labels: of inputs."""
    x = np.random.default_rng(0).normal(size=(32, 1, 28, 28)).astype("f4")
    return {"x": x, "y": labels(x)}


@contextmanager
def container(place: Path) -> Iterator[str]:
    """A process of a user's own serves the app. Yields the variant."""
    np.savez(place / "validation.npz", **pictures(lambda x: x.reshape(len(x), -1)[:, :4].argmin(axis=1)))
    (place / "each.py").write_text(CLASS.format(seconds=ITEM_S))
    options = ("--app", APP, "--model", "each", "--validation", "validation.npz", "--data-dir", str(place), "--json")
    words = command("container", "each:Each", *options)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=place) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield rig.cli(place, "variants", "--app", APP)[0]["variant"]
        finally:
            process.terminate()


@contextmanager
def network(place: Path) -> Iterator[str]:
    """An ONNX model serves the app, as many layers as take the time. Yields the variant."""
    file = place / "network.onnx"

    def session(layers: int) -> Any:
        file.write_bytes(tiny_models.convnet(layers))
        return rig.session(file)

    def seconds_of(layers: int) -> float:
        run = partial(session(layers).run, None, {"x": np.zeros((1, 1, 28, 28), "f4")})
        return median(timeit.repeat(run, number=1, repeat=9))

    few, many = seconds_of(5), seconds_of(15)
    made = session(5 + max(0, round(10 * (ITEM_S - few) / (many - few))))
    np.savez(place / "validation.npz", **pictures(lambda x: made.run(None, {"x": x})[0].argmax(axis=1)))
    rig.cli(
        place, "register", str(file), "--validation", str(place / "validation.npz"), "--app", APP, "--model", "network"
    )
    yield next(row["variant"] for row in rig.cli(place, "variants", "--app", APP) if row["precision"] == "fp32")


KINDS = {"container": container, "onnx": network}


async def ask(place: Path, variant: str, rates: dict[int, float], seconds: float) -> dict[int, Counter[str]]:
    """By priority: how evenly spaced queries end."""
    x = np.zeros((1, 1, 28, 28), "f4")
    async with infaas.connect(data_dir=place) as client:
        for _ in range(2):
            await client.query(APP, x, variant=variant, timeout=60.0)
        due = sorted((n / rate, level) for level, rate in rates.items() for n in range(round(rate * seconds)))
        levels = iter([level for _, level in due])
        needs: dict[str, Any] = {"variant": variant, "latency_ms": LATENCY_MS, "raise_refused": False}
        found: dict[int, Counter[str]] = {level: Counter() for level in rates}

        async def one(_: float) -> None:
            level = next(levels)
            end = await client.query(APP, x, priority=level, **needs)
            found[level][end.code if isinstance(end, Refused) else "late" if end.missed else "in time"] += 1

        await rig.paced((at for at, _ in due), one)
        return found


def measure(kind: str, dispatchers: int, seconds: float) -> None:
    with rig.system(SETTINGS.format(batch=64, dispatchers=dispatchers)) as own, KINDS[kind](own.data_dir) as variant:
        row = next(one for one in rig.cli(own.data_dir, "variants", "--app", APP) if one["variant"] == variant)
        print(f"{kind}, {dispatchers} dispatchers: an item takes {row['latency_ms']} ms", flush=True)
        for rates in ({1: RATES[1]}, RATES):
            found = asyncio.run(ask(own.data_dir, variant, rates, seconds))
            for level, ends in found.items():
                others = ", ".join(f"{count} {how}" for how, count in ends.items() if how != "in time")
                beside = "alone" if len(rates) == 1 else f"{rates[level]:g}/s beside the other"
                print(
                    f"  priority {level}, {beside}: {ends['in time']} of {ends.total()} in time{', ' if others else ''}{others}",
                    flush=True,
                )


def main() -> None:
    parser = rig.parser(__doc__, seconds=8.0)
    parser.add_argument("--only", choices=tuple(KINDS))
    parser.add_argument("--dispatchers", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    for kind in KINDS if given.only is None else (given.only,):
        for count in given.dispatchers:
            measure(kind, count, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
