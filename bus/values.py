"""Tensors from plain Python values, as JSON and MessagePack have them, and back. Needs no numpy."""

import struct
from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any

from bus.datatypes import DATATYPES
from bus.messages.public import Tensor, TensorView
from bus.tensors import LARGEST_RANK, BadTensor, items, pack_texts, texts, unknown_datatype, wrong_size

TensorFields = dict[str, Any]  # a tensor for the client library: datatype, shape, data

TYPES: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}, "O": {str}}  # by kind
_WORDS = {"b": "true and false", "i": "whole numbers", "u": "whole numbers", "f": "numbers", "O": "texts"}


class Ragged(ValueError):
    """A nested list has no shape. The text goes on after its name."""


def from_bytes(datatype: str, shape: list[int], data: Any, where: str) -> TensorFields:
    """The tensor with these raw bytes, which are not copied. where: the field, for errors. Raises BadTensor."""
    row = DATATYPES.get(datatype)
    if row is None:
        raise unknown_datatype(datatype, where)
    count = items(shape, where)
    if count * row.size != len(data) if row.size else 4 * count > len(data):
        if row.size:
            raise wrong_size(datatype, shape, len(data), where)
        raise BadTensor(
            f"field `{where}.data` has {len(data)} bytes of data: {count} texts, each after its four-byte length, need more"
        )
    return {"datatype": datatype, "shape": shape, "data": data}


def from_list(datatype: str, shape: list[int], data: Any, where: str) -> TensorFields:
    """The tensor with these elements: flat, or nested as the shape says. Raises BadTensor."""
    row = DATATYPES.get(datatype)
    if row is None:
        raise unknown_datatype(datatype, where)
    count = items(shape, where)
    if not isinstance(data, list):
        raise BadTensor(f"{where}.data must be a list")
    flat = data
    if data and type(data[0]) is list:
        try:
            found, flat = flatten(data)
        except Ragged as error:
            raise BadTensor(f"{where}.data {error}") from error
        if found != shape:
            raise BadTensor(f"{where}.data is nested as {found}, otherwise than its shape {shape} says")
    if len(flat) != count:
        raise BadTensor(
            f"{where}.data has {len(flat)} elements; its shape needs {count if count < 2**63 else 'far more'}"
        )
    if not set(map(type, flat)) <= TYPES[row.kind]:
        raise BadTensor(f"{where}.data must hold {_WORDS[row.kind]} only, for {datatype}")
    try:
        return {"datatype": datatype, "shape": shape, "data": packed(datatype, flat)}
    except OverflowError as error:
        raise BadTensor(f"{where}.data holds a number that does not fit {datatype}") from error


def to_list(tensor: TensorView | Tensor, where: str, errors: str = "strict") -> list[Any]:
    """All elements, flat. errors: as `bytes.decode` takes it. Raises BadTensor, also for texts that are not UTF-8."""
    data, row = tensor.data, DATATYPES[tensor.datatype]
    if row.code:
        return list(struct.unpack(f"<{len(data) // row.size}{row.code}", data))
    if tensor.datatype == "BF16":
        count = len(data) // 2
        bits = [half << 16 for half in struct.unpack(f"<{count}H", data)]
        return list(struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *bits)))
    try:
        return [piece.decode(errors=errors) for piece in texts(data, prod(tensor.shape), where)]
    except UnicodeDecodeError as error:
        raise BadTensor(f"{where} holds bytes that are no UTF-8: ask for it as binary data") from error


def packed(datatype: str, elements: Sequence[Any]) -> bytes:
    """The elements' bytes on the wire. They have the types in TYPES. Raises OverflowError for a number that does not fit."""
    row, count = DATATYPES[datatype], len(elements)
    try:
        if row.code:
            return struct.pack(f"<{count}{row.code}", *elements)
        if datatype == "BF16":
            bits = struct.unpack(f"<{count}I", struct.pack(f"<{count}f", *elements))
            return struct.pack(f"<{count}H", *map(_halved, bits))
    except struct.error as error:
        raise OverflowError(str(error)) from error
    return pack_texts(elements)


def flatten(value: Any) -> tuple[list[int], list[Any]]:
    """The shape of a nested list and its elements in row-major order. What is no list has the shape [].

    Where an element of the first row is no list, those of other rows may be some: they are among the elements. Raises Ragged.
    """
    shape: list[int] = []
    level = [value]
    while level and type(level[0]) is list:
        if set(map(type, level)) != {list} or len(set(map(len, level))) != 1:
            raise Ragged("is a ragged list: all items need the same shape")
        if len(shape) == LARGEST_RANK:
            raise Ragged(f"is nested more than {LARGEST_RANK} deep")
        shape.append(len(level[0]))
        level = level[0] if len(level) == 1 else list(chain.from_iterable(level))
    return shape, level


def leaves(value: Any) -> list[Any]:
    """All values of a nested list of any form, in order."""
    if isinstance(value, list) and set(map(type, value)).isdisjoint((list, tuple)):
        return value
    found: list[Any] = []
    level = [value]
    while level:
        part = level.pop()
        if isinstance(part, (list, tuple)):
            level.extend(reversed(part))
        else:
            found.append(part)
    return found


def nest(flat: list[Any], shape: Sequence[int]) -> Any:
    """Elements as nested lists; a bare value for the shape []."""
    for length in reversed(shape[1:]):
        flat = [flat[at : at + length] for at in range(0, len(flat), length)]
    return flat if shape else flat[0]


def filled(shape: Sequence[int], count: int) -> list[int] | None:
    """A shape with lengths for its open axes (-1): the first takes what is left of `count` elements, others 1. None: they do not fill it."""
    known = prod(length for length in shape if length != -1)
    if -1 not in shape:
        return list(shape) if count == known else None
    if known == 0 or count == 0 or count % known:
        return None
    first = shape.index(-1)
    return [length if length != -1 else count // known if axis == first else 1 for axis, length in enumerate(shape)]


def _halved(bits: int) -> int:
    """A float32's bits as those of the nearest bfloat16, ties to even. Raises OverflowError."""
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    if rounded & 0x7F80 == 0x7F80:
        raise OverflowError("too large for a bfloat16")
    return rounded
