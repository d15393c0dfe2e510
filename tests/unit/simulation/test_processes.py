"""Rates in pieces: the integral and its inverse."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.simulation.processes import Rates, timed

_rate = st.one_of(st.just(0.0), st.floats(1e-3, 1e5))


@st.composite
def _rates(draw):
    lengths = draw(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
    pairs = [(draw(_rate), draw(_rate)) for _ in lengths]
    borders = draw(st.floats(0, 100)) + np.concatenate([[0.0], np.cumsum(lengths)])
    first, last = np.array(pairs).T
    before = draw(st.floats(0, 1e6))
    return borders, first, last, before, Rates(borders[:-1], borders[1:], first, last, before)


@given(_rates(), st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_a_time_is_reached_when_the_integral_says(made, shares):
    borders, first, last, before, rates = made
    assume(rates.expected > 1e-6 * rates.until)  # else there is no number between before and until
    passed = np.minimum(before + rates.expected * np.sort(np.array(shares)), np.nextafter(rates.until, 0))
    times = rates.when(passed)
    assert (times >= borders[0]).all()
    assert (times < borders[-1]).all()
    pieces = np.concatenate([[0.0], np.cumsum(np.diff(borders) * (first + last) / 2)])
    at = np.searchsorted(borders, times, "right") - 1
    inside = (times - borders[at]) / np.diff(borders)[at]
    integral = pieces[at] + np.diff(borders)[at] * (first[at] * inside + (last - first)[at] * inside**2 / 2)
    assert before + integral == pytest.approx(passed, rel=1e-7, abs=1e-7)


def test_a_piece_is_never_left():
    # The last operational time before a border would, rounded, be at the border, or behind it.
    for end in np.random.default_rng(1).random(2000) + 0.5:
        rates = Rates(np.array([0.3]), np.array([end]), np.array([7.0]), np.array([7.0]))
        if end > 0.3:
            assert rates.when(np.array([np.nextafter(rates.until, 0)]))[0] < end


def test_points_are_joined_and_cut_at_the_duration():
    rates = Rates.through([(2, 10), (4, 30), (4, 0), (9, 5)], 6.5)
    assert rates.expected == pytest.approx(2 * 10 + 2 * 20 + 2.5**2 / 2)
    assert rates.when(np.array([0, 20, 59.999999])).tolist() == [0, 2, pytest.approx(4)]
    assert rates.last[-1] == pytest.approx(2.5)
    assert Rates.through([(5, 10)], 3).expected == pytest.approx(30)
    assert Rates.through([(0, 10), (1, 10)], 3).expected == pytest.approx(30)


def test_stairs_end_with_their_last_or_with_the_duration():
    assert Rates.stairs(np.array([1.0, 2.0, 4.0]), 0.5, 10).expected == pytest.approx(3.5)
    assert Rates.stairs(np.array([1.0, 2.0, 4.0]), 0.5, 1.25).expected == pytest.approx(2.5)


def test_neighbouring_arrivals_are_not_turned_round_by_rounding():
    rates = Rates(np.array([0.0]), np.array([1.7]), np.array([3.0]), np.array([7.0]))
    near = [np.random.default_rng(0).random(2000) * 0.9 * rates.expected]
    for _ in range(5):
        near.append(np.nextafter(near[-1], np.inf))
    passed = np.append(np.sort(np.concatenate(near)), rates.until)
    assert (np.diff(rates.when(passed[:-1])) < 0).any(), "nothing to be put right: this test shows nothing"
    whole = np.concatenate(list(timed(iter([rates]), iter([passed]))))
    single = np.concatenate(list(timed(iter([rates]), iter(passed.reshape(-1, 1)))))
    assert (np.diff(whole) >= 0).all()
    assert single.tolist() == whole.tolist()
