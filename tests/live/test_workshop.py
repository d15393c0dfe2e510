"""The workshop as it is deployed: actor and edge in one process, helper and sandboxes as processes of their own, on real NATS."""

import os
import signal
from pathlib import Path

import pytest

from bus.codec import decode, encode
from bus.fields import filled
from bus.messages.work import BuildVariants, CancelWork, InspectModel, ModelInspected, WorkFinished
from bus.natsbus import NatsBus
from bus.subjects import Subjects
from services.core.settings import BusSettings, RegistrarSettings, Settings
from services.executor.workshop.actor import WorkshopActor
from services.executor.workshop.edge import WorkshopEdge
from services.shell.runtime.runtime import Runtime
from tests.support.clients.responders import until
from tests.support.models import tiny_models
from tests.support.servers.processes import alive

X, Y = tiny_models.digits(100)
KEYS = {"inputs_key": "x", "labels_key": "y", "metric": "top1"}


class Workshop:
    """One worker's workshop on a bus, with the facts that it publishes."""

    def __init__(self, url: str, prefix: str, data_dir: Path) -> None:
        self.settings = Settings(
            prefix=prefix,
            data_dir=str(data_dir),
            bus=BusSettings(url=url),
            registrar=RegistrarSettings(seconds=60.0, memory_mb=2048),
        )
        self.subjects = Subjects(prefix)
        self.finished: list[WorkFinished] = []
        self.inspected: list[ModelInspected] = []

    async def __aenter__(self):
        self.bus = await NatsBus.connect(self.settings.bus.url, name="test")
        await self._hear("finished", WorkFinished, self.finished)
        await self._hear("inspected", ModelInspected, self.inspected)
        self.uploads = await self.bus.object_store(self.subjects.uploads_bucket)
        self.runtime = Runtime(
            "workshop",
            lambda: WorkshopActor("w", self.subjects, RegistrarSettings(seconds=60.0)),
            self.bus,
            self.subjects,
            WorkshopEdge(self.settings, self.bus),
        )
        await self.runtime.start()
        return self

    async def __aexit__(self, *_):
        await self.runtime.stop(0.2)
        await until(lambda: not self.runtime._tasks)  # the edge cleans up after itself
        await self.bus.close()

    async def _hear(self, fact: str, kind: type, into: list) -> None:
        await self.bus.subscribe(
            self.subjects.registrar(fact), lambda delivery: into.append(decode(kind, delivery.data))
        )

    async def order(self, registration: str, model: bytes, format: str = "onnx") -> None:
        await self.uploads.put(f"{registration}.model", model)
        await self.uploads.put(f"{registration}.validation", tiny_models.npz(x=X, y=Y))
        order = InspectModel(
            registration=registration,
            format=format,
            object=f"{registration}.model",
            validation=f"{registration}.validation",
            **KEYS,
        )
        self.bus.publish(self.subjects.workshop("w", "inspect"), encode(order))
        await self.bus.flush()


def children(pid: int) -> list[int]:
    """Living child processes, of all the process's threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return [one for one in found if alive(one)]


def helper() -> int | None:
    return next((pid for pid in children(os.getpid()) if b"executor.workshop" in command(pid)), None)


def sandbox() -> int | None:
    """The sandbox, once it is the Python process that has read its job."""
    pid = helper()
    return next((one for one in children(pid) if b"workshop.sandbox" in command(one)), None) if pid else None


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def environment(pid: int) -> bytes:
    """What the process was started with; nothing where this user may not look, which is what we want of it."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return b""


async def test_orders_are_carried_out_one_after_the_other(nats_url, prefix, tmp_path):
    async with Workshop(nats_url, prefix, tmp_path) as workshop:
        await workshop.order("good", tiny_models.mlp())
        await workshop.order("bad", b"a text file")
        await until(lambda: len(workshop.finished) == 2)
        assert [(one.registration, one.order) for one in workshop.finished] == [
            ("good", "inspect"),
            ("bad", "inspect"),
        ]
        assert workshop.finished[0].reason is None
        assert "not an ONNX model" in workshop.finished[1].reason
        (found,) = workshop.inspected
        assert (found.baseline_accuracy, found.worker) == (1.0, "w")
        artifacts = await workshop.bus.object_store(workshop.subjects.artifacts_bucket)
        assert await artifacts.get(found.source) == tiny_models.mlp()


