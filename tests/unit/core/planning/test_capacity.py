"""Blocking by Erlang's formulas, instances for a load, and both against queues that are simulated."""

import heapq
import random
from itertools import pairwise
from math import ceil, fsum, inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.core.catalog import variant_key
from services.core.cost import HANDLING_MS, LatencyTable
from services.core.planning.capacity import (
    GRID,
    LatencyTables,
    blocking,
    carried,
    instances_for,
    layers,
    service_rate,
    throughput,
)
from services.core.planning.problem import CandidateVariant, RequirementClass
from tests.support.data.planning_problems import TABLE_2
from tests.support.simulated.fleet import variant

# -- blocking


@pytest.mark.parametrize(
    ("servers", "offered", "share"),
    [(1, 1.0, 0.5), (2, 1.0, 0.2), (5, 3.0, 0.110054), (10, 5.0, 0.018385), (100, 100.0, 0.075700)],
)
def test_without_waiting_places_it_is_erlangs_loss_formula(servers: int, offered: float, share: float) -> None:
    assert blocking(servers, 0, offered) == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize("waiting", [0, 1, 9, 99])
def test_at_full_load_one_server_loses_one_in_as_many_as_its_queue_has_states(waiting: int) -> None:
    assert blocking(1, waiting, 1.0) == pytest.approx(1.0 / (waiting + 2))


def birth_and_death(servers: int, waiting: int, offered: float) -> float:
    """The last state's part in the stationary distribution of M/M/n/K."""
    weights = [1.0]
    for state in range(1, servers + waiting + 1):
        weights.append(weights[-1] * offered / min(state, servers))
    return weights[-1] / fsum(weights)


@given(st.integers(1, 40), st.integers(0, 60), st.floats(0.01, 80.0))
def test_it_is_the_last_state_of_the_queues_markov_chain(servers: int, waiting: int, offered: float) -> None:
    assert blocking(servers, waiting, offered) == pytest.approx(
        birth_and_death(servers, waiting, offered), rel=1e-6, abs=1e-12
    )


def test_nothing_offered_is_never_blocked_and_needs_nothing() -> None:
    assert blocking(3, 2, 0.0) == 0.0
    assert instances_for(0.0, 10.0, 0.1, 0.01) == instances_for(-1.0, 10.0, 0.1, 0.01) == 0.0


# -- the rate of one instance

BATCHED = variant(base_ms=10.0, per_item_ms=10.0)  # 8 in 90 ms, 1 in 20 ms


@pytest.mark.parametrize(
    ("limit_s", "items", "seconds"),
    [(inf, 8, 0.090), (0.200, 8, 0.090), (0.110, 4, 0.050), (0.062, 2, 0.030), (0.041, 1, 0.020), (0.001, 1, 0.020)],
)
def test_a_batch_must_fit_into_the_limit_twice(limit_s: float, items: int, seconds: float) -> None:
    expected = items / (seconds + HANDLING_MS / 1000.0)
    assert service_rate(LatencyTable(BATCHED), limit_s) == pytest.approx(expected, rel=0.03)


# -- instances for a load

LOADS = st.floats(0.1, 5000.0)
RATES = st.floats(1.0, 500.0)
LIMITS = st.sampled_from([0.01, 0.05, 0.3, 2.0, 30.0, inf])
MISSES = st.floats(1e-5, 0.4)
PEAKS = st.floats(1.0, 60.0)
MORE = st.floats(1.0, 10.0)


@given(LOADS, RATES, LIMITS, MISSES, PEAKS, MORE)
def test_larger_loads_need_no_fewer_and_larger_shares_of_misses_no_more(
    load: float, rate: float, limit_s: float, miss: float, peak: float, more: float
) -> None:
    assert (
        instances_for(load * more, rate, limit_s, miss, peak) >= instances_for(load, rate, limit_s, miss, peak) - 1e-9
    )
    least = instances_for(load, rate, limit_s, min(0.5, miss * more), peak)
    assert least <= instances_for(load, rate, limit_s, miss, peak) * (1 + 1e-6)


