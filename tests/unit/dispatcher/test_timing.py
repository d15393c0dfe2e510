"""Timing a sample of decisions changes none of them."""

import asyncio

from services.core.ask import Decision
from services.dispatcher.timing import SampledPolicy
from tests.support.clients.responders import until
from tests.support.servers.nats import run


class Counting:
    name = "counting"
    goal = "accuracy"

    def __init__(self) -> None:
        self.asked: list[object] = []

    def select(self, ask: object, now: float, view: object) -> Decision:
        self.asked.append((ask, now, view))
        return Decision((str(len(self.asked)),))


def test_every_decision_is_the_policys_and_some_are_timed() -> None:
    async def main() -> None:
        inner = Counting()
        policy = SampledPolicy(inner, asyncio.get_running_loop())
        assert (policy.name, policy.goal) == ("counting", "accuracy")
        decisions = [policy.select("ask", number, "view") for number in range(1000)]
        assert [decision.assignments for decision in decisions] == [(str(number + 1),) for number in range(1000)]
        assert inner.asked[7] == ("ask", 7, "view")
        assert policy.seconds.count == 1  # the others came at once
        assert policy.select == inner.select  # nothing is between
        await until(lambda: policy.select != inner.select)
        policy.select("ask", 0.0, "view")
        assert policy.seconds.count == 2

    run(main())
