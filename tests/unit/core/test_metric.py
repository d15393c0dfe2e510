"""Histograms count alike one by one and all at once."""

from hypothesis import given
from hypothesis import strategies as st

from services.core.metric import SECONDS, Histogram, MetricFamily, named

values = st.lists(st.one_of(st.floats(0, 60), st.sampled_from(SECONDS)), max_size=50)


@given(values)
def test_many_at_once_are_counted_as_one_by_one(given_values: list[float]) -> None:
    one, all_at_once = Histogram(), Histogram()
    for value in given_values:
        one.observe(value)
    all_at_once.observe_all(list(given_values))
    assert all_at_once.counts == one.counts
    assert abs(all_at_once.total - one.total) < 1e-6
    below = [sum(value <= bound for value in given_values) for bound in SECONDS]
    assert [sum(one.counts[: i + 1]) for i in range(len(SECONDS))] == below
    assert one.count == len(given_values)


def test_families_of_one_name_become_one() -> None:
    first, second, other = (
        MetricFamily("a", "gauge", "?"),
        MetricFamily("a", "gauge", "?"),
        MetricFamily("b", "gauge", "?"),
    )
    first.add(1, actor="x")
    second.add(2, actor="y")
    found = named([first, other, second])
    assert [family.name for family in found] == ["a", "b"]
    assert found[0].samples == [({"actor": "x"}, 1), ({"actor": "y"}, 2)]
