"""Instances that nobody needs: they serve until their place is needed. And swaps: release first, then load, in one turn."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.events import ScalingEvent
from bus.messages.fleet import (
    ExecutorExited,
    InstanceLoaded,
    InstanceSample,
    InstanceUnloaded,
    LoadAccepted,
    LoadInstance,
    LoadRefused,
    Release,
    UnloadInstance,
)
from services.core.placement import Device
from services.core.settings import MonitorSettings
from tests.support.simulated.monitored_worker import World, variant


def mark(keep: int = 0, name: str = "v") -> Release:
    return Release(variant=name, keep=keep, reclaim=True, orderer="model-autoscaler", reason="idle")


def loaded(count: int) -> World:
    """A worker with so many Active instances of v."""
    world = World()
    world.ensure(variant(), at_least=count)
    world.obey()
    return world


def marks(world: World) -> dict[str, bool]:
    return {name: status.reclaimable for name, status in world.told().items()}


def test_a_reclaimable_instance_serves_on_and_its_room_counts_as_free() -> None:
    world = loaded(3)
    world.report(queued={"v.w1-1": 5})
    reply = world.ask(mark(keep=1))
    assert reply == LoadAccepted(worker="w1", variant="v", instances=["v.w1-1", "v.w1-2", "v.w1-3"])
    assert marks(world) == {"v.w1-1": False, "v.w1-2": True, "v.w1-3": True}
    assert set(world.states().values()) == {"Active"}
    [device] = world.beat.devices
    assert (device.memory_used_mb, device.memory_reclaimable_mb) == (100.0, 200.0)
    event = world.of(ScalingEvent)[-1]
    world.advance(0.5)
    world.report({name: {"faces": 10} for name in ("v.w1-1", "v.w1-2", "v.w1-3")})
    world.advance(0.5)
    [device] = world.beat.devices
    assert (device.cores_used, device.cores_reclaimable) == pytest.approx((0.1, 0.2)), "10 ms each, in the first second"
    assert (event.scaler, event.action, event.count, event.reason) == ("model", "release", 2, "idle")


def test_the_same_mark_again_changes_nothing_whoever_is_busy_then() -> None:
    world = loaded(3)
    world.tell(mark(keep=1))
    before, events = marks(world), len(world.events)
    world.report({"v.w1-1": {"faces": 30}, "v.w1-2": {"faces": 30}}, queued={"v.w1-1": 9})
    sent, events = len(world.published), len(world.events)
    world.tell(mark(keep=1))
    world.tell(mark(keep=2))
    assert (len(world.published), len(world.events)) == (sent, events)
    assert marks(world) == before


def test_an_order_to_load_takes_marks_away_before_it_loads() -> None:
    world = loaded(3)
    world.tell(mark())
    world.report(queued={"v.w1-2": 5})
    world.published.clear()
    assert world.ensure(variant()).instances == ["v.w1-2"]
    event = world.of(ScalingEvent)[-1]
    assert (event.scaler, event.action, event.count, event.app) == ("dispatcher", "keep", 1, "faces")
    events = len(world.events)
    assert world.ensure(variant()).instances == ["v.w1-2"]
    assert len(world.events) == events, "nothing changes"
    assert len(world.ensure(variant(), at_least=4).instances) == 4
    assert not any(marks(world).values())
    assert [(e.action, e.count) for e in world.of(ScalingEvent)][-2:] == [("keep", 2), ("replicate", 1)]
    assert [m.instance for _, m in world.published if isinstance(m, LoadInstance)] == ["v.w1-4"]


def test_loads_are_given_up_and_reclaimable_ones_not_loaded_again() -> None:
    world = World(executor=None)
    world.ensure(variant())
    world.tell(mark())
    assert world.told() == {}
    assert [event.action for event in world.of(ScalingEvent)] == ["load", "release"]
    world = loaded(2)
    world.tell(mark(keep=1))
    world.tell(ExecutorExited(worker="w1", device="cpu", at=world.now, reason="killed"))
    assert world.states() == {"v.w1-3": "Loading"}


def test_a_plain_release_unloads_reclaimable_instances_first() -> None:
    world = loaded(2)
    world.tell(mark(keep=1))
    [marked] = [name for name, reclaimable in marks(world).items() if reclaimable]
    world.report(queued={marked: 5})
    world.tell(Release(variant="v", keep=1))
    assert {name for name, state in world.states().items() if state == "Unloading"} == {marked}


def test_a_busy_reclaimable_instance_answers_its_queue_before_its_place_is_taken() -> None:
    world = World()
    old = world.load(variant("old", memory_mb=800.0))
    world.tell(mark(name="old"))
    world.report({old: {"faces": 30}}, queued={old: 20})
    world.published.clear()
    assert world.ensure(variant("new", memory_mb=300.0)).instances == ["new.w1-1"]
    assert world.states() == {old: "Unloading", "new.w1-1": "Loading"}
    assert [m for _, m in world.published if isinstance(m, LoadInstance | UnloadInstance)] == [
        UnloadInstance(instance=old)
    ]
    world.obey(times=2)
    assert world.states() == {"new.w1-1": "Active"}
    [evicted] = [event for event in world.of(ScalingEvent) if event.action == "evict"]
    assert evicted.reason == "makes room for new; reclaimable"


def test_a_refusal_counts_only_what_is_needed() -> None:
    world = World()
    world.load(variant("a", memory_mb=500.0))
    world.load(variant("b", memory_mb=100.0))
    world.tell(mark(name="b"))
    reason = world.ensure(variant("c", memory_mb=400.0)).reason
    assert reason == "c needs 400 MB; instances in use take 500 of the 800 MB that cpu sets aside"
    assert set(world.states().values()) == {"Active"}


def test_a_new_monitor_knows_no_marks_until_the_order_is_repeated() -> None:
    world = World()
    world.catalogue(variant())
    world.loaded["v.w1-5"] = "v"
    world.report()
    assert marks(world) == {"v.w1-5": False}
    world.tell(mark())
    assert marks(world) == {"v.w1-5": True}


class Gpus(World):
    """GPUs of one worker, 800 MB each for instances; `obey` carries out every order, `silence` is a report of idle executors."""

    def __init__(self, number: int) -> None:
        self.gpus = [f"gpu-{n}" for n in range(number)]
        super().__init__(
            [Device(name=name, kind="gpu", cores=1, memory_mb=1000.0, simulated=True) for name in self.gpus],
            executor=None,
        )
        self.executor = 1
        self.idle()

    def obey(self, *, memory_mb: float = 0.0, fail: str = "") -> None:
        assert not fail
        orders = [(subject, m) for subject, m in self.published if isinstance(m, LoadInstance | UnloadInstance)]
        self.published = [entry for entry in self.published if entry not in orders]
        for subject, order in orders:
            facts = {"instance": order.instance, "device": subject.split(".")[3], "incarnation": 1}
            if isinstance(order, LoadInstance):
                name = self.loaded[order.instance] = order.variant.variant
                self.tell(InstanceLoaded(variant=name, load_ms=1.0, memory_mb=memory_mb, proof="", **facts))
            else:
                self.tell(InstanceUnloaded(variant=self.loaded.pop(order.instance), **facts))

    def idle(self) -> None:
        for device in self.gpus:
            here = [(n, s.variant) for n, s in self.told().items() if s.device == device and n in self.loaded]
            samples = [InstanceSample(n, name, 0, 0.0, 0, 0, 0.0, 0.0, []) for n, name in here]
            self.hear(samples, device)

    def where(self) -> dict[str, str]:
        """The device of each variant."""
        return {status.variant: status.device for status in self.told().values()}

    def gpu(self, name: str, memory_mb: float) -> LoadAccepted | LoadRefused:
        record = msgspec.structs.replace(variant(name, memory_mb=memory_mb), hardware="gpu", simulated=True)
        reply: LoadAccepted | LoadRefused = self.ensure(record, app=None)
        return reply


def test_a_load_goes_to_the_device_where_least_is_lost() -> None:
    world = Gpus(3)
    for name, memory_mb in (("idle", 700.0), ("marked", 750.0), ("going", 790.0)):
        world.gpu(name, memory_mb)
        world.obey()
    for _ in range(2):
        world.advance(1.5)
        world.idle()
    world.tell(mark(name="marked"))
    world.tell(Release(variant="going"))
    for name, beside in (("first", "going"), ("second", "marked"), ("third", "idle")):
        before = world.where()
        assert isinstance(world.gpu(name, 500.0), LoadAccepted)
        assert world.where()[name] == before[beside], name
    assert isinstance(world.gpu("fourth", 500.0), LoadRefused)


# -- Swaps on a full worker: what goes is released first, then what comes is loaded, in one turn.

SWAP = [("a", 300.0), ("b", 300.0), ("c", 200.0)]  # all that a worker has room for


@pytest.mark.parametrize("reclaim", [False, True])
@pytest.mark.parametrize("sizes", [(400.0, 250.0, 150.0), (150.0, 250.0, 400.0), (100.0, 600.0, 100.0)])
def test_three_busy_instances_of_a_full_worker_are_swapped_for_others_in_one_turn(
    reclaim: bool, sizes: tuple[float, ...]
) -> None:
    world = World()
    old = [world.load(variant(name, memory_mb=memory_mb)) for name, memory_mb in SWAP]
    world.report({old[0]: {"faces": 30}}, queued=dict.fromkeys(old, 20))
    for name, _ in SWAP:
        assert isinstance(world.ask(Release(variant=name, reclaim=reclaim)), LoadAccepted)
    new = [variant(f"new{n}", memory_mb=memory_mb) for n, memory_mb in enumerate(sizes)]
    for record in new:
        assert isinstance(world.ensure(record), LoadAccepted)
    assert [state for name, state in world.states().items() if name in old] == ["Unloading"] * 3
    assert not [m for _, m in world.published if isinstance(m, LoadInstance) and m.variant in new], "queues first"
    world.obey(times=2)
    assert world.states() == {f"new{n}.w1-1": "Active" for n in range(3)}
    assert world.beat.devices[0].memory_used_mb == sum(sizes)


@given(
    old=st.lists(st.tuples(st.integers(1, 8), st.booleans(), st.integers(0, 9)), min_size=1, max_size=6),
    new=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    reclaim=st.lists(st.booleans(), min_size=6, max_size=6),
    shuffled=st.randoms(use_true_random=False),
)
def test_whatever_is_released_what_fits_beside_the_rest_is_admitted_in_the_same_turn(
    old: list[tuple[int, bool, int]], new: list[int], reclaim: list[bool], shuffled: Any
) -> None:
    """Sizes in 100 MB of the 800 that there are; old ones: size, whether it is released, its queue."""
    world = World(settings=MonitorSettings(cores_overcommit=16.0))
    sizes = {f"old{n}": size for n, (size, _, _) in enumerate(old)} | {f"new{n}": size for n, size in enumerate(new)}
    record = {name: variant(name, memory_mb=100.0 * size) for name, size in sizes.items()}
    there, queues = {}, {}
    for number, (_, goes, queue) in enumerate(old):
        reply = world.ensure(record[f"old{number}"])
        if isinstance(reply, LoadAccepted):
            there[f"old{number}"] = goes
            queues[reply.instances[0]] = queue
    world.obey()
    world.report(queued=queues)
    for number, (name, goes) in enumerate(there.items()):
        if goes:
            world.tell(Release(variant=name, reclaim=reclaim[number]))
    room = 8 - sum(sizes[name] for name, goes in there.items() if not goes)
    for name in (f"new{number}" for number in range(len(new))):
        reply = world.ensure(record[name])
        if sizes[name] <= room:
            assert isinstance(reply, LoadAccepted), (reply, room)
            room -= sizes[name]
        else:
            assert isinstance(reply, LoadRefused), "what serves and has just been used is not evicted"
    for _ in range(20):  # the executor obeys in any order, one order at a time
        orders = [entry for entry in world.published if isinstance(entry[1], LoadInstance | UnloadInstance)]
        if not orders:
            break
        world.published = [entry for entry in world.published if entry not in orders]
        world.published.append(orders.pop(shuffled.randrange(len(orders))))
        world.obey()
        world.published += orders
        assert sum(sizes[name] for name in world.loaded.values()) <= 8
    assert {name for name, goes in there.items() if not goes} <= set(world.loaded.values())
    assert set(world.states().values()) <= {"Active"}


def test_what_must_wait_takes_the_place_that_it_fits_best() -> None:
    world = Gpus(2)
    world.gpu("stays", 400.0)
    world.gpu("large", 800.0)
    world.gpu("small", 400.0)
    world.obey()
    before = world.where()
    assert before["stays"] == before["small"] != before["large"]
    for name in ("large", "small"):
        world.tell(Release(variant=name))
    assert isinstance(world.gpu("next-small", 300.0), LoadAccepted)
    assert isinstance(world.gpu("next-large", 800.0), LoadAccepted)
    world.obey()
    world.obey()
    assert world.where() == {
        "stays": before["stays"],
        "next-small": before["small"],
        "next-large": before["large"],
    }
