"""What nobody would pass over."""

from hypothesis import given
from hypothesis import strategies as st

from dashboard.pareto import front

points = st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=30)


def test_the_front_of_a_few() -> None:
    assert front([(1, 5), (2, 2), (3, 3), (5, 1), (2, 2)]) == [True, True, False, True, False]
    assert front([]) == []


@given(points)
def test_it_beats_everything_else_and_nothing_in_it_is_beaten(found: list[tuple[int, ...]]) -> None:
    kept = front(found)
    best = [point for point, on in zip(found, kept, strict=True) if on]
    assert len(set(best)) == len(best)
    for point, on in zip(found, kept, strict=True):
        beaten = any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in best)
        assert beaten is (not on and point not in best)
