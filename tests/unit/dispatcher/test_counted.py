"""Older marks are found, bounded, and known to be complete or not; and never more are in memory than fit."""

import pytest

from services.dispatcher.counted import MARK, MOST, MOVED, NONE, Counted, OlderMarks


def marks(numbers: range) -> bytes:
    return b"".join((number * 2_654_435_761 % 2**64).to_bytes(MARK, "big") for number in numbers)


def test_all_that_have_moved_are_found_and_no_others() -> None:
    older = OlderMarks(marks(range(5000)), 3, 3)
    assert all(older.has(marks(range(number, number + 1))) for number in range(0, 5000, 7))
    assert not any(older.has(marks(range(number, number + 1))) for number in range(5000, 6000))
    assert older.has(marks(range(100, 600)))
    assert not older.has(marks(range(4990, 5010)))
    assert not NONE.has(marks(range(1)))


def test_the_oldest_go_and_then_it_says_so() -> None:
    older = OlderMarks(marks(range(MOST - 1)), 3, 3)
    assert not older.full
    older = OlderMarks(older.plus(marks(range(MOST, MOST + MOVED))), 4, 4)
    assert older.full
    assert len(older.marks) == MARK * MOST
    assert not older.has(marks(range(1)))
    assert older.has(marks(range(MOST, MOST + MOVED)))


@pytest.mark.parametrize(("moved", "there"), [(0, True), (-1, True), (5, True), (6, False)])
def test_those_in_memory_serve_if_they_are_new_enough(moved: int, there: bool) -> None:
    found = Counted()
    found.put("a._", marks(range(9)), 5, 0)
    assert (found.get("a._", moved) is not None) is there


def test_what_was_never_moved_needs_no_reading_and_what_is_not_known_does() -> None:
    assert Counted().get("a._", 0) is NONE
    assert Counted().get("a._", -1) is None
    assert Counted().get("a._", 4) is None


def test_what_is_lost_is_not_looked_for_again_and_is_known_to_be_lost() -> None:
    found = Counted()
    found.put("a._", b"", 0, 9)
    there = found.get("a._", 9)
    assert (there.full, there.revision, there.covers) == (True, 0, 9)


def test_memory_is_bounded_and_the_least_recently_used_go() -> None:
    found = Counted(10 * OlderMarks(marks(range(MOVED)), 1, 1).size)
    for number in range(100):
        found.put(f"a.{number}", marks(range(MOVED)), 1, 0)
        found.get("a.0", 1)
    assert len(list(found)) == 10
    assert found.get("a.0", 1) is not None
    assert found.get("a.50", 1) is None
    found.put("a.0", marks(range(MOVED)), 2, 0)
    for key in list(found):
        found.drop(key)
    assert found.bytes == 0