@given(LOADS, RATES, LIMITS, MISSES, PEAKS, MORE)
@example(load=911.0, rate=10.0, limit_s=30.0, miss=0.1, peak=1.0, more=10.0)  # beyond the table, within it
@example(load=4000.0, rate=10.0, limit_s=30.0, miss=0.4, peak=1.0, more=2.0)
def test_burstier_arrivals_never_need_fewer(
    load: float, rate: float, limit_s: float, miss: float, peak: float, more: float
) -> None:
    least = instances_for(load, rate, limit_s, miss, peak) * (1 - 1e-9)
    assert instances_for(load, rate, limit_s, miss, peak * more) >= least


@given(LOADS, RATES, LIMITS, MISSES, PEAKS)
def test_a_twentieth_of_the_queries_at_most_may_miss_only_if_the_load_is_carried(
    load: float, rate: float, limit_s: float, miss: float, peak: float
) -> None:
    assert instances_for(load, rate, limit_s, min(miss, 0.05), peak) >= 0.9 * load / rate


def test_instances_to_spare_grow_slowly_and_carry_what_does_not_overflow() -> None:
    spare = [instances_for(load, 1.0, 2.0, 0.001) / load for load in (1.0, 10.0, 50.0, 100.0, 1000.0, 10_000.0)]
    assert spare == sorted(spare, reverse=True)
    assert spare[0] > 1.8
    assert spare[-1] < 1.05
    border = [instances_for(load, 1.0, 2.0, 0.001) for load in (GRID[-1] * 0.85 + 0.01 * n for n in range(1000))]
    assert max(b - a for a, b in pairwise(border)) < 0.02  # no jump where the table ends
    half = instances_for(100.0, 10.0, 0.3, 0.5)
    assert carried(half, 100.0, 10.0, 0.3, 1.0) == pytest.approx(50.0)
    assert carried(10 * half, 100.0, 10.0, 0.3, 1.0) == 100.0


def missed(servers: int, rate: float, limit_s: float, gaps: list[float]) -> float:
    """The share of arrivals that an M/D/n queue turns away, because they would end too late."""
    free = [0.0] * servers
    at, late = 0.0, 0
    for gap in gaps:
        at += gap
        end = max(at, free[0]) + 1.0 / rate
        if end - at > limit_s + 1e-9:
            late += 1
        else:
            heapq.heapreplace(free, end)
    return late / len(gaps)


CASES = [  # load, rate, limit_s, miss
    (3.0, 10.0, 0.3, 0.005),
    (20.0, 10.0, 0.2, 0.01),
    (45.0, 10.0, 0.5, 0.005),
    (100.0, 25.0, 0.1, 0.01),
    (150.0, 10.0, 0.15, 0.02),
    (300.0, 60.0, 0.05, 0.005),
]


def test_of_simulated_arrivals_no_more_miss_than_was_asked_and_without_the_spare_ones_more_do() -> None:
    luck = random.Random(1)
    asked, with_them, without = [], [], []
    for load, rate, limit_s, miss in CASES:
        gaps = [luck.expovariate(load) for _ in range(20_000)]
        count = ceil(instances_for(load, rate, limit_s, miss) - 1e-9)
        asked.append(miss)
        with_them.append(missed(count, rate, limit_s, gaps))
        without.append(missed(max(1, int(load / rate)), rate, limit_s, gaps))
    assert fsum(with_them) <= fsum(asked)
    assert all(found <= 2 * miss for found, miss in zip(with_them, asked, strict=True))
    assert fsum(without) > 5 * fsum(asked)


def test_of_simulated_bursts_no_more_miss_than_was_asked() -> None:
    """Gamma arrivals whose gaps vary by cv have a peakedness of cv squared; counted as Poisson's they would miss far more."""
    luck = random.Random(2)
    found, unaware, asked = [], [], []
    for cv in (1.5, 2.0, 3.0):
        for load, rate, limit_s, miss in CASES[1:5]:
            shape = 1.0 / cv**2
            gaps = [luck.gammavariate(shape, 1.0 / (shape * load)) for _ in range(20_000)]
            for peak, ends in ((cv**2, found), (1.0, unaware)):
                ends.append(missed(ceil(instances_for(load, rate, limit_s, miss, peak) - 1e-9), rate, limit_s, gaps))
            asked.append(miss)
    assert fsum(found) <= fsum(asked)
    assert fsum(unaware) > 3 * fsum(asked)


