"""A query's head against the contract and the app's signature: every refusal names its field."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.codec import decode
from bus.datatypes import ARRAYS, DATATYPES, SIZES
from bus.messages.catalog import AppRecord, Signature, TensorSpec
from bus.messages.public import QueryHead, Requirements
from bus.tensors import LARGEST_RANK, BadTensor, fit
from services.core.cost import open_axis
from services.core.validation import MOST_ITEMS, WrongField, count_items, length_of, wrong_requirement

NUMBERS = sorted(ARRAYS.values())


def app(*inputs: TensorSpec) -> AppRecord:
    taken = inputs or (TensorSpec(name="x", datatype="FP32", shape=[4]),)
    return AppRecord(app="a", links={}, signature=Signature(inputs=list(taken), outputs=[]))


def head(**fields: object) -> QueryHead:
    return decode(QueryHead, msgspec.msgpack.encode(fields))


def tensor(shape: list[int], datatype: str = "FP32", data: object = None) -> dict[str, object]:
    size = math.prod(shape) * SIZES[datatype]
    return {"datatype": datatype, "shape": shape, "data": bytes(size) if data is None else data}


@pytest.mark.parametrize(
    ("inputs", "items"),
    [
        (tensor([3, 4]), 3),
        ({"x": tensor([3, 4])}, 3),
        ([[1, 2, 3, 4], [0.5, 0, 0, 0]], 2),
        ({"x": [[1, 2, 3, 4]]}, 1),
        (tensor([2, 4], "INT64"), 2),
        (tensor([2, 4], "BF16"), 2),
    ],
)
def test_items_are_counted_without_decoding_the_data(inputs: object, items: int) -> None:
    assert count_items(head(inputs=inputs), app()) == items


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        (tensor([0, 4], data=b""), "inputs.shape"),
        (tensor([2**31, 4], data=b""), "inputs.shape"),
        (tensor([], data=b""), "inputs.shape"),
        (tensor([1] * (LARGEST_RANK + 1)), "`inputs.shape` has 33 axes"),
        (tensor([MOST_ITEMS + 1, 4], data=b""), "inputs.shape"),
        (tensor([1, 5]), "`inputs` has shape [1, 5]: the model takes [n, 4]"),
        (tensor([1, 4], data=bytes(15)), "`inputs.data` has 15 bytes"),
        (tensor([1, 4], data="0" * 16), "inputs.data must be bytes"),
        (tensor([1, 4], "BYTES", data=b""), "inputs.datatype is BYTES: the model takes FP32, so give numbers"),
        (
            tensor([4]),
            "`inputs` has shape [4]: the model takes [n, 4] for x; it lacks the axis of items: one item has shape [1, 4]",
        ),
        ({**tensor([1, 4]), "datatype": "FP31"}, "inputs.datatype"),
        ({"y": tensor([1, 4])}, "inputs lacks 'x'"),
        ({"x": tensor([1, 4]), "y": tensor([1, 4])}, "unknown tensor 'y'"),
        ({"x": [[1, 2, 3]]}, "`inputs.x` has shape [1, 3]"),
        ([[1, 2, 3, 4], [1]], "ragged"),
        ([["a", "b", "c", "d"]], "numbers only"),
        ([], "no items"),
        ([[]], "empty list"),
        (7, "inputs must be"),
    ],
)
def test_what_does_not_fit_is_named(inputs: object, names: str) -> None:
    with pytest.raises(WrongField) as refused:
        count_items(head(inputs=inputs), app())
    assert names in str(refused.value)


@pytest.mark.parametrize(
    ("bucket", "key", "names"),
    [(name, "k", "inputs_ref.bucket") for name in ("", "a.b", "a b", ">", "*", "a\r\nPUB x 0\r\n", "é", "a" * 129)]
    + [("b", "", "inputs_ref.key"), ("b", "k" * 1001, "inputs_ref.key")],
)
def test_references_that_can_name_nothing(bucket: str, key: str, names: str) -> None:
    """A bucket's name becomes part of subjects: nobody writes protocol, or over-long lines, by it."""
    with pytest.raises(WrongField, match=names):
        count_items(head(inputs_ref={"bucket": bucket, "key": key}), app())
    there = {"bucket": "infaas-inputs", "key": "../any name > *"}
    assert [count_items(head(inputs_ref={**there, **more}), app()) for more in ({}, {"items": 7})] == [1, 7]
    with pytest.raises(WrongField, match="inputs_ref"):
        count_items(head(inputs_ref={**there, "items": -1}), app())


