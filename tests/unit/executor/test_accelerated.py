"""What an accelerator's hands do otherwise than the CPU's: here on the CPU, whose models take no device memory."""

import pytest

from bus.memory import MemoryBus
from services.executor.accelerated import AcceleratedEdge, final
from services.executor.work import BatchResult, LoadModel, MeasureMemory, UnloadModel
from tests.servers import run
from tests.unit.executor.test_simulated import ARTIFACT, SUBJECTS, batch, record


def test_memory_is_what_the_models_say_of_the_device(tmp_path):
    async def main() -> None:
        bus = MemoryBus()
        variant = record(0.1)
        store = await bus.object_store(SUBJECTS.artifacts_bucket)
        await store.put(variant.artifact, ARTIFACT)
        edge = AcceleratedEdge(bus, SUBJECTS, "cpu", 1, tmp_path, watchdog=20.0, least_s=5.0)
        for instance in ("i", "j"):
            assert (await edge.perform(LoadModel(instance, variant))).memory_mb == 0.0
        edge._held["i"].handle.memory_mb, edge._held["j"].handle.memory_mb = 100.0, 23.0
        assert await edge.perform(MeasureMemory()) == 123.0
        assert (await edge.perform(batch(1, 5))).errors is None
        await edge.perform(UnloadModel("i"))
        assert await edge.perform(MeasureMemory()) == 23.0
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
