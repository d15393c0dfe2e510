"""Typed contents and bytes are the same elements."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.datatypes import DATATYPES
from bus.messages.public import TensorView
from bus.tensors import BadTensor, pack_texts
from services.gateway.rpc.infer import fill, to_data
from services.gateway.rpc.messages import INFERENCE

NUMBERS = [name for name, row in DATATYPES.items() if row.code and row.contents]


@pytest.mark.parametrize("datatype", NUMBERS)
@given(data=st.binary(min_size=8, max_size=64))
def test_numbers_go_in_and_come_out(datatype: str, data: bytes) -> None:
    dtype = np.dtype(DATATYPES[datatype].array)
    data = data[: len(data) // dtype.itemsize * dtype.itemsize]
    if datatype == "BOOL":
        data = bytes(byte & 1 for byte in data)
    array = np.frombuffer(data, dtype)
    contents = INFERENCE.InferTensorContents()
    fill(contents, TensorView(datatype, [len(array)], memoryview(data)))
    read = INFERENCE.InferTensorContents.FromString(contents.SerializeToString())
    held = np.array(list(getattr(read, DATATYPES[datatype].contents)), dtype)
    np.testing.assert_array_equal(held, array)
    assert to_data(read, datatype, [len(array)], "x") == data


@given(pieces=st.lists(st.binary(max_size=9), min_size=1, max_size=9))
def test_texts_go_in_and_come_out(pieces: list[bytes]) -> None:
    data = pack_texts(pieces)
    contents = INFERENCE.InferTensorContents()
    fill(contents, TensorView("BYTES", [len(pieces)], memoryview(data)))
    assert list(contents.bytes_contents) == pieces
    assert to_data(contents, "BYTES", [len(pieces)], "x") == data


def test_fields_that_nobody_knows_are_no_elements() -> None:
    contents = INFERENCE.InferTensorContents.FromString(b"\x32\x04\0\0\x80\x3f" + b"\x4a\x02hi")
    assert to_data(contents, "FP32", [1], "x") == struct.pack("<f", 1.0)


def test_numbers_of_which_each_has_its_own_tag_are_read() -> None:
    contents = INFERENCE.InferTensorContents.FromString(b"\x35\0\0\x80\x3f\x35\0\0\0\x40")
    assert to_data(contents, "FP32", [2], "x") == struct.pack("<ff", 1.0, 2.0)


@pytest.mark.parametrize(
    ("datatype", "shape", "given", "words"),
    [
        ("FP32", [2], {"fp32_contents": [1.0]}, "x.contents.fp32_contents` has 1 elements"),
        ("FP32", [1], {"int_contents": [1]}, "x.contents.int_contents`: the elements of FP32 belong into `fp32_contents`"),
        ("FP32", [1], {"fp32_contents": [1.0], "fp64_contents": [1.0]}, "x.contents.fp64_contents`"),
        ("INT8", [1], {"int_contents": [128]}, "integers that do not fit INT8"),
        ("UINT8", [1], {"uint_contents": [256]}, "integers that do not fit UINT8"),
        ("FP16", [1], {"fp32_contents": [1.0]}, "cannot hold FP16"),
        ("BF16", [1], {}, "cannot hold BF16"),
        ("INT64", [2**31 - 1] * 3, {"int64_contents": [1]}, "needs 9903520300447984"),
        ("INT64", [-1], {"int64_contents": [1]}, r"shape\[0\]` is -1"),
        ("INT64", [2**31], {"int64_contents": [1]}, r"shape\[0\]` is 2147483648"),
        ("INT64", [], {"int64_contents": [1]}, "has 0 axes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(datatype: str, shape: list[int], given: dict[str, list[float]], words: str) -> None:
    with pytest.raises(BadTensor, match=words):
        to_data(INFERENCE.InferTensorContents(**given), datatype, shape, "x")
