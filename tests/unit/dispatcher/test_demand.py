"""Dispatchers tell what they were asked for, by needs and by the worker that took it."""

from itertools import count

import pytest

from bus.codec import decode
from bus.messages.scaling import DemandReport
from services.core.selection.eligibility import Ask
from services.core.selection.policy import Decision, SelectionPolicy
from services.dispatcher.demand import reason_of
from services.dispatcher.metrics import EVERY, SampledPolicy
from tests.support.simulated.fleet import Fleet, metrics, variant
from tests.unit.dispatcher.test_pipelines import ONE, Staged, nested, planned


def reports(fleet: Fleet, subject: str) -> list[DemandReport]:
    return [decode(DemandReport, body) for _, heard, body in fleet.stage.heard if heard == subject]


def test_served_and_refused_items_are_told_apart() -> None:
    fleet = Fleet(variant(load_ms=50.0))
    fleet.stage.listen("infaas.demand.*")
    fleet.stage.listen("infaas.worker.*.demand")
    fleet.ask(latency_ms=1000.0, seconds=1.0)  # nobody has it yet: waits for the load
    fleet.asks(5, latency_ms=1000.0, seconds=1.6)
    everybody, worker = "infaas.demand.d0", "infaas.worker.w0.demand"
    rows = [row for report in reports(fleet, everybody) for row in report.rows]
    assert (sum(row.refused for row in rows), sum(row.items for row in rows)) == (1, 5)
    assert {(row.app, row.worker, row.latency_ms) for row in rows} == {("app", "*", 1000.0)}
    own = [row for report in reports(fleet, worker) for row in report.rows]
    # Nobody had taken any when one was refused, so it is no worker's part: the leader hears of it.
    assert (sum(row.refused for row in own), sum(row.items for row in own)) == (0, 5)
    assert {row.worker for row in own} == {"w0"}
    assert reports(fleet, everybody)[-1].rows == reports(fleet, worker)[-1].rows == []  # and that it is over
    told = len(reports(fleet, worker))
    fleet.stage.run(3.0)
    assert len(reports(fleet, worker)) == told


def test_a_worker_hears_of_what_it_took_alone() -> None:
    fleet = Fleet(variant(load_ms=50.0), workers=3)
    fleet.stage.listen("infaas.worker.*.demand")
    fleet.ask(latency_ms=1000.0, seconds=1.0)
    busy = next(d for d in fleet.devices.values() if d.loads).name  # the one that was told to load it
    fleet.asks(4, latency_ms=1000.0, seconds=1.0)
    for name in fleet.devices:
        rows = [row for report in reports(fleet, f"infaas.worker.{name}.demand") for row in report.rows]
        assert sum(row.items for row in rows) == (4 if name == busy else 0)


# -- The reason that a load on demand is recorded with: what the query needed, and why this variant.


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (Ask("a", 1, 10.0), "no instance can take a query; ready soonest"),
        (Ask("a", 1, 10.0, latency_s=0.03), "no instance can do 30 ms; ready soonest"),
        (
            Ask("a", 1, 10.0, 0.1, 0.97, 0.002),
            "no instance can do 100 ms, accuracy 0.97, US$ 0.002 per 1,000 queries; ready soonest",
        ),
        (Ask("a", 1, 10.0, model="m", variant="m-v1", accuracy=0.9), "no instance can do m-v1, accuracy 0.9; ready soonest"),
    ],
)  # fmt: skip
def test_the_reason_says_what_was_asked(ask: Ask, told: str) -> None:
    assert reason_of(ask) == told


# -- What a dispatcher counts, and that timing a sample of decisions changes none of them.


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
    fleet.asks(7, "p", seconds=0.001)
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
    fleet.ask("p", seconds=0.1)
    found = metrics(fleet)
    assert found["infaas_dispatcher_queries", "joining"] == found["infaas_dispatcher_parts", "joining"] == 1
    assert found["infaas_dispatcher_parts", "executor"] == 1
