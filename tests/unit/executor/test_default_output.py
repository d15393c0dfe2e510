"""Queries whose app has a default output leave an executor at their deadline: alone, with the dispatcher's side played by the test."""

from typing import Any

import msgspec
import pytest

from bus.codec import encode
from bus.messages.fleet import DispatcherHeartbeat, UnloadInstance
from bus.messages.flow import DoneBatch, Execute, HandBack, Route
from bus.messages.public import Answer, Refusal, Tensor
from services.core.actor import After, Do, Effect
from services.core.deadlines import DeadlineReached
from services.core.outcomes import GRACE
from services.executor.actor import BatchesDue
from tests.unit.executor.test_actor import NOW, published
from tests.unit.executor.test_actor import Alone as Executor

SLO = 0.5
BODY = msgspec.Raw(encode({"inputs": {"x": Tensor("FP32", [1, 2], bytes(8))}}))


class Alone(Executor):
    """Its queries have so much time, and all but those that say otherwise a default output."""

    def take(self, uid: bytes = b"u" * 16, *, fallback: bool = True, now: float = NOW) -> list[Effect]:
        route = Route(
            uid, 0, 0, "_INBOX.1", now + SLO, now, "d1", "i", "app", 1, "q", resendable=True, fallback=fallback
        )
        return self.tell(Execute(route, BODY), now)


def sent(effects: list[Effect], kind: type) -> list[Any]:
    return [message for _, message in published(effects, kind)]


def test_what_runs_or_waits_goes_back_when_its_time_is_up() -> None:
    alone = Alone()
    [timer] = [effect for effect in alone.take() if isinstance(effect, After) and effect.key == "deadline"]
    assert timer.delay == pytest.approx(SLO, rel=0.05)
    run = alone.begin()
    [back] = sent(alone.tell(DeadlineReached(), NOW + timer.delay), HandBack)
    assert (back.reason, back.route.uid) == ("late", b"u" * 16)
    effects = alone.end(run, NOW + 5)
    assert sent(effects, Answer) == sent(effects, DoneBatch) == []
    assert sent(alone.tell(DeadlineReached(), NOW + 6), HandBack) == []
    alone = Alone()
    alone.take()
    run = alone.begin()
    alone.take(b"v" * 16, now=NOW + 0.2)
    assert [back.route.uid for back in sent(alone.tell(DeadlineReached(), NOW + SLO), HandBack)] == [b"u" * 16]
    assert [back.route.uid for back in sent(alone.tell(DeadlineReached(), NOW + 0.2 + SLO), HandBack)] == [b"v" * 16]
    alone.end(run, NOW + 5)
    assert sent(alone.tell(BatchesDue(), NOW + 5), HandBack) == []
    assert not alone.actor.instances["i"].queue.items


def test_answers_in_time_stay_and_without_a_default_all_is_as_it_was() -> None:
    alone = Alone()
    alone.take()
    effects = alone.end(alone.begin(), NOW + 0.01)
    assert len(sent(effects, Answer)) == len(sent(effects, DoneBatch)) == 1
    assert sent(alone.tell(DeadlineReached(), NOW + 1), HandBack) == []
    alone = Alone()
    [timer] = [e for e in alone.take(fallback=False) if isinstance(e, After) and e.key == "deadline"]
    assert timer.delay == pytest.approx(SLO + GRACE)
    [refusal] = sent(alone.end(alone.begin(), NOW + 0.01, errors=["division by zero"]), Refusal)
    assert refusal.error.code == "model_error"


def test_a_failure_goes_back_with_its_reason_instead_of_being_told() -> None:
    alone = Alone()
    alone.take()
    effects = alone.end(alone.begin(), NOW + 0.01, errors=["division by zero"])
    assert sent(effects, Refusal) == []
    [back] = sent(effects, HandBack)
    assert (back.reason, back.text) == ("failed", "division by zero")


def test_while_no_dispatcher_lives_its_executor_ends_it() -> None:
    alone = Alone()
    alone.take()
    run = alone.begin()
    alone.tell(DispatcherHeartbeat(dispatcher="d1", incarnation=0, at=NOW, flushed={}, leaving=True), NOW + 0.1)
    assert sent(alone.tell(DeadlineReached(), NOW + SLO), HandBack) == []
    [refusal] = sent(alone.tell(DeadlineReached(), NOW + SLO + GRACE), Refusal)
    assert refusal.error.code == "deadline"
    assert sent(alone.end(run, NOW + 2), Answer) == []


def test_the_same_query_again_after_its_default_is_a_new_one() -> None:
    alone = Alone()
    alone.take()
    run = alone.begin()
    alone.tell(DeadlineReached(), NOW + SLO)
    alone.take(now=NOW + 1)
    assert sent(alone.end(run, NOW + 1.1), Answer) == []
    assert len(sent(alone.end(alone.begin(NOW + 1.1), NOW + 1.2), Answer)) == 1


def test_an_instance_that_leaves_while_lapsed_ones_wait_hands_back_only_the_others() -> None:
    alone = Alone()
    alone.take()
    run = alone.begin()
    alone.take(b"v" * 16)
    alone.tell(DeadlineReached(), NOW + SLO)
    alone.take(b"w" * 16, now=NOW + 1)
    alone.tell(UnloadInstance(instance="i"), NOW + 1)
    effects = [*alone.end(run, NOW + 1.1), *alone.tell(BatchesDue(), NOW + 1.1)]
    assert [type(effect.command).__name__ for effect in effects if isinstance(effect, Do)][:1] == ["RunBatch"]
    assert sent(effects, HandBack) == []


def test_a_run_that_a_default_may_have_to_interrupt_does_not_keep_the_loop() -> None:
    for fallback in (True, False):
        alone = Alone()
        alone.actor._runs._inline_below = 1.0
        alone.take(fallback=fallback)
        assert alone.begin().command.inline is not fallback


def test_many_that_were_answered_set_one_timer() -> None:
    alone = Alone()
    timers = 0
    for number in range(100):
        timers += sum(isinstance(e, After) and e.key == "deadline" for e in alone.take(number.to_bytes(16)))
        alone.end(alone.begin(), NOW + 0.01)
    assert timers == 1
    alone.take(b"z" * 16)
    assert [back.route.uid for back in sent(alone.tell(DeadlineReached(), NOW + SLO), HandBack)] == [b"z" * 16]
