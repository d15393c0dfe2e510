"""A shadow beside a simulated system, which takes the place of the real one: what it records, and that it changes nothing there."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
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
from bus.messages.events import ScalingEvent, ShadowEvent
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from bus.messages.scaling import ClassDemand, DemandReport, PipelineArrivals
from bus.subjects import Subjects
from services.autoscaler.vms.rules import PricedKind
from services.core.actor import Changed, Envelope, Malformed, Record, Started, Stopping, Synced, Tick
from services.core.catalog import app_key, variant_key
from services.core.placement import OVERCOMMIT, Device
from services.core.settings import Settings
from services.simulation.scenario.model import BEGINS, MachineSpec, Scenario
from services.simulation.scenario.policies import base_tree, settings_of
from services.simulation.scenario.toml import Location
from services.simulation.shadow.actor import LISTEN, Shadow, make_shadow
from services.simulation.shadow.live import (
    LiveOutcome,
    LiveOutcomes,
    LiveScaling,
    LiveSystem,
    simulated_entry,
    visits_of,
)
from services.simulation.shadow.system import ShadowSpec, machines_of
from tests.support.data.events import VARIANT, app_record, event, variant_record
from tests.support.data.examples import examples
from tests.support.data.pipelines import plan_of
from tests.support.data.small_scenarios import CPU, PRICES, Told, load, machine, scenario, settings

ELASTIC = machine("cpu", devices=(CPU,), start=1, minimum=1, maximum=3, boot_s=1.7)
RISING = scenario(
    load((0.0, 10.0), (12.0, 10.0), (13.0, 500.0), (40.0, 500.0)), duration_s=40.0, machines=(ELASTIC,), interference={}
)


def spec(base: str = "infaas", kinds: Iterable[MachineSpec] = (), **sections: dict[str, Any]) -> ShadowSpec:
    return ShadowSpec(
        name=base,
        base=base,
        settings=settings_of(Location("test"), base_tree(base), sections),
        kinds={
            one.kind: PricedKind(
                name=one.kind, devices=one.devices, price_per_hour=one.price_per_hour, minimum=one.minimum,
                maximum=one.maximum, boot_s=one.boot_s,
            )
            for one in kinds
        },
        prices=PRICES,
        boot_s=2.0,
    )  # fmt: skip


class Beside(Told):
    """A run with shadows in the same kernel from time 2 on."""

    def __init__(self, given: Scenario, *specs: ShadowSpec) -> None:
        super().__init__(given)
        self.found: dict[str, Any] = {}
        self.shadows = [make_shadow(Subjects(), one) for one in specs]
        for number, shadow in enumerate(self.shadows):
            self.kernel.at(BEGINS + 2.0 - self.kernel.now, self._enter, (f"shadow-{number}", shadow))

    def _enter(self, what: tuple[str, Shadow]) -> None:
        self.kernel.enter(*what)

    def recorded(self, policy: str) -> list[ShadowEvent]:
        return [one for _, one in self.log if isinstance(one, ShadowEvent) and one.policy == policy]

    def actions(self, policy: str) -> list[ShadowEvent]:
        return [one for one in self.recorded(policy) if one.action != "sample"]


@pytest.fixture(scope="module")
def rising() -> Beside:
    """A system under rising load, beside which the same policy and a static one run; the static one is stopped early."""
    run = Beside(RISING, spec("infaas", [ELASTIC]), spec("static", [ELASTIC]))
    run.kernel.at(BEGINS + 39.0 - run.kernel.now, lambda _: run.kernel.leave("shadow-1", goodbye=True))
    run.found = run.result()
    return run


@pytest.mark.slow
def test_a_system_does_the_same_with_shadows_beside_it(rising: Beside) -> None:
    alone = Told(RISING)
    found = alone.result()
    assert {key: value for key, value in found.items() if key != "events"} == {
        key: value for key, value in rising.found.items() if key != "events"
    }
    assert alone.rows() == [row for row in rising.rows() if row[2] != ShadowEvent.kind]
    assert rising.actions("infaas")  # it did something


def test_the_same_policy_beside_a_system_answers_as_much_and_costs_as_much(rising: Beside) -> None:
    found = rising.shadows[0].document()
    assert not rising.shadows[0].fault
    offered = sum(rising.found["series"]["offered_qps"][8:])
    assert found["shadow"]["items"] == pytest.approx(offered, rel=0.1)
    assert found["shadow"]["in_time"] == pytest.approx(1.0 - rising.found["slo_violation_ratio"], abs=0.12)
    assert found["shadow"]["cost_rate"] == pytest.approx(found["real"]["cost_rate"], rel=0.25)
    assert found["shadow"]["actions"].get("add_worker", 0) > 0  # the real one adds machines, too
    assert found["shadow"]["machines"]["cpu"] > 1


def test_each_action_tells_what_the_fleet_costs_after_it(rising: Beside) -> None:
    rows = rising.recorded("infaas")
    added = [one for one in rows if one.action == "add_worker" and one.count]
    assert added
    first = rows[0]
    assert first.action == "sample"
    assert first.cost_rate == pytest.approx(ELASTIC.price_per_hour)
    assert added[0].cost_rate >= first.cost_rate + ELASTIC.price_per_hour - 1e-9
    assert added[0].scaler == "vm"
    assert added[0].reason
    assert [one for one in rising.actions("infaas") if one.variant and one.action in ("load", "replicate")]
    assert max(one.apps_cost_rate for one in rows) > first.apps_cost_rate
    # Instances that have just come may be promised more cores than there are.
    assert all(0.0 <= one.apps_cost_rate <= OVERCOMMIT * one.cost_rate + 1e-9 for one in rows)


def test_costs_are_told_every_ten_seconds_and_static_systems_add_nothing(rising: Beside) -> None:
    rows = rising.recorded("static")
    times = [one.time - BEGINS for one in rows if one.action == "sample"]
    assert times == pytest.approx([7.0, 17.0, 27.0, 37.0, 39.0], abs=0.3)
    document = rising.shadows[1].document()
    found = document["shadow"]
    ours = f"{found['in_time']:.2%} of {found['items']} items in time (the system: "
    assert rows[-1].reason.startswith(ours)  # which the dashboard shows
    assert rows[-1].reason.endswith("); 1 cpu, 1 instance")
    assert rows[-1].count == 0
    assert found["machines"] == {"cpu": 1}
    assert found["instances"] == 1
    assert "add_worker" not in found["actions"]
    assert found["in_time"] < 0.9  # one instance for 10/s gets 500/s


def test_what_is_loaded_at_the_start_is_loaded_there_too() -> None:
    quiet = scenario(load((0.0, 4.0)), duration_s=14.0)
    run = Beside(quiet, spec("infaas", autoscaler={"hold_s": 1000.0}))
    run.result()
    found = run.shadows[0].document()
    assert found["shadow"]["instances"] >= found["real"]["instances"] >= 1
    assert found["shadow"]["machines"] == found["real"]["machines"] == {"mixed": 2}
    assert found["shadow"]["in_time"] == 1.0


def test_a_policy_that_fails_says_so_and_ends() -> None:
    name = f"{__name__}:Broken"
    broken = ShadowSpec(
        name=name, base=name, settings=settings(dispatcher={"policy": name}), kinds={}, prices=PRICES, boot_s=1.0
    )
    run = Beside(scenario(load((0.0, 20.0)), duration_s=12.0), broken)
    run.result()
    assert "the policy failed: d-0 failed: RuntimeError('no idea')" in run.shadows[0].fault


class Broken:
    """A user's policy that fails."""

    name = "broken"

    def select(self, ask: Any, now: float, view: Any) -> Any:
        del ask, now, view
        raise RuntimeError("no idea")


