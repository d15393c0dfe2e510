"""The protocol's tensors to the system's and back, against numpy."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bus.datatypes import ARRAYS, DATATYPES
from bus.messages.public import Tensor, TensorView
from bus.tensors import BadTensor, from_array, to_array
from bus.values import from_bytes, from_list, to_list

FINITE = {"allow_nan": False, "allow_infinity": False}
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, max_side=4)


def view(wire: dict[str, Any]) -> TensorView:
    return TensorView(wire["datatype"], wire["shape"], memoryview(wire["data"]))


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    datatype = draw(st.sampled_from(sorted(ARRAYS.values())))
    dtype = np.dtype(DATATYPES[datatype].array)
    elements = st.floats(width=dtype.itemsize * 8, **FINITE) if dtype.kind == "f" else None
    return datatype, draw(hnp.arrays(dtype, SHAPES, elements=elements))


@given(arrays(), st.booleans())
def test_numbers_there_and_back(sample: tuple[str, np.ndarray], flat: bool) -> None:
    datatype, array = sample
    data = array.ravel().tolist() if flat else array.tolist()
    wire = from_list(datatype, list(array.shape), data, "x")
    assert wire["data"] == array.tobytes()
    assert to_list(view(wire), "x") == array.ravel().tolist()


@given(arrays())
def test_raw_bytes_stay_where_they_are(sample: tuple[str, np.ndarray]) -> None:
    datatype, array = sample
    data = memoryview(array.tobytes())
    wire = from_bytes(datatype, list(array.shape), data, "x")
    assert wire["data"] is data
    assert (to_array(view(wire), "x") == array).all()
    with pytest.raises(BadTensor, match="bytes of data"):
        from_bytes(datatype, list(array.shape), data[:-1], "x")


@given(st.lists(st.text(max_size=5), min_size=1, max_size=5))
def test_texts_there_and_back(texts: list[str]) -> None:
    wire = from_list("BYTES", [len(texts)], texts, "x")
    assert wire["data"] == from_array(np.array(texts, object)).data
    assert to_list(view(wire), "x") == texts


@given(st.floats(width=32, **FINITE))
def test_bfloat16_is_the_nearest(number: float) -> None:
    try:
        wire = from_list("BF16", [1], [number], "x")
    except BadTensor:
        assert abs(number) > 3.38e38  # it would round to infinity
        return
    (found,) = to_list(view(wire), "x")
    assert abs(found - number) <= abs(number) * 2**-8 + 2.0**-134
    assert math.copysign(1, found) == math.copysign(1, number)
    assert to_array(view(wire), "x").tolist() == [found]


def test_texts_that_are_none_must_be_asked_for_raw() -> None:
    tensor = Tensor("BYTES", [1], b"\x01\0\0\0\xff")
    with pytest.raises(BadTensor, match=r"x .*binary"):
        to_list(TensorView(tensor.datatype, tensor.shape, memoryview(tensor.data)), "x")


@given(st.sampled_from(sorted(ARRAYS.values())), st.lists(st.integers(-3, 2**40), max_size=4), st.binary(max_size=40))
def test_any_shape_is_taken_or_refused_by_name(datatype: str, shape: list[int], data: bytes) -> None:
    try:
        wire = from_bytes(datatype, shape, memoryview(data), "inputs.x")
    except BadTensor as error:
        assert "inputs.x" in str(error)
    else:
        assert math.prod(wire["shape"]) * np.dtype(DATATYPES[datatype].array).itemsize == len(data)


NESTED = st.recursive(
    st.integers() | st.floats() | st.text(max_size=2) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3),
)


@given(st.sampled_from([*sorted(ARRAYS.values()), "BF16", "BYTES"]), st.lists(st.integers(0, 4), max_size=3), NESTED)
def test_any_data_is_taken_or_refused_by_name(datatype: str, shape: list[int], data: Any) -> None:
    try:
        wire = from_list(datatype, shape, data, "inputs.x")
    except BadTensor as error:
        assert "inputs.x" in str(error)
    else:
        assert len(to_list(view(wire), "x")) == math.prod(shape)
