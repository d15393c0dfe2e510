"""Dispatchers tell what they were asked for, by needs and by the worker that took it."""

import pytest

from bus.codec import decode
from bus.messages.scaling import DemandReport
from services.core.selection.eligibility import Ask
from services.dispatcher.demand import reason_of
from tests.support.simulated.fleet import Fleet, variant


def reports(fleet: Fleet, subject: str) -> list[DemandReport]:
    return [decode(DemandReport, body) for _, heard, body in fleet.stage.heard if heard == subject]


def test_served_and_refused_items_are_told_apart() -> None:
    fleet = Fleet(variant(load_ms=50.0))
    fleet.stage.listen("infaas.demand.*")
    fleet.stage.listen("infaas.worker.*.demand")
    fleet.ask(latency_ms=1000.0)  # nobody has it yet: waits for the load
    fleet.stage.run(1.0)
    for _ in range(5):
        fleet.ask(latency_ms=1000.0)
    fleet.stage.run(1.6)
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
    fleet.ask(latency_ms=1000.0)
    fleet.stage.run(1.0)
    busy = next(d for d in fleet.devices.values() if d.loads).name  # the one that was told to load it
    for _ in range(4):
        fleet.ask(latency_ms=1000.0)
    fleet.stage.run(1.0)
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
            "no instance can do 100 ms, accuracy 0.97, US$ 2 per million answers; ready soonest",
        ),
        (Ask("a", 1, 10.0, model="m", variant="m-v1", accuracy=0.9), "no instance can do m-v1, accuracy 0.9; ready soonest"),
    ],
)  # fmt: skip
def test_the_reason_says_what_was_asked(ask: Ask, told: str) -> None:
    assert reason_of(ask) == told
