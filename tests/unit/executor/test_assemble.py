"""From queries to one array and back: what does not fit is refused, and classes get their names."""

import numpy as np
import pytest
from msgspec import Raw

from bus.messages.catalog import Signature, TensorSpec
from bus.messages.flow import Route
from bus.messages.public import TensorView
from bus.tensors import BadTensor
from services.executor.edge import named_classes, several, single
from services.executor.queue import QueuedQuery

FLOATS = TensorSpec(name="x", datatype="FP32", shape=[2])


def query(*rows):
    array = np.array(rows, "f4")
    route = Route(b"u", 0, 0, "", 1.0, 0.0, "d", "i", "a", len(rows), None)
    view = TensorView("FP32", list(array.shape), memoryview(array.tobytes()))
    return QueuedQuery(route, Raw(b""), view, len(rows), None)


def test_nan_is_refused_unless_the_model_takes_it():
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


def test_a_list_gets_the_models_datatype_only_if_its_numbers_fit():
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
