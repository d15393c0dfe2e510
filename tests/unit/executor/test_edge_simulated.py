"""A simulated device's cpu_edge, with a real model in onnxruntime and a real (in-process) object store."""

import asyncio
import hashlib
import shutil
import threading
import time
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
from services.core.settings import ExecutorSettings, Settings, WorkerSettings
from services.executor.__main__ import wire
from services.executor.backends.base import BackendUnavailable, Cancelled
from services.executor.commands import BatchResult, LoadModel, MeasureProcess, RunBatch, TransferModel, UnloadModel
from services.executor.edge import AcceleratedEdge, ExecutorEdge, final
from services.executor.edge_simulated import NOTE, SimulatedEdge
from services.executor.endings import answer_of
from services.executor.instances import HeldInstance
from services.executor.queue import queued_query
from services.shell.host.accelerators import Accelerator
from services.shell.host.running import shared
from services.shell.runtime.runtime import Runtime
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
        await (await bus.object_store(SUBJECTS.artifacts_bucket)).put(variant.artifact, ARTIFACT)
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
    loaded = HeldInstance("i", variant, 1.0)
    return [answer_of(loaded, "w0", work, result, i, 8, 0.1) for i, work in enumerate(command.queries)]


def test_outputs_are_the_models_own_or_zeros_that_say_so(tmp_path: Path) -> None:
    variant, command = record(0.1), batch(1, 5, 2)
    result = on_device(variant, tmp_path, lambda edge: edge.perform(command))
    assert result.finished - result.started >= 0.002
    found = np.concatenate([to_array(one["scores"], "scores") for one in result.outputs])
    assert found.argmax(axis=1).tolist() == CLASSES.tolist()
    for answer in answers(variant, command, result):
        assert (answer.simulated, answer.hardware, answer.reason) == (True, "gpu", msgspec.UNSET)
    variant, command = record(100.0), batch(1, 5)
    result = on_device(variant, tmp_path, lambda edge: edge.perform(command))
    assert result.finished - result.started >= 0.0025
    assert [one["scores"].shape for one in result.outputs] == [[1, tiny_models.CLASSES], [5, tiny_models.CLASSES]]
    assert not any(to_array(one["scores"], "scores").any() for one in result.outputs)
    assert result.bytes == 6 * tiny_models.CLASSES * 4
    assert [answer.reason for answer in answers(variant, command, result)] == [NOTE, NOTE]


def test_open_sizes_are_computed_and_what_is_not_loaded_fails(tmp_path: Path) -> None:
    variant, command = record(100.0, outputs=[-1]), batch(8)
    result = on_device(variant, tmp_path, lambda edge: edge.perform(command))
    assert to_array(result.outputs[0]["scores"], "scores").argmax(axis=1).tolist() == CLASSES.tolist()
    assert result.note == ""
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


# -- What an accelerator's hands do otherwise than the CPU's: here on the CPU, whose models take no device memory.


async def test_memory_is_what_the_models_say_of_the_device(tmp_path):
    bus = MemoryBus()
    variant = record(0.1)
    await (await bus.object_store(SUBJECTS.artifacts_bucket)).put(variant.artifact, ARTIFACT)
    edge = AcceleratedEdge(bus, SUBJECTS, "cpu", 1, tmp_path, ExecutorSettings())
    for instance in ("i", "j"):
        assert (await edge.perform(LoadModel(instance, variant))).memory_mb == 0.0
    edge._loaded["i"].handle.memory_mb, edge._loaded["j"].handle.memory_mb = 100.0, 23.0
    assert (await edge.perform(MeasureProcess())).memory_mb == 123.0
    assert (await edge.perform(batch(1, 5))).errors is None
    await edge.perform(UnloadModel("i"))
    assert (await edge.perform(MeasureProcess())).memory_mb == 23.0
    await bus.close()


