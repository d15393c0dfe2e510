"""From queries to one array and back: what does not fit is refused, and classes get their names."""

import numpy as np
import pytest
from msgspec import Raw

from bus.messages.catalog import Signature, TensorSpec
from bus.messages.flow import Route
from bus.messages.public import Error, Refusal, TensorView
from bus.tensors import BadTensor
from services.core.outcomes import KEPT, KEPT_BYTES, RecentAnswers
from services.executor.edge import named_classes, several, single
from services.executor.queue import QueuedQuery

FLOATS = TensorSpec(name="x", datatype="FP32", shape=[2])


def query(*rows):
    array = np.array(rows, "f4")
    route = Route(b"u", 0, 0, "", 1.0, 0.0, "d", "i", "a", len(rows), None)
    view = TensorView("FP32", list(array.shape), memoryview(array.tobytes()))
    return QueuedQuery(route, Raw(b""), view, len(rows), None)


def test_nan_and_numbers_that_do_not_fit_are_refused() -> None:
    good, bad = query([1, 2], [3, 4]), query([5, np.nan])
    assert single([good, good], FLOATS).tolist() == [[1, 2], [3, 4], [1, 2], [3, 4]]
    with pytest.raises(BadTensor, match=r"`inputs` holds NaN at index \[0, 1\]"):
        single([bad], FLOATS)
    assert np.isnan(single([good, bad], FLOATS, allow_nan=True)).any()
    named = QueuedQuery(bad.route, Raw(b""), {"x": bad.inputs}, 1, None)
    signature = Signature(inputs=[FLOATS], outputs=[])
    with pytest.raises(BadTensor, match=r"`inputs\.x` holds NaN"):
        several([named], signature)
    assert np.isnan(several([named], signature, allow_nan=True)["x"]).any()
    whole = TensorSpec(name="x", datatype="UINT8", shape=[2])
    listed = QueuedQuery(query([0, 0]).route, Raw(b""), [[1.0, 255]], 1, None)
    assert single([listed], whole).dtype == np.uint8
    for wrong in ([[0.5, 1]], [[256, 0]]):
        with pytest.raises(BadTensor, match="UINT8"):
            single([QueuedQuery(listed.route, Raw(b""), wrong, 1, None)], whole)


@pytest.mark.parametrize(
    ("output", "labels", "names"),
    [
        ([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]], ["no", "yes"], [["yes", "no"], ["yes"]]),
        ([[0.9], [0.2], [0.6]], ["no", "yes"], [["yes", "no"], ["yes"]]),
        ([[[[0.1]], [[0.9]]], [[[0.8]], [[0.2]]], [[[0.3]], [[0.7]]]], ["no", "yes"], [["yes", "no"], ["yes"]]),
        (np.array([1, 0, 7]), ["no", "yes"], [["yes", "no"], ["7"]]),
        ([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]], ["a", "b", "c"], None),
    ],
)
def test_classes_are_named_query_by_query(output, labels, names):
    queries = [query([1, 2], [3, 4]), query([5, 6])]
    assert named_classes([np.asarray(output)], labels, queries) == names


# -- Answers that an executor keeps to repeat them: how many, and how large.


def route(number: int) -> Route:
    return Route(number.to_bytes(16, "big"), 0, 0, "_INBOX.x", 0.0, 0.0, "d", "i", "app", 1, None)


@pytest.mark.parametrize(("size", "least"), [(2**20, KEPT_BYTES // (2**20 + 200)), (100, KEPT)])
def test_recent_answers_are_bounded_by_number_and_by_bytes(size: int, least: int) -> None:
    answers = RecentAnswers()
    refusal = Refusal(id=None, error=Error(code="model_error", message="x" * size))
    count = 3 * least
    for number in range(count):
        answers.keep(route(number), refusal)
    kept = [number for number in range(count) if answers.get((route(number).uid, 0)) is not None]
    assert least <= len(kept) <= 2 * least + 2
    assert kept == list(range(count - len(kept), count)), "the last ones"
    assert answers.get((route(count - 1).uid, 0)).code == "model_error"  # type: ignore[union-attr]