# -- layers

LOADS = st.tuples(st.floats(0.1, 500.0), st.floats(0.1, 500.0)).map(lambda two: (min(two), max(two)))


@given(LOADS, st.floats(1.0, 200.0), st.floats(0.02, 2.0), st.floats(1.0, 30.0), st.floats(0.5, 3.0))
def test_layers_end_one_after_the_other_and_a_faster_variant_takes_no_more_instances(
    loads: tuple[float, float], rate: float, limit_s: float, peakedness: float, margin: float
) -> None:
    ends = layers(loads, 1.2 * loads[1], rate, limit_s, 0.005, peakedness, margin)
    assert list(ends) == sorted(ends)
    faster = layers(loads, 1.2 * loads[1], 2 * rate, limit_s, 0.005, peakedness, margin)
    assert all(quick <= slow * 1.05 + 1e-6 for quick, slow in zip(faster[:-1], ends[:-1], strict=True))


@given(st.floats(0.1, 500.0), st.floats(1.0, 200.0), st.floats(0.02, 2.0), st.floats(1.0, 30.0), st.floats(0.0, 100.0))
def test_more_instances_carry_no_less_and_never_more_than_the_load(
    load: float, rate: float, limit_s: float, peakedness: float, count: float
) -> None:
    here = carried(count, load, rate, limit_s, peakedness)
    assert 0.0 <= here <= load
    assert here <= carried(count + 1.0, load, rate, limit_s, peakedness) + 1e-9


# -- What an instance can carry within a latency.
TABLE = LatencyTable(variant(base_ms=10.0, per_item_ms=10.0))  # 20 ms alone, 90 ms for 8


def test_the_best_batch_counts_and_one_that_waits_for_another_must_fit_twice() -> None:
    assert 88 < throughput(TABLE, inf) < 89
    assert throughput(TABLE, 0.180) == throughput(TABLE, inf)
    assert throughput(TABLE, 0.179) < throughput(TABLE, inf)
    assert 49 < throughput(TABLE, 0.040) < 50  # one at a time


@given(st.floats(0.001, 10), st.floats(0.001, 10))
def test_more_time_never_carries_less(one: float, other: float) -> None:
    assert throughput(TABLE, min(one, other)) <= throughput(TABLE, max(one, other)) + 1e-9


# -- What a demand accepts.
DEMAND = RequirementClass(app="classify", load=10, latency_ms=300)


@pytest.mark.parametrize(
    ("demand", "accepted"),
    [
        ({}, True),
        ({"app": "other"}, False),
        ({"latency_ms": 200.0}, True),
        ({"latency_ms": 199.0}, False),
        ({"accuracy": 0.8}, True),
        ({"accuracy": 0.81}, False),
        ({"cost": 200.0}, True),
        ({"cost": 199.0}, False),
        ({"model": "resnet50"}, True),
        ({"model": "vgg"}, False),
        ({"variant": "A"}, True),
        ({"variant": "B"}, False),
    ],
)
def test_what_a_demand_accepts(demand: dict[str, object], accepted: bool) -> None:
    one: CandidateVariant = replace(TABLE_2[0], accuracy=0.8)
    assert replace(DEMAND, **demand).accepts(one) is accepted


def test_an_unmeasured_accuracy_is_held_against_nobody() -> None:
    """As in selection: the dispatcher would send such queries there."""
    assert replace(DEMAND, accuracy=1.0).accepts(TABLE_2[0])


def test_a_table_goes_with_its_variants_entry_in_the_catalogue() -> None:
    tables, record = LatencyTables(), variant()
    first = tables.table(record)
    assert tables.table(record) is first
    tables.changed(variant_key("another"))
    assert tables.table(record) is first
    tables.changed(variant_key(record.variant))
    assert tables.table(record) is not first
