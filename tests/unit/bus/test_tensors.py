"""Wire tensors and arrays: a round trip loses nothing, and what contradicts itself is refused by name."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bus import codec
from bus.datatypes import ARRAYS, DATATYPES
from bus.messages.catalog import TensorSpec
from bus.messages.public import Tensor, TensorView
from bus.tensors import BadTensor, check_finite, datatype_of, fit, from_array, items, to_array
from bus.values import from_bytes, from_list, to_list

shapes = hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5)


@given(st.sampled_from(sorted(ARRAYS)).flatmap(lambda name: hnp.arrays(np.dtype(name), shapes)))
def test_what_goes_over_the_wire_comes_back_bit_by_bit(array):
    back = to_array(codec.decode(TensorView, codec.encode(from_array(array))), "inputs")
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@given(hnp.arrays(object, shapes, elements=st.text(st.characters(exclude_categories=["Cs"]), max_size=8)))
def test_strings_keep_every_character(array):
    assert to_array(from_array(array), "inputs").tolist() == array.tolist()


def test_layout_widening_and_lists_keep_the_numbers() -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    assert from_array(array.T).data == np.ascontiguousarray(array.T).astype("<f4").tobytes()
    tensor = Tensor(datatype="BF16", shape=[3], data=np.array([0x3F80, 0xC000, 0x7F80], "<u2").tobytes())
    assert to_array(tensor, "x").tolist() == [1.0, -2.0, float("inf")]
    assert to_array([[1, 2], [3, 4.5]], "x").tolist() == [[1.0, 2.0], [3.0, 4.5]]


@pytest.mark.parametrize(
    ("tensor", "field"),
    [
        (Tensor("FP32", [2, 2], b"\0" * 15), "x.data"),
        (Tensor("FP32", [2, 2], b""), "x.data"),
        (Tensor("FP32", [], b"\0" * 4), "x.shape"),
        (Tensor("FP32", [1] * 33, b"\0" * 4), "x.shape"),
        (Tensor("FP32", [0, 4], b""), "x.shape[0]"),
        (Tensor("FP32", [1, -4], b""), "x.shape[1]"),
        (Tensor("FP32", [1, 2**31], b""), "x.shape[1]"),
        (Tensor("FP32", [2**31 - 1] * 32, b""), "x.data"),
        (Tensor("UINT8", [2**30, 2**30, 16], b""), "x.data"),
        (Tensor("BF16", [2], b"\0"), "x.data"),
        (Tensor("FP31", [1], b"\0"), "x.datatype"),
        (Tensor("F" * 10_000, [1], b"\0"), "x.datatype"),
        (Tensor("BYTES", [2], b"\1\0\0\0a"), "x.data"),
        (Tensor("BYTES", [1], b"\xff\xff\xff\xff"), "x.data"),
        (Tensor("BYTES", [1], b"\1\0\0\0\xff"), "x.data"),
        (Tensor("BYTES", [2**31 - 1] * 9, b"\0\0\0\0"), "x.data"),
        ([], "x"),
        ([[]], "x"),
        ([[1, 2], [3]], "x"),
        ([["a"]], "x"),
        ([None], "x"),
        ([{}], "x"),
        ([2**70], "x"),
        ([[b"1"]], "x"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(tensor, field):
    with pytest.raises(BadTensor) as refused:
        to_array(tensor, "x")
    assert f"`{field}" in str(refused.value)
    assert len(str(refused.value)) < 300


@given(st.lists(st.integers(), max_size=40))
def test_any_shape_is_either_counted_or_refused(shape):
    try:
        count = items(shape, "x")
    except BadTensor:
        assert not 1 <= len(shape) <= 32 or any(not 1 <= d < 2**31 for d in shape)
    else:
        assert count == int(np.prod(np.array(shape, dtype=object)))


def spec(datatype, *shape):
    return TensorSpec(name="x", datatype=datatype, shape=list(shape))


def test_arrays_are_fitted_and_nan_named_by_its_place() -> None:
    assert fit(np.array([[1, 2]]), spec("FP32", 2), "x").dtype == np.float32
    same = np.zeros((3, 7, 2), "f4")
    assert fit(same, spec("FP32", -1, 2), "x") is same
    assert fit(np.array([True]), spec("INT64"), "x").dtype == np.int64
    assert fit(np.array([3.0, 255.0]), spec("UINT8"), "x").tolist() == [3, 255]
    assert fit(np.array([1, 0]), spec("BOOL"), "x").tolist() == [True, False]
    assert np.isinf(fit(np.array([np.inf, 1.0]), spec("FP32"), "x")[0])
    check_finite(np.zeros((2, 2), "f4"), "inputs")
    check_finite(np.array([1]), "inputs")
    for value, what in ((np.nan, "NaN"), (-np.inf, "an infinite value")):
        array = np.zeros((3, 4), "f4")
        array[1, 2] = value
        with pytest.raises(BadTensor, match=rf"`inputs` holds {what} at index \[1, 2\]"):
            check_finite(array, "inputs")


@pytest.mark.parametrize(
    ("shape", "wanted", "remedy"),
    [
        ((4,), (4,), "lacks the axis of items"),
        ((2, 8, 8, 3), (3, 8, 8), "transpose it by (0, 3, 1, 2)"),
        ((2, 3, 8, 8), (8, 8, 3), "transpose it by (0, 2, 3, 1)"),
        ((5,), (1,), "x.reshape(-1, 1)"),
        ((2, 3), (4,), ""),
    ],
)
def test_a_wrong_shape_is_told_with_its_remedy(shape, wanted, remedy):
    with pytest.raises(BadTensor, match=r"the model takes \[n, ") as refused:
        fit(np.zeros(shape, "f4"), spec("FP32", *wanted), "inputs")
    assert remedy in str(refused.value)
    assert (";" in str(refused.value)) == bool(remedy)


def test_what_has_no_wire_name_or_other_values_is_refused() -> None:
    with pytest.raises(BadTensor, match="multiply by 255 and convert to uint8"):
        fit(np.array([[0.5, 1.0]], "f4"), spec("UINT8", 2), "inputs")
    for array in (np.zeros(1, "c8"), np.zeros(1, "M8[s]"), np.array([object()])):
        with pytest.raises(BadTensor):
            from_array(array)
    with pytest.raises(BadTensor):
        datatype_of(np.zeros(1, "c8"))
    tensor = Tensor("BYTES", [1], b"\x01\0\0\0\xff")
    with pytest.raises(BadTensor, match=r"x .*binary"):
        to_list(TensorView(tensor.datatype, tensor.shape, memoryview(tensor.data)), "x")


@pytest.mark.parametrize(
    ("array", "wanted"),
    [
        (np.zeros((2, 3), "f4"), spec("FP32", 4)),
        (np.zeros((2, 3), "f4"), spec("FP32")),
        (np.zeros((2,), "f4"), spec("FP32", 3)),
        (np.array([1.5]), spec("INT64")),
        (np.array([np.nan]), spec("INT64")),
        (np.array([1e300]), spec("FP32")),
        (np.array([1e6], "f4"), spec("FP16")),
        (np.array([2**40]), spec("INT32")),
        (np.array([300]), spec("UINT8")),
        (np.array([-1]), spec("UINT8")),
        (np.array([2**63], "u8"), spec("INT64")),
        (np.array(["a"], object), spec("FP32")),
        (np.array([1.0]), spec("BYTES")),
        (np.array([2.0]), spec("BOOL")),
    ],
)
def test_what_does_not_fit_the_model_is_refused(array, wanted):
    with pytest.raises(BadTensor, match="field `inputs"):
        fit(array, wanted, "inputs")


# -- The protocol's tensors to the system's and back, against numpy.
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