async def test_a_sandbox_knows_neither_bus_nor_credentials(nats_url, prefix, tmp_path):
    async with Workshop(nats_url, prefix, tmp_path) as workshop:
        await workshop.order("endless", tiny_models.endless())
        await until(sandbox)
        pid, parent = sandbox(), helper()
        for one in (pid, parent):
            said = command(one) + environment(one)
            assert b"secret" not in said
            assert b"INFAAS_" not in said


@pytest.mark.parametrize("who", [sandbox, helper])
async def test_a_killed_process_fails_its_order_and_no_other(nats_url, prefix, tmp_path, who):
    async with Workshop(nats_url, prefix, tmp_path) as workshop:
        await workshop.order("killed", tiny_models.endless())
        await until(who)
        os.kill(who(), signal.SIGKILL)
        await workshop.order("next", tiny_models.mlp())
        await until(lambda: len(workshop.finished) == 2)
        assert [one.registration for one in workshop.finished] == ["killed", "next"]
        assert workshop.finished[0].reason
        assert workshop.finished[1].reason is None


async def test_nothing_runs_on_when_the_worker_stops(nats_url, prefix, tmp_path):
    async with Workshop(nats_url, prefix, tmp_path) as workshop:
        await workshop.order("endless", tiny_models.endless())
        await until(sandbox)
        pids = [helper(), sandbox()]
        await workshop.runtime.stop(0.1)
        await until(lambda: workshop.finished)
        assert workshop.finished[0].lost
        await until(lambda: not any(alive(pid) for pid in pids))
        await until(lambda: not list(tmp_path.glob("workers/w/*")))


async def test_a_cancelled_order_ends_with_its_processes_and_the_next_one_is_carried_out(nats_url, prefix, tmp_path):
    async with Workshop(nats_url, prefix, tmp_path) as workshop:
        await workshop.order("endless", tiny_models.endless())
        await until(sandbox)
        pids = [helper(), sandbox()]
        await workshop.order("good", tiny_models.mlp())
        workshop.bus.publish(workshop.subjects.workshop("w", "cancel"), encode(CancelWork(registration="endless")))
        await until(lambda: workshop.finished)
        assert [(one.registration, one.reason) for one in workshop.finished] == [("good", None)]
        assert not any(alive(pid) for pid in pids)


@pytest.mark.torch
async def test_the_next_model_of_torch_finds_torch_imported_and_another_one_ends_that(nats_url, prefix, tmp_path):
    model = tiny_models.exported(tmp_path / "m.pt2", pytest.importorskip("torch"))
    async with Workshop(nats_url, prefix, tmp_path) as workshop:
        coming = InspectModel(registration="", format="pt2", object="", validation="", **KEYS)
        workshop.bus.publish(workshop.subjects.workshop("w", "inspect"), encode(coming))
        await until(sandbox)
        first = helper()
        await workshop.order("first", model, "pt2")
        await until(lambda: workshop.finished)
        assert helper() == first, "it was told that a model would come"
        (found,) = workshop.inspected
        build = filled(BuildVariants, found, model="m", version="1", format="pt2", plans=[], **KEYS)
        workshop.bus.publish(workshop.subjects.workshop("w", "build"), encode(build))
        await until(lambda: len(workshop.finished) == 2)
        await workshop.order("second", model, "pt2")
        await until(lambda: len(workshop.finished) == 3)
        assert [one.reason for one in workshop.finished] == [None] * 3
        assert helper() == first
        await workshop.order("third", tiny_models.mlp())
        await until(lambda: len(workshop.finished) == 4)
        assert not alive(first)
