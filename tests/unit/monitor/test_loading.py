"""Orders to a worker: what is admitted, evicted, refused, released, and what executors and history hear of it."""

import msgspec
import pytest

from bus.codec import encode
from bus.messages.catalog import AppRecord
from bus.messages.events import ScalingEvent, StateEvent, WorkerEvent
from bus.messages.fleet import (
    EnsureLoaded,
    ExecutorExited,
    InstanceLoaded,
    InstanceSample,
    InstanceUnloaded,
    LoadAccepted,
    LoadInstance,
    LoadRefused,
    LoadReply,
    Release,
    UnloadInstance,
)
from bus.messages.scaling import Drain, LeaderRecord
from services.core.actor import Changed, Do, Envelope, Failed, TimedOut
from services.core.catalog import UNREAD
from services.core.cost import LOADING_S, instance_price_per_s
from services.core.placement import quarantine_key
from services.core.settings import MonitorSettings
from services.monitor.effects import KeepQuarantine
from tests.support.data.pipelines import deployed
from tests.support.simulated.monitored_worker import CPU, PRICES, S, World, variant


def test_a_load_is_ordered_followed_and_told() -> None:
    world = World()
    assert world.ensure(variant()) == LoadAccepted(worker="w1", variant="v", instances=["v.w1-1"])
    [order] = [m for subject, m in world.published if subject == S.executor("w1", "cpu", "load")]
    price = instance_price_per_s(variant(), PRICES, CPU.cores, CPU.memory_mb)
    assert order == LoadInstance(instance="v.w1-1", variant=variant(), price_per_s=pytest.approx(price))
    assert world.states() == {"v.w1-1": "Loading"}
    assert world.told()["v.w1-1"].ready_at == pytest.approx(world.now + 0.2 + LOADING_S)
    world.obey()
    assert world.states() == {"v.w1-1": "Active"}
    assert [(e.app, e.from_state, e.to_state, e.reason) for e in world.of(StateEvent)] == [
        ("faces", "Inactive", "Loading", "a query needs it"),
        ("faces", "Loading", "Active", "loaded in 200 ms; here"),
    ]
    [event] = world.of(ScalingEvent)
    assert (event.scaler, event.action, event.count, event.app, event.variant) == (
        "dispatcher", "load", 1, "faces", "v",
    )  # fmt: skip


def test_both_replies_can_be_read_as_one() -> None:
    world = World()
    accepted, refused = world.ensure(variant()), world.ensure(variant("big", memory_mb=900.0))
    both = [msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=LoadReply) for reply in (accepted, refused)]
    assert both[0].instances == ["v.w1-1"] and not both[0].reason
    assert (
        both[1].reason == "big needs 900 MB, cpu sets 800 MB aside: use a larger device or raise monitor.memory_share"
    )


def test_orders_are_idempotent() -> None:
    world = World()
    first = world.ensure(variant())
    assert world.ensure(variant()) == first
    world.obey()
    assert world.ensure(variant()) == first
    assert world.ensure(variant(), at_least=3).instances == ["v.w1-1", "v.w1-2", "v.w1-3"]
    world.obey()
    assert set(world.states().values()) == {"Active"}
    assert [event.action for event in world.of(ScalingEvent)] == ["load", "replicate", "replicate"]


@pytest.mark.parametrize(
    ("record", "at_least", "reason"),
    [
        (variant(memory_mb=900.0), 1, "v needs 900 MB, cpu sets 800 MB aside: use a larger device or raise monitor.memory_share"),
        (variant(threads=4), 1, "v needs 4 threads, cpu has 2 cores"),
        (msgspec.structs.replace(variant(), hardware="gpu"), 1, "v needs a device of kind gpu, cpu is of kind cpu"),
        (variant(memory_mb=300.0), 3, "v needs 300 MB; instances in use take 600 of the 800 MB that cpu sets aside"),
        (variant(), 1000, "at_least is 1000; one worker takes at most 256 instances of a variant"),
    ],
)  # fmt: skip
def test_refusals_say_why(record: object, at_least: int, reason: str) -> None:
    world = World()
    refused = LoadRefused(worker="w1", variant="v", reason=reason, lasting=at_least == 1)
    assert world.ensure(record, at_least) == refused  # type: ignore[arg-type]


