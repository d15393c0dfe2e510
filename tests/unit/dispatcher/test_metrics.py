"""Timing a sample of decisions changes none of them."""

from itertools import count

import pytest

from services.core.selection.policy import Decision
from services.dispatcher.metrics import EVERY, SampledPolicy


class Counting:
    name = "counting"
    goal = "accuracy"

    def __init__(self) -> None:
        self.asked: list[object] = []

    def select(self, ask: object, now: float, view: object) -> Decision:
        self.asked.append((ask, now, view))
        return Decision((str(len(self.asked)),))


def test_every_decision_is_the_policys_and_some_are_timed() -> None:
    inner, ticks, seconds = Counting(), count(), list[float]()
    policy = SampledPolicy(inner, lambda: next(ticks) * 0.001, seconds.append)
    assert (policy.name, policy.goal) == ("counting", "accuracy")
    decisions = [policy.select("ask", number / 1e6, "view") for number in range(1000)]
    assert [decision.assignments for decision in decisions] == [(str(number + 1),) for number in range(1000)]
    assert inner.asked[7] == ("ask", 7e-6, "view")
    assert len(seconds) == 1  # the others came within 50 ms
    policy.select("ask", EVERY, "view")
    assert seconds == pytest.approx([0.001, 0.001])
