"""QueryClasses of query: exact while they are few, stricter than asked while they are many, and never a query lost."""

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.public import Requirements
from services.simulation.replay.classes import HELD, MOST, QueryClasses
from services.simulation.replay.recorded import RecordedCost

asked = st.tuples(
    st.one_of(st.none(), st.floats(0.5, 1e5)),
    st.one_of(st.none(), st.floats(0, 1)),
    st.one_of(st.none(), st.floats(1e-6, 10)),
    st.integers(1, 64),
)


def test_few_are_kept_as_they_are():
    kinds = QueryClasses()
    for i in range(90):
        kinds.add(float(i), (50.0, 200.0, None)[i % 3], 0.9 if i % 3 == 1 else None, None, 1 + i % 2)
    found = kinds.found()
    assert not kinds.folded
    assert {(one.needs, one.items) for one in found} == {
        (Requirements(latency_ms=latency, accuracy=accuracy), items)
        for latency, accuracy in ((50.0, None), (200.0, 0.9), (None, None))
        for items in (1, 2)
    }
    assert next(one for one in found if one.needs.latency_ms == 200.0 and one.items == 2).times.tolist() == [
        float(i) for i in range(1, 90, 6)
    ]


@given(st.lists(asked, min_size=1, max_size=200))
def test_every_query_is_there_once_and_asks_no_less(queries):
    kinds = QueryClasses()
    for i, (latency, accuracy, cost, items) in enumerate(queries):
        kinds.add(float(i), latency, accuracy, cost, items)
    found = kinds.found()
    assert len(found) <= MOST
    assert sorted(np.concatenate([one.times for one in found]).tolist()) == [float(i) for i in range(len(queries))]
    for one in found:
        assert (np.diff(one.times) > 0).all()
        for at in one.times:
            latency, accuracy, cost, _ = queries[int(at)]
            assert (one.needs.latency_ms or inf) <= (latency or inf)
            assert (one.needs.accuracy or 0.0) >= (accuracy or 0.0)
            assert (inf if one.needs.cost is None else one.needs.cost) <= (inf if cost is None else cost)


def test_ever_new_needs_take_no_more_room():
    kinds = QueryClasses()
    latencies = np.random.default_rng(1).uniform(20, 80, 20_000)
    for i, latency in enumerate(latencies):
        kinds.add(float(i), float(latency), None, None, 1)
    assert len(kinds._cells) <= HELD
    found = kinds.found()
    assert kinds.folded == "needs"
    assert 8 <= len(found) <= MOST
    assert sum(len(one.times) for one in found) == len(latencies)
    for one in found:  # nearly what was asked
        assert (latencies[one.times.astype(int)] < one.needs.latency_ms * 1.1).all()


def test_items_of_a_kind_are_their_mean():
    kinds = QueryClasses()
    for i in range(1000):
        kinds.add(float(i), 50.0 + i % 2, None, None, 1 + i % 200)
    found = kinds.found()
    assert kinds.folded == "sizes"
    assert {one.needs.latency_ms for one in found} == {50.0, 51.0}
    assert sum(one.items * len(one.times) for one in found) == pytest.approx(100_500, rel=0.03)


# -- Recorded cost as a time line: nothing is lost, nothing counted twice, and cores come out of what was paid.
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
