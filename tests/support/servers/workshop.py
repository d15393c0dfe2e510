"""A worker's workshop without its executor, on a bus in this process, in sandboxes or without."""

import asyncio
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bus.codec import decode, encode
from bus.memory import MemoryBus
from bus.messages.catalog import Functions
from bus.messages.work import (
    BuildVariants,
    InspectModel,
    ModelInspected,
    VariantBuilt,
    VariantFailed,
    VariantPlan,
    WorkFinished,
    WorkProgress,
)
from bus.subjects import Subjects
from services.core.settings import RegistrarSettings
from services.executor.backends.functions import FunctionProcess
from services.executor.backends.remote import RELAY
from services.executor.workshop.actor import WorkshopOrder
from services.executor.workshop.helper import Helper
from services.executor.workshop.sandbox import child, supervisor
from services.executor.workshop.sandbox.protocol import Frame, SandboxInput, SandboxLimits, SandboxTask
from tests.support.models import tiny_models
from tests.support.models.tiny_models import npz

SUBJECTS = Subjects("t")
KINDS = {
    "inspected": ModelInspected, "built": VariantBuilt, "variant-failed": VariantFailed, "progress": WorkProgress,
    "finished": WorkFinished,
}  # fmt: skip
X, Y = tiny_models.digits(200)
GOOD = npz(x=X, y=Y)
LIMITS = RegistrarSettings(seconds=240.0, memory_mb=2048, max_model_mb=16)


async def in_this_process(
    task: SandboxTask,
    limits: SandboxLimits,
    on_frame: Callable[[Frame], None],
    relay: int | None = None,
    forks: object = None,
    waiting: Any = None,
) -> None:
    """The work of a sandbox, in place of `supervisor.run`."""
    frames: list[bytes] = []
    made: list[FunctionProcess] = []  # which in a sandbox die with it

    def process_of(functions: Functions) -> FunctionProcess:
        made.append(FunctionProcess(functions))
        return made[-1]

    order = SandboxInput(task=task, limits=limits)
    channel = SimpleNamespace(received=lambda kind: order, send=lambda frame: frames.append(encode(frame)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(task.scratch)
        for name in ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):  # which the sandbox sets for itself
            patch.setenv(name, os.environ.get(name, ""))
        patch.setattr(tempfile, "tempdir", None)
        patch.setattr(child, "Channel", SimpleNamespace(of_child=lambda: channel))
        patch.setattr(child, "lock_down", lambda *given: [])
        patch.setattr(child, "FunctionProcess", process_of)
        if relay is not None:
            patch.setenv(RELAY, str(os.dup(relay)))
        assert await asyncio.to_thread(child.main) == 0
    logging.disable(logging.NOTSET)  # which it silences
    for process in made:
        process.close()
    if relay is not None:
        with socket.socket(fileno=os.dup(relay)) as ended:
            ended.shutdown(socket.SHUT_RDWR)
    for frame in frames:
        on_frame(decode(Frame, frame))


class Shop:
    """Orders in, facts out. confined: what a sandbox does, it does; else this process."""

    def __init__(
        self,
        directory: Path,
        limits: RegistrarSettings = LIMITS,
        devices: dict[str, str] | None = None,
        *,
        confined: bool = False,
    ) -> None:
        self.directory, self.limits, self.devices, self.confined = directory, limits, devices or {}, confined
        self.facts: list = []

    def inspect(self, model: bytes, validation: bytes = GOOD, *, format: str = "onnx", metric: str = "top1", **extra):
        order = InspectModel(
            registration="r", format=format, object="model", validation="validation", inputs_key="x",
            labels_key="y", metric=metric, **extra,
        )  # fmt: skip
        asyncio.run(
            self._run(
                WorkshopOrder(worker="w", devices=self.devices, inspect=order),
                {"model": model, "validation": validation},
            )
        )
        return self

    def build(self, *plans: VariantPlan, format: str = "onnx", metric: str = "top1", **extra):
        """Variants of the model that was inspected last."""
        (found,) = self.of(ModelInspected)
        order = BuildVariants(
            registration="r", model="m", version="1", format=format, source=found.source,
            validation=found.validation, inputs_key="x", labels_key="y", metric=metric, signature=found.signature,
            plans=list(plans), **extra,
        )  # fmt: skip
        asyncio.run(self._run(WorkshopOrder(worker="w", devices=self.devices, build=order), {}))
        return self

    async def _run(self, order: WorkshopOrder, uploads: dict[str, bytes]) -> None:
        bus = MemoryBus()
        inspected = self.of(ModelInspected)
        self.facts.clear()
        for fact, kind in KINDS.items():
            await bus.subscribe(
                SUBJECTS.registrar(fact), lambda delivery, kind=kind: self.facts.append(decode(kind, delivery.data))
            )
        store = await bus.object_store(SUBJECTS.uploads_bucket)
        for key, content in uploads.items():
            await store.put(key, content)
        artifacts = await bus.object_store(SUBJECTS.artifacts_bucket)
        for key, content in getattr(self, "kept", {}).items():
            await artifacts.put(key, content)
        work = self.directory / f"work-{len(list(self.directory.iterdir()))}"
        work.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            if not self.confined:
                patch.setattr(supervisor, "run", in_this_process)
            await Helper(bus, SUBJECTS, self.limits, order, work).run()
        await bus.flush()
        self.kept = {key: await artifacts.get(key) for key in await artifacts.keys()}
        await bus.close()
        if order.build is not None:
            self.facts.extend(inspected)

    def of(self, kind: type) -> list:
        return [fact for fact in self.facts if isinstance(fact, kind)]

    @property
    def reason(self) -> str | None:
        (finished,) = self.of(WorkFinished)
        return finished.reason
