"""What an instance can carry within a latency."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from services.core.cost import LatencyTable
from services.core.planning.capacity import throughput
from tests.support.simulated.fleet import variant

TABLE = LatencyTable(variant(base_ms=10.0, per_item_ms=10.0))  # 20 ms alone, 90 ms for 8


def test_without_a_limit_the_best_batch_counts() -> None:
    assert 88 < throughput(TABLE, inf) < 89


def test_a_batch_that_waits_for_another_must_fit_twice() -> None:
    assert throughput(TABLE, 0.180) == throughput(TABLE, inf)
    assert throughput(TABLE, 0.179) < throughput(TABLE, inf)
    assert 49 < throughput(TABLE, 0.040) < 50  # one at a time


@given(st.floats(0.001, 10), st.floats(0.001, 10))
def test_more_time_never_carries_less(one: float, other: float) -> None:
    assert throughput(TABLE, min(one, other)) <= throughput(TABLE, max(one, other)) + 1e-9
