"""What a dispatcher counts, and that timing a sample of decisions changes none of them."""

from itertools import count

import pytest

from services.core.selection.policy import Decision, SelectionPolicy
from services.dispatcher.metrics import EVERY, SampledPolicy
from tests.support.simulated.fleet import metrics
from tests.unit.dispatcher.test_pipelines import ONE, Staged, nested, planned


class Counting(SelectionPolicy):
    name = "counting"
    goal = "accuracy"

    def __init__(self) -> None:
        self.asked: list[object] = []

    def select(self, ask: object, now: float, view: object) -> Decision:
        self.asked.append((ask, now, view))
        return Decision(str(len(self.asked)))


def test_every_decision_is_the_policys_and_some_are_timed() -> None:
    inner, ticks, seconds = Counting(), count(), list[float]()
    policy = SampledPolicy(inner, lambda: next(ticks) * 0.001, seconds.append)
    assert (policy.name, policy.goal) == ("counting", "accuracy")
    decisions = [policy.select("ask", number / 1e6, "view") for number in range(1000)]
    assert [decision.instance for decision in decisions] == [str(number + 1) for number in range(1000)]
    assert inner.asked[7] == ("ask", 7e-6, "view")
    assert len(seconds) == 1  # the others came within 50 ms
    policy.select("ask", EVERY, "view")
    assert seconds == pytest.approx([0.001, 0.001])


def test_pipelines_are_counted_by_vertex_and_their_queues_by_variant() -> None:
    fleet = Staged(ONE)
    fleet.change("p", plan=planned(batch=4), latency_ms=2000.0)
    variant = planned().vertices["a"].variant
    assert ("infaas_pipeline_queries", "p") not in metrics(fleet), "nobody has asked it"
    for _ in range(7):
        fleet.ask("p")
    fleet.stage.run(0.001)
    busy = metrics(fleet)
    assert busy["infaas_pipeline_queries", "p"] == busy["infaas_dispatcher_queries", "joining"] == 7
    assert busy["infaas_dispatcher_queries", "waiting"] == busy["infaas_dispatcher_queries", "executor"] == 0
    assert busy["infaas_pipeline_queue_items", variant] == busy["infaas_dispatcher_parts", "waiting"] > 0
    assert busy["infaas_pipeline_visits_total", "p", "a"] == 7
    fleet.stage.run(2.0)
    ended = metrics(fleet)
    assert (ended["infaas_pipeline_queries", "p"], ended["infaas_pipeline_queue_items", variant]) == (0, 0)
    assert ended["infaas_pipeline_visits_total", "p", "a"] == 7


def test_a_pipeline_within_another_one_is_a_part_and_no_query() -> None:
    fleet = nested()
    fleet.change("p", latency_ms=None)
    fleet.devices["w0"].late = {"deep": 400.0}
    fleet.one(fleet.ask("p"))
    fleet.ask("p")
    fleet.stage.run(0.1)
    found = metrics(fleet)
    assert found["infaas_dispatcher_queries", "joining"] == found["infaas_dispatcher_parts", "joining"] == 1
    assert found["infaas_dispatcher_parts", "executor"] == 1
