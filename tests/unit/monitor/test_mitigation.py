"""Where an interfered instance goes: the policy alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.messages.events import ScalingEvent, StateEvent
from bus.messages.fleet import (
    InstanceLoaded,
    InstanceMoved,
    InstanceSample,
    InstanceUnloaded,
    LoadInstance,
    MoveInstance,
    State,
    UnloadInstance,
)
from bus.messages.scaling import AskToMove, Drain
from services.core.lifecycle import SERVING
from services.core.placement import Amount, Device
from services.core.settings import MonitorSettings
from services.monitor.effects import MachineSample
from services.monitor.instances import MonitoredInstance
from services.monitor.mitigation import BUSIEST, GAIN, better_cores, smoothed
from services.monitor.policy import LoadFailures, make_room, scaler, to_keep, to_release
from tests.support.simulated.monitored_worker import CPU, S, World, variant


@pytest.mark.parametrize(
    ("what", "threads", "at", "busy", "pinned", "chosen"),
    [
        ("the idle core", 1, [0], {0: 1.0, 1: 0.1}, [], [1]),
        ("it is where it would go", 1, [1], {0: 1.0, 1: 0.1}, [], []),
        ("kept to none yet", 1, [], {0: 1.0, 1: 0.1}, [], [1]),
        ("everything is busy", 1, [0], {0: 1.0, 1: 0.9}, [], []),
        ("not clearly better", 1, [0], {0: 0.5, 1: 0.4}, [], []),
        ("the idlest two of four", 2, [0, 1], {0: 1.0, 1: 1.0, 2: 0.3, 3: 0.1}, [], [2, 3]),
        ("one of its two is fine", 2, [0, 1], {0: 1.0, 1: 0.0, 2: 0.0}, [], [1, 2]),
        ("not onto another's core", 1, [0], {0: 1.0, 1: 0.1, 2: 0.2}, [[1]], [2]),
        ("another's core is better than a hog's", 1, [0], {0: 1.0, 1: 0.1}, [[1]], [1]),
        ("it needs all there are", 2, [], {0: 1.0, 1: 0.1}, [], []),
        ("cores that are not measured", 1, [0], {}, [], []),
    ],
)
def test_cores(
    what: str, threads: int, at: list[int], busy: dict[int, float], pinned: list[list[int]], chosen: list[int]
) -> None:
    assert better_cores(threads, at, busy, pinned) == chosen, what


@given(
    st.integers(1, 5),
    st.dictionaries(st.integers(0, 7), st.floats(0, 1), min_size=1),
    st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=4),
    st.data(),
)
def test_a_move_is_always_for_the_better(
    threads: int, busy: dict[int, float], pinned: list[list[int]], data: st.DataObject
) -> None:
    at = data.draw(st.lists(st.sampled_from(sorted(busy)), unique=True, max_size=threads))
    chosen = better_cores(threads, at, busy, pinned)
    if chosen:
        assert len(chosen) == threads == len(set(chosen))
        assert all(busy[core] <= BUSIEST for core in chosen)
        assert set(chosen) != set(at)
        if not pinned:
            here = at or list(busy)
            before, after = (sum(busy[core] for core in cores) / len(cores) for cores in (here, chosen))
            assert before - after >= GAIN - 1e-9


def test_one_glance_at_a_core_says_little() -> None:
    busy = smoothed(smoothed({}, {0: 0.0}), {0: 1.0, 1: 0.4})
    assert busy == {0: 0.5, 1: 0.4}
    for _ in range(10):
        busy = smoothed(busy, {0: 1.0})
    assert busy == {0: pytest.approx(1.0, abs=0.01)}


# -- The monitor brings slowed instances elsewhere: other cores, another device, or it asks the controller.

SETTINGS = MonitorSettings(mitigate_after_s=2.0, mitigate_again_s=20.0)
HOGGED = MachineSample(utilisation=0.6, memory_used_mb=500.0, cores={0: 1.0, 1: 0.1})
FULL = MachineSample(utilisation=1.0, memory_used_mb=500.0, cores={0: 1.0, 1: 1.0})


def machine(sample: MachineSample = HOGGED) -> tuple[World, str]:
    """A worker on such a machine, and its instance."""
    world = World(settings=SETTINGS)
    world.machine = sample
    return world, world.load(variant())


def slowed(world: World, instance: str, seconds: float, slower: float = 6.0) -> None:
    """It serves so long, slower than its profile."""
    world.serve({instance: {"faces": 5}}, times=round(seconds * 2), slower=slower)


def moved(world: World, order: MoveInstance, **changes: Any) -> InstanceMoved:
    fact = InstanceMoved(
        instance=order.instance, variant="v", device="cpu", incarnation=1, cores=order.cores, proof="1 thread on core 1"
    )
    fact = replace(fact, **changes)
    world.tell(fact)
    return fact


def test_interference_moves_an_instance_to_the_idle_core() -> None:
    world, instance = machine()
    slowed(world, instance, 1.5)
    assert world.states() == {instance: "Interfered"}
    assert world.said(MoveInstance) == [], "it may be over in a moment"
    slowed(world, instance, 2.5)
    assert world.said(MoveInstance) == [MoveInstance(instance=instance, cores=[1])]
    moved(world, world.said(MoveInstance)[0])
    assert world.states() == {instance: "Active"}, "it is judged afresh"
    assert world.told()[instance].factor == 1.0
    assert "core 1 (10% busy) would be better; 1 thread on core 1" in world.of(StateEvent)[-1].reason
    [event] = [event for event in world.of(ScalingEvent) if event.action == "migrate"]
    assert (event.scaler, event.variant, event.app) == ("monitor", "v", "faces")


def test_what_recovers_or_has_ended_stays_and_draining_workers_move_nothing() -> None:
    world, instance = machine()
    slowed(world, instance, 1.5)
    assert world.states() == {instance: "Interfered"}
    world.serve({}, times=8)
    assert world.said(MoveInstance) == []
    world, instance = machine()
    slowed(world, instance, 1.0)
    slowed(world, instance, 10.0, slower=1.0)
    assert world.said(MoveInstance) == []
    assert world.states() == {instance: "Active"}
    world, instance = machine()
    world.tell(Drain(epoch=1))
    slowed(world, instance, 10.0)
    assert world.said(MoveInstance) == world.said(AskToMove) == []


def test_not_again_within_the_back_off() -> None:
    world, instance = machine()
    slowed(world, instance, 5.0)
    moved(world, world.said(MoveInstance)[0])
    world.machine = replace(HOGGED, cores={0: 0.0, 1: 1.0})  # the neighbour follows
    slowed(world, instance, 15.0)
    assert world.states() == {instance: "Interfered"}
    assert len(world.said(MoveInstance)) == 1
    slowed(world, instance, 6.0)
    assert world.said(MoveInstance)[1:] == [MoveInstance(instance=instance, cores=[0])]


def test_nowhere_to_go_or_a_failed_move_asks_the_controller() -> None:
    world, instance = machine(FULL)
    slowed(world, instance, 10.0)
    assert world.said(MoveInstance) == []
    [ask] = world.said(AskToMove)
    assert [subject for subject, message in world.published if message == ask] == [S.controller("ask")]
    assert (ask.worker, ask.variant, ask.app) == ("w1", "v", "faces")
    assert "no idler cores and no other device" in ask.reason
    assert world.states() == {instance: "Interfered"}, "it serves until another worker's instance does"
    slowed(world, instance, 15.0)
    assert len(world.said(AskToMove)) == 2
    world, instance = machine()
    slowed(world, instance, 4.0)
    moved(world, world.said(MoveInstance)[0], error="this process cannot run on core 1", cores=[])
    assert len(world.said(AskToMove)) == 1
    assert world.states() == {instance: "Interfered"}
    assert not [event for event in world.of(ScalingEvent) if event.action == "migrate"]


# -- another device


GPUS = [
    CPU,
    *(Device(name=f"gpu-{n}", kind="gpu", cores=1, memory_mb=1000.0, simulated=True) for n in range(2)),
]
ON_GPU = replace(variant("g", memory_mb=500.0), hardware="gpu", simulated=True)


def facts(device: str, instance: str) -> dict[str, Any]:
    return {"instance": instance, "variant": "g", "device": device, "incarnation": 1}


def report(world: World, device: str, instance: str | None, slower: float = 1.0) -> None:
    samples = [] if instance is None else [InstanceSample(instance, "g", 0, 0.0, 10, 10, 0.1 * slower, 0.1, [])]
    world.hear(samples, device)


def gpu_world() -> tuple[World, str, str, str]:
    """A world whose instance runs on one of two GPUs; instance, its device, the other device."""
    world = World(GPUS, settings=SETTINGS)
    for name in ("gpu-0", "gpu-1"):
        report(world, name, None)
    instance = world.ensure(ON_GPU).instances[0]
    [subject] = [subject for subject, message in world.published if isinstance(message, LoadInstance)]
    here = subject.split(".")[3]
    there = {"gpu-0": "gpu-1", "gpu-1": "gpu-0"}[here]
    world.tell(InstanceLoaded(load_ms=1.0, memory_mb=1.0, proof="here", **facts(here, instance)))
    return world, instance, here, there


def interfere(world: World, instance: str, here: str, there: str) -> None:
    for _ in range(8):
        world.advance(0.5)
        report(world, here, instance, slower=4.0)
        report(world, there, None)
        world.report()


def test_another_device_takes_over_before_the_first_lets_go() -> None:
    world, instance, here, there = gpu_world()
    world.published.clear()
    interfere(world, instance, here, there)
    subject, order = next((s, m) for s, m in world.published if isinstance(m, LoadInstance))
    assert subject == S.executor("w1", there, "load")
    assert world.states() == {instance: "Interfered", order.instance: "Loading"}
    assert world.said(UnloadInstance) == []
    [event] = [event for event in world.of(ScalingEvent) if event.action == "migrate"]
    assert f"{there} has room" in event.reason
    world.tell(InstanceLoaded(load_ms=1.0, memory_mb=1.0, proof="there", **facts(there, order.instance)))
    assert world.states() == {instance: "Unloading", order.instance: "Active"}
    assert world.said(UnloadInstance) == [UnloadInstance(instance=instance)]
    world.tell(InstanceUnloaded(**facts(here, instance)))
    assert world.states() == {order.instance: "Active"}


def test_another_device_without_room_is_none() -> None:
    world, instance, here, there = gpu_world()
    taken = world.ensure(replace(ON_GPU, variant="h", model="m-h")).instances[0]
    world.tell(InstanceLoaded(load_ms=1.0, memory_mb=1.0, proof="there", **facts(there, taken) | {"variant": "h"}))
    world.published.clear()
    for _ in range(8):
        world.advance(0.5)
        report(world, here, instance, slower=4.0)
        world.hear([InstanceSample(taken, "h", 0, 0.0, 0, 0, 0.0, 0.0, [])], there)
        world.report()
    assert world.said(LoadInstance) == []
    assert [ask.variant for ask in world.said(AskToMove)] == ["g"]


# -- Who makes room, who goes first, and when a failed load may be tried again.
SLIGHTLY = 1e-6  # MB, for sums in another order


def instance(
    name: str,
    used: float,
    *,
    app: str | None = None,
    state: State = "Active",
    queued: int = 0,
    memory_mb: float = 100.0,
    reclaimable: bool = False,
) -> MonitoredInstance:
    made = MonitoredInstance(name, variant(name, memory_mb=memory_mb), "cpu", state, 0.0, app)
    made.last_used, made.queued, made.reclaimable = used, queued, reclaimable
    return made


def room(instances: list[MonitoredInstance], need_mb: float, least: int = 1, cores: float = 0.0) -> list[str] | None:
    need = Amount(need_mb, cores)
    victims = make_room(
        instances,
        lambda i: (i.last_used, 0.0),
        need,
        lambda i: [app for app in i.apps if app],
        lambda _: least,
        now=100.0,
        idle_s=1.0,
    )
    return None if victims is None else [victim.id for victim in victims]


def test_the_least_recently_used_go_first_and_never_an_apps_last() -> None:
    instances = [instance("a", 30.0), instance("b", 10.0), instance("c", 20.0)]
    assert room(instances, 100.0) == ["b"]
    assert room(instances, 150.0) == ["b", "c"]
    assert room(instances, 301.0) is None
    only = [instance("a", 10.0, app="faces")]
    assert room(only, 50.0) is None
    assert room([*only, instance("b", 20.0, app="faces")], 50.0) == ["a"]
    assert room([*only, instance("b", 20.0, app="faces")], 150.0) is None
    assert room(only, 50.0, least=0) == ["a"]
    both = [instance("a", 10.0, app="faces"), instance("coming", 20.0, app="faces", state="Loading")]
    assert room(both, 50.0) is None


def test_cores_are_made_free_too() -> None:
    instances = [instance("a", 30.0), instance("b", 10.0), instance("c", 20.0)]
    for one in instances:
        used = one.last_used
        one.observe(InstanceSample(one.id, one.id, 0, 0.0, 9, 9, 1.0, 1.0, []), 1.0, 50.0)
        one.last_used = used
    assert room(instances, 10.0, cores=2.0) == ["b", "c"], "what they compute"
    assert room(instances, 10.0, cores=4.0) is None
    assert room([instance("idle", 10.0)], 10.0, cores=1.0) is None, "it computes nothing that would become free"


@pytest.mark.parametrize("busy", [{"queued": 1}, {"used": 99.5}, {"state": "Loading"}, {"state": "Overloaded"}])
def test_what_is_in_use_stays(busy: dict[str, object]) -> None:
    fields: dict[str, object] = {"used": 10.0} | busy
    assert room([instance("a", **fields)], 50.0) is None  # type: ignore[arg-type]


def test_reclaimable_ones_go_first_and_an_apps_last_after_the_others() -> None:
    instances = [
        instance("idle", 1.0),
        instance("busy", 99.5, queued=3, state="Overloaded", reclaimable=True),
        instance("coming", 99.0, state="Loading", reclaimable=True),
        instance("old", 50.0, reclaimable=True),
    ]
    assert room(instances, 100.0) == ["old"]
    assert room(instances, 200.0) == ["old", "coming"]
    assert room(instances, 300.0) == ["old", "coming", "busy"]
    assert room(instances, 400.0) == ["old", "coming", "busy", "idle"]
    assert room(instances, 401.0) is None
    last = instance("last", 1.0, app="faces", reclaimable=True)
    other = instance("other", 50.0, app="digits", reclaimable=True)
    digits = instance("digits", 99.9, app="digits")
    assert room([last, other, digits], 100.0) == ["other"]
    assert room([last, other, digits], 200.0) == ["other", "last"]
    assert room([last, instance("idle", 2.0)], 100.0) == ["last"], "nobody needs it, whatever the app's minimum"
    assert room([last, other, digits], 100.0, least=0) == ["last"]


def test_what_the_others_make_unnecessary_stays() -> None:
    small, large = instance("small", 1.0, reclaimable=True), instance("large", 2.0, memory_mb=300.0, reclaimable=True)
    assert room([small, large], 250.0) == ["large"]
    idle = instance("idle", 50.0, memory_mb=300.0)
    assert room([small, idle], 300.0) == ["idle"], "the reclaimable one alone would not do"


@given(
    st.lists(
        st.tuples(
            st.floats(0, 99),
            st.sampled_from([None, "x", "y"]),
            st.integers(0, 1),
            st.floats(1, 200),
            st.booleans(),
            st.sampled_from(["Active", "Loading", "Overloaded", "Unloading"]),
        ),
        max_size=12,
    ),
    st.floats(1, 1000),
    st.integers(0, 3),
)
def test_room_is_enough_and_leaves_every_app_its_least(
    drawn: list[tuple[float, str | None, int, float, bool, State]], need: float, least: int
) -> None:
    instances = [
        instance(f"i{n}", used, app=app, queued=queued, memory_mb=memory, reclaimable=reclaimable, state=state)
        for n, (used, app, queued, memory, reclaimable, state) in enumerate(drawn)
    ]
    spare = sum(i.memory_mb for i in instances if i.reclaimable and i.state != "Unloading")
    gone = room(instances, need, least)
    if gone is None:
        assert spare < need + SLIGHTLY
        return
    victims = [i for i in instances if i.id in gone]
    assert sum(i.memory_mb for i in victims) >= need - SLIGHTLY
    for one in victims:
        assert sum(i.memory_mb for i in victims if i is not one) < need + SLIGHTLY, "none goes without need"
    needed = [i for i in victims if not i.reclaimable]
    assert not needed or spare < need + SLIGHTLY, "nothing that is needed goes while reclaimable instances suffice"
    assert all(i.state == "Active" and not i.queued for i in needed)
    for app in {app for i in needed for app in i.apps if app}:
        assert sum(app in i.apps and i.state in SERVING for i in instances if i.id not in gone) >= least


def test_a_mark_is_taken_from_the_busiest_first() -> None:
    instances = [
        instance("needed", 99.0),
        instance("idle", 60.0, reclaimable=True),
        instance("busy", 50.0, queued=3, reclaimable=True),
        instance("coming", 99.0, state="Loading", reclaimable=True),
    ]
    assert [i.id for i in to_keep(instances, 2)] == ["busy", "idle"]
    assert len(to_keep(instances, 9)) == 3
    assert to_keep(instances, -1) == []
    assert [i.id for i in to_release(instances, 1)] == ["coming", "idle", "busy"], "before any that is needed"


def test_release_takes_what_is_not_loaded_yet_then_the_idle() -> None:
    instances = [
        instance("busy", 50.0, queued=3), instance("idle", 60.0), instance("idler", 40.0),
        instance("coming", 99.0, state="Loading"), instance("going", 1.0, state="Unloading"),
    ]  # fmt: skip
    assert [i.id for i in to_release(instances, 1)] == ["coming", "idler", "idle"]
    assert to_release(instances, 4) == []
    assert len(to_release(instances, -1)) == 4


def test_a_failed_load_waits_longer_each_time() -> None:
    failures = LoadFailures()
    assert failures.obstacle("v", 0.0) == ""
    pauses = []
    now = 0.0
    for _ in range(9):
        failures.failed("v", "no such operator", now)
        pause = 0.0
        while failures.obstacle("v", now + pause):
            pause += 0.5
        pauses.append(pause)
        now += pause
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert "the last 9 loads failed (no such operator)" in failures.obstacle("v", now - 1.0)
    failures.succeeded("v")
    assert failures.obstacle("v", now - 1.0) == ""


@pytest.mark.parametrize(
    ("orderer", "name"),
    [("dispatcher-ab12", "dispatcher"), ("", "dispatcher"), ("model-autoscaler-w1", "model"), ("vm-1", "vm")],
)
def test_scalers_by_name(orderer: str, name: str) -> None:
    assert scaler(orderer) == name
