"""What is loaded is the file that was registered, byte for byte."""

import asyncio
import hashlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from bus.memory import MemoryBus
from services.executor.backends.base import BackendError
from services.executor.edge import ExecutorEdge
from services.executor.work import LoadModel
from tests.support.models import tiny_models
from tests.unit.executor.test_moving import SUBJECTS, record


def test_another_file_under_the_artifact_s_name_is_not_loaded(tmp_path: Path) -> None:
    good = tiny_models.mlp()
    variant = replace(record(good), artifact=hashlib.sha256(good).hexdigest())

    async def main() -> None:
        bus = MemoryBus()
        store = await bus.object_store(SUBJECTS.artifacts_bucket)
        await store.put(variant.artifact, tiny_models.mlp() + b"\0")
        edge = ExecutorEdge(bus, SUBJECTS, "cpu", 2, tmp_path, watchdog=20.0, least_s=5.0)
        with pytest.raises(BackendError, match="not the file that was registered"):
            await edge.perform(LoadModel("i", variant))
        assert not any(file.is_file() for file in tmp_path.rglob("*"))  # noqa: ASYNC240
        await store.put(variant.artifact, good)
        await edge.perform(LoadModel("i", variant))
        await bus.close()

    asyncio.run(main())
