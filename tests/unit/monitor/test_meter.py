"""What a worker's time costs adds up to its bill, whatever comes and goes."""

from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bus.messages.catalog import AppRecord, PipelineRecord
from bus.messages.events import CostEvent
from bus.messages.jobs import SYSTEM
from services.monitor.devices import Meter
from tests.support.simulated.fleet import SIGNATURE
from tests.unit.core.test_cost import varied
from tests.unit.dispatcher.test_pipelines import CASCADE, ONE, SLO_MS, Staged, planned, vertex

RECORD = varied()
APPS = ("faces", "digits", "cars")


class Bill(RuleBasedStateMachine):
    """Instances come, go and work at any time; periods close at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.meter = Meter("w1", "cpu", 0.25, self.now)
        self.opened = self.now
        self.loaded: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.rows: list[CostEvent] = []
        self.busy = 0.0
        self.count = 0

    @rule(seconds=st.floats(0.0, 100.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(share=st.floats(0.0, 1.0), app=st.sampled_from([None, *APPS]))
    def one_comes(self, share: float, app: str | None) -> None:
        self.count += 1
        name = f"i{self.count}"
        self.loaded[name] = self.now
        self.meter.occupy(name, RECORD, share, app, self.now)

    @precondition(lambda self: self.loaded)
    @rule(data=st.data())
    def one_goes(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        self.seconds[name] = self.now - self.loaded.pop(name)
        self.meter.vacate(name, self.now)

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), again=st.booleans(), app=st.sampled_from([None, *APPS]))
    def one_is_reclaimable_or_needed_again(self, data: st.DataObject, again: bool, app: str | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        if again:
            self.meter.claim(name, app, self.now)
        else:
            self.meter.release(name, self.now)

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), busy=st.dictionaries(st.sampled_from((*APPS, SYSTEM)), st.floats(0.0, 10.0)))
    def one_works(self, data: st.DataObject, busy: dict[str, float]) -> None:
        self.meter.used(data.draw(st.sampled_from(sorted(self.loaded))), busy)
        self.busy += sum(busy.values())

    @rule()
    def the_period_ends(self) -> None:
        rows = self.meter.close(self.now)
        assert fsum(row.cost for row in rows) == pytest.approx(0.25 * (self.now - self.opened), rel=1e-9, abs=1e-12)
        assert all(row.cost >= 0 and row.time == self.now for row in rows)
        assert len([row for row in rows if row.variant is None]) == (self.now > self.opened)
        self.opened = self.now
        self.rows += rows

    @invariant()
    def nobody_works_more_than_was_reported(self) -> None:
        assert fsum(row.busy_seconds for row in self.rows) <= self.busy * (1 + 1e-9) + 1e-9

    def teardown(self) -> None:
        self.the_period_ends()
        loaded = sum(self.seconds.values()) + sum(self.now - since for since in self.loaded.values())
        assert fsum(r.seconds for r in self.rows if r.variant) == pytest.approx(loaded, rel=1e-9, abs=1e-6)
        assert fsum(row.busy_seconds for row in self.rows) == pytest.approx(self.busy, rel=1e-9, abs=1e-9)


TestBill = Bill.TestCase


def test_the_system_pays_for_its_time_and_the_owner_for_the_rest() -> None:
    meter = Meter("w1", "cpu", 2.0, 0.0)
    meter.occupy("a", RECORD, 0.5, "faces", 0.0)
    meter.used("a", {SYSTEM: 1.0})
    rows = meter.close(10.0)
    assert [(row.app, row.seconds, row.busy_seconds) for row in rows[:2]] == [(SYSTEM, 1.0, 1.0), ("faces", 9.0, 0.0)]
    assert [row.cost for row in rows] == pytest.approx([1.0, 9.0, 10.0])


def test_a_reclaimable_instance_is_booked_as_idle() -> None:
    meter = Meter("w1", "cpu", 2.0, 0.0)
    meter.occupy("a", RECORD, 0.75, "faces", 0.0)
    # both are promised more than there is, so each pays two thirds of its share
    meter.occupy("b", RECORD, 0.75, "digits", 0.0)
    meter.release("a", 2.0)
    meter.used("a", {"cars": 1.5})
    meter.claim("a", "digits", 6.0)
    meter.vacate("b", 6.0)
    b, a, idle = meter.close(10.0)
    assert (a.app, a.seconds, a.busy_seconds) == ("cars", 10.0, 1.5)
    assert a.cost == pytest.approx(2.0 * (2.0 * 0.5 + 4.0 * 0.75))
    assert b.cost == pytest.approx(2.0 * (2.0 * 0.5 + 4.0 * 0.75))
    assert idle.cost == pytest.approx(2.0 * 4.0 * 0.25 * 2)
    [again, _] = meter.close(11.0)
    assert (again.app, again.cost) == ("digits", pytest.approx(1.5)), "who needs it again pays"
    meter.release("a", 11.0)
    [free, idle] = meter.close(12.0)
    assert (free.seconds, free.cost, idle.cost) == (1.0, 0.0, pytest.approx(2.0))


def test_instances_cost_their_share_by_use_and_the_rest_is_idle() -> None:
    meter = Meter("w1", "cpu", 2.0, 0.0)
    meter.occupy("a", RECORD, 0.25, "faces", 4.0)
    mine, idle = meter.close(10.0)
    assert (mine.app, mine.variant, mine.seconds, mine.cost) == ("faces", RECORD.variant, 6.0, pytest.approx(3.0))
    assert (idle.app, idle.variant, idle.model, idle.seconds, idle.cost) == (
        None, None, None, 10.0, pytest.approx(17.0),
    )  # fmt: skip
    meter = Meter("w1", "cpu", 1.0, 0.0)
    meter.occupy("a", RECORD, 1.0, "faces", 0.0)
    meter.used("a", {"faces": 1.0, "digits": 3.0})
    costs = {row.app: (row.seconds, row.busy_seconds, row.cost) for row in meter.close(8.0)}
    assert costs == {
        "faces": (2.0, 1.0, pytest.approx(2.0)),
        "digits": (6.0, 3.0, pytest.approx(6.0)),
        None: (8.0, 0.0, pytest.approx(0.0)),
    }


def test_an_instance_nobody_used_is_charged_to_who_used_it_last() -> None:
    meter = Meter("w1", "cpu", 1.0, 0.0)
    meter.occupy("a", RECORD, 0.5, "faces", 0.0)
    meter.used("a", {"digits": 1.0})
    meter.close(10.0)
    assert [(row.app, row.cost) for row in meter.close(20.0)] == [
        ("digits", pytest.approx(5.0)),
        (None, pytest.approx(5.0)),
    ]


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=20))
def test_shares_beyond_the_device_shrink_in_proportion(shares: list[float]) -> None:
    meter = Meter("w1", "cpu", 1.0, 0.0)
    for i, share in enumerate(shares):
        meter.occupy(f"i{i}", RECORD, share, f"app{i}", 0.0)
    costs = {row.app: row.cost for row in meter.close(1.0)}
    crowd = max(1.0, fsum(shares))
    assert [costs[f"app{i}"] for i in range(len(shares))] == pytest.approx([share / crowd for share in shares])


def test_a_remote_engine_is_paid_by_the_instance() -> None:
    meter = Meter("w1", "remote", 0.25, 100.0, by_instance=True)
    meter.occupy("i1", RECORD, 1.0, "faces", 100.0)
    meter.occupy("i2", RECORD, 1.0, "digits", 104.0)
    rows = meter.close(110.0)
    assert {row.app: row.cost for row in rows} == {"faces": 2.5, "digits": 1.5, None: 0.0}
    meter.vacate("i1", 110.0)
    meter.vacate("i2", 110.0)
    assert fsum(row.cost for row in meter.close(120.0)) == 0.0


# -- Money follows use: who asks pays, whoever's instance answers, and all rows together are the bill. Virtual time.
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


def test_pipelines_pay_for_visits_also_of_those_within_them() -> None:
    fleet = Staged(CASCADE, says={"cheap": 1.0})
    asks(fleet, "p")
    _, busy = bill(fleet)
    assert {app for app, seconds in busy.items() if seconds} == {"p"}
    assert {(one.app, one.payer) for one in fleet.outcomes()} == {("p", None), ("cheap", "p"), ("dear", "p")}
    fleet = Staged(CASCADE)
    outer = PipelineRecord(vertices=[vertex("inner")], output={"y": "inner.y"})
    fleet.add(AppRecord(app="inner", links={}, signature=SIGNATURE, pipeline=CASCADE, latency_ms=SLO_MS))
    fleet.change("p", pipeline=outer)
    asks(fleet, "p")
    assert {app for app, seconds in bill(fleet)[1].items() if seconds} == {"p"}
    assert {(one.app, one.payer) for one in fleet.outcomes()} == {("p", None), ("inner", "p"), ("cheap", "p")}


def test_an_app_beside_it_pays_for_its_own_queries_and_the_sum_is_the_bill() -> None:
    fleet = Staged(CASCADE, says={"cheap": 0.0})  # the second stage is not asked
    asks(fleet, "p", "cheap", "cheap", "cheap")
    cost, busy = bill(fleet)
    assert busy["cheap"] / busy["p"] == pytest.approx(3.0, rel=0.01)
    price = fleet.stage.members["w0"].actor._devices["cpu"].price_per_hour  # type: ignore[attr-defined]
    periods = [event for _, event in fleet.stage.records if isinstance(event, CostEvent) and event.app is None]
    assert sum(cost.values()) == pytest.approx(sum(one.seconds for one in periods) * price / 3600.0)


def test_an_app_that_links_a_model_pays_for_queries_that_name_it_alone() -> None:
    fleet = Staged(ONE)
    for _ in range(round(SECONDS)):
        fleet.ask("_", model="a", seconds=1.0)
    fleet.stage.run(12.0)
    assert {app for app, seconds in bill(fleet)[1].items() if seconds} == {"a"}
    assert {(one.app, one.payer, one.outcome) for one in fleet.outcomes()} == {("_", "a", "ok")}


def test_what_is_refused_names_who_would_have_paid() -> None:
    fleet = Staged(ONE, load=False)
    fleet.devices["w0"].broken = "no memory"
    fleet.ask("p")
    fleet.ask("_", model="a", seconds=40.0)
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
