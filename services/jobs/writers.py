"""Outputs of a job, appended to a file in order of the inputs: .npy, JSON lines, a MessagePack stream (docs/jobs.md)."""

from collections.abc import Mapping

import msgspec

from bus.messages.jobs import Checkpoint
from bus.messages.public import Tensor
from services.jobs.items import BadItem, nested, split
from services.jobs.npy import write_header

_pack = msgspec.msgpack.Encoder().encode
_json = msgspec.json.Encoder().encode


def rendered(
    form: str, outputs: Mapping[str, Tensor], items: int, before: Checkpoint, total: int
) -> tuple[bytes, Checkpoint]:
    """The bytes to append for one chunk's outputs, and what is known of the file then (bytes and position not counted).

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