# -- alone: bad input


def alone(base: str = "infaas") -> tuple[Shadow, Callable[..., list[Any]]]:
    """A shadow without any system. The function hands it messages, all at a time."""
    shadow = make_shadow(Subjects(), spec(base))

    def tell(now: float, *messages: Any) -> list[Any]:
        return [effect for message in messages for effect in shadow.handle(Envelope(now, message))]

    tell(0.0, Started())
    return shadow, tell


APP = Changed("b", app_key("a"), encode(AppRecord(app="a", links={})))


def test_nothing_registered_and_no_worker_are_said_with_the_remedy() -> None:
    shadow, tell = alone()
    tell(1.0, Synced("b"))
    assert tell(LISTEN + 1.0, Tick()) == [] or not shadow.document()
    assert "infaas register" in shadow.fault
    shadow, tell = alone()
    tell(1.0, APP, Synced("b"))
    tell(LISTEN + 1.0, Tick())
    assert "no worker sends heartbeats" in shadow.fault
    assert "infaas doctor" in shadow.fault
    assert tell(LISTEN + 2.0, Tick(), Stopping(1.0)) == []


def heartbeat(now: float) -> WorkerHeartbeat:
    cpu = DeviceStatus(
        device="cpu", kind="cpu", cores=2, memory_mb=4000.0, memory_used_mb=0.0, cores_used=0.0, utilisation=0.0,
        price_per_hour=0.1,
    )  # fmt: skip
    return WorkerHeartbeat(worker="w0", hardware="cpu", incarnation=1, at=now, devices=[cpu], instances=[])


