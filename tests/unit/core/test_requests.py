"""Answers go to whoever waits for one; a request that comes too early is kept until the actor knows enough."""

from collections.abc import Iterable

from bus.messages.public import AdminDone, Error, Refusal
from services.core.actor import After, Do, Effect, Envelope, Failed, Publish, Synced, TimedOut
from services.core.requests import Commands, Retry, SyncGate, TakeOver, TakeOvers, answer, not_now, refuse


def test_answers_go_to_who_waits_and_failed_commands_are_overloads() -> None:
    error = Error(code="bad_request", message="no")
    assert answer("_INBOX.1", AdminDone()) == (Publish("_INBOX.1", AdminDone()),)
    assert refuse("_INBOX.1", error) == (Publish("_INBOX.1", Refusal(error=error)),)
    assert answer("", AdminDone()) == refuse("", error) == ()
    error = not_now("jobs cannot be kept", Failed("x", "the disk is full"), 2.0)
    assert (error.code, error.retry_after_ms) == ("overloaded", 2000.0)
    assert error.message == "jobs cannot be kept now, try again: the disk is full"
    assert not_now("jobs cannot be kept", TimedOut("x"), 2.0).message.endswith(": it took too long")


def test_requests_wait_for_all_buckets_and_then_come_in_order() -> None:
    def handler(envelope: Envelope) -> Iterable[Effect]:
        return (Publish(envelope.reply, envelope.message),)

    gate = SyncGate(("a", "b"))
    gated = gate.after(handler)
    assert gated(Envelope(1.0, "first", reply="x")) == ()
    assert gate.synced(Envelope(2.0, Synced("b"))) == ()
    assert gated(Envelope(3.0, "second", reply="y")) == ()
    assert gate.unsynced == {"a"}
    assert list(gate.synced(Envelope(4.0, Synced("a")))) == [Publish("x", "first"), Publish("y", "second")]
    assert gate.synced_at == 4.0
    assert gated(Envelope(5.0, "third", reply="z")) == (Publish("z", "third"),)
    assert list(gate.synced(Envelope(6.0, Synced("a")))) == []


# -- Commands are repeated until they succeed; work of a peer that is gone is taken over, by one of several.


def test_a_command_that_failed_is_given_again_after_a_pause() -> None:
    commands = Commands(2.0)
    do = commands.start(Do(("keep", "j"), "command", 10.0))
    (again,) = commands.failed(do.id)
    assert again == After(do.id, 2.0, Retry(do))
    assert commands.retry(Envelope(1.0, Retry(do))) == (do,)
    assert commands.get(do.id) == do
    commands.ended(do.id)
    assert commands.failed(do.id) == ()
    assert commands.get(do.id) is None


def test_own_work_and_that_of_peers_that_are_gone_is_taken_over() -> None:
    takeovers = TakeOvers("a", timeout_s=5.0, command_s=10.0)
    takeovers.heard("alive", 99.0, leaving=False)
    takeovers.heard("silent", 90.0, leaving=False)
    takeovers.heard("left", 99.0, leaving=True)
    unfinished = [("w1", "alive"), ("w2", "silent"), ("w3", "left"), ("w4", "a"), ("w5", "never heard of")]
    started = takeovers.start(unfinished, 100.0, since=98.0)
    assert started[0] == Do(("takeover", "w2"), TakeOver("w2", "a", "silent"), 10.0)
    assert [do.id[1] for do in started] == ["w2", "w3", "w4"]
    takeovers.ended("w2")
    assert [do.id[1] for do in takeovers.start(unfinished, 100.0, since=98.0)] == ["w2"]
    assert [do.id[1] for do in takeovers.start(unfinished, 104.0, since=98.0)] == ["w5"]
