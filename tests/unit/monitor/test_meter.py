"""What a worker's time costs adds up to its bill, whatever comes and goes."""

from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bus.messages.events import CostEvent
from services.monitor.devices import Meter
from tests.unit.core.test_cost import Variant

RECORD = Variant().record()
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
    @rule(data=st.data(), busy=st.dictionaries(st.sampled_from(APPS), st.floats(0.0, 10.0)))
    def one_works(self, data: st.DataObject, busy: dict[str, float]) -> None:
        self.meter.used(data.draw(st.sampled_from(sorted(self.loaded))), busy)
        self.busy += sum(busy.values())

    @rule()
    def the_period_ends(self) -> None:
        rows = self.meter.close(self.now)
        assert fsum(row.cost for row in rows) == pytest.approx(0.25 * (self.now - self.opened), rel=1e-9, abs=1e-12)
        assert all(row.cost >= 0 and row.time == self.now for row in rows)
        idle = [row for row in rows if row.variant is None]
        assert len(idle) == (self.now > self.opened)
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


def test_a_reclaimable_instance_is_booked_as_idle() -> None:
    meter = Meter("w1", "cpu", 2.0, 0.0)
    meter.occupy("a", RECORD, 0.75, "faces", 0.0)
    meter.occupy(
        "b", RECORD, 0.75, "digits", 0.0
    )  # both are promised more than there is, so each pays two thirds of its share
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


def test_an_instance_costs_its_share_and_the_rest_is_idle() -> None:
    meter = Meter("w1", "cpu", 2.0, 0.0)
    meter.occupy("a", RECORD, 0.25, "faces", 4.0)
    mine, idle = meter.close(10.0)
    assert (mine.app, mine.variant, mine.seconds, mine.cost) == ("faces", RECORD.variant, 6.0, pytest.approx(3.0))
    assert (idle.app, idle.variant, idle.model, idle.seconds, idle.cost) == (
        None, None, None, 10.0, pytest.approx(17.0),
    )  # fmt: skip


def test_apps_share_an_instance_by_the_time_they_used_it() -> None:
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