def test_it_listens_before_it_begins() -> None:
    shadow, tell = alone()
    tell(1.0, APP, Synced("b"), heartbeat(1.0))
    tell(LISTEN - 0.1, heartbeat(2.0), Tick())
    assert shadow.document() == {}
    assert tell(LISTEN - 0.05, Stopping(1.0)) == []
    tell(LISTEN + 0.1, Tick())
    assert shadow.began == pytest.approx(LISTEN + 0.1)
    assert not shadow.fault


def test_the_real_systems_outcomes_and_actions_count_from_the_beginning() -> None:
    shadow, tell = alone()
    ok, late = LiveOutcome("ok"), LiveOutcome("late", 3)
    unload = event(ScalingEvent, action="unload")
    tell(1.0, APP, Synced("b"), LiveOutcomes([ok]), LiveScaling([unload]))
    tell(LISTEN + 1.0, heartbeat(LISTEN), Tick())
    offline, part = LiveOutcome("ok", 5, "offline"), LiveOutcome("ok", 5, None, b"0" * 16)
    tell(
        LISTEN + 2.0,
        LiveOutcomes([ok, late, offline, part]),
        LiveScaling([unload, event(ScalingEvent, action="load", count=0)]),
    )
    tell(LISTEN + 3.0, Tick())
    real = shadow.document()["real"]
    assert (real["items"], real["in_time"], real["actions"]) == (4, 0.25, {"unload": 1})


def test_queries_of_a_planned_pipeline_are_heard_as_visits_of_its_stages() -> None:
    shadow, tell = alone()
    graph = PipelineRecord(vertices=[PipelineVertex(name="one", app="a", inputs={"x": "$.x"})], output={"y": "one.y"})
    planned = AppRecord(app="p", links={}, latency_ms=500.0, pipeline=graph, plan=plan_of({"one": 1}, {"one": ""}))
    tell(1.0, APP, Changed("b", app_key("p"), encode(planned)), Synced("b"))
    tell(LISTEN + 0.1, heartbeat(LISTEN), Tick())
    tell(LISTEN + 0.2, PipelineArrivals("d", "p", LISTEN + 0.1, [4, 3]))
    tell(LISTEN + 3.0, heartbeat(LISTEN + 3.0), Tick())
    found = shadow.document()
    assert found["shadow"]["items"] == 7
    assert found["notes"][0].startswith("each visit of a stage of p counts as a query in the shadow")


def test_what_cannot_be_read_or_is_no_record_is_passed_over() -> None:
    """The reply subject of an event is where its sender waits for the stream."""
    shadow, tell = alone()
    assert tell(1.0, Malformed("no map")) == []
    assert all(inlet.malformed for inlet in shadow.inlets)
    for key, value in (("app.a", b"\xc1"), ("app.a", encode(3)), ("other", b""), ("app.a", None)):
        assert simulated_entry(key, value, set()) is None


