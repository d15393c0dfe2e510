"""Answers go to whoever waits for one; a request that comes too early is kept until the actor knows enough."""

from collections.abc import Iterable

from bus.messages.public import AdminDone, Error, Refusal
from services.core.actor import Effect, Envelope, Failed, Publish, Synced, TimedOut
from services.core.requests import SyncGate, answer, not_now, refuse


def test_an_answer_goes_to_whoever_waits_for_one() -> None:
    error = Error(code="bad_request", message="no")
    assert answer("_INBOX.1", AdminDone()) == (Publish("_INBOX.1", AdminDone()),)
    assert refuse("_INBOX.1", error) == (Publish("_INBOX.1", Refusal(error=error)),)
    assert answer("", AdminDone()) == refuse("", error) == ()


def test_a_command_that_failed_is_an_overload_that_says_why() -> None:
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