@pytest.mark.parametrize("inputs", [[3, 4], [[3], [4]], {"x": [3, 4]}])
def test_numbers_for_a_model_of_texts_are_refused_as_numbers(inputs: object) -> None:
    with pytest.raises(WrongField, match=r"inputs(\.x)? holds numbers: the model takes BYTES, so give texts"):
        count_items(head(inputs=inputs), app(TensorSpec(name="x", datatype="BYTES", shape=[1])))


def test_inputs_are_named_and_hold_as_many_items() -> None:
    with pytest.raises(WrongField, match="`inputs` is missing"):
        count_items(head(), app())
    two = app(TensorSpec(name="a", datatype="FP32", shape=[1]), TensorSpec(name="b", datatype="INT64", shape=[2]))
    assert count_items(head(inputs={"a": tensor([3, 1]), "b": tensor([3, 2], "INT64")}), two) == 3
    with pytest.raises(WrongField, match=r"inputs\.b holds 2 items"):
        count_items(head(inputs={"a": tensor([3, 1]), "b": tensor([2, 2], "INT64")}), two)
    with pytest.raises(WrongField, match="a, b"):
        count_items(head(inputs=tensor([3, 1])), two)


@pytest.mark.parametrize("wanted", NUMBERS)
@pytest.mark.parametrize("given_", NUMBERS)
def test_what_is_taken_here_is_what_the_executor_can_convert(given_: str, wanted: str) -> None:
    spec = TensorSpec(name="x", datatype=wanted, shape=[2])
    try:
        fit(np.zeros((1, 2), DATATYPES[given_].array), spec, "inputs")
        convertible = True
    except BadTensor:
        convertible = False
    try:
        count_items(head(inputs=tensor([1, 2], given_)), app(spec))
        taken = True
    except WrongField:
        taken = False
    assert taken == convertible


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("latency_ms", value) for value in (0.0, -1.0, math.nan, math.inf)),
        *(("accuracy", value) for value in (-0.1, 1.1, math.nan)),
        *(("confidence", value) for value in (-0.1, 1.1, math.nan)),
        *(("cost", value) for value in (-1.0, math.nan, math.inf)),
        *(("deadline", value) for value in (-1.0, math.nan, math.inf)),
        *(("priority", value) for value in (0, 10)),
        ("context", "c" * 1001),
        *((name, value) for name in ("model", "version", "variant") for value in ("", "../x", "a b", ">", "*", "\0", "a" * 65, "é")),
    ],
)  # fmt: skip
def test_requirements_out_of_range_name_their_field(field: str, value: object) -> None:
    wrong = wrong_requirement(Requirements(**{field: value}))  # type: ignore[arg-type]
    assert str(wrong).startswith(f"{field} must be ")


def test_requirements_within_range_pass() -> None:
    assert wrong_requirement(Requirements()) is None
    wish = Requirements(
        latency_ms=1e-3, accuracy=1.0, confidence=1.0, cost=0.0, deadline=1.0, priority=9, model="m-1_a"
    )
    assert wrong_requirement(wish) is None


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["x", "datatype", "shape", "data"]), inner),
    max_leaves=12,
)  # fmt: skip


@given(anything)
def test_whatever_comes_is_counted_or_refused(inputs: object) -> None:
    try:
        assert count_items(head(inputs=inputs), app()) >= 1
    except WrongField as refused:
        assert "inputs" in str(refused)


@pytest.mark.parametrize(
    "inputs",
    [tensor([3, 7]), {"x": tensor([3, 7])}, [[0] * 7] * 3, {"x": [[0] * 7]}],
    ids=["one", "named", "list", "map"],
)
def test_the_length_of_an_open_axis(inputs: object) -> None:
    taken = app(TensorSpec(name="x", datatype="FP32", shape=[-1]))
    axis = open_axis(taken.signature)
    assert axis == ("x", 1)
    assert count_items(head(inputs=inputs), taken)
    assert length_of(head(inputs=inputs), axis) == 7
    assert length_of(head(inputs_ref={"bucket": "infaas-inputs", "key": "k"}), axis) is None
    assert open_axis(app().signature) is None
