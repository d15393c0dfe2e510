"""What an accelerator's hands do otherwise than the CPU's: here on the CPU, whose models take no device memory."""

import pytest

from bus.memory import MemoryBus
from services.core.settings import ExecutorSettings, Settings, WorkerSettings
from services.executor.__main__ import wire
from services.executor.commands import BatchResult, LoadModel, MeasureProcess, UnloadModel
from services.executor.edge import AcceleratedEdge, final
from services.shell.host.accelerators import Accelerator
from services.shell.runtime.runtime import Runtime
from tests.support.servers.nats import run
from tests.unit.executor.test_edge_simulated import ARTIFACT, SUBJECTS, batch, record


def test_memory_is_what_the_models_say_of_the_device(tmp_path):
    async def main() -> None:
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

    run(main())


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
        "executor": "ExecutorEdge",
        "workshop": "WorkshopEdge",
        "executor-gpu-0": "AcceleratedEdge",
        "executor-gpu-1": "AcceleratedEdge",
        "executor-gpu-2": "SimulatedEdge",
        "executor-inferentia-0": "SimulatedEdge",
        "executor-remote": "RemoteEdge",
    }
    assert [edges[f"executor-gpu-{n}"]._models._device for n in range(2)] == ["cuda:0", "cuda:1"]
