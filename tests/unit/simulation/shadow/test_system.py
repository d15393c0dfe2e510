"""What a shadow begins with: the real system's machines and catalogue, as a simulated system takes them."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import (
    AppRecord,
    PipelineEdge,
    PipelinePlan,
    PipelineRecord,
    PipelineVertex,
    PlannedStage,
    VariantRecord,
)
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from bus.messages.scaling import ClassDemand, PipelineArrivals
from services.autoscaler.vms.rules import PricedKind
from services.core.catalog import app_key, variant_key
from services.core.placement import Device
from services.core.settings import Settings
from services.simulation.shadow.live import LiveSystem, simulated_entry, visits_of
from services.simulation.shadow.system import ShadowSpec, machines_of
from tests.support.data.events import VARIANT, app_record, variant_record


def device(kind: str = "cpu", name: str = "", **fields: Any) -> DeviceStatus:
    plain = {"cores": 4, "memory_mb": 8000.0, "price_per_hour": 0.2, "utilisation": 0.0}
    return DeviceStatus(device=name or kind, kind=kind, memory_used_mb=0.0, cores_used=0.0, **(plain | fields))


def worker(name: str, *devices: DeviceStatus, **fields: Any) -> WorkerHeartbeat:
    plain: dict[str, Any] = {"hardware": "cpu", "incarnation": 1, "at": 0.0, "instances": []}
    return WorkerHeartbeat(worker=name, devices=list(devices), **(plain | fields))


def spec(**kinds: PricedKind) -> ShadowSpec:
    return ShadowSpec(name="infaas", base="infaas", settings=Settings(), kinds=kinds, prices={}, boot_s=5.0)


def kind(name: str, **fields: Any) -> PricedKind:
    gpu = Device(name="gpu-0", kind="gpu", cores=1, memory_mb=16000.0, address="cuda:0")
    return PricedKind(name=name, devices=(gpu,), price_per_hour=3.0, **fields)


def found(workers: Sequence[WorkerHeartbeat], chosen: ShadowSpec) -> dict[str, tuple[int, int, int, tuple[str, ...]]]:
    specs = machines_of({one.worker: (one, one.devices) for one in workers}, chosen)
    return {one.kind: (one.start, one.minimum, one.maximum, one.workers) for one in specs}


def test_workers_that_are_alike_are_of_one_kind_and_keep_their_names() -> None:
    workers = [worker("w1", device()), worker("w0", device(memory_mb=8010.0)), worker("big", device(cores=16))]
    assert found(workers, spec()) == {"cpu": (2, 2, 2, ("w0", "w1")), "cpu-2": (1, 1, 1, ("big",))}
    assert found(workers[:2], spec(cpu=kind("cpu", minimum=1, maximum=5))) == {"cpu": (2, 1, 5, ("w0", "w1"))}


def test_kinds_of_the_settings_may_be_started_though_none_runs() -> None:
    chosen = spec(gpu=kind("gpu", maximum=2, boot_s=9.0), never=kind("never"))
    assert found([worker("w0", device())], chosen) == {"cpu": (1, 1, 1, ("w0",)), "gpu": (0, 0, 2, ())}
    of = {one.kind: one for one in machines_of({"w0": (worker("w0"), [device()])}, chosen)}
    assert (of["gpu"].boot_s, of["cpu"].boot_s) == (9.0, 5.0)
    assert of["gpu"].price_per_hour == 3.0
    assert all(one.simulated for each in of.values() for one in each.devices)


def test_a_workers_kind_is_what_the_controller_counts_it_as() -> None:
    workers = [worker("w0", device(), kind="plain"), worker("w1", device(), device("gpu", "gpu-0"), kind="accelerated")]
    assert set(found(workers, spec())) == {"plain", "accelerated"}
    assert found([worker("w0")], spec()) == {}  # nothing works there


def test_a_simulated_catalogue() -> None:
    app = decode(AppRecord, simulated_entry("app.digits", encode(app_record(default_output={"y": 1})), set()) or b"")
    assert (app.app, app.default_output, app.slo_target, app.links) == ("digits", None, None, {"mlp": "1"})
    own = encode(app_record(slo_target=0.9))
    assert decode(AppRecord, simulated_entry("app.digits", own, set()) or b"").slo_target == 0.9
    assert decode(AppRecord, simulated_entry("app.digits", own, set(), 0.999) or b"").slo_target == 0.999
    key = variant_key(VARIANT)
    variant = decode(VariantRecord, simulated_entry(key, encode(variant_record()), {"cpu"}) or b"")
    assert variant.simulated
    twin = encode(variant_record(hardware="gpu", simulated=True))
    assert simulated_entry(key, twin, {"gpu"}) is None
    assert simulated_entry(key, twin, {"cpu"}) is not None


def test_what_is_no_record_is_left_out() -> None:
    for key, value in (("app.a", b"\xc1"), ("app.a", encode(3)), ("other", b""), ("app.a", None)):
        assert simulated_entry(key, value, set()) is None


def test_the_real_systems_cost() -> None:
    live = LiveSystem()
    live.changed(app_key("digits"), encode(app_record()))
    live.changed(variant_key(VARIANT), encode(variant_record()))

    def instance(name: str, **fields: Any) -> InstanceStatus:
        plain: dict[str, Any] = {"variant": VARIANT, "device": "cpu", "state": "Active", "since": 0.0}
        return InstanceStatus(instance=name, **(plain | fields))

    instances = [
        instance("a"), instance("b", reclaimable=True), instance("c", state="Unloading"), instance("d", variant="unknown"),
    ]  # fmt: skip
    live.heartbeat(worker("w0", device(), instances=instances), 100.0)
    live.heartbeat(worker("w1", device("gpu", "gpu-0", price_per_hour=3.0)), 100.0)
    live.heartbeat(worker("w2", device(), leaving=True), 100.0)
    assert live.cost_rate(101.0) == 3.2
    assert live.apps_cost_rate(101.0) == 0.2 / 4  # one thread of four
    assert live.prices(101.0) == {"cpu": 0.05, "gpu": 3.0}
    assert live.loaded(live.workers(101.0)[0]) == {VARIANT: 2, "unknown": 1}
    assert live.cost_rate(200.0) == 0.0  # nobody is heard any more
    live.changed(variant_key(VARIANT), None)
    assert live.apps_cost_rate(101.0) == 0.0
    assert [key for key, _ in live.entries()] == ["app.digits"]


def test_simulated_devices_beside_real_ones_are_left_out() -> None:
    live = LiveSystem()
    first = worker("w0", device(), device("gpu", "gpu-0"), device("gpu", "gpu-1", simulated=True))
    live.heartbeat(first, 1.0)
    real = live.real_kinds(1.0)
    assert [one.device for one in live.devices(first, real)] == ["cpu", "gpu-0"]
    alone = worker("w1", device("gpu", "gpu-0", simulated=True))
    assert [one.device for one in live.devices(alone, set())] == ["gpu-0"]


# -- pipelines

STAGES = PipelineRecord(
    vertices=[
        PipelineVertex(name="first", app="digits", inputs={"x": "$.x"}),
        PipelineVertex(name="second", app="faces", inputs={"x": "$.x"}, accuracy=0.9),
        PipelineVertex(name="other", app="votes", inputs={"x": "$.x"}),
    ],
    edges=[PipelineEdge(source="first", target="second", probability=0.5)],
    output={"y": "second.y | first.y"},
)
STAGE = PlannedStage(hardware="cpu", batch=1, replicas=1, scale=1.0, service_ms=10.0, rho=0.1, variant=VARIANT)
PLAN = PipelinePlan(
    pipeline="social", policy="inferline", status="feasible", cost_per_s=0.0, p99_ms=50.0,
    vertices={"first": STAGE, "second": replace(STAGE, scale=0.5, service_ms=30.0)}, envelope=[(1.0, 20)],
    dispersion=[1.0], steps=[], rate=10.0, latency_ms=100.0,
)  # fmt: skip


def test_arrivals_at_a_planned_pipeline_are_demand_for_its_planned_stages() -> None:
    live = LiveSystem()
    report = PipelineArrivals("d0", "social", 7.0, [3, 0, 8])
    assert visits_of(report, live.catalog, lambda: 0.0).rows == []
    record = app_record(app="social", links={}, pipeline=STAGES, plan=PLAN, latency_ms=100.0)
    live.changed(app_key("social"), encode(record))
    found = visits_of(report, live.catalog, lambda: 0.0)
    assert (found.at, found.seconds) == (7.0, 0.03)
    assert found.rows == [ClassDemand("digits", "", 11, 70.0), ClassDemand("faces", "", 5, 90.0, 0.9)]
    assert [row.items for row in visits_of(report, live.catalog, lambda: 0.6).rows] == [11, 6]  # 5.5 by chance
    live.changed(app_key("social"), encode(replace(record, plan=None)))
    assert visits_of(report, live.catalog, lambda: 0.0).rows == [], "dispatchers report what no plan provides for"
