"""Orders of the controller: drain and resume, and epochs; quarantine of what cannot be loaded, and its release."""

import pytest

from bus.codec import encode
from bus.messages.events import StateEvent, WorkerEvent
from bus.messages.fleet import EnsureLoaded, ExecutorExited, LoadAccepted, LoadInstance, LoadRefused, Release
from bus.messages.scaling import Drain, LeaderRecord
from services.core.actor import Changed, Do, Envelope, Failed, TimedOut
from services.core.quarantine import quarantine_key
from services.monitor.machine import KeepQuarantine
from services.monitor.policy import Knobs
from tests.support.simulated.monitored_worker import S, World, variant


def ask(world: World, order: Drain | Release | EnsureLoaded) -> LoadAccepted | LoadRefused:
    [reply] = [m for m in world.tell(order, reply="_INBOX.7") if isinstance(m, LoadAccepted | LoadRefused)]
    return reply


def test_a_draining_worker_takes_nothing_new_and_keeps_what_it_has() -> None:
    world = World()
    instance = world.load(variant())
    reply = ask(world, Drain(epoch=3, reason="the least used of its kind"))
    assert reply == LoadAccepted(worker="w1", variant="", instances=[instance])
    assert world.beat.draining and not world.beat.leaving
    assert world.ensure(variant("b")).reason == "this worker is draining: the least used of its kind"
    assert world.ensure(variant(), at_least=1) == LoadRefused(
        worker="w1", variant="v", reason="this worker is draining: the least used of its kind"
    )
    assert world.states() == {instance: "Active"}
    event = world.of(WorkerEvent)[-1]
    assert (event.from_state, event.to_state, event.reason) == ("Ready", "Draining", "the least used of its kind")
    ask(world, Release(variant="v", epoch=3))
    world.obey()
    assert world.states() == {}


def test_a_drain_is_taken_back() -> None:
    world = World()
    ask(world, Drain(epoch=3))
    ask(world, Drain(epoch=3, resume=True, reason="the load is back"))
    assert not world.beat.draining
    assert isinstance(world.ensure(variant()), LoadAccepted)
    assert [e.to_state for e in world.of(WorkerEvent)][-2:] == ["Draining", "Ready"]


def test_the_same_order_twice_changes_nothing() -> None:
    world = World()
    for _ in range(2):
        assert isinstance(ask(world, Drain(epoch=1)), LoadAccepted)
    assert [e.to_state for e in world.of(WorkerEvent)].count("Draining") == 1


def test_what_a_dying_executor_took_along_is_not_loaded_again_while_draining() -> None:
    world = World()
    world.load(variant())
    ask(world, Drain(epoch=1))
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
    ask(world, Release(variant="none", epoch=5))
    reply = ask(world, late)
    assert isinstance(reply, LoadRefused)
    assert reply.reason == "the order is of epoch 4, and a later leader has spoken in epoch 5"
    assert world.states() == {instance: "Active"}
    assert not world.beat.draining


def test_a_monitor_that_has_just_started_knows_the_epoch_from_the_leader_s_record() -> None:
    world = World()
    for garbage in (None, b"", b"\xc1"):
        world.tell(Changed(S.control_bucket, "controller", garbage))
    world.tell(Changed(S.control_bucket, "controller", encode(LeaderRecord(holder="vm-new", epoch=5, until=0.0))))
    assert isinstance(ask(world, Drain(epoch=4, orderer="vm-old")), LoadRefused)
    assert isinstance(ask(world, Drain(epoch=5, orderer="vm-new")), LoadAccepted)


def test_orders_without_an_epoch_and_of_the_present_one_are_obeyed() -> None:
    world = World()
    assert isinstance(ask(world, EnsureLoaded(variant=variant("a"), epoch=7)), LoadAccepted)
    assert isinstance(ask(world, EnsureLoaded(variant=variant("b"), epoch=7)), LoadAccepted)
    assert isinstance(ask(world, EnsureLoaded(variant=variant("c"))), LoadAccepted)
    assert isinstance(ask(world, EnsureLoaded(variant=variant("d"), epoch=8)), LoadAccepted)


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


def test_a_success_between_starts_the_count_anew() -> None:
    world = World()
    fail(world, 2)
    world.load(variant())
    world.tell(Release(variant="v"))
    world.obey()
    fail(world, 2)
    assert world.beat.quarantined == {}


def test_loads_that_fail_at_once_count_as_one() -> None:
    world = World()
    world.ensure(variant(), at_least=4)
    world.obey(fail="no such operator")
    assert world.beat.quarantined == {}


def test_quarantine_can_be_switched_off() -> None:
    world = World(knobs=Knobs(quarantine_after=0))
    for _ in range(5):
        world.ensure(variant())
        world.obey(fail="no such operator")
        world.advance(70.0, reporting=True)
    assert world.beat.quarantined == {}


def test_what_is_quarantined_is_written_down_until_it_is() -> None:
    world = World()
    fail(world, 2)
    world.ensure(variant())
    [order] = [m for _, m in world.published if isinstance(m, LoadInstance)]
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
