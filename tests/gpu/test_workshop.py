"""The whole way on a real GPU: a sandbox looks at it, builds and measures variants there, and an executor serves one."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from bus.memory import MemoryBus
from bus.messages.catalog import VariantRecord
from bus.messages.work import ModelInspected, VariantBuilt, VariantFailed, VariantPlan
from bus.subjects import Subjects
from bus.tensors import to_array
from services.core.settings import ExecutorSettings
from services.executor.commands import LoadModel, MeasureProcess, UnloadModel
from services.executor.edge import AcceleratedEdge
from services.shell.host.accelerators import why_no_gpu
from tests.support.models import tiny_models
from tests.support.servers.nats import run
from tests.unit.executor.test_edge_simulated import CLASSES, SUBJECTS, batch
from tests.unit.executor.workshop.test_helper import GOOD, Shop

if why_no_gpu():
    pytest.skip(why_no_gpu(), allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

DEVICES = {"gpu": "cuda:0"}


def plan(framework: str, precision: str, format: str) -> VariantPlan:
    return VariantPlan(
        variant=f"m-v1-{framework}-{precision}-t1-b8", framework=framework, precision=precision, threads=1, max_batch=8,
        format=format, hardware="gpu",
    )  # fmt: skip


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_variants_are_built_measured_and_served_there(tmp_path: Path, format: str) -> None:
    content = tiny_models.mlp()
    if format == "pt2":
        content = tiny_models.exported(tmp_path / "upload.pt2", pytest.importorskip("torch"))
    (tmp_path / "shop").mkdir()
    shop = Shop(tmp_path / "shop", devices=DEVICES)
    shop.inspect(content, GOOD, format=format, hardware="gpu")
    assert shop.reason is None
    (found,) = shop.of(ModelInspected)
    assert found.hardware == "gpu"
    working = [name for name in ("torch-cuda", "ort-cuda", "tensorrt") if found.frameworks[name] == ""]
    usable = [name for name in working if (name == "torch-cuda") == (format == "pt2")]
    if not usable:
        pytest.skip(f"no framework runs {format} files here: {found.frameworks}")
    shop.build(*(plan(name, precision, format) for name in usable for precision in ("fp32", "fp16")), format=format)
    assert [(one.plan.variant, one.reason) for one in shop.of(VariantFailed)] == []
    for built in shop.of(VariantBuilt):
        assert (built.hardware, built.profile.rows[0].batch) == ("gpu", 1)
        assert built.agreement >= 0.98
        assert "cuda:0" in built.profile.host["framework"]
        serve(shop, built, found, tmp_path / built.plan.variant)


def serve(shop: Shop, built: VariantBuilt, found: ModelInspected, cache: Path) -> None:
    record = VariantRecord(
        variant=built.plan.variant, model="m", version="1", framework=built.plan.framework,
        precision=built.plan.precision, threads=1, max_batch=8, hardware="gpu", artifact=built.artifact,
        format=built.plan.format, accuracy=built.accuracy, agreement=built.agreement, profile=built.profile,
        signature=found.signature,
    )  # fmt: skip
    content = shop.kept[built.artifact]
    assert hashlib.sha256(content).hexdigest() == built.artifact

    async def main() -> None:
        bus = MemoryBus()
        store = await bus.object_store(Subjects(SUBJECTS.prefix).artifacts_bucket)
        await store.put(built.artifact, content)
        edge = AcceleratedEdge(bus, SUBJECTS, "cuda:0", 1, cache, ExecutorSettings(watchdog_least_s=60.0))
        loaded = await edge.perform(LoadModel("i", record))
        assert "cuda:0" in loaded.proof
        assert (await edge.perform(MeasureProcess())).memory_mb == loaded.memory_mb
        result = await edge.perform(batch(1, 5, 2))
        assert result.errors is None
        name = found.signature.outputs[0].name
        scores = np.concatenate([to_array(one[name], name) for one in result.outputs])
        assert scores.argmax(axis=1).tolist() == CLASSES.tolist()
        await edge.perform(UnloadModel("i"))
        assert (await edge.perform(MeasureProcess())).memory_mb == 0
        await bus.close()

    run(main())
