"""Quantiles from counts: within the stated error of the true ones, whatever the values."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.simulation.statistics import RELATIVE_ERROR, Quantiles


def counted(values: list[float], settle_every: int = 10**9) -> Quantiles:
    found = Quantiles()
    for number, value in enumerate(values, 1):
        found.fresh.append(value)
        if number % settle_every == 0:
            found.settle()
    return found


@given(
    values=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=300),
    share=st.floats(0.001, 1.0),
)
def test_a_quantile_is_near_the_value_of_its_rank(values: list[float], share: float) -> None:
    true = sorted(values)[max(1, ceil(share * len(values))) - 1]
    (found,) = counted(values).quantiles(share)
    assert found == pytest.approx(true, rel=RELATIVE_ERROR)
    assert RELATIVE_ERROR <= 0.01


@given(values=st.lists(st.floats(0, 1e4), max_size=60), cut=st.integers(0, 60), often=st.integers(1, 7))
def test_parts_together_are_the_whole(values: list[float], cut: int, often: int) -> None:
    parts = counted(values[:cut], often)
    parts.merge(counted(values[cut:]))
    assert parts.count == len(values)
    assert parts.bins == counted(values, 1).bins
    assert parts.quantiles(0.5, 0.99) == counted(values, 13).quantiles(0.5, 0.99)


def test_nothing_and_zero() -> None:
    assert Quantiles().quantiles(0.5, 0.99) == [None, None]
    assert counted([0.0, 0.0, 0.5]).quantiles(0.5, 1.0) == [0.0, pytest.approx(0.5, rel=RELATIVE_ERROR)]


def test_its_size_is_that_of_the_range_not_of_the_count() -> None:
    found = Quantiles()
    for _ in range(50):
        found.fresh.extend(i / 1e4 for i in range(1, 10_001))
        found.settle(least=4096)
    assert len(found.fresh) == 0
    assert len(found.bins) < 64 * 15
    assert found.count == 500_000