async def test_what_is_computed_is_shown_to_the_supervisor_meanwhile(tmp_path):
    running = shared()
    if running is None:
        pytest.skip("shared memory without a file: Linux only")
    running.clear()
    seen = []

    class Watched(ExecutorEdge):
        def _result(self, model, command):
            seen.append(running.read())
            return super()._result(model, command)

    bus = MemoryBus()
    variant = record(0.1)
    await (await bus.object_store(SUBJECTS.artifacts_bucket)).put(variant.artifact, ARTIFACT)
    edge = Watched(bus, SUBJECTS, "cpu", 1, tmp_path, ExecutorSettings(), running)
    await edge.perform(LoadModel("i", variant))
    assert (await edge.perform(batch(1, 2))).errors is None
    assert edge.inline(replace(batch(1), inline=True)).errors is None
    await bus.close()
    first, second = (number.to_bytes(16, "big") for number in range(2))
    assert seen == [[first, second], [first]]
    assert running.read() == []


@pytest.mark.parametrize(
    ("errors", "lost"),
    [
        (None, False),
        (["", "CUDA out of memory. Tried to allocate 2.00 GiB"], False),
        (["", "CUDA error: an illegal memory access was encountered"], True),
        (["CUDA failure 719: unspecified launch failure"], True),
    ],
)
def test_some_errors_mean_that_the_device_is_lost(errors, lost):
    assert bool(final(BatchResult(0.0, 1.0, [], errors))) == lost
    assert final(None) == final("illegal memory access") == ""


def test_a_worker_has_an_executor_for_every_device_it_has_or_simulates(tmp_path):
    gpus = [Accelerator(address=f"cuda:{n}", kind="gpu", name="T4", memory_mb=15360.0, uuid=str(n)) for n in range(2)]
    settings = Settings(
        data_dir=str(tmp_path),
        worker=WorkerSettings(name="w", cores=2, simulate={"gpu": 1, "inferentia": 1}),
        executor=ExecutorSettings(remote_hosts=("engine.test",)),
    )

    async def main() -> list[Runtime]:
        bus = MemoryBus()
        try:
            return await wire(settings, bus, gpus)
        finally:
            await bus.close()

    edges = {runtime.name: runtime.edge for runtime in run(main())}
    assert {name: type(edge).__name__ for name, edge in edges.items()} == {
        "executor": "ExecutorEdge", "workshop": "WorkshopEdge", "executor-gpu-0": "AcceleratedEdge",
        "executor-gpu-1": "AcceleratedEdge", "executor-gpu-2": "SimulatedEdge",
        "executor-inferentia-0": "SimulatedEdge", "executor-remote": "RemoteEdge",
    }  # fmt: skip
    assert [edges[f"executor-gpu-{n}"]._models._device for n in range(2)] == ["cuda:0", "cuda:1"]


class Endless:
    """A loaded model whose runs end only when they are cancelled. cancelled: when."""

    one_at_a_time, outputs, memory_mb = "", ("scores",), 0.0

    def __init__(self) -> None:
        self.ends = threading.Event()
        self.cancelled = 0.0

    def run_single(self, array: object) -> list[object]:
        assert self.ends.wait(60.0), "nobody cancels it"
        raise Cancelled("it was cancelled")

    def cancel(self) -> None:
        self.cancelled = time.monotonic()
        self.ends.set()

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("watchdog", "watchdog_least_s", "least_s"),
    [(1.0, 0.2, 0.2), (1.0, 1.0, 1.0), (500.0, 0.2, 1.0)],  # the batch is predicted to take 2 ms
)
async def test_a_run_that_takes_many_times_its_profile_is_cancelled(tmp_path, watchdog, watchdog_least_s, least_s):
    bus = MemoryBus()
    variant = record(0.1)
    await (await bus.object_store(SUBJECTS.artifacts_bucket)).put(variant.artifact, ARTIFACT)
    settings = ExecutorSettings(watchdog=watchdog, watchdog_least_s=watchdog_least_s)
    edge = AcceleratedEdge(bus, SUBJECTS, "cpu", 1, tmp_path, settings)
    await edge.perform(LoadModel("i", variant))
    took = []
    while not took or (min(took) >= 5.0 and len(took) < 20):  # what else the machine does only adds to it
        edge._loaded["i"].handle = endless = Endless()
        began = time.monotonic()
        assert (await edge.perform(batch(1))).errors == ["it was cancelled"]
        took.append(endless.cancelled - began)
    assert 0.99 * least_s <= min(took) < 5.0, "5 s is the default; a timer may come a tick early"
    await bus.close()