def test_the_least_recently_used_makes_room_and_is_gone_before_the_load_begins() -> None:
    world = World()
    old = world.load(variant("old", memory_mb=300.0))
    world.advance(5.0, reporting=True)
    young = world.load(variant("young", memory_mb=300.0))
    world.advance(5.0, reporting=True)
    world.report()
    world.published.clear()
    world.ensure(variant("new", memory_mb=400.0))
    assert world.states() == {old: "Unloading", young: "Active", "new.w1-1": "Loading"}
    orders = [message for _, message in world.published if isinstance(message, LoadInstance | UnloadInstance)]
    assert orders == [UnloadInstance(instance=old)], "no memory for the new one until the old one is gone"
    world.obey(times=2)
    assert world.states() == {young: "Active", "new.w1-1": "Active"}
    [evicted] = [event for event in world.of(ScalingEvent) if event.action == "evict"]
    assert (evicted.scaler, evicted.variant, evicted.reason) == (
        "monitor",
        "old",
        "makes room for new; not used for 10 s",
    )


def test_the_last_instance_of_an_app_in_use_is_not_evicted() -> None:
    world = World()
    only = world.load(variant("a", memory_mb=500.0), app="faces")
    world.advance(60.0, reporting=True)
    reply = world.ensure(variant("b", memory_mb=400.0), app="digits")
    assert reply.reason == "b needs 400 MB; instances in use take 500 of the 800 MB that cpu sets aside"
    assert world.states() == {only: "Active"}
    world.catalogue(apps=[AppRecord(app="faces", links={"m-a": "1"}, min_instances=0)])
    assert isinstance(world.ensure(variant("b", memory_mb=400.0), app="digits"), LoadAccepted)


def test_a_replica_of_a_deployed_pipeline_is_not_evicted_unless_it_is_reclaimable() -> None:
    world = World()
    idle = world.load(variant("a", memory_mb=500.0), app=None)
    world.catalogue(apps=[deployed({"lang": 1}, {"lang": "a"})])
    world.advance(60.0, reporting=True)
    assert isinstance(world.ensure(variant("b", memory_mb=400.0)), LoadRefused)
    assert world.states() == {idle: "Active"}
    world.tell(Release(variant="a", keep=0, reclaim=True, orderer="vm-1"))
    assert isinstance(world.ensure(variant("b", memory_mb=400.0)), LoadAccepted)


def test_another_instance_that_can_serve_the_app_frees_the_first() -> None:
    world = World()
    a = world.load(variant("a", memory_mb=300.0), app="faces")
    world.load(variant("b", memory_mb=300.0), app=None)
    world.advance(60.0, reporting=True)
    assert isinstance(world.ensure(variant("c", memory_mb=600.0), app="digits"), LoadRefused)
    world.catalogue(apps=[AppRecord(app="faces", links={"m-a": "1", "m-b": "1"})])
    assert isinstance(world.ensure(variant("c", memory_mb=500.0), app="digits"), LoadAccepted)
    assert world.states()[a] == "Unloading"


def test_busy_instances_and_what_they_really_take_count() -> None:
    world = World()
    first, second = (world.load(variant(name, memory_mb=400.0)) for name in ("a", "b"))
    world.advance(10.0, reporting=True)
    world.report(queued={first: 1, second: 1})
    assert isinstance(world.ensure(variant("c", memory_mb=400.0)), LoadRefused)
    world = World()
    world.ensure(variant("a", memory_mb=100.0))
    world.obey(memory_mb=500.0)
    assert world.beat.devices[0].memory_used_mb == 500.0
    assert isinstance(world.ensure(variant("b", memory_mb=400.0)), LoadRefused)


def test_loads_that_fail_or_nobody_answers_say_why() -> None:
    world = World()
    world.ensure(variant())
    world.obey(fail="no such operator")
    assert world.states() == {}
    assert world.of(StateEvent)[-1].reason == "no such operator"
    assert "the last load failed (no such operator)" in world.ensure(variant()).reason
    world.advance(1.0)
    assert isinstance(world.ensure(variant()), LoadAccepted)
    world = World()
    world.ensure(variant())
    world.advance(40.0, reporting=True)
    assert world.states() == {}
    assert world.of(StateEvent)[-1].reason == "the executor did not answer the load order within 32 s"


