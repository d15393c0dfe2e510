"""A device as a cache of models: what makes room under `cache = "lru"` and `"cost"`, what stays in host memory, and what is loaded at the start."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.messages.catalog import VariantRecord
from bus.messages.events import CostEvent, ScalingEvent, StateEvent
from bus.messages.fleet import DemoteInstance, LoadAccepted, LoadInstance, Release, UnloadInstance
from services.core.actor import Changed
from services.core.cost import load_seconds
from services.core.placement import Device
from services.core.settings import MonitorSettings
from tests.support.data.examples import examples
from tests.support.simulated.monitored_worker import S, World, variant

GPU = Device(name="gpu", kind="gpu", cores=1, memory_mb=1000.0)


def model(name: str, memory_mb: float = 100.0, host_mb: float | None = 100.0) -> VariantRecord:
    return variant(name, memory_mb=memory_mb, host_mb=host_mb, hardware="gpu")


def world(devices: tuple[Device, ...] = (GPU,), **settings: object) -> World:
    return World(devices, settings=MonitorSettings(**{"cache": "lru", "max_models": 2, **settings}))  # type: ignore[arg-type]


def use(on: World, *instances: str) -> None:
    """Each serves one query, one after the other."""
    for instance in instances:
        on.advance(0.5)
        on.report({instance: {"faces": 1}})


def actions(on: World) -> list[tuple[str, str]]:
    return [(event.action, event.variant) for event in on.of(ScalingEvent)]


def test_the_least_recently_used_is_demoted_and_comes_back_by_a_transfer() -> None:
    here = world()
    a, b = here.load(model("a")), here.load(model("b"))
    use(here, b, a)
    here.published.clear()
    here.ensure(model("c"))
    assert here.states() == {a: "Active", b: "Unloading", "c.w1-1": "Loading"}
    assert [m for _, m in here.published if isinstance(m, DemoteInstance | LoadInstance)] == [
        DemoteInstance(instance=b)
    ]
    here.obey()
    assert here.states() == {a: "Active", b: "Warm", "c.w1-1": "Loading"}, "the load begins when the room is free"
    here.obey()
    assert here.states() == {a: "Active", b: "Warm", "c.w1-1": "Active"}
    assert here.beat.devices[0].host_used_mb == 100.0
    use(here, "c.w1-1")
    reply = here.ensure(model("b"))
    assert reply.instances == [b], "the instance that is Warm comes back, and keeps its name"
    here.obey()
    ready_at = here.told()[b].ready_at
    assert ready_at == pytest.approx(here.told()[b].since + load_seconds(model("b"), warm=True))
    here.obey()
    assert here.states() == {a: "Warm", b: "Active", "c.w1-1": "Active"}
    assert here.beat.devices[0].host_used_mb == 200.0, "a, and the copy of b"
    assert actions(here) == [
        ("load", "a"), ("load", "b"), ("demote", "b"), ("load", "c"), ("demote", "a"), ("promote", "b"),
    ]  # fmt: skip
    demoted = next(event for event in here.of(ScalingEvent) if event.action == "demote")
    assert (demoted.scaler, demoted.reason) == ("monitor", "makes room for c; not used for 0 s")
    moves = [(e.from_state, e.to_state) for e in here.of(StateEvent) if e.instance == b and e.app == "faces"]
    assert moves == [
        ("Inactive", "Loading"), ("Loading", "Active"), ("Active", "Unloading"), ("Unloading", "Warm"),
        ("Warm", "Loading"), ("Loading", "Active"),
    ]  # fmt: skip


def loads_in(seconds: float, record: VariantRecord) -> VariantRecord:
    return replace(record, profile=replace(record.profile, load_ms=1000.0 * seconds))


@pytest.mark.parametrize("cache", ["reserve", "cost"])
def test_what_costs_least_to_miss_makes_room(cache: str) -> None:
    """Though it was used last: it is quickly loaded, or its room is all that is needed, or it is not due again for long."""

    def left(a: VariantRecord, b: VariantRecord, uses: int = 1, **settings: object) -> set[str]:
        here = world(cache=cache, **settings)
        names = here.load(a), here.load(b)
        for n in range(uses):
            use(here, *(names if n % 20 == 0 else names[:1]))
            here.advance(2.0)
        use(here, names[0], names[1])
        here.advance(2.0)
        here.ensure(model("new", host_mb=None))
        here.obey()
        return {name[0] for name, state in here.states().items() if state == "Active"}

    plain = model("a", host_mb=None)
    assert left(loads_in(9.0, plain), model("b", host_mb=None)) == {"a"}
    assert left(model("a", 60.0, None), model("b", 400.0, None), max_models=0, device_mb=460) == {"a"}
    assert left(plain, model("b", host_mb=None), uses=61) == {"a"}
    assert left(plain, model("b", host_mb=None)) == {"b"}, "where nothing else tells them apart, it is the older one"


def test_host_memory_drops_what_costs_least_to_miss() -> None:
    here = world(cache="cost", max_models=1, host_mb=250)
    for record in (loads_in(9.0, model("a")), model("b"), model("c"), model("d")):
        here.ensure(record)
        for _ in range(3):
            here.obey()
        use(here, f"{record.variant}.w1-1")
    assert here.states() == {"a.w1-1": "Warm", "c.w1-1": "Warm", "d.w1-1": "Active"}


def test_nothing_that_runs_or_waits_is_evicted_and_the_order_is_kept_until_one_is_idle() -> None:
    here = world()
    a, b = here.load(model("a")), here.load(model("b"))
    here.advance(0.5)
    here.report({a: {"faces": 1}, b: {"faces": 1}}, queued={a: 1, b: 3})
    reply = here.ensure(model("c"))
    assert isinstance(reply, LoadAccepted) and reply.instances == []
    assert here.states() == {a: "Active", b: "Active"}
    here.report(queued={b: 3})
    here.advance(0.1)
    here.obey()
    assert here.states() == {a: "Warm", b: "Active", "c.w1-1": "Loading"}


def test_an_instance_waits_for_the_query_that_ordered_it() -> None:
    here = world(max_models=1)
    a = here.load(model("a"))
    here.ensure(model("b"))
    here.advance(0.05)
    assert here.states() == {a: "Active"}
    use(here, a)
    here.obey()
    assert here.states()[a] == "Warm"


def test_host_memory_drops_its_own_least_recently_used() -> None:
    here = world(max_models=1, host_mb=250)
    for name in "abcd":
        use(here, here.load(model(name)) if name == "a" else loaded(here, name))
    assert here.states() == {"b.w1-1": "Warm", "c.w1-1": "Warm", "d.w1-1": "Active"}
    assert here.of(StateEvent)[-1].to_state != "Loading"
    dropped = [event.reason for event in here.of(StateEvent) if event.to_state == "Unloading"]
    assert "makes room in host memory for c" in dropped


def with_a_copy(host_mb: int) -> World:
    """One (b) is on the device, and was in host memory before; the other (a) is Warm."""
    here = world(max_models=1, host_mb=host_mb)
    use(here, here.load(model("b")))
    use(here, loaded(here, "a"))
    use(here, loaded(here, "b"))
    assert here.states() == {"a.w1-1": "Warm", "b.w1-1": "Active"} and here.copied == {"b.w1-1": "b"}
    return here


def test_a_copy_gives_its_place_to_what_is_warm_and_needs_none_for_its_own_way_back() -> None:
    here = with_a_copy(host_mb=200)
    assert loaded(here, "a")
    assert here.states() == {"a.w1-1": "Active", "b.w1-1": "Warm"}, "both fit, since no byte is taken twice"
    use(here, "a.w1-1")
    here.published.clear()
    here.ensure(model("big", host_mb=None))
    here.obey(times=2)
    assert here.copied == {} and here.warm == {"a.w1-1": "a", "b.w1-1": "b"}
    here.report()
    assert here.beat.devices[0].host_used_mb == 200.0


def test_a_copy_is_dropped_before_anything_warm_and_a_lost_order_is_repeated() -> None:
    here = world(max_models=2, host_mb=200)
    use(here, here.load(model("a")), here.load(model("b")))
    for name in "cab":
        use(here, loaded(here, name))
    assert here.states() == {"a.w1-1": "Active", "b.w1-1": "Active", "c.w1-1": "Warm"}
    assert here.copied == {"b.w1-1": "b"}, "that of a has gone"
    use(here, "a.w1-1", "b.w1-1")
    here.published.clear()
    here.ensure(model("d"))
    drop = UnloadInstance(instance="b.w1-1", tier="host")
    assert here.orders == [drop], "a leaves the device once there is room for it"
    here.published.clear()  # lost
    here.report()
    assert here.orders == [drop]
    here.obey(times=3)
    assert here.states() == {"a.w1-1": "Warm", "b.w1-1": "Active", "c.w1-1": "Warm", "d.w1-1": "Active"}


def loaded(here: World, name: str) -> str:
    [instance] = here.ensure(model(name)).instances
    here.obey(times=4)
    return str(instance)


@pytest.mark.parametrize(
    ("record", "settings", "why"),
    [
        (model("a", host_mb=None), {}, "its backend cannot keep a model in host memory"),
        (model("a"), {"host_mb": 0}, "monitor.host_mb is 0"),
        (model("a", host_mb=300.0), {"host_mb": 200}, "it takes 300 MB of host memory, monitor.host_mb is 200"),
    ],
)
def test_what_cannot_be_warm_is_unloaded(record: VariantRecord, settings: dict[str, int], why: str) -> None:
    here = world(max_models=1, **settings)
    use(here, here.load(record))
    here.ensure(model("b"))
    here.obey(times=2)
    assert here.states() == {"b.w1-1": "Active"}
    [evicted] = [event for event in here.of(ScalingEvent) if event.action == "evict"]
    assert evicted.reason == f"makes room for b; not used for 0 s; {why}"


def test_bytes_and_count_limit_under_reserve_too() -> None:
    here = world(max_models=0, device_mb=250)
    use(here, *[here.load(model(name)) for name in "ab"])
    assert loaded(here, "c")
    assert here.states() == {"a.w1-1": "Warm", "b.w1-1": "Active", "c.w1-1": "Active"}
    reply = here.ensure(model("big", memory_mb=300.0))
    assert reply.reason == ("big needs 300 MB, gpu sets 250 MB aside: use a larger device or raise monitor.device_mb")
    here = world(cache="reserve", max_models=1)
    here.load(model("a"))
    reply = here.ensure(model("b"))
    assert reply.reason == "gpu holds 1 instances in use, as many as monitor.max_models allows"


def test_a_model_that_is_wanted_while_it_leaves_comes_back_without_being_made_again() -> None:
    here = world(max_models=1)
    a = here.load(model("a"))
    use(here, a)
    b = here.ensure(model("b")).instances[0]
    here.tell(Release(variant="b"))  # nobody needs it any more
    here.ensure(model("a"))
    here.obey(times=3)
    assert here.states() == {a: "Active"} and b not in here.loaded
    assert not [e for e in here.of(StateEvent) if e.instance == "a.w1-2"]


def test_a_warm_instance_costs_nothing_and_takes_nothing_of_the_device() -> None:
    here = world(max_models=1)
    use(here, here.load(model("a")))
    loaded(here, "b")
    here.advance(20.0, reporting=True)
    before = len(here.of(CostEvent))
    here.advance(10.0, reporting=True)
    assert {event.variant for event in here.of(CostEvent)[before:]} == {None, "b"}
    assert here.beat.devices[0].memory_used_mb == 100.0


def test_a_new_monitor_adopts_what_is_warm() -> None:
    here = world()
    here.catalogue(model("a"), model("b"))
    here.loaded, here.warm = {"a.w1-1": "a"}, {"b.w1-3": "b"}
    here.report()
    assert here.states() == {"a.w1-1": "Active", "b.w1-3": "Warm"}
    assert here.beat.devices[0].host_used_mb == 100.0
    here.copied = {"a.w1-1": "a"}
    here.report()
    here.advance(1.0)
    assert here.beat.devices[0].host_used_mb == 200.0
    assert here.ensure(model("b")).instances == ["b.w1-3"]
    here.tell(Changed(S.catalog_bucket, "variant.b", None))


@pytest.mark.parametrize("tier", ["host", "device"])
def test_a_removed_variant_leaves_host_memory_and_gives_its_room_back(tier: str) -> None:
    here = world()
    here.catalogue(model("b"))
    if tier == "host":
        here.warm = {"b.w1-3": "b"}
        here.report()
    else:
        [name] = here.ensure(model("b")).instances
        here.obey()
    here.tell(Changed(S.catalog_bucket, "variant.b", None))
    unloaded = "b.w1-3" if tier == "host" else name
    assert [m for _, m in here.published if isinstance(m, UnloadInstance)] == [UnloadInstance(instance=unloaded)]
    here.obey()
    assert here.states() == {}


def test_a_monitor_keeps_nothing_of_a_variant_that_is_gone_and_gives_no_name_twice() -> None:
    here = world(quarantine_after=1)

    def live_and_go(name: str, *, fails: bool = False) -> str:
        here.catalogue(model(name))
        [instance] = here.ensure(model(name)).instances
        here.obey(fail="broken" if fails else "")
        here.tell(Changed(S.catalog_bucket, f"variant.{name}", None))
        here.obey()
        return str(instance)

    given = [live_and_go(name) for name in ("b", "c", "b", "c", "b")]
    assert len({*given}) == 5
    live_and_go("b", fails=True)
    here.advance(1.0)
    assert here.beat.quarantined == {}
    sizes = []
    for number in range(20):
        live_and_go(f"x{number}", fails=number % 2 == 0)
        table = here.actor._table
        sizes.append([len(kept) for kept in (table._numbers, table.uses._of, table.failures._of, table.instances)])
    assert sizes[-1] == sizes[0]


def test_preloading_takes_what_fits_one_variant_of_each_model_first() -> None:
    here = World((GPU,), executor=None, settings=MonitorSettings(preload="warm", host_mb=250))
    here.catalogue(model("a"), model("b"), model("c"), model("d", host_mb=None))
    here.executor = 1
    here.report()
    assert here.states() == {}, "what is on its way to host memory serves nobody"
    here.obey()
    assert sorted(here.states().values()) == ["Warm", "Warm"]
    here.report()
    assert len(here.states()) == 2, "once"
    here = World((GPU,), executor=None, settings=MonitorSettings(preload="active", max_models=2))
    twin = model("a2")
    here.catalogue(model("a"), replace(twin, model="m-a"), model("b"))
    here.executor = 1
    here.report()
    here.obey()
    assert here.states() == {"a.w1-1": "Active", "b.w1-1": "Active"}


def test_a_query_for_a_model_that_is_being_preloaded_brings_it_to_the_device() -> None:
    here = World((GPU,), executor=None, settings=MonitorSettings(preload="warm"))
    here.catalogue(model("a"))
    here.executor = 1
    here.report()
    [instance] = here.ensure(model("a")).instances
    here.obey(times=2)
    assert here.states() == {instance: "Active"} and list(here.loaded) == [instance]


SIZES = [30.0, 60.0, 90.0, 120.0, 250.0, 400.0]
MODELS = [model(f"m{n}", SIZES[n % len(SIZES)], None if n % 5 == 4 else SIZES[n % len(SIZES)]) for n in range(12)]
OF = {record.variant: record.profile for record in MODELS}


class Limits:
    """A worker under orders at once, whose executor carries them out in any order and says what it does."""

    DEVICE_MB, HOST_MB, COUNT = 400, 300, 3

    def __init__(self, cache: str) -> None:
        self.world = world(cache=cache, device_mb=self.DEVICE_MB, host_mb=self.HOST_MB, max_models=self.COUNT)

    @property
    def next(self) -> list[int]:
        """Orders that may be carried out next: those for one instance in their order."""
        names = [order.instance for order in self.world.orders]
        return [n for n, name in enumerate(names) if name not in names[:n]]

    def check(self) -> None:
        """What is there, with what is under way to there, fits."""
        here = self.world
        coming = {o.instance: o.variant.variant for o in here.orders if isinstance(o, LoadInstance)}
        device = here.loaded | coming
        assert sum(OF[name].memory_mb for name in device.values()) <= self.DEVICE_MB
        assert len(device) <= self.COUNT
        leaving = {o.instance for o in here.orders if isinstance(o, DemoteInstance)}
        host = here.warm | here.copied | {i: name for i, name in here.loaded.items() if i in leaving}
        assert sum(OF[name].host_mb or 0.0 for name in host.values()) <= self.HOST_MB
        [told] = here.beat.devices
        assert told.memory_used_mb + told.memory_reclaimable_mb <= self.DEVICE_MB


@settings(max_examples=examples(25), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data(), cache=st.sampled_from(["lru", "cost", "reserve"]))
def test_under_a_hundred_orders_at_once_neither_bytes_nor_count_are_ever_exceeded(
    data: st.DataObject, cache: str
) -> None:
    limits = Limits(cache)
    here = limits.world
    for number in data.draw(st.lists(st.integers(0, len(MODELS) - 1), min_size=100, max_size=100)):
        record = MODELS[number]
        here.ensure(record, orderer=data.draw(st.sampled_from(["d1", "d1", "vm-0"])))
        limits.check()
        step = data.draw(st.sampled_from(["", "obey", "obey", "report", "time", "release", "fail"]))
        busy = data.draw(st.sets(st.sampled_from(sorted(here.loaded)))) if here.loaded else set()
        if step in ("obey", "fail") and here.orders:
            which = data.draw(st.sampled_from(limits.next))
            here.obey(only=which, fail="no such operator" if step == "fail" else "")
        elif step == "report" and len(limits.next) == len(here.orders):
            here.report({one: {"faces": 1} for one in busy}, queued=dict.fromkeys(busy, 1))
        elif step == "time":
            here.advance(data.draw(st.floats(0.0, 2.0)))
        elif step == "release":
            here.tell(Release(variant=record.variant, reclaim=data.draw(st.booleans())))
        limits.check()
    for _ in range(60):  # nothing gets stuck: all orders end, and what is left serves or is Warm
        here.obey()
        here.report()
        here.advance(0.2)
        limits.check()
    assert set(here.states().values()) <= {"Active", "Warm"}


@given(busy=st.sets(st.integers(0, 3)), wanted=st.integers(4, 7))
def test_what_runs_or_waits_stays_whatever_is_ordered(busy: set[int], wanted: int) -> None:
    here = world(max_models=4)
    instances = [here.load(model(f"n{n}")) for n in range(4)]
    use(here, *instances)
    at_work = {instances[n] for n in busy}
    here.report(queued=dict.fromkeys(at_work, 1))
    for n in range(wanted):
        here.ensure(model(f"other{n}"))
        here.obey()
        here.advance(0.06)
    states = here.states()
    assert all(states[one] == "Active" for one in at_work)
