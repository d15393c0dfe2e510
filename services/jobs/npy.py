"""The header of a .npy file, read and written without numpy (format: numpy.lib.format, versions 1 to 3)."""

import ast
import struct
from typing import BinaryIO

from msgspec import Struct

from bus.tensors import NUMPY_NAMES
from services.jobs.items import BadItem, row_bytes

MAGIC = b"\x93NUMPY"
HEADER = 256  # bytes that our own headers take, so that one can be written again with another number of items
LONGEST = 65536
_DATATYPES = {code: name for name, code in NUMPY_NAMES.items()} | {"|u1": "UINT8", "<u1": "UINT8", "<i1": "INT8"}


class NpyHeader(Struct, frozen=True):
    """What a .npy file holds: so many items of this datatype and shape, from byte `start` on."""

    datatype: str
    items: int
    shape: list[int]
    start: int

    @property
    def row(self) -> int:
        """Bytes of one item."""
        return row_bytes(self.datatype, self.shape)


def read_header(file: BinaryIO, size: int) -> NpyHeader:
    """Understand a file's beginning. size: of the whole file. Raises BadItem."""
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