def test_release_drains_and_unloads() -> None:
    world = World()
    for _ in range(3):
        world.ensure(variant(), at_least=3)
    world.obey()
    world.report(queued={"v.w1-1": 5})
    world.tell(Release(variant="v", keep=1, orderer="model-autoscaler", reason="too many"), reply="_INBOX.2")
    assert world.states() == {"v.w1-1": "Active", "v.w1-2": "Unloading", "v.w1-3": "Unloading"}
    world.obey()
    assert world.states() == {"v.w1-1": "Active"}
    assert [(e.scaler, e.action, e.count) for e in world.of(ScalingEvent)][-1] == ("model", "unload", 2)
    assert world.of(StateEvent)[-1].to_state == "Inactive"


def test_a_release_while_it_loads_is_repeated_once_it_is_loaded() -> None:
    world = World()
    world.ensure(variant())
    world.tell(Release(variant="v"))
    assert world.states() == {"v.w1-1": "Unloading"}
    world.published.clear()
    world.tell(
        InstanceLoaded(
            instance="v.w1-1", variant="v", device="cpu", incarnation=1, load_ms=1.0, memory_mb=1.0, proof=""
        )
    )
    assert UnloadInstance(instance="v.w1-1") in [message for _, message in world.published]


def test_a_lost_word_of_an_unload_is_noticed() -> None:
    world = World()
    instance = world.load(variant())
    world.tell(Release(variant="v"))
    world.loaded.clear()  # it is gone, and nobody said so
    world.report()
    assert world.states() == {instance: "Unloading"}
    world.report()
    assert world.states() == {}


def test_a_release_before_its_load_was_read_keeps_the_room_until_its_executor_has_answered() -> None:
    world = World()
    world.ensure(variant())
    world.tell(Release(variant="v"))
    for _ in range(4):
        world.report()  # its connection is clogged: it does not know the instance yet
    assert world.states() == {"v.w1-1": "Unloading"}
    assert world.said(UnloadInstance) == [UnloadInstance(instance="v.w1-1")] * 2
    world.tell(InstanceUnloaded(instance="v.w1-1", variant="", device="cpu", incarnation=1))
    assert world.states() == {}


def test_a_load_order_that_was_written_off_is_undone_when_it_is_carried_out_late() -> None:
    world = World()
    zombie = world.ensure(variant()).instances[0]
    world.catalogue(variant())
    world.advance(40.0, reporting=True)
    assert world.states() == {}
    world.loaded[zombie] = "v"
    world.published.clear()
    world.report()
    assert UnloadInstance(instance=zombie) in [message for _, message in world.published]
    assert world.ensure(variant("w")).instances == ["w.w1-1"]


def test_a_leaving_worker_takes_nothing() -> None:
    world = World()
    world.load(variant())
    world.stop()
    assert world.beat.leaving
    assert world.beat.instances == []
    assert world.of(StateEvent)[-1].reason == "the worker stopped"
    assert world.ensure(variant("b")).reason == "this worker is leaving"


# -- Orders of the controller: drain and resume, and epochs; quarantine of what cannot be loaded, and its release.


def test_a_draining_worker_takes_nothing_new_and_keeps_what_it_has() -> None:
    world = World()
    instance = world.load(variant())
    reply = world.ask(Drain(epoch=3, reason="the least used of its kind"))
    assert reply == LoadAccepted(worker="w1", variant="", instances=[instance])
    assert world.beat.draining and not world.beat.leaving
    assert world.ensure(variant("b")).reason == "this worker is draining: the least used of its kind"
    assert world.ensure(variant(), at_least=1) == LoadRefused(
        worker="w1", variant="v", reason="this worker is draining: the least used of its kind"
    )
    assert world.states() == {instance: "Active"}
    event = world.of(WorkerEvent)[-1]
    assert (event.from_state, event.to_state, event.reason) == ("Ready", "Draining", "the least used of its kind")
    world.ask(Release(variant="v", epoch=3))
    world.obey()
    assert world.states() == {}


def test_a_drain_is_taken_back() -> None:
    world = World()
    world.ask(Drain(epoch=3))
    world.ask(Drain(epoch=3, resume=True, reason="the load is back"))
    assert not world.beat.draining
    assert isinstance(world.ensure(variant()), LoadAccepted)
    assert [e.to_state for e in world.of(WorkerEvent)][-2:] == ["Draining", "Ready"]


