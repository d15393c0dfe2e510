"""Deadlines come in order, once each, and those of ended items are not kept for ever."""

from hypothesis import given
from hypothesis import strategies as st

from services.core.actor import After
from services.core.deadlines import FEW, DeadlineReached, Deadlines


def watched(waiting: dict[str, float]) -> Deadlines[str, float]:
    deadlines: Deadlines[str, float] = Deadlines(lambda at: at)
    for key, at in waiting.items():
        deadlines.watch(key, at, 0.0, waiting)
    return deadlines


def test_timers_are_set_to_the_earliest_that_has_not_ended() -> None:
    deadlines: Deadlines[str, float] = Deadlines(lambda at: at)
    waiting = {"late": 5.0, "early": 2.0, "later": 9.0}
    effects = [deadlines.watch(key, at, 1.0, waiting) for key, at in waiting.items()]
    assert effects == [(After("deadline", 4.0, DeadlineReached()),), (After("deadline", 1.0, DeadlineReached()),), ()]
    assert deadlines.due(1.9, waiting) == []
    assert deadlines.due(2.0, waiting) == [2.0]
    assert deadlines.timer(2.0) == (After("deadline", 3.0, DeadlineReached()),)
    deadlines = watched({"a": 1.0, "b": 2.0})
    assert deadlines.due(3.0, {"b": 2.0}) == [2.0]
    assert deadlines.timer(3.0) == ()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=30))
def test_each_item_is_due_at_its_last_deadline(comings: list[tuple[int, int]]) -> None:
    deadlines: Deadlines[int, int] = Deadlines(float)
    waiting: dict[int, int] = {}
    for key, at in comings:
        waiting[key] = at
        deadlines.watch(key, at, 0.0, waiting)
    found = []
    for now in range(22):
        for at in deadlines.due(now, waiting):
            key = next(key for key, item in waiting.items() if item is at or item == at)
            found.append((now, waiting.pop(key)))
    assert waiting == {}
    assert all(now == at for now, at in found)


def test_deadlines_of_what_has_ended_are_not_kept_for_ever() -> None:
    deadlines: Deadlines[int, float] = Deadlines(lambda at: at)
    waiting: dict[int, float] = {}
    for number in range(3 * FEW):
        waiting = {number: 1e9}
        deadlines.watch(number, 1e9, 0.0, waiting)
    assert len(deadlines) <= FEW + 4
    assert deadlines.due(1e9, waiting) == [1e9]
