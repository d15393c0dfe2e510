"""Recorded cost as a time line: nothing is lost, nothing counted twice, and cores come out of what was paid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.simulation.replay.recorded import RecordedCost

periods = st.lists(st.tuples(st.floats(0.1, 30), st.floats(0, 5), st.floats(0, 1)), min_size=1, max_size=30)


@given(periods, st.floats(0.5, 20))
def test_all_that_was_paid_within_is_in_the_bins(rows, every):
    """A worker's periods one after the other; each has an instance that was there for a part of it."""
    end = sum(seconds for seconds, _, _ in rows)
    bill = RecordedCost(0.0, end, min(every, end))
    at = 0.0
    for seconds, cost, part in rows:
        at += seconds
        bill.add(at, seconds, "w0/cpu", None, None, cost, simulated=False)
        bill.add(at, seconds * part, "w0/cpu", "digits", "v", cost / 2, simulated=True)
    bins = bill.bins({})
    assert sum(one.cost.get("", 0.0) for one in bins) == pytest.approx(sum(cost for _, cost, _ in rows), abs=1e-9)
    paid = sum(cost for _, cost, _ in rows) / 2
    assert sum(one.cost.get("digits", 0.0) for one in bins) == pytest.approx(paid, abs=1e-9)
    assert bill.simulated().get("digits", 0.0) == pytest.approx(paid, abs=1e-9)
    held = sum(one.instances.get("v", 0.0) * min(bill._every, end - i * bill._every) for i, one in enumerate(bins))
    assert held == pytest.approx(sum(seconds * part for seconds, _, part in rows), abs=1e-6)
    assert all(one.workers == ["w0"] for one in bins[:-1])


def test_what_lies_before_and_after_is_cut_off():
    bill = RecordedCost(100.0, 110.0, 5.0)
    for at in (90.0, 104.0, 114.0, 140.0):
        bill.add(at, 10.0, "w0/cpu", None, None, 10.0, simulated=False)
    assert [one.cost for one in bill.bins({})] == [{"": 5.0}, {"": 5.0}]
    assert bill.rows == 2


def test_cores_from_the_price_of_one():
    bill = RecordedCost(0.0, 10.0, 10.0)
    bill.add(10.0, 10.0, "w0/cpu", None, None, 8 * 10 * 0.048 / 3600, simulated=False)
    for _ in range(2):  # two chips of four cores
        bill.add(10.0, 10.0, "w0/inferentia", None, None, 4 * 10 * 0.09 / 3600, simulated=True)
    assert bill.cores("w0/cpu", 0.048) == 8
    assert bill.cores("w0/inferentia", 0.09) == 4
    assert bill.cores("w0/cpu", 0.0) is None
    assert bill.cores("w1/cpu", 0.048) is None
    assert bill.is_simulated("w0/inferentia")
    assert not bill.is_simulated("w0/cpu")
