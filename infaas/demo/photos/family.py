"""The photograph family as the demo wants it: the files are made when they are not there."""

import asyncio
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from infaas.demo.asks import HEADROOM, Ask
from infaas.demo.family import Family
from infaas.demo.photos import files, stamps
from infaas.errors import InfaasError

CLASSES = 1000
RATES = (
    4.0,
    16.0,
    8.0,
)  # queries a second: these networks take 5 to 20 ms a picture, on cores that do everything else too
MOST_ITEMS = 4  # 203 kB each; more would take the way through the object store, which is not what is shown here
# Batches of 64 such pictures take seconds and up to 2 GB to measure; queries of this demo never make them.
SETTINGS = "[registrar]\nmax_batches = [8]\n"


async def photos(tell: Callable[[str, float], None]) -> Family:
    """The family; raises InfaasError with a remedy when its files are not there and cannot be made."""
    where = files.directory()
    if not files.ready(where):
        await _make(where, tell)
    validation = files.load(where, stamps.VALIDATION)

    def save(path: Path) -> Path:
        np.savez_compressed(path, x=validation.x, y=validation.y)
        return path

    return Family(
        app="photos",
        things="photographs",
        classes=CLASSES,
        models={name: where / f"{name}.onnx" for name in files.MODELS},
        save_validation=save,
        unseen=files.load(where, stamps.UNSEEN),
        asks=asks,
        validated=len(validation) // len(stamps.VIEWS),
        views=len(stamps.VIEWS),
        rates=RATES,
        most_items=MOST_ITEMS,
        settings=SETTINGS,
    )


def asks(variants: Iterable[Mapping[str, Any]]) -> list[Ask]:
    """The requirements, by what was measured: the accuracies are those of the best and of a middling variant."""
    rows = [(float(row["accuracy"] or 0.0), float(row["cost_per_1000"])) for row in variants]
    accuracies = sorted(accuracy for accuracy, _ in rows)
    high, fair = (math.floor(100 * one) / 100 for one in (accuracies[-1], accuracies[len(accuracies) // 2]))
    cheapest = min(cost for accuracy, cost in rows if accuracy >= fair)
    ceiling = float(f"{cheapest * HEADROOM:.1g}")
    return [
        Ask(name="nothing", needs={}),
        Ask(name="within 60 ms", needs={"latency_ms": 60.0}),
        Ask(name=f"accuracy ≥ {fair:g}, within 150 ms", needs={"accuracy": fair, "latency_ms": 150.0}),
        Ask(
            name=f"accuracy ≥ {fair:g}, at most ${ceiling:g} per 1,000",
            needs={"accuracy": fair, "cost": ceiling},
        ),
        Ask(name=f"accuracy ≥ {high:g}", needs={"accuracy": high}),
        Ask(name="accuracy ≥ 0.999", needs={"accuracy": 0.999}, possible=False, weight=0.25),
        Ask(name="within 0.1 ms", needs={"latency_ms": 0.1}, possible=False, weight=0.25),
        Ask(
            name=f"accuracy ≥ {fair:g}, at most $1e-12 per 1,000",
            needs={"accuracy": fair, "cost": 1e-12},
            possible=False,
            weight=0.25,
        ),
    ]


async def _make(where: Path, tell: Callable[[str, float], None]) -> None:
    """In a process of its own, so that the demo does not carry torch along."""
    files.require_packages()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "infaas.demo.photos", str(where)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(os.environ) | {"PYTHONPATH": _path()},
    )
    try:
        _, complaints = await asyncio.gather(_listen(process, tell), _read(process.stderr))
        if await process.wait() != 0:
            last = complaints.decode(errors="replace").strip().splitlines()[-1:]
            raise InfaasError(f"the photograph family could not be made: {''.join(last)}")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def _path() -> str:
    source = str(Path(__file__).parents[3])
    return os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))


async def _listen(process: asyncio.subprocess.Process, tell: Callable[[str, float], None]) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        tell(line.decode(errors="replace").strip(), 0.0)


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    assert stream is not None
    return await stream.read()