@hypothesis_settings(max_examples=examples(25))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "unknown", "_"]), st.integers(0, 3000), st.integers(0, 50),
            st.none() | st.floats(0.001, 1e6), st.floats(0.0, 1.0), st.none() | st.floats(0.0, 1e6),
        ),
        max_size=4,
    ),
    st.floats(0.0, 1e4),
)  # fmt: skip
def test_any_demand_is_offered_item_by_item(rows: list[tuple[Any, ...]], seconds: float) -> None:
    """Whatever it asks for: each item is answered or refused, and nothing but events comes out."""
    shadow, tell = alone()
    tell(1.0, APP, Synced("b"))
    tell(LISTEN, heartbeat(LISTEN), Tick())
    demands = [
        ClassDemand(app, "*", items, latency, accuracy, cost, refused=refused)
        for app, items, refused, latency, accuracy, cost in rows
    ]
    tell(LISTEN + 0.1, DemandReport(dispatcher="d", at=LISTEN, seconds=min(seconds, 1.0), rows=demands))
    out = tell(LISTEN + 60.0, heartbeat(LISTEN + 60.0), Tick())
    assert shadow.document()["shadow"]["items"] == sum(one.items + one.refused for one in demands)
    assert all(isinstance(one, Record) for one in out[1:])
    assert not shadow.fault


# -- What a shadow begins with: the real system's machines and catalogue, as a simulated system takes them.


def device(kind: str = "cpu", name: str = "", **fields: Any) -> DeviceStatus:
    plain = {"cores": 4, "memory_mb": 8000.0, "price_per_hour": 0.2, "utilisation": 0.0}
    return DeviceStatus(device=name or kind, kind=kind, memory_used_mb=0.0, cores_used=0.0, **(plain | fields))


def worker(name: str, *devices: DeviceStatus, **fields: Any) -> WorkerHeartbeat:
    plain: dict[str, Any] = {"hardware": "cpu", "incarnation": 1, "at": 0.0, "instances": []}
    return WorkerHeartbeat(worker=name, devices=list(devices), **(plain | fields))


def shadow_spec(**kinds: PricedKind) -> ShadowSpec:
    return ShadowSpec(name="infaas", base="infaas", settings=Settings(), kinds=kinds, prices={}, boot_s=5.0)


def kind(name: str, **fields: Any) -> PricedKind:
    gpu = Device(name="gpu-0", kind="gpu", cores=1, memory_mb=16000.0, address="cuda:0")
    return PricedKind(name=name, devices=(gpu,), price_per_hour=3.0, **fields)


def found(workers: Sequence[WorkerHeartbeat], chosen: ShadowSpec) -> dict[str, tuple[int, int, int, tuple[str, ...]]]:
    specs = machines_of({one.worker: (one, one.devices) for one in workers}, chosen)
    return {one.kind: (one.start, one.minimum, one.maximum, one.workers) for one in specs}


def test_workers_of_one_kind_are_those_that_the_controller_counts_so() -> None:
    workers = [worker("w1", device()), worker("w0", device(memory_mb=8010.0)), worker("big", device(cores=16))]
    assert found(workers, shadow_spec()) == {"cpu": (2, 2, 2, ("w0", "w1")), "cpu-2": (1, 1, 1, ("big",))}
    assert found(workers[:2], shadow_spec(cpu=kind("cpu", minimum=1, maximum=5))) == {"cpu": (2, 1, 5, ("w0", "w1"))}
    workers = [worker("w0", device(), kind="plain"), worker("w1", device(), device("gpu", "gpu-0"), kind="accelerated")]
    assert set(found(workers, shadow_spec())) == {"plain", "accelerated"}
    assert found([worker("w0")], shadow_spec()) == {}  # nothing works there


def test_kinds_of_the_settings_may_be_started_though_none_runs() -> None:
    chosen = shadow_spec(gpu=kind("gpu", maximum=2, boot_s=9.0), never=kind("never"))
    assert found([worker("w0", device())], chosen) == {"cpu": (1, 1, 1, ("w0",)), "gpu": (0, 0, 2, ())}
    of = {one.kind: one for one in machines_of({"w0": (worker("w0"), [device()])}, chosen)}
    assert (of["gpu"].boot_s, of["cpu"].boot_s) == (9.0, 5.0)
    assert of["gpu"].price_per_hour == 3.0
    assert all(one.simulated for each in of.values() for one in each.devices)


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