def test_orders_count_by_epoch_and_twice_change_nothing() -> None:
    world = World()
    for _ in range(2):
        assert isinstance(world.ask(Drain(epoch=1)), LoadAccepted)
    assert [e.to_state for e in world.of(WorkerEvent)].count("Draining") == 1
    world = World()
    assert isinstance(world.ask(EnsureLoaded(variant=variant("a"), epoch=7)), LoadAccepted)
    assert isinstance(world.ask(EnsureLoaded(variant=variant("b"), epoch=7)), LoadAccepted)
    assert isinstance(world.ask(EnsureLoaded(variant=variant("c"))), LoadAccepted)
    assert isinstance(world.ask(EnsureLoaded(variant=variant("d"), epoch=8)), LoadAccepted)


def test_what_a_dying_executor_took_along_is_not_loaded_again_while_draining() -> None:
    world = World()
    world.load(variant())
    world.ask(Drain(epoch=1))
    world.tell(ExecutorExited(worker="w1", device="cpu", at=world.now, reason="killed"))
    assert world.states() == {}
    world.executor, world.loaded = 2, {}
    world.report()
    assert [e.to_state for e in world.of(WorkerEvent)][-2:] == ["Failed", "Draining"]


@pytest.mark.parametrize("order", ["load", "release", "drain", "resume"])
def test_an_order_of_a_leader_that_has_been_replaced_is_refused(order: str) -> None:
    world = World()
    instance = world.load(variant())
    late = {
        "load": EnsureLoaded(variant=variant("b"), epoch=4, orderer="vm-old"),
        "release": Release(variant="v", epoch=4),
        "drain": Drain(epoch=4),
        "resume": Drain(epoch=4, resume=True),
    }[order]
    world.ask(Release(variant="none", epoch=5))
    reply = world.ask(late)
    assert reply.reason == "the order is of epoch 4, and a later leader has spoken in epoch 5"
    assert world.states() == {instance: "Active"}
    assert not world.beat.draining


def test_a_monitor_that_has_just_started_knows_the_epoch_from_the_leader_s_record() -> None:
    world = World()
    for garbage in (None, b"", b"\xc1"):
        world.tell(Changed(S.control_bucket, "controller", garbage))
    world.tell(Changed(S.control_bucket, "controller", encode(LeaderRecord(holder="vm-new", epoch=5, until=0.0))))
    assert isinstance(world.ask(Drain(epoch=4, orderer="vm-old")), LoadRefused)
    assert isinstance(world.ask(Drain(epoch=5, orderer="vm-new")), LoadAccepted)


def fail(world: World, times: int, name: str = "v") -> None:
    for _ in range(times):
        assert isinstance(world.ensure(variant(name)), LoadAccepted)
        world.obey(fail="no such operator")
        world.advance(10.0, reporting=True)


def test_three_failures_in_a_row_are_quarantine() -> None:
    world = World()
    fail(world, 3)
    assert world.beat.quarantined == {"v": "its last 3 loads failed: no such operator"}
    reply = world.ensure(variant())
    assert reply.reason == (
        "v is quarantined here until infaas.admin.release-variant names it: its last 3 loads failed: no such operator"
    )
    world.advance(300.0, reporting=True)
    assert isinstance(world.ensure(variant()), LoadRefused)
    assert isinstance(world.ensure(variant("other")), LoadAccepted)
    event = [e for e in world.of(StateEvent) if e.to_state == "Quarantined"]
    assert [(e.variant, e.from_state, e.reason) for e in event] == [
        ("v", "Inactive", "its last 3 loads failed: no such operator")
    ]


def test_failures_count_by_turn_until_a_success() -> None:
    world = World()
    fail(world, 2)
    world.load(variant())
    world.tell(Release(variant="v"))
    world.obey()
    fail(world, 2)
    assert world.beat.quarantined == {}
    world = World()
    world.ensure(variant(), at_least=4)
    world.obey(fail="no such operator")
    assert world.beat.quarantined == {}


@pytest.mark.parametrize(("after", "reason"), [(0, "no such operator"), (3, f"{UNREAD}: its digest does not match")])
def test_quarantine_can_be_switched_off_and_is_not_for_files_that_others_mend(after: int, reason: str) -> None:
    world = World(settings=MonitorSettings(quarantine_after=after))
    for _ in range(5):
        world.ensure(variant())
        world.obey(fail=reason)
        world.advance(70.0, reporting=True)
    assert world.beat.quarantined == {}


