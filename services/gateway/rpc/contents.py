"""InferTensorContents and the same elements as bytes in C order, little endian. Pure."""

import sys
from array import array
from typing import Any

from bus.messages.public import TensorView
from bus.tensors import ITEM_BYTES, BadTensor, items
from services.gateway.oip.tensors import packed_texts, texts
from services.gateway.rpc.wire import varint

FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_CODES = {
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
}
_PACKED = {
    "BOOL": b"\x0a",
    "FP32": b"\x32",
    "FP64": b"\x3a",
}  # tags of fields whose packed form is the elements' own bytes
_SWAP = sys.byteorder == "big"


def to_data(contents: Any, datatype: str, shape: list[int], where: str) -> bytes:
    """The elements of `contents`, which must be as many as the shape holds and in the datatype's own field. Raises BadTensor."""
    name = FIELDS.get(datatype)
    if name is None:
        raise BadTensor(f"field `{where}.contents` cannot hold {datatype}: send it in `raw_input_contents`")
    for field, _ in contents.ListFields():
        if field.name != name:
            raise BadTensor(f"field `{where}.contents.{field.name}`: the elements of {datatype} belong into `{name}`")
    elements = getattr(contents, name)
    count = items(shape, where)
    if len(elements) != count:
        raise BadTensor(
            f"field `{where}.contents.{name}` has {len(elements)} elements: shape {shape} of {datatype} needs {count}"
        )
    if datatype == "BYTES":
        return packed_texts(elements)
    if datatype in _PACKED:
        contents.DiscardUnknownFields()
        whole: bytes = contents.SerializeToString()
        return whole[-count * ITEM_BYTES[datatype] :]
    try:
        return _bytes(array(_CODES[datatype], elements))
    except OverflowError as error:
        raise BadTensor(f"field `{where}.contents.{name}` holds integers that do not fit {datatype}") from error


def fill(contents: Any, tensor: TensorView) -> None:
    """Put the tensor's elements into `contents`; its datatype must be one of FIELDS."""
    datatype, data = tensor.datatype, tensor.data
    if datatype in _PACKED:
        contents.MergeFromString(b"".join((_PACKED[datatype], varint(len(data)), data)))
        return
    elements = getattr(contents, FIELDS[datatype])
    if datatype == "BYTES":
        elements.extend(map(bytes, texts(data)))
        return
    numbers = array(_CODES[datatype])
    numbers.frombytes(data)
    if _SWAP:
        numbers.byteswap()
    elements.extend(numbers)


def _bytes(numbers: "array[Any]") -> bytes:
    if _SWAP:
        numbers.byteswap()
    return numbers.tobytes()
