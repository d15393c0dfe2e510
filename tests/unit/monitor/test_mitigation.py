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
    UnloadInstance,
)
from bus.messages.scaling import AskToMove, Drain
from services.core.placement import Device
from services.core.settings import MonitorSettings
from services.monitor.effects import MachineSample
from services.monitor.mitigation import BUSIEST, GAIN, better_cores, smoothed
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


def test_an_instance_whose_queries_have_ended_stays() -> None:
    world, instance = machine()
    slowed(world, instance, 1.5)
    assert world.states() == {instance: "Interfered"}
    world.serve({}, times=8)
    assert world.said(MoveInstance) == []


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


def test_what_recovers_by_itself_stays() -> None:
    world, instance = machine()
    slowed(world, instance, 1.0)
    slowed(world, instance, 10.0, slower=1.0)
    assert world.said(MoveInstance) == []
    assert world.states() == {instance: "Active"}


def test_nowhere_to_go_asks_the_controller_and_goes_on() -> None:
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


def test_a_move_that_fails_asks_the_controller() -> None:
    world, instance = machine()
    slowed(world, instance, 4.0)
    moved(world, world.said(MoveInstance)[0], error="this process cannot run on core 1", cores=[])
    assert len(world.said(AskToMove)) == 1
    assert world.states() == {instance: "Interfered"}
    assert not [event for event in world.of(ScalingEvent) if event.action == "migrate"]


def test_a_draining_worker_moves_nothing() -> None:
    world, instance = machine()
    world.tell(Drain(epoch=1))
    slowed(world, instance, 10.0)
    assert world.said(MoveInstance) == world.said(AskToMove) == []


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
    other = replace(ON_GPU, variant="h", model="m-h")
    taken = world.ensure(other).instances[0]
    world.tell(InstanceLoaded(load_ms=1.0, memory_mb=1.0, proof="there", **facts(there, taken) | {"variant": "h"}))
    world.published.clear()
    for _ in range(8):
        world.advance(0.5)
        report(world, here, instance, slower=4.0)
        world.hear([InstanceSample(taken, "h", 0, 0.0, 0, 0, 0.0, 0.0, [])], there)
        world.report()
    assert world.said(LoadInstance) == []
    assert [ask.variant for ask in world.said(AskToMove)] == ["g"]
