from hypothesis import given
from hypothesis import strategies as st

from bus.messages.events import Event
from services.recorder.policy import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MOST,
    latest,
    pause_after_failure,
    pause_after_fetch,
)


def test_messages_gather_only_while_some_but_not_all_came() -> None:
    assert pause_after_fetch(0) == 0  # the next fetch itself waits for the first
    assert pause_after_fetch(MOST) == 0  # there is more
    assert all(0 < pause_after_fetch(n) < 1 for n in range(1, MOST))


@given(st.integers(1, 1000))
def test_pauses_grow_to_a_bound(failures: int) -> None:
    pause = pause_after_failure(failures)
    assert FIRST_PAUSE <= pause <= LONGEST_PAUSE
    assert pause <= pause_after_failure(failures + 1)
    assert failures == 1 or pause == LONGEST_PAUSE or pause == 2 * pause_after_failure(failures - 1)


class _Fact(Event, frozen=True, kw_only=True):
    key: int
    number: int


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_latest_is_the_maximum_of_each_key(pairs: list[tuple[int, int]]) -> None:
    facts = [_Fact(time=float(time), key=key, number=i) for i, (key, time) in enumerate(pairs)]
    found = {fact.key: fact for fact in latest(facts, lambda fact: fact.key)}
    for key in {fact.key for fact in facts}:
        assert found[key] == max((f for f in facts if f.key == key), key=lambda f: (f.time, f.number))
    assert len(found) == len({fact.key for fact in facts})
