"""Money follows use: who asks pays, whoever's instance answers, and all rows together are the bill. Virtual time."""

import pytest

from bus.messages.catalog import AppRecord, PipelineRecord
from bus.messages.events import CostEvent
from tests.support.simulated.fleet import SIGNATURE
from tests.unit.dispatcher.test_pipelines import CASCADE, ONE, SLO_MS, Staged, planned, vertex

SECONDS = 30.0


def bill(fleet: Staged) -> tuple[dict[str | None, float], dict[str | None, float]]:
    """US$ and busy seconds by app."""
    cost: dict[str | None, float] = {}
    busy: dict[str | None, float] = {}
    for _, event in fleet.stage.records:
        if isinstance(event, CostEvent):
            cost[event.app] = cost.get(event.app, 0.0) + event.cost
            busy[event.app] = busy.get(event.app, 0.0) + event.busy_seconds
    return cost, busy


def asks(fleet: Staged, *apps: str) -> None:
    for _ in range(round(SECONDS)):
        for app in apps:
            fleet.ask(app)
        fleet.stage.run(1.0)
    fleet.stage.run(12.0)  # the last period ends


def test_a_pipeline_pays_for_the_visits_of_its_stages() -> None:
    fleet = Staged(CASCADE)
    fleet.devices["w0"].says = {"cheap": 1.0}
    asks(fleet, "p")
    _, busy = bill(fleet)
    assert {app for app, seconds in busy.items() if seconds} == {"p"}
    assert {(one.app, one.payer) for one in fleet.outcomes()} == {("p", None), ("cheap", "p"), ("dear", "p")}


def test_an_app_beside_it_pays_for_its_own_queries_and_the_sum_is_the_bill() -> None:
    fleet = Staged(CASCADE)
    fleet.devices["w0"].says = {"cheap": 0.0}  # the second stage is not asked
    asks(fleet, "p", "cheap", "cheap", "cheap")
    cost, busy = bill(fleet)
    assert busy["cheap"] / busy["p"] == pytest.approx(3.0, rel=0.01)
    price = fleet.stage.members["w0"].actor._devices["cpu"].price_per_hour  # type: ignore[attr-defined]
    periods = [event for _, event in fleet.stage.records if isinstance(event, CostEvent) and event.app is None]
    assert sum(cost.values()) == pytest.approx(sum(one.seconds for one in periods) * price / 3600.0)


def test_an_app_that_links_a_model_pays_for_queries_that_name_it_alone() -> None:
    fleet = Staged(ONE)
    for _ in range(round(SECONDS)):
        fleet.ask("_", model="a")
        fleet.stage.run(1.0)
    fleet.stage.run(12.0)
    assert {app for app, seconds in bill(fleet)[1].items() if seconds} == {"a"}
    assert {(one.app, one.payer, one.outcome) for one in fleet.outcomes()} == {("_", "a", "ok")}


def test_the_outer_pipeline_pays_for_those_of_one_within_it() -> None:
    fleet = Staged(CASCADE)
    outer = PipelineRecord(vertices=[vertex("inner")], output={"y": "inner.y"})
    fleet.add(AppRecord(app="inner", links={}, signature=SIGNATURE, pipeline=CASCADE, latency_ms=SLO_MS))
    fleet.change("p", pipeline=outer)
    asks(fleet, "p")
    assert {app for app, seconds in bill(fleet)[1].items() if seconds} == {"p"}
    assert {(one.app, one.payer) for one in fleet.outcomes()} == {("p", None), ("inner", "p"), ("cheap", "p")}


def test_what_is_refused_names_who_would_have_paid() -> None:
    fleet = Staged(ONE, load=False)
    fleet.devices["w0"].broken = "no memory"
    fleet.ask("p")
    fleet.ask("_", model="a")
    fleet.stage.run(40.0)
    assert {(one.app, one.payer, one.outcome) for one in fleet.outcomes()} == {
        ("p", None, "refused"), ("a", "p", "refused"), ("_", "a", "refused"),
    }  # fmt: skip


def test_a_planned_replica_costs_who_asks_it_and_idle_the_pipeline() -> None:
    fleet = Staged(ONE)
    fleet.change("p", plan=planned())
    asks(fleet, "a")
    assert {app for app, seconds in bill(fleet)[1].items() if seconds} == {"a"}
    before = bill(fleet)[0]
    fleet.stage.run(40.0)
    after = bill(fleet)[0]
    assert after.get("p", 0.0) > before.get("p", 0.0)
    assert after["a"] == before["a"]
