"""All covers within a limit, against every combination there is."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.planning.cover import Offer
from services.core.planning.covers import TooMany, covers

OFFERS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50), st.integers(1, 4)), min_size=1, max_size=4)


@given(OFFERS, st.integers(1, 100), st.integers(0, 80))
def test_none_is_missing_and_none_has_one_too_many(offered: list[tuple[int, int, int]], need: int, limit: int) -> None:
    offers = [Offer(i, float(price), float(rate), most) for i, (price, rate, most) in enumerate(offered)]

    def carries(counts: tuple[int, ...]) -> bool:
        return sum(n * rate for n, (_, rate, _) in zip(counts, offered, strict=True)) >= need

    def one_less(counts: tuple[int, ...], i: int) -> tuple[int, ...]:
        return (*counts[:i], counts[i] - 1, *counts[i + 1 :])

    expected = {
        counts
        for counts in product(*(range(most + 1) for _, _, most in offered))
        if carries(counts)
        and sum(n * price for n, (price, _, _) in zip(counts, offered, strict=True)) <= limit
        and not any(n and carries(one_less(counts, i)) for i, n in enumerate(counts))
    }
    found = covers(float(need), offers, limit + 1e-6, 10_000)
    assert len(found) == len(set(found))
    assert {tuple(dict(one).get(i, 0) for i in range(len(offers))) for one in found} == expected


def test_too_many_are_refused() -> None:
    offers = [Offer(i, 1.0, 1.0, 50) for i in range(5)]
    with pytest.raises(TooMany):
        covers(20.0, offers, 100.0, 50)
