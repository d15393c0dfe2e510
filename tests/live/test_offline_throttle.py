"""The throttle in real processes: while the worker is busy nothing of a job is computed, and the job says why.

The coordinator and the runner are processes of their own on a real server; monitor and executor are the test's, which can thus
be as busy as it likes.
"""

import asyncio
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bus.codec import decode, encode
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from bus.messages.flow import DoneBatch, Execute
from bus.messages.jobs import JobStatus
from bus.messages.public import Answer, Tensor
from bus.natsbus import NatsBus
from bus.port import Delivery
from bus.subjects import Subjects
from bus.tensors import from_array, to_array
from infaas import following
from services.core.catalog import key_of
from services.core.settings import BusSettings
from services.recorder.__main__ import streams
from tests.support.clients.responders import until
from tests.support.data import offline_inputs
from tests.support.servers.processes import program
from tests.support.simulated.fleet import catalogue, variant

VARIANT = variant()
X = np.arange(40, dtype="f4").reshape(20, 2)


def service(name: str, url: str, prefix: str, directory: Path) -> AbstractContextManager["subprocess.Popen[str]"]:
    more = {
        "INFAAS_BUS__URL": url, "INFAAS_PREFIX": prefix, "INFAAS_DATA_DIR": str(directory), "INFAAS_WORKER__NAME": "w0",
        "INFAAS_JOBS__CHUNK_ITEMS": "2",
    }  # fmt: skip
    return program("infaas.cli.run", name, patience=0.0, **more)


class Worker:
    """Monitor and executor of w0, as the test wants them to be."""

    def __init__(self, bus: NatsBus, subjects: Subjects) -> None:
        self.bus = bus
        self.subjects = subjects
        self.utilisation = 0.1
        self.state: Any = "Active"
        self.computed: list[str | None] = []

    async def open(self) -> None:
        await self.bus.subscribe(self.subjects.execute("w0", "cpu"), self._execute)
        self.beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            device = DeviceStatus(
                device="cpu", kind="cpu", cores=2, memory_mb=4000.0, memory_used_mb=0.0, cores_used=0.0,
                utilisation=self.utilisation, price_per_hour=0.1,
            )  # fmt: skip
            instance = InstanceStatus(
                instance="i-1", variant=VARIANT.variant, device="cpu", state=self.state, since=0.0
            )
            beat = WorkerHeartbeat(
                worker="w0", hardware="cpu", incarnation=1, at=time.time(), devices=[device], instances=[instance]
            )
            self.bus.publish(self.subjects.worker_heartbeat("w0"), encode(beat))
            await asyncio.sleep(0.1)

    def _execute(self, delivery: Delivery) -> None:
        execute = decode(Execute, delivery.data)
        route = execute.route
        x = to_array(msgspec.msgpack.decode(execute.body, type=dict[str, Tensor])["inputs"], "inputs")
        self.computed.append(route.id)
        now = time.time()
        answer = Answer(
            route.id, {"y": from_array(x[:, :1] * 2)}, "m", "1", VARIANT.variant, "cpu", "w0", 0.9, 1.0, 0.0, 1.0,
            len(x), False, False, 1e-9, [],
        )  # fmt: skip
        self.bus.publish(route.reply_to, encode(answer))
        done = DoneBatch(
            "w0/cpu/1", "w0", len(self.computed), "i-1", VARIANT.variant, len(x), now, now, 0.0, 0, [route.uid]
        )
        self.bus.publish(self.subjects.done(route.dispatcher), encode(done))


async def test_while_the_worker_is_busy_a_job_waits_and_says_why(tmp_path: Path, nats_url: str, prefix: str) -> None:
    subjects = Subjects(prefix)

    async def scene(bus: NatsBus) -> None:
        for spec in streams(subjects, BusSettings(outcome_bytes=2**24, event_bytes=2**24)).values():
            await bus.ensure_stream(spec)  # a part is stored once its outcome is kept
        catalog = await bus.key_value(subjects.catalog_bucket)
        for record in catalogue(VARIANT):
            await catalog.put(key_of(record), encode(record))
        worker = Worker(bus, subjects)
        worker.utilisation = 0.9
        await worker.open()
        (tmp_path / "jobs").mkdir()
        source = offline_inputs.write(tmp_path / "jobs" / "in.npy", X)

        async def step(text: str) -> None:
            async def told() -> bool:
                return text in (await following.status(bus, subjects, job)).step

            await until(told)

        with service("jobs", nats_url, prefix, tmp_path), service("offline", nats_url, prefix, tmp_path) as runner:
            job = await following.submit(bus, subjects, "app", str(source), str(tmp_path / "jobs" / "out.jsonl"))
            await step("w0: cpu is used 90% by other work")
            assert worker.computed == []
            worker.utilisation, worker.state = 0.1, "Interfered"
            await step(f"{VARIANT.variant} is Interfered")
            assert worker.computed == []
            runner.send_signal(signal.SIGSTOP)  # what it has taken, another one computes
            worker.state = "Active"
            with service("offline", nats_url, prefix, tmp_path):
                status: JobStatus = await following.wait(bus, subjects, job, timeout=120)
        assert (status.state, status.done, status.variants) == ("done", 20, [VARIANT.variant])
        assert {label for label in worker.computed if label} == {f"{job}/{n}" for n in range(10)}
        found = offline_inputs.read(tmp_path / "jobs" / "out.jsonl", "y")
        assert found.tolist() == (X[:, :1] * 2).tolist()
        worker.beating.cancel()

    bus = await NatsBus.connect(nats_url, name="test")
    try:
        await scene(bus)
    finally:
        await bus.close()