def test_what_is_quarantined_is_written_down_until_it_is() -> None:
    world = World()
    fail(world, 2)
    world.ensure(variant())
    [order] = world.said(LoadInstance)
    kept: list[KeepQuarantine] = []

    def effects(message: object) -> None:
        for effect in world.actor.handle(Envelope(world.now, message)):
            if isinstance(effect, Do) and isinstance(effect.command, KeepQuarantine):
                kept.append(effect.command)
            elif not isinstance(effect, Do):
                world._perform([effect])

    from bus.messages.fleet import InstanceFailed

    fact = InstanceFailed(instance=order.instance, variant="v", device="cpu", incarnation=1, reason="broken")
    effects(fact)
    assert kept == [KeepQuarantine("w1", "v", "its last 3 loads failed: broken")]
    for lost in (Failed(("quarantine", "v"), "disconnected"), TimedOut(("quarantine", "v"))):
        effects(lost)
        _, timer = world.timers.pop(("quarantine", "v"))
        effects(timer)
    assert len(kept) == 3


def test_a_new_monitor_learns_what_was_quarantined_and_hears_of_the_release() -> None:
    world = World()
    world.catalogue(variant())
    key = quarantine_key("w1", "v")
    world.tell(Changed(S.control_bucket, key, b"its last 3 loads failed: broken"))
    assert world.beat.quarantined == {"v": "its last 3 loads failed: broken"}
    assert "broken" in world.ensure(variant()).reason
    world.tell(Changed(S.control_bucket, quarantine_key("w2", "v"), None))
    world.tell(Changed(S.control_bucket, "controller", b"who leads"))
    assert isinstance(world.ensure(variant()), LoadRefused)
    world.tell(Changed(S.control_bucket, key, None))
    assert world.beat.quarantined == {}
    assert isinstance(world.ensure(variant()), LoadAccepted)
    moves = [(e.from_state, e.to_state) for e in world.of(StateEvent) if "Quarantined" in (e.from_state, e.to_state)]
    assert moves == [("Inactive", "Quarantined"), ("Quarantined", "Inactive")]


def test_a_worker_that_is_there_for_one_variant_keeps_it_loaded_until_it_drains() -> None:
    world = World(keeps=variant("only"))
    world.advance(1.0, reporting=True)
    world.obey()
    assert list(world.loaded.values()) == ["only"]
    world.tell(Release(variant="only", keep=0, orderer="vm-0", reason="too many"))
    world.obey()
    assert world.loaded == {}
    world.advance(1.0, reporting=True)
    world.obey()
    assert list(world.loaded.values()) == ["only"]
    assert {event.scaler for event in world.of(ScalingEvent) if event.action == "load"} == {"monitor"}
    world.tell(Drain(epoch=0, reason="it is stopped", orderer="worker"))
    world.tell(Release(variant="only", keep=0, orderer="vm-0", reason="too many"))
    world.obey()
    world.advance(2.0, reporting=True)
    world.obey()
    assert world.loaded == {}


@pytest.mark.parametrize(("memory_mb", "ordered"), [(100.0, ["b"]), (0.8 * CPU.memory_mb, [])], ids=["room", "no room"])
def test_a_new_monitor_loads_nothing_before_it_knows_what_is_loaded(memory_mb: float, ordered: list[str]) -> None:
    """A monitor that was replaced knows of nothing, and what it orders then may not fit beside what is there."""
    world = World(executor=None, startup_s=1.0)
    world.executor, world.loaded = 5, {"v.w1-3": "v"}
    there, another = variant(), variant("b", memory_mb=memory_mb)
    world.ensure(another)
    world.catalogue(there, another)
    world.tell(
        InstanceLoaded(
            instance="v.w1-3", variant="v", device="cpu", incarnation=5, load_ms=1.0, memory_mb=1.0, proof=""
        )
    )
    assert world.orders == []
    world.report()
    assert [one.variant.variant for one in world.orders if isinstance(one, LoadInstance)] == ordered
    assert ("b.w1-1" in world.states()) is bool(ordered)


def test_a_report_from_before_an_order_does_not_say_that_it_was_lost() -> None:
    world = World()
    world.advance(1.0)
    world.load(variant())
    samples: list[InstanceSample] = []
    for _ in range(5):
        world.hear(samples, "cpu", at=world.now - 0.5)
    assert world.states() == {"v.w1-1": "Active"}
