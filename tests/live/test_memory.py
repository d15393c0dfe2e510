"""What admission books for a model is what a process gains by it: models of 1 to 400 MB, each profiled in a process of its own and
loaded and asked in one executor's process.
"""

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bus.codec import encode
from bus.memory import MemoryBus
from bus.messages.catalog import Profile, Signature, VariantRecord
from bus.messages.flow import Route
from bus.subjects import Subjects
from bus.tensors import from_array
from services.core.settings import ExecutorSettings
from services.executor.commands import LoadModel, RunBatch
from services.executor.edge import ExecutorEdge
from services.executor.queue import queued_query
from services.executor.workshop.sandbox.protocol import Artifact, MeasureTask, ValidationFile
from services.executor.workshop.tasks import profiling
from services.executor.workshop.tasks.measuring import _status_mb as status_mb
from tests.support.data.events import floats

ROOT = Path(__file__).parents[2]
# MB; the first of each comes before all.
SIZES = {"ort": (0.5, 1, 2, 5, 12, 40, 100, 200, 400), "torch": (0.5, 1.5, 6, 25, 150)}
BATCH = 8
WITHIN = 0.1
GRAIN_MB = 2.0  # what allocators and the interpreter take or give back meanwhile
FORMATS = {"ort": "onnx", "torch": "pt2"}

pytestmark = pytest.mark.timeout(600)


def side_of(mb: float) -> int:
    """The models are products of square matrices of this side."""
    return 256 if mb < 8 else 1024


def layers_of(mb: float) -> int:
    return max(1, round(mb * 2**20 / 4 / side_of(mb) ** 2))


def build(directory: Path, framework: str) -> None:
    """The model files of one framework."""
    rng = np.random.default_rng(0)
    for mb in SIZES[framework]:
        side, path = side_of(mb), directory / f"{framework}-{mb}"
        matrices = [(rng.normal(size=(side, side)) / side**0.5).astype("f4") for _ in range(layers_of(mb))]
        (build_onnx if framework == "ort" else build_torch)(path, matrices)


def build_onnx(path: Path, matrices: list[np.ndarray]) -> None:
    from tests.support.models import tiny_models

    names, side = ["x", *(f"h{n}" for n in range(1, len(matrices))), "y"], len(matrices[0])
    nodes = "  ".join(f"{into} = MatMul({of}, w{n})" for n, (of, into) in enumerate(pairwise(names)))
    weights = {f"w{n}": one for n, one in enumerate(matrices)}
    path.write_bytes(tiny_models.made(f"(float[n, {side}] x) => (float[n, {side}] y) {{{nodes}}}", **weights))


def build_torch(path: Path, matrices: list[np.ndarray]) -> None:
    import torch

    from services.executor.backends import pt2

    side = len(matrices[0])
    net = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in matrices))
    with torch.no_grad():
        for layer, one in zip(net, matrices, strict=True):
            layer.weight.copy_(torch.from_numpy(one))
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    raw = Path(f"{path}.raw.pt2")
    torch.export.save(torch.export.export(net.eval(), (torch.zeros(2, side),), dynamic_shapes=shapes), raw)
    pt2.reduce(raw, path, 2**31)
    raw.unlink()


def signature(side: int) -> Signature:
    return floats({"x": [side]}, {"y": [side]})


def profile(path: Path) -> float:
    """The MB that a profile says, made in this process."""
    framework, _, mb = path.name.partition("-")
    side = side_of(float(mb))
    data = Path(f"{path}.npz")
    np.savez(data, x=np.ones((32, side), "f4"), y=np.zeros(32, "i8"))
    task = MeasureTask(
        artifact=Artifact(framework=framework, precision="fp32", format=FORMATS[framework], path=str(path)),
        data=ValidationFile(path=str(data), inputs_key="x", labels_key="y", metric="top1", most_bytes=2**30),
        scratch=str(path.parent),
        signature=signature(side),
        reference="",
        threads=1,
        max_batches=[BATCH],
        score=False,
    )
    return profiling.profile(task, lambda _: None).memory_mb[BATCH]


def gains(directory: Path) -> dict[str, tuple[float, float]]:
    """By model: what this process, an executor's edge, says that it grew by, and what it did grow by once it had computed batches."""

    async def main() -> dict[str, tuple[float, float]]:
        bus = MemoryBus()
        edge = ExecutorEdge(bus, Subjects("t"), "cpu", 1, directory, ExecutorSettings())
        return {
            f"{framework}-{mb}": await gain(edge, framework, mb) for framework, sizes in SIZES.items() for mb in sizes
        }

    async def gain(edge: ExecutorEdge, framework: str, mb: float) -> tuple[float, float]:
        side, name = side_of(mb), f"{framework}-{mb}"
        with (directory / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        record = VariantRecord(
            variant=name, model=name, version="1", framework=framework, precision="fp32", threads=1, max_batch=BATCH,
            hardware="cpu", artifact=digest, format=FORMATS[framework], accuracy=None, agreement=None,
            profile=Profile(rows=[], load_ms=1.0, memory_mb=mb, saturation_qps=1.0), signature=signature(side),
        )  # fmt: skip
        os.link(directory / name, directory / f"{digest}.{FORMATS[framework]}")  # as it lies there once it is fetched
        before = status_mb("VmRSS")
        loaded = await edge.perform(LoadModel(name, record))
        forget_peak()
        body = msgspec.Raw(encode(from_array(np.ones((BATCH, side), "f4"))))
        route = Route(b"u" * 16, 0, 0, "inbox", 2e9, 0.0, "d", name, "app", BATCH, "q")
        for _ in range(5):
            result = await edge.perform(RunBatch(name, [queued_query(route, body, body)], 1.0, inline=False))
            assert result.errors is None, result.errors
        return loaded.memory_mb, status_mb("VmHWM") - before

    return asyncio.run(main())


def forget_peak() -> None:
    """VmHWM begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


def child(*arguments: str) -> Any:
    """What this file prints as a program."""
    command = [sys.executable, "-m", "tests.live.test_memory", *arguments]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks of memory cannot be told apart here")
def test_what_is_booked_is_what_the_process_gains(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for framework in SIZES:
        child("build", str(tmp_path), framework)
    models = [f"{framework}-{mb}" for framework, sizes in SIZES.items() for mb in sizes[1:]]
    assert len(models) == 12
    with ThreadPoolExecutor(2) as threads:
        profiled = dict(
            zip(models, threads.map(lambda name: child("profile", str(tmp_path / name)), models), strict=True)
        )
    gained = child("gains", str(tmp_path))
    table = {name: (profiled[name], *gained[name]) for name in models}
    wrong = {
        name: figures
        for name, figures in table.items()
        if abs(max(figures[:2]) - figures[2]) > max(GRAIN_MB, WITHIN * figures[2])
    }
    assert not wrong, f"by model: profiled, measured at the load, gained\n{table}"
    booked, total = (sum(f(figures) for figures in table.values()) for f in (lambda f: max(f[:2]), lambda f: f[2]))
    assert booked == pytest.approx(total, rel=WITHIN)


if __name__ == "__main__":
    what, directory, *more = sys.argv[1:]
    match what:
        case "build":
            print(json.dumps(build(Path(directory), *more)))
        case "profile":
            print(json.dumps(profile(Path(directory))))
        case "gains":
            print(json.dumps(gains(Path(directory))))
