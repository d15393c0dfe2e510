"""The interval of a mean holds however often one looks."""

from math import log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.confidence import Sampled, apart, difference

LEVEL = 0.1


@pytest.mark.parametrize("mean", [0.1, 0.5, 0.98])
@pytest.mark.parametrize("values", ["binary", "between"])
def test_the_truth_is_never_left_in_most_runs(mean: float, values: str) -> None:
    """Looked at after each of 300 observations, in 200 runs. A test of level 0.1 would be wrong in most runs."""
    random, left = Random(1), 0
    for _ in range(200):
        found = Sampled()
        for _ in range(300):
            x = float(random.random() < mean) if values == "binary" else random.betavariate(2 * mean, 2 * (1 - mean))
            found += Sampled(x, 1)
            if found.excludes(mean, LEVEL):
                left += 1
                break
    assert left <= 0.15 * 200


@given(st.integers(0, 400), st.integers(1, 400), st.floats(0.001, 0.2))
def test_the_interval_is_where_the_evidence_passes(right: int, count: int, level: float) -> None:
    found = Sampled(min(right, count), count)
    low, high = found.interval(level)
    assert 0.0 <= low <= found.mean <= high <= 1.0
    for inside in (low + 1e-6, high - 1e-6):
        assert low >= inside or inside >= high or not found.excludes(inside, level)
    assert low == 0.0 or found.excludes(low - 1e-9, level)
    assert high == 1.0 or found.excludes(high + 1e-9, level)


def test_as_the_mixture_integrated_numerically() -> None:
    """An independent way to the same ratio: the mean of the likelihood ratios over the prior's quantiles."""
    found, mean, n = Sampled(37, 50), 0.9, 200_000
    from math import exp, pi, sin

    grid = [sin(pi * (i + 0.5) / n / 2) ** 2 for i in range(n)]  # quantiles of the arcsine distribution
    ratios = (exp(37 * log(p / mean) + 13 * log((1 - p) / (1 - mean))) for p in grid)
    evidence = log(sum(ratios) / n)
    assert found.excludes(mean, exp(-evidence) * 1.001)
    assert not found.excludes(mean, exp(-evidence) * 0.999)


def test_without_observations_everything_is_possible() -> None:
    assert Sampled().interval() == (0.0, 1.0)
    assert not Sampled().excludes(0.5)
    assert difference(Sampled(), Sampled()) == (-1.0, 1.0)


def test_two_that_differ() -> None:
    low, high = difference(Sampled(700, 1000), Sampled(950, 1000), 0.01)
    assert low < -0.25 < high < 0


def test_a_difference_is_left_only_where_no_pair_of_means_has_it() -> None:
    """At every moment, of a hundred runs of equal means; and where it is left, the interval says so."""
    left = 0
    for seed in range(100):
        draw = Random(seed)
        new, old = Sampled(), Sampled()
        out = False
        for _ in range(60):
            new += Sampled(sum(draw.random() < 0.9 for _ in range(5)), 5)
            old += Sampled(sum(draw.random() < 0.9 for _ in range(45)), 45)
            out |= apart(new, old, 0.0, 0.05)
        left += out
    assert left <= 5
    new, old = Sampled(930, 1000), Sampled(950, 1000)
    low, high = difference(new, old, 0.05)
    assert low < -0.02 < high
    assert [apart(new, old, by, 0.05) for by in (low - 1e-4, low + 1e-4, high - 1e-4, high + 1e-4)] == [
        True,
        False,
        False,
        True,
    ]
    assert low > new.interval(0.05)[0] - old.interval(0.05)[1]
    assert not apart(Sampled(), old, 0.5)
