"""A simulated device's cpu_edge, with a real model in onnxruntime and a real (in-process) object store."""

import asyncio
import hashlib
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.memory import MemoryBus
from bus.messages.catalog import Profile, ProfileRow, VariantRecord
from bus.messages.flow import Route
from bus.messages.public import Answer
from bus.subjects import Subjects
from bus.tensors import from_array, to_array
from services.core.emulation import emulated, with_tiers
from services.core.settings import ExecutorSettings
from services.executor.answers import answer_of
from services.executor.backends.base import BackendUnavailable
from services.executor.commands import BatchResult, LoadModel, MeasureProcess, RunBatch, TransferModel, UnloadModel
from services.executor.edge import ExecutorEdge
from services.executor.edge_simulated import NOTE, SimulatedEdge
from services.executor.instances import Loaded
from services.executor.queue import queued_query
from tests.support.data.events import variant_record
from tests.support.models import tiny_models
from tests.support.models.gpu_stand_ins import SIGNATURE
from tests.support.servers.nats import run

pytest.importorskip("onnxruntime")

SUBJECTS = Subjects("t")
ARTIFACT = tiny_models.mlp()
X, CLASSES = tiny_models.digits(8)


def record(item_ms: float, outputs: list[int] | None = None) -> VariantRecord:
    """A simulated GPU's variant of the tiny model, which is said to take the CPU so long for an item."""
    rows = [ProfileRow(batch=n, p50_ms=item_ms * n, p99_ms=1.0, cpu_ms=1.0, wall_over_cpu=1.0) for n in (1, 8)]
    found = SIGNATURE
    if outputs is not None:
        found = replace(found, outputs=[replace(found.outputs[0], shape=outputs)])
    measured = variant_record(
        model="tiny", max_batch=8, artifact=hashlib.sha256(ARTIFACT).hexdigest(), signature=found,
        profile=Profile(rows=rows, load_ms=1.0, memory_mb=10.0, saturation_qps=100.0),
    )  # fmt: skip
    made = emulated(measured, "gpu", "tiny-v1-simgpu-fp32-t1-b8")
    return replace(made, profile=with_tiers(replace(made.profile, load_ms=80.0, memory_mb=26.0), "gpu"))


def batch(*sizes: int) -> RunBatch:
    """Queries of so many items each, taken from X in order."""
    works, at = [], 0
    for number, n in enumerate(sizes):
        route = Route(number.to_bytes(16, "big"), 0, 0, "inbox", 2e9, 0.0, "d", "i", "app", n, str(number))
        body = msgspec.Raw(encode(from_array(X[at : at + n])))
        works.append(queued_query(route, body, body))
        at += n
    return RunBatch("i", works, 0.002, False)


def on_device(variant: VariantRecord, cache: Path, test: Callable[[SimulatedEdge], Awaitable[Any]]) -> Any:
    """Run a test on a device that has this variant loaded as instance `i`."""

    async def main() -> Any:
        bus = MemoryBus()
        store = await bus.object_store(SUBJECTS.artifacts_bucket)
        await store.put(variant.artifact, ARTIFACT)
        cpu_edge = ExecutorEdge(bus, SUBJECTS, "cpu", 1, cache, ExecutorSettings())
        edge = SimulatedEdge(cpu_edge, "gpu", 1)
        try:
            loaded = await edge.perform(LoadModel("i", variant))
            assert loaded.load_ms >= 70.0  # timers are good to a millisecond or two
            assert loaded.memory_mb == variant.profile.memory_mb
            assert loaded.proof.startswith("simulated gpu")
            assert (await edge.perform(MeasureProcess())).memory_mb == variant.profile.memory_mb
            result = await test(edge)
            await edge.perform(UnloadModel("i"))
            assert (await edge.perform(MeasureProcess())).memory_mb == 0
            return result
        finally:
            await bus.close()

    return run(main())


def answers(variant: VariantRecord, command: RunBatch, result: BatchResult) -> list[Answer]:
    loaded = Loaded("i", variant, 1.0)
    return [answer_of(loaded, "w0", work, result, i, 8, 0.1) for i, work in enumerate(command.queries)]


def test_outputs_are_the_models_own_where_the_cpu_keeps_up(tmp_path: Path) -> None:
    variant, command = record(0.1), batch(1, 5, 2)
    result = on_device(variant, tmp_path, lambda edge: edge.perform(command))
    assert result.finished - result.started >= 0.002
    found = np.concatenate([to_array(one["scores"], "scores") for one in result.outputs])
    assert found.argmax(axis=1).tolist() == CLASSES.tolist()
    for answer in answers(variant, command, result):
        assert (answer.simulated, answer.hardware, answer.reason) == (True, "gpu", msgspec.UNSET)


