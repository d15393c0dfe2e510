"""The formats of a job's input and output: .npy, JSON lines, a MessagePack stream (docs/jobs.md).

An input is read item by item, never as a whole. The same file cut from the same position with the same limits gives the same chunks:
therefore a chunk's number means the same items after a restart. Outputs are appended in the order of the inputs. An item is one position of
the batch axis: for a model that takes x [n, 784] it is 784 numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import accumulate, pairwise
from math import isfinite, prod
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from bus.codec import encode
from bus.datatypes import ARRAYS, DATATYPES, SIZES, same_kind
from bus.messages.catalog import Signature, TensorSpec
from bus.messages.jobs import Checkpoint, Position
from bus.messages.public import Tensor, TensorView
from bus.tensors import BadTensor, shown, takes, texts
from bus.values import TYPES, Ragged, flatten, nest, packed, to_list


class BadItem(ValueError):
    """An item that does not fit the model; the text says how."""


def pack(value: Any, spec: TensorSpec) -> tuple[list[int], bytes]:
    """The shape and bytes of one item given as a nested list (or a bare value, where the model takes [n] or [n, 1]). Raises BadItem."""
    try:
        shape, flat = flatten(value if isinstance(value, list) or spec.shape != [1] else [value])
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


LINE = 64 * 2**20  # bytes of one line, or of one object of a MessagePack stream


class BadJobInput(ValueError):
    """An input that cannot be computed; the text names the item, counted from 0."""


Shape = tuple[str, str, tuple[int, ...]]  # input, datatype, shape of one item
Shapes = tuple[Shape, ...]
ItemTensor = tuple[Shape, bytes | memoryview]


class Item(NamedTuple):
    """One item. Items with equal `shapes` may share a chunk. data: bytes by input. next: where the next item begins."""

    shapes: Shapes
    data: tuple[bytes | memoryview, ...]
    next: Position


class Cut(NamedTuple):
    """One chunk of an input. body: the MessagePack of a query's field `inputs`."""

    items: int
    body: bytes
    next: Position


class Reader(Protocol):
    """One input file, open for reading."""

    def count(self) -> int:
        """Read every item, and count them; raises BadJobInput."""

    def cut(self, position: Position, first: int, most: int, most_bytes: int) -> Cut:
        """At least one and up to `most` items from there on. first: number of the first one, for errors. Raises BadJobInput."""


def open_reader(form: str, file: BinaryIO, size: int, signature: Signature) -> Reader:
    """The reader of a format. Raises BadJobInput when the file's beginning shows that it cannot be used."""
    if form == "npy":
        return NpyReader(file, size, signature)
    return ItemReader(json_lines if form == "jsonl" else message_pack, file, signature)


