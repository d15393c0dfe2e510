"""One item's values to bytes and back, checked against the model's signature; and headers of .npy files. Needs no numpy.

An item is one position of the batch axis: for a model that takes x [n, 784] it is 784 numbers.
"""

import ast
import struct
from collections.abc import Sequence
from math import isfinite
from typing import Any, BinaryIO

from msgspec import Struct

from bus.messages.catalog import TensorSpec
from bus.tensors import ITEM_BYTES, NUMPY_NAMES

_CODES = {
    "BOOL": "?", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I",
    "UINT64": "Q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip


class BadItem(ValueError):
    """An item that does not fit the model; the text says how."""


def packed_as(datatype: str) -> str:
    """The datatype in which numbers for an input of this datatype are sent. Executors convert FP32 to BF16."""
    return "FP32" if datatype == "BF16" else datatype


def pack(value: Any, spec: TensorSpec) -> tuple[list[int], bytes]:
    """The shape and bytes of one item given as a nested list (or a bare value, where the model takes [n]). Raises BadItem."""
    shape: list[int] = []
    flat: list[Any] = []
    _flatten(value, spec.shape, 0, shape, flat)
    if spec.datatype == "BYTES":
        return shape, _pack_texts(flat)
    code = _CODES[packed_as(spec.datatype)]
    kinds = (int, float) if code in "efd" else (bool,) if code == "?" else (int,)
    for number in flat:
        if type(number) not in kinds:
            shown = type(number).__name__ if number is not None else "null"
            raise BadItem(f"holds {shown} {str(number)[:40]!r} where the model takes {spec.datatype}")
    try:
        return shape, struct.pack(f"<{len(flat)}{code}", *flat)
    except (struct.error, OverflowError) as error:
        raise BadItem(f"holds a number that does not fit {spec.datatype}: {error}") from error


def _flatten(value: Any, wanted: Sequence[int], axis: int, shape: list[int], flat: list[Any]) -> None:
    if axis == len(wanted):
        if isinstance(value, list):
            raise BadItem(f"is nested deeper than the shape that the model takes, {shown(wanted)}")
        flat.append(value)
        return
    if not isinstance(value, list):
        raise BadItem(f"has {axis} axes, the model takes {shown(wanted)}")
    if len(shape) == axis:
        shape.append(len(value))
        if len(value) == 0 or wanted[axis] not in (-1, len(value)):
            raise BadItem(f"has shape {shape}{', ...' * (axis + 1 < len(wanted))}, the model takes {shown(wanted)}")
    elif len(value) != shape[axis]:
        raise BadItem("is no regular nested list: every row must have the same length")
    for one in value:
        _flatten(one, wanted, axis + 1, shape, flat)


def fits(shape: Sequence[int], spec: TensorSpec) -> bool:
    """Whether an item of this shape is what the model takes."""
    return len(shape) == len(spec.shape) and all(w in (-1, s) and s > 0 for s, w in zip(shape, spec.shape, strict=True))


def converts(datatype: str, spec: TensorSpec) -> bool:
    """Whether the executor takes this datatype for that input: only floating-point precision may be lost."""
    if datatype == "BYTES" or spec.datatype == "BYTES":
        return datatype == spec.datatype
    have, want = _kind(datatype), _kind(spec.datatype)
    return have == want or (want == "f" and have in "iu") or (want in "iu" and have in "iub")


def shown(shape: Sequence[int]) -> str:
    """A shape for people."""
    return f"[{', '.join('any' if length == -1 else str(length) for length in shape)}]"


def row_bytes(datatype: str, shape: Sequence[int]) -> int:
    """Bytes of one item; not for BYTES, whose items differ."""
    size = ITEM_BYTES[datatype]
    for length in shape:
        size *= length
    return size


def split(datatype: str, count: int, shape: Sequence[int], data: bytes | memoryview) -> list[memoryview]:
    """The bytes of each of `count` items. Raises BadItem when they are not that many."""
    view = memoryview(data)
    if datatype != "BYTES":
        row = row_bytes(datatype, shape)
        if row * count != len(view):
            raise BadItem(
                f"has {len(view)} bytes of data, {count} items of {shown(shape)} {datatype} take {row * count}"
            )
        return [view[i * row : (i + 1) * row] for i in range(count)]
    texts = 1
    for length in shape:
        texts *= length
    rows, at = [], 0
    for _ in range(count):
        start = at
        for _ in range(texts):
            at += 4 + int.from_bytes(view[at : at + 4], "little")
        if at > len(view):
            break
        rows.append(view[start:at])
    if len(rows) != count or at != len(view):
        raise BadItem(f"its data does not hold {count * texts} texts, each after its four-byte length")
    return rows


def nested(datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Any:
    """One item's bytes as nested lists of numbers or texts; NaN and infinities become None. A bare value for shape []."""
    flat: list[Any]
    if datatype == "BYTES":
        flat = _unpack_texts(bytes(data))
    elif datatype == "BF16":
        halves = struct.unpack(f"<{len(data) // 2}H", data)
        flat = list(
            struct.unpack(f"<{len(halves)}f", struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves)))
        )
    else:
        flat = list(struct.unpack(f"<{len(data) // ITEM_BYTES[datatype]}{_CODES[datatype]}", data))
    if _kind(datatype) == "f":
        flat = [number if isfinite(float(number)) else None for number in flat]
    for length in reversed(shape[1:]):
        flat = [flat[i : i + length] for i in range(0, len(flat), length)]
    return flat if shape else flat[0]


