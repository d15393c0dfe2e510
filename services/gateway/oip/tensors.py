"""Tensors between the protocol's form (JSON numbers, nested or flat, or raw bytes) and the system's. Pure, and without numpy.

Datatypes as the system's (bus.tensors); little-endian bytes in row-major order; BYTES elements each after a four-byte length.
"""

import math
import struct
from typing import Any

from bus.messages.public import TensorView
from bus.tensors import DATATYPES, ITEM_BYTES, BadTensor, items

CODES = {
    "BOOL": "?", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
_FLOATS = frozenset({"FP16", "FP32", "FP64", "BF16"})
_PLAIN: dict[str, set[type]] = {"FP": {int, float}, "INT": {int}, "BOOL": {bool}, "BYTES": {str}}
_WORDS = {"FP": "numbers", "INT": "whole numbers", "BOOL": "true and false", "BYTES": "texts"}
_LENGTH = struct.Struct("<I")

TensorFields = dict[str, Any]  # a tensor for the client library: datatype, shape, data


def from_bytes(datatype: str, shape: list[int], data: Any, where: str) -> TensorFields:
    """The tensor with these raw bytes, which are not copied. where: the field, for errors. Raises BadTensor."""
    count = _count(datatype, shape, where)
    size = ITEM_BYTES.get(datatype)
    if size is not None and count * size != len(data):
        need = f"{count * size}" if count < 2**56 else "more than any machine has"
        raise BadTensor(f"{where} has {len(data)} bytes of data; its shape and {datatype} need {need}")
    if size is None and 4 * count > len(data):
        raise BadTensor(
            f"{where} has {len(data)} bytes of data; {count} texts, each after four bytes of length, need more"
        )
    return {"datatype": datatype, "shape": shape, "data": data}


def from_numbers(datatype: str, shape: list[int], data: Any, where: str) -> TensorFields:
    """The tensor with this JSON data: flat, or nested as the shape says. Raises BadTensor."""
    count = _count(datatype, shape, where)
    if not isinstance(data, list):
        raise BadTensor(f"{where}.data must be a list")
    flat = _flat(data, shape, where) if data and type(data[0]) is list else data
    if len(flat) != count:
        raise BadTensor(
            f"{where}.data has {len(flat)} elements; its shape needs {count if count < 2**63 else 'far more'}"
        )
    kind = _kind(datatype)
    if not set(map(type, flat)) <= _PLAIN[kind]:
        raise BadTensor(f"{where}.data must hold {_WORDS[kind]} only, for {datatype}")
    try:
        return {"datatype": datatype, "shape": shape, "data": _packed(datatype, flat)}
    except (struct.error, OverflowError) as error:
        raise BadTensor(f"{where}.data holds a number that does not fit {datatype}") from error


def to_numbers(tensor: TensorView, where: str) -> list[Any]:
    """All elements, flat, for JSON. Raises BadTensor for bytes that are not UTF-8."""
    datatype, data = tensor.datatype, tensor.data
    code = CODES.get(datatype)
    if code is not None:
        return list(struct.unpack(f"<{len(data) // ITEM_BYTES[datatype]}{code}", data))
    if datatype == "BF16":
        widened = b"".join([b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2)])
        return list(struct.unpack(f"<{len(data) // 2}f", widened))
    try:
        return [bytes(piece).decode() for piece in texts(data)]
    except UnicodeDecodeError as error:
        raise BadTensor(f"{where} holds bytes that are no UTF-8: ask for it as binary data") from error


def texts(data: memoryview) -> list[memoryview]:
    """The elements of a BYTES tensor."""
    found = []
    at = 0
    while at + 4 <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return found


def packed_texts(elements: list[bytes]) -> bytes:
    """A BYTES tensor's data."""
    return b"".join([part for element in elements for part in (_LENGTH.pack(len(element)), element)])


def count_of(tensor: TensorFields) -> int:
    """Its number of elements."""
    return math.prod(tensor["shape"])


def _count(datatype: str, shape: list[int], where: str) -> int:
    if datatype not in DATATYPES:
        raise BadTensor(f"{where}.datatype is {datatype[:40]!r}: use one of {', '.join(DATATYPES)}")
    return items(shape, where)


def _kind(datatype: str) -> str:
    if datatype in _FLOATS:
        return "FP"
    return datatype if datatype in ("BOOL", "BYTES") else "INT"


def _flat(data: list[Any], shape: list[int], where: str) -> list[Any]:
    level: list[Any] = [data]
    for axis, length in enumerate(shape):
        for part in level:
            if type(part) is not list or len(part) != length:
                raise BadTensor(f"{where}.data is nested otherwise than its shape says, at axis {axis}")
        level = [element for part in level for element in part]
    return level


def _packed(datatype: str, flat: list[Any]) -> bytes:
    code = CODES.get(datatype)
    if code is not None:
        return struct.pack(f"<{len(flat)}{code}", *flat)
    if datatype == "BF16":
        return struct.pack(
            f"<{len(flat)}H", *map(_halved, struct.unpack(f"<{len(flat)}I", struct.pack(f"<{len(flat)}f", *flat)))
        )
    return packed_texts([text.encode() for text in flat])


def _halved(bits: int) -> int:
    """A float32's bits as those of the nearest bfloat16, ties to even."""
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    if rounded & 0x7F80 == 0x7F80:
        raise OverflowError
    return rounded