class NpyReader:
    """One array, for a model with one input; items are read at their place in the file."""

    def __init__(self, file: BinaryIO, size: int, signature: Signature) -> None:
        self._file = file
        spec = signature.inputs[0]
        if len(signature.inputs) > 1:
            names = ", ".join(spec.name for spec in signature.inputs)
            raise BadJobInput(f"the model takes {names}: a .npy file holds one array, use .jsonl or .msgpack")
        try:
            self.header: NpyHeader = read_header(file, size)
        except BadItem as error:
            raise BadJobInput(f"the file {error}") from error
        if not same_kind(self.header.datatype, spec.datatype):
            raise BadJobInput(f"the file holds {self.header.datatype}, the model takes {spec.datatype}")
        if not fits(self.header.shape, spec):
            raise BadJobInput(f"its items have shape {shown(self.header.shape)}, the model takes {shown(spec.shape)}")

    def count(self) -> int:
        return self.header.items

    def cut(self, position: Position, first: int, most: int, most_bytes: int) -> Cut:
        header = self.header
        items = max(1, min(most, header.items - first, most_bytes // max(1, header.row)))
        start = position.offset or header.start
        self._file.seek(start)
        data = self._file.read(items * header.row)
        if len(data) != items * header.row:
            raise BadJobInput(f"item {first + len(data) // max(1, header.row)}: the file ends before it")
        tensor = Tensor(header.datatype, [items, *header.shape], data)
        return Cut(items, encode(tensor), Position(start + len(data)))


class ItemReader:
    """A file of items that are parsed one by one."""

    def __init__(self, parse: Any, file: BinaryIO, signature: Signature) -> None:
        self._parse = parse
        self._file = file
        self._signature = signature

    def _items(self, position: Position, first: int) -> Iterator[Item]:
        self._file.seek(position.offset)
        found: Iterator[Item] = self._parse(self._file, position, first, self._signature)
        return found

    def count(self) -> int:
        return sum(1 for _ in self._items(Position(), 0))

    def cut(self, position: Position, first: int, most: int, most_bytes: int) -> Cut:
        taken: list[Item] = []
        size = 0
        for item in self._items(position, first):
            size += sum(map(len, item.data))
            if taken and (item.shapes != taken[0].shapes or size > most_bytes):
                break
            taken.append(item)
            if len(taken) == most:
                break
        if not taken:
            raise BadJobInput(f"item {first}: the file ends before it")
        tensors = {
            name: Tensor(datatype, [len(taken), *shape], b"".join([item.data[i] for item in taken]))
            for i, (name, datatype, shape) in enumerate(taken[0].shapes)
        }
        inputs: Any = next(iter(tensors.values())) if len(self._signature.inputs) == 1 else tensors
        return Cut(len(taken), encode(inputs), taken[-1].next)


def json_lines(file: BinaryIO, position: Position, first: int, signature: Signature) -> Iterator[Item]:
    """One item a line: its nested list, a map of input names to nested lists, or of a table's columns to values."""
    decode = msgspec.json.Decoder().decode
    offset, number = position.offset, first
    while line := file.readline(LINE):
        offset += len(line)
        if len(line) == LINE and not line.endswith(b"\n"):
            raise BadJobInput(f"item {number}: its line is longer than {LINE // 2**20} MB")
        if not line.strip():
            continue
        try:
            value = decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise BadJobInput(f"item {number}: the line is no JSON: {error}") from error
        cells = [
            _packed(one, spec, f"item {number}: {_named(spec.name, signature)}")
            for spec, one in _by_input(_row(value, signature, number), signature, number)
        ]
        yield Item(tuple(cell[0] for cell in cells), tuple(cell[1] for cell in cells), Position(offset))
        number += 1


def message_pack(file: BinaryIO, position: Position, first: int, signature: Signature) -> Iterator[Item]:
    """A stream of objects, each what a query's field `inputs` may be: a tensor of one or more items, a list, or a map."""
    import msgpack  # noqa: PLC0415  (only for files of this kind)

    unpacker = msgpack.Unpacker(file, raw=False, max_buffer_size=LINE, read_size=256 * 1024)
    start, skip, number = position.offset, position.skip, first
    while True:
        try:
            value = unpacker.unpack()
        except msgpack.OutOfData:
            if file.tell() > start:
                raise BadJobInput(f"item {number}: the file ends within a MessagePack object") from None
            return
        except Exception as error:  # of many kinds
            raise BadJobInput(f"item {number}: no MessagePack object of at most {LINE // 2**20} MB: {error}") from error
        end = position.offset + unpacker.tell()
        items = _of_object(value, signature, number)
        for i, (shapes, data) in enumerate(items):
            if i < skip:
                continue
            last = i + 1 == len(items)
            yield Item(shapes, data, Position(end) if last else Position(start, i + 1))
            number += 1
        start, skip = end, 0


def _of_object(value: Any, signature: Signature, number: int) -> list[tuple[Shapes, tuple[bytes | memoryview, ...]]]:
    columns: list[list[ItemTensor]] = []
    for spec, one in _by_input(value, signature, number):
        where = _named(spec.name, signature)
        if isinstance(one, list):
            columns.append([_packed(item, spec, f"item {number + i}: {where}") for i, item in enumerate(one)])
            continue
        try:
            columns.append(_tensor_cells(one, spec))
        except BadItem as error:
            raise BadJobInput(f"item {number}: {where}{error}") from error
    if len({len(column) for column in columns}) != 1 or not columns[0]:
        raise BadJobInput(f"item {number}: the first axis counts items: at least one, and the same for all inputs")
    return [
        (tuple(cell[0] for cell in cells), tuple(cell[1] for cell in cells)) for cells in zip(*columns, strict=True)
    ]


def _packed(value: Any, spec: TensorSpec, where: str) -> ItemTensor:
    try:
        shape, data = pack(value, spec)
    except BadItem as error:
        raise BadJobInput(f"{where}{error}") from error
    return (spec.name, spec.datatype, tuple(shape)), data


def _tensor_cells(tensor: Any, spec: TensorSpec) -> list[ItemTensor]:
    if not _is_tensor(tensor):
        raise BadItem("is neither a tensor nor a nested list")
    datatype, shape, rows = _tensor_rows(tensor)
    if not fits(shape, spec):
        raise BadItem(f"has items of shape {shown(shape)}, the model takes {shown(spec.shape)}")
    if not same_kind(datatype, spec.datatype):
        raise BadItem(f"has datatype {datatype}, the model takes {spec.datatype}")
    return [((spec.name, datatype, tuple(shape)), row) for row in rows]


def _tensor_rows(tensor: Mapping[str, Any]) -> tuple[str, list[int], list[memoryview]]:
    datatype, shape, data = tensor["datatype"], tensor["shape"], tensor["data"]
    if datatype not in DATATYPES or not isinstance(data, bytes):
        raise BadItem(f"is no tensor: datatype must be one of {', '.join(DATATYPES)}, data bytes")
    if not isinstance(shape, list) or not shape or not all(type(n) is int and n > 0 for n in shape):
        raise BadItem("is no tensor: shape must be a list of lengths above 0, the first of which counts items")
    if shape[0] > len(data) + 1:
        raise BadItem(f"has {len(data)} bytes of data for {shape[0]} items")
    return datatype, shape[1:], split(datatype, shape[0], shape[1:], data)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() >= {"datatype", "shape", "data"}


def _row(value: Any, signature: Signature, number: int) -> Any:
    """The values of a table's row, in the order of its columns; anything else as it is."""
    spec = signature.inputs[0]
    if len(signature.inputs) > 1 or not spec.columns or not isinstance(value, dict) or spec.name in value:
        return value
    if missing := [name for name in spec.columns if name not in value]:
        raise BadJobInput(f"item {number}: column {missing[0]!r} is missing: give each line {', '.join(spec.columns)}")
    return [value[name] for name in spec.columns]


def _by_input(value: Any, signature: Signature, number: int) -> list[tuple[Any, Any]]:
    """The item's value for each input of the model."""
    if not isinstance(value, dict) or _is_tensor(value):
        if len(signature.inputs) > 1:
            names = ", ".join(spec.name for spec in signature.inputs)
            raise BadJobInput(f"item {number}: the model takes {names}: give a map of these names")
        return [(signature.inputs[0], value)]
    missing = [spec.name for spec in signature.inputs if spec.name not in value]
    unknown = value.keys() - {spec.name for spec in signature.inputs}
    if missing or unknown:
        what = f"lacks the input {missing[0]!r}" if missing else f"has an input {next(iter(unknown))!r} too much"
        raise BadJobInput(f"item {number}: {what}")
    return [(spec, value[spec.name]) for spec in signature.inputs]


def _named(name: str, signature: Signature) -> str:
    return f"input {name} " if len(signature.inputs) > 1 else ""


# -- outputs

_pack = msgspec.msgpack.Encoder().encode
_json = msgspec.json.Encoder().encode


LABEL = "label"


def rendered(
    form: str,
    outputs: Mapping[str, Tensor],
    items: int,
    before: Checkpoint,
    total: int,
    labels: Sequence[str] | None = None,
) -> tuple[bytes, Checkpoint]:
    """The bytes to append for one chunk's outputs, and the checkpoint after that, except for its bytes and position.

    total: items of the whole job. labels: the name of each item's class; .npy has no place for it, nor has an item with an output of
    the name LABEL. Raises BadItem when this format cannot hold the outputs.
    """
    for name, tensor in outputs.items():
        if not tensor.shape or tensor.shape[0] != items:
            raise BadItem(f"output {name} has shape {tensor.shape} for {items} items")
    if form == "npy":
        return _npy(outputs, before, total)
    rows = {
        name: (tensor.datatype, tensor.shape[1:], split(tensor.datatype, items, tensor.shape[1:], tensor.data))
        for name, tensor in outputs.items()
    }
    lines = []
    for i in range(items):
        line: dict[str, Any] = {} if labels is None else {LABEL: labels[i]}
        if form == "jsonl":
            line |= {name: nested(datatype, shape, data[i]) for name, (datatype, shape, data) in rows.items()}
            lines.append(_json(line) + b"\n")
        else:
            line |= {name: Tensor(kind, [1, *shape], bytes(data[i])) for name, (kind, shape, data) in rows.items()}
            lines.append(_pack(line))
    return b"".join(lines), before


def _npy(outputs: Mapping[str, Tensor], before: Checkpoint, total: int) -> tuple[bytes, Checkpoint]:
    if len(outputs) != 1:
        raise BadItem(f"the model returns {', '.join(outputs)}: .npy holds one array, use .jsonl or .msgpack")
    (tensor,) = outputs.values()
    shape = tensor.shape[1:]
    if before.items == 0:
        after = msgspec.structs.replace(before, datatype=tensor.datatype, shape=shape)
        return write_header(tensor.datatype, total, shape) + bytes(tensor.data), after
    if (tensor.datatype, shape) != (before.datatype, before.shape):
        was, now = f"{before.datatype} {before.shape}", f"{tensor.datatype} {shape}"
        raise BadItem(f"outputs changed from {was} to {now}: .npy holds one array, use .jsonl or .msgpack")
    return bytes(tensor.data), before
