"""The formats of a job's input and output: .npy, JSON lines, a MessagePack stream (docs/jobs.md).

An input is read item by item, never as a whole. The same file cut from the same position with the same limits gives the same chunks:
therefore a chunk's number means the same items after a restart. Outputs are appended in the order of the inputs.
"""

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec

from bus.codec import encode
from bus.datatypes import DATATYPES, same_kind
from bus.messages.catalog import Signature, TensorSpec
from bus.messages.jobs import Checkpoint, Position
from bus.messages.public import Tensor
from bus.tensors import shown
from services.jobs.items import BadItem, NpyHeader, fits, nested, pack, read_header, split, write_header

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
    """One item a line: its nested list, or a map of input names to nested lists."""
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
            for spec, one in _by_input(value, signature, number)
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


def rendered(
    form: str, outputs: Mapping[str, Tensor], items: int, before: Checkpoint, total: int
) -> tuple[bytes, Checkpoint]:
    """The bytes to append for one chunk's outputs, and the checkpoint after that, except for its bytes and position.

    total: items of the whole job. Raises BadItem when this format cannot hold them.
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
    if form == "jsonl":
        lines = [
            _json({name: nested(datatype, shape, data[i]) for name, (datatype, shape, data) in rows.items()}) + b"\n"
            for i in range(items)
        ]
    else:
        lines = [
            _pack(
                {name: Tensor(datatype, [1, *shape], bytes(data[i])) for name, (datatype, shape, data) in rows.items()}
            )
            for i in range(items)
        ]
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
