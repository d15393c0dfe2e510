"""An app's default output becomes tensors of its signature where it fits, and is never lost where it does not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.catalog import Signature, TensorSpec
from bus.messages.public import Tensor
from bus.tensors import to_array
from services.dispatcher.defaults import MOST_BYTES, default_outputs


def signature(*outputs: tuple[str, str, list[int]]) -> Signature:
    return Signature(inputs=[], outputs=[TensorSpec(name=n, datatype=d, shape=s) for n, d, s in outputs])


def shown(value: Any, *outputs: tuple[str, str, list[int]], items: int = 2) -> dict[str, tuple[str, Any]]:
    found = default_outputs(value, signature(*outputs) if outputs else None, items)
    assert found is not None
    return {name: (tensor.datatype, to_array(tensor, name).tolist()) for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("value", "outputs", "expected"),
    [
        (7, [("y", "FP32", [])], {"y": ("FP32", [7.0, 7.0])}),
        (0, [("y", "FP32", [2])], {"y": ("FP32", [[0.0, 0.0]] * 2)}),
        ([0.5, 0.25], [("y", "FP16", [2])], {"y": ("FP16", [[0.5, 0.25]] * 2)}),
        ([[1, 2], [3, 4]], [("y", "INT64", [2, 2])], {"y": ("INT64", [[[1, 2], [3, 4]]] * 2)}),
        ([1, 2, 3], [("y", "FP32", [-1])], {"y": ("FP32", [[1.0, 2.0, 3.0]] * 2)}),
        (5, [("y", "INT64", [-1])], {"y": ("INT64", [[5], [5]])}),
        (True, [("y", "BOOL", [])], {"y": ("BOOL", [True, True])}),
        (1.0, [("y", "INT32", [])], {"y": ("INT32", [1, 1])}),
        ({"b": 2}, [("a", "FP32", []), ("b", "FP32", [])], {"b": ("FP32", [2.0, 2.0])}),
        # what does not fit comes as it is
        ("none", [("y", "FP32", [])], {"y": ("BYTES", ["none", "none"])}),
        ("none", [("y", "BYTES", [])], {"y": ("BYTES", ["none", "none"])}),
        (1.5, [("y", "INT32", [])], {"y": ("FP64", [1.5, 1.5])}),
        (-1, [("y", "UINT8", [])], {"y": ("INT64", [-1, -1])}),
        ([1, 2], [("y", "FP32", [3])], {"y": ("INT64", [[1, 2], [1, 2]])}),
        ([], [("y", "FP32", [3])], {"y": ("BYTES", ["[]", "[]"])}),
        ({"c": 1}, [("y", "FP32", [])], {"y": ("BYTES", ['{"c":1}'] * 2)}),
        (2**70, [("y", "INT64", [])], {"y": ("FP64", [2.0**70] * 2)}),
        ("x", [], {"output": ("BYTES", ["x", "x"])}),
        (3, [], {"output": ("INT64", [3, 3])}),
    ],
)
def test_values_and_signatures(value: Any, outputs: list[Any], expected: dict[str, Any]) -> None:
    assert shown(value, *outputs) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SPECS = st.lists(
    st.tuples(
        st.sampled_from(["y", "z"]),
        st.sampled_from(["FP32", "FP16", "INT8", "UINT64", "BOOL", "BYTES", "BF16"]),
        st.lists(st.sampled_from([-1, 1, 2, 3]), max_size=3),
    ),
    max_size=2,
    unique_by=lambda spec: spec[0],
)


@given(JSON, SPECS, st.integers(1, 4))
def test_whatever_it_is_there_are_as_many_items_as_were_asked_for(value: Any, outputs: list[Any], items: int) -> None:
    found = default_outputs(value, signature(*outputs), items)
    assert found
    for name, tensor in found.items():
        assert isinstance(tensor, Tensor)
        assert to_array(tensor, name).shape[0] == items


def test_nothing_is_made_that_no_message_can_hold() -> None:
    assert default_outputs("x" * 60_000, None, 65_536) is None
    assert default_outputs(0, signature(("y", "FP32", [1000])), 65_536) is None
    fits = default_outputs(0, signature(("y", "FP32", [1000])), MOST_BYTES // 4000)
    assert fits is not None
    assert len(fits["y"].data) <= MOST_BYTES
    # A number fills no picture of gigabytes: it comes as it is.
    assert shown(3, ("y", "FP32", [30_000, 30_000])) == {"y": ("INT64", [3, 3])}
