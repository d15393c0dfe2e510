"""One item's values to bytes and back, checked against the model's signature; and headers of .npy files. Only these import numpy.

An item is one position of the batch axis: for a model that takes x [n, 784] it is 784 numbers.
"""

from collections.abc import Sequence
from io import BytesIO
from itertools import accumulate, pairwise
from math import isfinite, prod
from typing import Any, BinaryIO

from msgspec import Struct

from bus.datatypes import ARRAYS, DATATYPES, SIZES
from bus.messages.catalog import TensorSpec
from bus.messages.public import TensorView
from bus.tensors import BadTensor, shown, takes, texts
from bus.values import TYPES, Ragged, flatten, nest, packed, to_list


class BadItem(ValueError):
    """An item that does not fit the model; the text says how."""


def pack(value: Any, spec: TensorSpec) -> tuple[list[int], bytes]:
    """The shape and bytes of one item given as a nested list (or a bare value, where the model takes [n]). Raises BadItem."""
    try:
        shape, flat = flatten(value)
    except Ragged as error:
        raise BadItem(str(error)) from error
    if len(shape) > len(spec.shape) or list in map(type, flat):
        raise BadItem(f"is nested deeper than the shape that the model takes, {shown(spec.shape)}")
    if len(shape) < len(spec.shape):
        raise BadItem(f"has {len(shape)} axes, the model takes {shown(spec.shape)}")
    if not fits(shape, spec):
        raise BadItem(f"has shape {shape}, the model takes {shown(spec.shape)}")
    kinds = TYPES[DATATYPES[spec.datatype].kind]
    if not set(map(type, flat)) <= kinds:
        wrong = next(one for one in flat if type(one) not in kinds)
        name = "null" if wrong is None else type(wrong).__name__
        raise BadItem(f"holds {name} {str(wrong)[:40]!r} where the model takes {spec.datatype}")
    try:
        return shape, packed(spec.datatype, flat)
    except OverflowError as error:
        raise BadItem(f"holds a number that does not fit {spec.datatype}: {error}") from error


def fits(shape: Sequence[int], spec: TensorSpec) -> bool:
    """Whether an item of this shape is what the model takes."""
    return 0 not in shape and takes(spec.shape, shape)


def row_bytes(datatype: str, shape: Sequence[int]) -> int:
    """Bytes of one item; not for BYTES, whose items differ."""
    return SIZES[datatype] * prod(shape)


def split(datatype: str, count: int, shape: Sequence[int], data: bytes | memoryview) -> list[memoryview]:
    """The bytes of each of `count` items. Raises BadItem when they are not that many."""
    view = memoryview(data)
    if SIZES[datatype]:
        row = row_bytes(datatype, shape)
        if row * count != len(view):
            raise BadItem(
                f"has {len(view)} bytes of data, {count} items of {shown(shape)} {datatype} take {row * count}"
            )
        return [view[i * row : (i + 1) * row] for i in range(count)]
    each = prod(shape)
    try:
        pieces = texts(view, count * each, "")
    except BadTensor as error:
        raise BadItem(f"its data does not hold {count * each} texts, each after its four-byte length") from error
    ends = [0, *accumulate(sum(4 + len(piece) for piece in pieces[i * each : (i + 1) * each]) for i in range(count))]
    return [view[start:end] for start, end in pairwise(ends)]


def nested(datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Any:
    """One item's bytes as nested lists of numbers or texts; NaN and infinities become None. A bare value for shape []."""
    flat = to_list(TensorView(datatype, list(shape), memoryview(data)), "item", "replace")
    if DATATYPES[datatype].kind == "f":
        flat = [number if isfinite(number) else None for number in flat]
    return nest(flat, shape)


# -- the header of a .npy file

LONGEST = 65536  # bytes of a header that is read


class NpyHeader(Struct, frozen=True):
    """The contents of a .npy file: so many items of this datatype and shape, from byte `start` on."""

    datatype: str
    items: int
    shape: list[int]
    start: int

    @property
    def row(self) -> int:
        """Bytes of one item."""
        return row_bytes(self.datatype, self.shape)


def read_header(file: BinaryIO, size: int) -> NpyHeader:
    """Parse a file's beginning. size: bytes of the whole file. Raises BadItem."""
    from numpy.lib import format as npy  # noqa: PLC0415  (60 ms and 10 MB, for jobs with such files)

    try:
        version = npy.read_magic(file)
    except ValueError as error:
        raise BadItem("is no .npy file: save it with numpy.save") from error
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        shape, fortran, dtype = read(file, max_header_size=LONGEST)
    except Exception as error:  # a ValueError, and what its parsers raise beside it
        raise BadItem(f"has a .npy header that is not understood: {error}") from error
    datatype = ARRAYS.get(dtype.str)
    if datatype is None:
        raise BadItem(f"holds {dtype.str!r}: only little-endian numbers and booleans; texts go into .jsonl or .msgpack")
    if not shape or min(shape) < 0:
        raise BadItem("has no axis: the first one counts the items")
    if fortran and len(shape) > 1:
        raise BadItem("is in Fortran order: save numpy.ascontiguousarray(array)")
    found = NpyHeader(datatype, shape[0], list(shape[1:]), file.tell())
    if size != found.start + found.items * found.row:
        raise BadItem(f"has {size} bytes, its header speaks of {found.start + found.items * found.row}")
    return found


def write_header(datatype: str, items: int, shape: list[int]) -> bytes:
    """A header. It can be rewritten for another number of items: numpy leaves room. Raises BadItem where .npy has no such datatype."""
    from numpy.lib import format as npy  # noqa: PLC0415

    row = DATATYPES[datatype]
    if not row.code:
        raise BadItem(f".npy holds no {datatype}: let the output's name end in .jsonl or .msgpack")
    file = BytesIO()
    npy.write_array_header_1_0(file, {"descr": row.array, "fortran_order": False, "shape": (items, *shape)})
    return file.getvalue()
