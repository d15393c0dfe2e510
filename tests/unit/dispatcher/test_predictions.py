"""Predictions are found again by query, by inputs with context, by the client's id; and never more are kept than fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.ensemble.base import Member, Outputs
from services.dispatcher.counted import MARK, MOST, MOVED, NONE, Counted, OlderMarks
from services.dispatcher.predictions import MOST_BYTES, Prediction, Predictions

MEMBERS = (Member(model="m", version="1"), Member(model="k", version="1"))


def scores(rows: int = 1) -> Outputs:
    return {"y": np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)}


def prediction(
    uid: int, app: str = "a", context: str | None = None, digest: bytes = b"d", id: str | None = None, items: int = 1
) -> Prediction:
    outputs = {"m": scores(items)}
    return Prediction(bytes([uid]) * 16, app, context, digest, 0.0, MEMBERS, {"m": 1.0}, outputs, items, id)


def test_predictions_are_found_by_query_and_by_inputs_with_their_context() -> None:
    log = Predictions()
    log.add(prediction(1))
    assert log.by_query("a", b"\x01" * 16) is not None
    assert log.by_query("b", b"\x01" * 16) is None
    assert log.by_query("a", b"\x02" * 16) is None
    log = Predictions()
    log.add(prediction(1, context="me"))
    log.add(prediction(2, context="you"))
    assert log.by_inputs("a", b"d", "me", 0).uid[0] == 1
    assert log.by_inputs("a", b"d", None, 0) is None
    assert log.by_inputs("b", b"d", "me", 0) is None
    assert log.by_inputs("a", b"e", "me", 0) is None
    assert log.by_inputs("a", b"d", False, 0).uid[0] == 2


def test_of_equal_inputs_the_latest_without_feedback_for_the_item_is_meant() -> None:
    log = Predictions()
    for uid in (1, 2):
        log.add(prediction(uid, items=2))
    met = []
    for item in (0, 0, 1, 0):
        found = log.by_inputs("a", b"d", None, item)
        found.fed.add(item)
        met.append(found.uid[0])
    assert met == [2, 1, 2, 2]


def test_ids_mean_the_latest_and_late_parts_are_added_once() -> None:
    log = Predictions()
    log.add(prediction(1, id="q", digest=b"1"))
    log.add(prediction(2, id="q", digest=b"2"))
    found = [log.by_id("a", "q", digest, None) for digest in (None, b"1", b"2")]
    assert [one and one.uid[0] for one in found] == [2, 1, 2]
    assert log.by_id("a", "q", b"3", None) is None
    assert log.by_id("a", "q", None, "me") is None
    assert log.by_id("b", "q", None, None) is None
    log = Predictions()
    log.add(prediction(1))
    before = log.bytes
    log.late(b"\x01" * 16, "k", scores())
    assert log.bytes == before + 16
    log.late(b"\x01" * 16, "k", scores())
    log.late(b"\x09" * 16, "k", scores())
    assert log.bytes == before + 16
    assert set(log.by_query("a", b"\x01" * 16).outputs) == {"m", "k"}


def test_items_are_told_apart_and_as_many_kept_as_the_documents_say() -> None:
    [row] = [outputs["y"] for outputs in prediction(1, items=3).of_item(1).values()]
    assert row.tolist() == [[4.0, 5.0, 6.0, 7.0]]
    # docs/ensembles.md: 50,000 of five members with ten classes.
    outputs = {f"m{i}": {"y": np.zeros((1, 10), np.float32)} for i in range(5)}
    assert MOST_BYTES // Prediction(b"u" * 16, "a", None, None, 0.0, [], {}, outputs).size >= 50_000


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30), st.sampled_from("ab"), st.sampled_from([b"1", b"2"]), st.sampled_from(["x", None])
        )
    )
)
def test_memory_is_bounded_and_nothing_of_what_has_gone_is_found(
    added: list[tuple[int, str, bytes, str | None]],
) -> None:
    log = Predictions(4 * prediction(1, id="x").size)
    for uid, app, digest, label in added:
        log.add(prediction(uid, app, digest=digest, id=label))
    kept = [uid for uid in range(31) for app in "ab" if log.by_query(app, bytes([uid]) * 16)]
    assert len(kept) == len(log) <= 4
    assert 0 <= len(log) * prediction(1, id="x").size - log.bytes <= 4 * len(log), "some have no id"
    last = list(dict.fromkeys(uid for uid, *_ in reversed(added)))[:4]
    assert sorted(kept) == sorted(last)
    for app in "ab":
        for digest in (b"1", b"2"):
            found = log.by_inputs(app, digest, None, 0)
            assert found is None or found.uid[0] in kept
        by_id = log.by_id(app, "x", None, None)
        assert by_id is None or by_id.uid[0] in kept


@pytest.mark.parametrize("field", ["id", "context"])
def test_what_clients_name_their_queries_counts(field: str) -> None:
    log = Predictions(2**20)
    for uid in range(100):
        log.add(prediction(uid, **{field: f"{uid}" + "x" * 2**16}))
    assert 0 < len(log) <= 16


# -- Older marks are found, bounded, and known to be complete or not; and never more are in memory than fit.


def marks(numbers: range) -> bytes:
    return b"".join((number * 2_654_435_761 % 2**64).to_bytes(MARK, "big") for number in numbers)


def test_moved_marks_are_found_until_the_oldest_go() -> None:
    older = OlderMarks(marks(range(5000)), 3, 3)
    assert all(older.has(marks(range(number, number + 1))) for number in range(0, 5000, 7))
    assert not any(older.has(marks(range(number, number + 1))) for number in range(5000, 6000))
    assert older.has(marks(range(100, 600)))
    assert not older.has(marks(range(4990, 5010)))
    assert not NONE.has(marks(range(1)))
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


def test_marks_that_never_moved_or_are_lost_need_no_reading() -> None:
    assert Counted().get("a._", 0) is NONE
    assert Counted().get("a._", -1) is None
    assert Counted().get("a._", 4) is None
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
        found.pop(key)
    assert found.bytes == 0