def test_else_they_are_zeros_and_every_answer_says_so(tmp_path: Path) -> None:
    variant, command = record(100.0), batch(1, 5)
    result = on_device(variant, tmp_path, lambda edge: edge.perform(command))
    assert result.finished - result.started >= 0.0025
    assert [one["scores"].shape for one in result.outputs] == [[1, tiny_models.CLASSES], [5, tiny_models.CLASSES]]
    assert not any(to_array(one["scores"], "scores").any() for one in result.outputs)
    assert result.bytes == 6 * tiny_models.CLASSES * 4
    assert [answer.reason for answer in answers(variant, command, result)] == [NOTE, NOTE]


def test_outputs_whose_size_only_the_model_knows_are_always_computed(tmp_path: Path) -> None:
    variant, command = record(100.0, outputs=[-1]), batch(8)
    result = on_device(variant, tmp_path, lambda edge: edge.perform(command))
    assert to_array(result.outputs[0]["scores"], "scores").argmax(axis=1).tolist() == CLASSES.tolist()
    assert result.note == ""


def test_what_is_not_loaded_fails_like_on_any_device(tmp_path: Path) -> None:
    gone = msgspec.structs.replace(batch(1), instance="other")
    result = on_device(record(0.1), tmp_path, lambda edge: edge.perform(gone))
    assert result.errors == ["the model is no longer loaded"]


def test_a_warm_model_comes_back_by_a_transfer_with_its_artifact_gone_from_store_and_disk(tmp_path: Path) -> None:
    variant, command = record(0.1), batch(1, 5, 2)
    transfer_ms = variant.profile.transfer_ms
    assert transfer_ms == pytest.approx(10.0)

    async def there_and_back(edge: SimulatedEdge) -> BatchResult:
        demoted = await edge.perform(TransferModel("i", "host"))
        assert (demoted.tier, demoted.memory_mb) == ("host", variant.profile.host_mb)
        assert (await edge.perform(MeasureProcess())).memory_mb == 0
        shutil.rmtree(tmp_path)
        promoted = await edge.perform(TransferModel("i", "device"))
        assert (promoted.tier, promoted.memory_mb) == ("device", variant.profile.memory_mb)
        assert 0.9 * transfer_ms <= promoted.load_ms < variant.profile.init_ms
        assert promoted.copied
        again = await edge.perform(TransferModel("i", "host"))
        assert (again.load_ms, again.copied) == (0.0, False), "its copy never left"
        await edge.perform(TransferModel("i", "device"))
        dropped = await edge.perform(TransferModel("i", "device", copied=False))
        assert (dropped.tier, dropped.copied) == ("device", False)
        assert (await edge.perform(TransferModel("i", "host"))).load_ms >= 0.9 * transfer_ms
        await edge.perform(TransferModel("i", "device"))
        result: BatchResult = await edge.perform(command)
        return result

    result = on_device(variant, tmp_path, there_and_back)
    found = np.concatenate([to_array(one["scores"], "scores") for one in result.outputs])
    assert found.argmax(axis=1).tolist() == CLASSES.tolist()


def test_a_device_whose_profile_has_no_host_tier_says_so(tmp_path: Path) -> None:
    variant = record(0.1)
    variant = replace(variant, profile=replace(variant.profile, init_ms=None, transfer_ms=None, host_mb=None))

    async def demote(edge: SimulatedEdge) -> None:
        with pytest.raises(BackendUnavailable, match="keeps no models in host memory"):
            await edge.perform(TransferModel("i", "host"))

    on_device(variant, tmp_path, demote)


def test_batches_overlap_on_a_gpu_and_share_its_speed(tmp_path: Path) -> None:
    """Three at once that take 52 ms alone: each is there while the others are, and together they take three times as long."""
    made = record(100.0)
    rows = [ProfileRow(batch=n, p50_ms=52.0, p99_ms=52.0, cpu_ms=0.0, wall_over_cpu=1.0) for n in (1, 8)]
    variant = replace(made, profile=replace(made.profile, rows=rows))

    async def three(edge: SimulatedEdge) -> list[BatchResult]:
        return await asyncio.gather(*(edge.perform(batch(1)) for _ in range(3)))

    results = on_device(variant, tmp_path, three)
    assert max(one.started for one in results) < min(one.finished for one in results)
    assert max(one.finished for one in results) - min(one.started for one in results) >= 3 * 0.052 - 0.01


def test_a_batch_that_fails_leaves_the_gpu_to_the_others(tmp_path: Path) -> None:
    variant, wrong = record(0.1), batch(1)
    wrong.queries[0].inputs = {"y": wrong.queries[0].inputs}

    async def both(edge: SimulatedEdge) -> list[BatchResult]:
        return await asyncio.gather(edge.perform(wrong), edge.perform(batch(1)), edge.perform(batch(2)))

    failed, *good = on_device(variant, tmp_path, both)
    assert failed.errors
    assert not any(one.errors for one in good)
