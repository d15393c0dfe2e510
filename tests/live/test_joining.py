"""A worker that claims a GPU joins a system with two registrars: the model registered there gets its variants, once.

The GPU worker is a script: its heartbeats and its workshop's answers; everything else is real.
"""

import asyncio
from pathlib import Path

import pytest

from bus.codec import decode, encode
from bus.messages.catalog import Profile, ProfileRow
from bus.messages.fleet import DeviceStatus, WorkerHeartbeat
from bus.messages.public import RegistrationStatus
from bus.messages.work import BuildVariants, InspectModel, ModelInspected, VariantBuilt, WorkFinished
from bus.port import Bus, Delivery
from infaas.demo import digits
from infaas.registering import last_status
from services.registrar.__main__ import wire as wire_registrar
from tests.live.test_registrar import System, cluster
from tests.support.clients.responders import until

pytestmark = pytest.mark.slow

FRAMEWORKS = {"ort": "", "ort-cuda": "", "tensorrt": "TensorRT is not installed", "torch-cuda": ""}


class GpuWorker:
    """`g1`, with one GPU. orders: what its workshop was asked."""

    def __init__(self, system: System) -> None:
        self.system, self.orders = system, list[InspectModel | BuildVariants]()
        self.bus: Bus = system.bus
        self.subjects = system.subjects

    async def join(self) -> asyncio.Task[None]:
        await self.bus.subscribe(self.subjects.workshop("g1", "inspect"), self._inspect)
        await self.bus.subscribe(self.subjects.workshop("g1", "build"), self._build)
        return asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        kinds = {"cpu": ("cpu", 8), "gpu-0": ("gpu", 1)}
        devices = [
            DeviceStatus(
                device=name, kind=kind, cores=cores, memory_mb=81920, memory_used_mb=0, cores_used=0, utilisation=0,
                price_per_hour=3.06,
            )
            for name, (kind, cores) in kinds.items()
        ]  # fmt: skip
        while True:
            beat = WorkerHeartbeat(worker="g1", hardware="cpu", incarnation=1, at=0.0, devices=devices, instances=[])
            self.bus.publish(self.subjects.worker_heartbeat("g1"), encode(beat))
            await asyncio.sleep(0.2)

    def _inspect(self, delivery: Delivery) -> None:
        order = decode(InspectModel, delivery.data)
        self.orders.append(order)
        record = self.record
        fact = ModelInspected(
            registration=order.registration, worker="g1", hardware=order.hardware, source=order.object,
            validation=order.validation, signature=record.signature, operators=["Gemm"], fixed_batch=False, samples=500,
            baseline_accuracy=0.9, frameworks=FRAMEWORKS,
        )  # fmt: skip
        self.bus.publish(self.subjects.registrar("inspected"), encode(fact))

    def _build(self, delivery: Delivery) -> None:
        order = decode(BuildVariants, delivery.data)
        self.orders.append(order)
        rows = [ProfileRow(batch=n, p50_ms=0.2, p99_ms=0.3, cpu_ms=0.1, wall_over_cpu=1.0) for n in (1, 8)]
        for plan in order.plans:
            fact = VariantBuilt(
                registration=order.registration, worker="g1", hardware=plan.hardware, plan=plan, artifact="aa",
                accuracy=0.9, agreement=1.0,
                profile=Profile(rows=rows, load_ms=900.0, memory_mb=700.0, saturation_qps=40_000.0),
            )  # fmt: skip
            self.bus.publish(self.subjects.registrar("built"), encode(fact))
        end = WorkFinished(registration=order.registration, worker="g1", order="build")
        self.bus.publish(self.subjects.registrar("finished"), encode(end))


async def fitted(system: System, registration: str) -> RegistrationStatus:
    found: list[RegistrationStatus] = []

    async def over() -> bool:
        status = await last_status(system.bus, system.subjects, registration)
        found.extend([status] if status is not None else [])
        return bool(found) and found[-1].state in ("done", "failed")

    await until(over)
    return found[-1]


async def test_the_first_gpu_worker_brings_its_variants(nats_url: str, prefix: str, tmp_path: Path) -> None:
    async with cluster(nats_url, prefix, tmp_path) as system:
        for _ in range(2):
            await system.start(wire_registrar)
        status = await system.register(digits.models()["mlp-s"])
        assert status.state == "done", status
        before = await system.catalog()
        model = before.model("mlp", "1")
        assert model is not None
        worker = GpuWorker(system)
        worker.record = before.variants_of("digits")[0]
        beating = await worker.join()
        await until(lambda: worker.orders)
        inspection = worker.orders[0]
        assert isinstance(inspection, InspectModel)
        assert (inspection.object, inspection.validation) == (model.source, model.validation)
        assert (inspection.stored, inspection.hardware) == (True, "gpu")
        status = await fitted(system, inspection.registration)
        assert (status.state, status.app, status.model, status.version) == ("done", "digits", "mlp", "1")
        assert status.variants == ["mlp-v1-ort-cuda-fp32-t1-b8", "mlp-v1-ort-cuda-fp16-t1-b8"]
        await asyncio.sleep(2.5)  # two sweeps of each registrar
        assert len(worker.orders) == 2, "one inspection and one build"
        after = await system.catalog()
        gpu = [record for record in after.variants_of("digits") if record.hardware == "gpu"]
        assert {record.variant for record in gpu} == set(status.variants)
        assert not any(record.simulated for record in gpu)
        rest = [record for record in after.variants_of("digits") if record.hardware != "gpu"]
        assert rest == list(before.variants_of("digits"))
        assert after.app("digits") == before.app("digits")
        beating.cancel()
