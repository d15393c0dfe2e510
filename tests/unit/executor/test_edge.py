"""What an accelerator's hands do otherwise than the CPU's: here on the CPU, whose models take no device memory."""

import threading
import time

import pytest
from msgspec.structs import replace

from bus.memory import MemoryBus
from services.core.settings import ExecutorSettings, Settings, WorkerSettings
from services.executor.__main__ import wire
from services.executor.backends.base import Cancelled
from services.executor.commands import BatchResult, LoadModel, MeasureProcess, UnloadModel
from services.executor.edge import AcceleratedEdge, ExecutorEdge, final
from services.shell.host.accelerators import Accelerator
from services.shell.host.running import shared
from services.shell.runtime.runtime import Runtime
from tests.support.servers.nats import run
from tests.unit.executor.test_edge_simulated import ARTIFACT, SUBJECTS, batch, record


async def test_memory_is_what_the_models_say_of_the_device(tmp_path):
    bus = MemoryBus()
    variant = record(0.1)
    store = await bus.object_store(SUBJECTS.artifacts_bucket)
    await store.put(variant.artifact, ARTIFACT)
    edge = AcceleratedEdge(bus, SUBJECTS, "cpu", 1, tmp_path, ExecutorSettings())
    for instance in ("i", "j"):
        assert (await edge.perform(LoadModel(instance, variant))).memory_mb == 0.0
    edge._loaded["i"].handle.memory_mb, edge._loaded["j"].handle.memory_mb = 100.0, 23.0
    assert (await edge.perform(MeasureProcess())).memory_mb == 123.0
    assert (await edge.perform(batch(1, 5))).errors is None
    await edge.perform(UnloadModel("i"))
    assert (await edge.perform(MeasureProcess())).memory_mb == 23.0
    await bus.close()


def test_what_is_computed_is_shown_to_the_supervisor_meanwhile(tmp_path):
    running = shared()
    if running is None:
        pytest.skip("shared memory without a file: Linux only")
    running.clear()
    seen = []

    class Watched(ExecutorEdge):
        def _result(self, model, command):
            seen.append(running.read())
            return super()._result(model, command)

    async def main() -> None:
        bus = MemoryBus()
        variant = record(0.1)
        await (await bus.object_store(SUBJECTS.artifacts_bucket)).put(variant.artifact, ARTIFACT)
        edge = Watched(bus, SUBJECTS, "cpu", 1, tmp_path, ExecutorSettings(), running)
        await edge.perform(LoadModel("i", variant))
        assert (await edge.perform(batch(1, 2))).errors is None
        inline = replace(batch(1), inline=True)
        assert edge.inline(inline).errors is None
        await bus.close()

    run(main())
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

    edges = {runtime.name: runtime._edge for runtime in run(main())}
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
    store = await bus.object_store(SUBJECTS.artifacts_bucket)
    await store.put(variant.artifact, ARTIFACT)
    settings = ExecutorSettings(watchdog=watchdog, watchdog_least_s=watchdog_least_s)
    edge = AcceleratedEdge(bus, SUBJECTS, "cpu", 1, tmp_path, settings)
    await edge.perform(LoadModel("i", variant))
    took = []
    while not took or (min(took) >= 5.0 and len(took) < 20):  # what else the machine does only adds to it
        edge._loaded["i"].handle = endless = Endless()
        began = time.monotonic()
        found = await edge.perform(batch(1))
        assert found.errors == ["it was cancelled"]
        took.append(endless.cancelled - began)
    assert least_s <= min(took) < 5.0, "5 s is the default"
    await bus.close()