def _pack_texts(texts: list[Any]) -> bytes:
    pieces: list[bytes] = []
    for text in texts:
        if not isinstance(text, str):
            raise BadItem(f"holds {type(text).__name__} {str(text)[:40]!r} where the model takes texts")
        piece = text.encode()
        pieces += (len(piece).to_bytes(4, "little"), piece)
    return b"".join(pieces)


def _unpack_texts(data: bytes) -> list[str]:
    texts, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        texts.append(data[at + 4 : at + 4 + size].decode(errors="replace"))
        at += 4 + size
    return texts


def _kind(datatype: str) -> str:
    return "f" if datatype == "BF16" else "S" if datatype == "BYTES" else NUMPY_NAMES[datatype][1]


# -- the header of a .npy file (format: numpy.lib.format, versions 1 to 3)

MAGIC = b"\x93NUMPY"
HEADER = 256  # bytes of each header that is written, so that it can be rewritten for another number of items
LONGEST = 65536
_DATATYPES = {code: name for name, code in NUMPY_NAMES.items()} | {"|u1": "UINT8", "<u1": "UINT8", "<i1": "INT8"}


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
    if file.read(6) != MAGIC:
        raise BadItem("is no .npy file: save it with numpy.save")
    version = file.read(2)
    width = 2 if version[:1] == b"\x01" else 4
    length = int.from_bytes(file.read(width), "little")
    if length > LONGEST:
        raise BadItem("has a .npy header that is too long")
    raw = file.read(length)
    try:
        header = ast.literal_eval(raw.decode("latin1").strip())
        shape, descr = [int(n) for n in header["shape"]], header["descr"]
        fortran = header["fortran_order"]
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise BadItem(f"has a .npy header that is not understood: {error}") from error
    datatype = _DATATYPES.get(descr) if isinstance(descr, str) else None
    if datatype is None:
        raise BadItem(f"holds {descr!r}: only little-endian numbers and booleans; texts go into .jsonl or .msgpack")
    if not shape or min(shape) < 0:
        raise BadItem("has no axis: the first one counts the items")
    if fortran and len(shape) > 1:
        raise BadItem("is in Fortran order: save numpy.ascontiguousarray(array)")
    found = NpyHeader(datatype, shape[0], shape[1:], 8 + width + length)
    if size != found.start + found.items * found.row:
        raise BadItem(f"has {size} bytes, its header speaks of {found.start + found.items * found.row}")
    return found


def write_header(datatype: str, items: int, shape: list[int]) -> bytes:
    """A header of HEADER bytes. Raises BadItem where .npy has no such datatype."""
    descr = NUMPY_NAMES.get(datatype)
    if descr is None:
        raise BadItem(f".npy holds no {datatype}: let the output's name end in .jsonl or .msgpack")
    whole = (items, *shape)
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {whole!r}, }}"
    body = text.encode("latin1").ljust(HEADER - 11) + b"\n"
    if len(body) != HEADER - 10:
        raise BadItem(f"an output with {len(shape)} axes does not fit a .npy header: use .msgpack")
    return MAGIC + b"\x01\x00" + struct.pack("<H", len(body)) + body
