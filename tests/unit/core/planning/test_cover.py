"""Carrying one load at least cost, against every combination there is."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from services.core.planning.cover import CoverSearch, Offer

OFFERS = st.lists(
    st.tuples(st.floats(0, 20), st.floats(0.5, 50), st.integers(1, 4), st.floats(0.01, 0.9)), min_size=1, max_size=4
)


@given(OFFERS, st.floats(0.1, 100), st.booleans())
def test_nothing_is_cheaper(offered: list[tuple[float, float, int, float]], need: float, narrow: bool) -> None:
    offers = [
        Offer(i, price, rate, most, ((0, weight),) if narrow else ())
        for i, (price, rate, most, weight) in enumerate(offered)
    ]
    search = CoverSearch(need, offers, [1.0], steps=100_000)
    found = search.run()
    assert search.finished
    costs = [
        sum(n * offer.price for n, offer in zip(counts, offers, strict=True))
        for counts in product(*(range(offer.most + 1) for offer in offers))
        if sum(n * offer.rate for n, offer in zip(counts, offers, strict=True)) >= need
        and (not narrow or sum(n * offer.weights[0][1] for n, offer in zip(counts, offers, strict=True)) <= 1)
    ]
    if found is None:
        assert not costs
        return
    cost = sum(found.get(offer.candidate, 0) * offer.price for offer in offers)
    assert abs(cost - search.cost) <= 1e-9 * max(1.0, cost)
    assert not costs or cost <= min(costs) * (1 + 1e-6) + 1e-9
    assert sum(found.get(offer.candidate, 0) * offer.rate for offer in offers) >= need * (1 - 1e-6)


def test_instances_that_run_and_fresh_ones_of_one_variant_add_up() -> None:
    offers = [Offer(0, 1.0, 5.0, 2), Offer(0, 1.2, 5.0, 100), Offer(1, 30.0, 100.0, 10)]
    assert CoverSearch(20.0, offers, (), steps=100).run() == {0: 4}


def test_a_search_cut_short_says_so_and_keeps_what_it_found() -> None:
    offers = [Offer(i, 1.0 + 0.01 * i, 1.0 + 0.009 * i, 50) for i in range(8)]
    search = CoverSearch(37.7, offers, (), steps=10)
    assert search.run() is not None
    assert not search.finished
