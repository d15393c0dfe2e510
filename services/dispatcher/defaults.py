"""An app's default output as an answer's outputs: one item's value, given to every item of the query. Pure."""

import math
import struct
from typing import Any

import msgspec

from bus.messages.catalog import Signature, TensorSpec
from bus.messages.public import Tensor

_CODES = {
    "BOOL": "?", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I",
    "UINT64": "Q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
MOST_BYTES = 2**20 - 2**14  # of an answer's outputs, so that NATS takes it with what else it says
_UNFIT = (struct.error, OverflowError, TypeError, ValueError)


def default_outputs(value: Any, signature: Signature | None, items: int) -> dict[str, Tensor] | None:
    """Output name to tensor, `items` long; None where they are more than MOST_BYTES together.

    value: a map of output names to values, else the first output's. A number fills the output's shape, a nested list must have as
    many numbers as it. What does not fit the signature, or fills more than a message, comes as it is: numbers as INT64 or FP64, all
    else as BYTES (JSON where it is no text).
    """
    specs = [] if signature is None else signature.outputs
    named = {spec.name: spec for spec in specs}
    if isinstance(value, dict) and value and value.keys() <= named.keys():
        one = {name: _tensor(part, named[name]) for name, part in value.items()}
    else:
        first = specs[0] if specs else TensorSpec(name="output", datatype="", shape=[])
        one = {first.name: _tensor(value, first)}
    if items * sum(len(tensor.data) for tensor in one.values()) > MOST_BYTES:
        return None
    return {
        name: Tensor(tensor.datatype, [items, *tensor.shape[1:]], tensor.data * items) for name, tensor in one.items()
    }


def _tensor(value: Any, spec: TensorSpec) -> Tensor:
    """Of one item."""
    code = _CODES.get(spec.datatype)
    flat = _numbers(value)
    if code is not None and flat is not None:
        shape = _shape(spec.shape, len(flat), scalar=not isinstance(value, list))
        if shape is not None and math.prod(shape) * struct.calcsize(f"<{code}") <= MOST_BYTES:
            whole = code not in "efd"
            filled = flat * (math.prod(shape) // len(flat))
            try:
                numbers = [_whole(number) for number in filled] if whole else filled
                packed = struct.pack(f"<{len(numbers)}{code}", *numbers)
            except _UNFIT:
                return _as_it_is(value, flat)
            return Tensor(spec.datatype, [1, *shape], packed)
    return _as_it_is(value, flat)


def _as_it_is(value: Any, flat: list[Any] | None) -> Tensor:
    if flat is not None:
        shape = [1, len(flat)] if isinstance(value, list) else [1]
        for datatype in ("INT64", "FP64"):
            if datatype == "INT64" and any(isinstance(number, float) for number in flat):
                continue
            try:
                packed = struct.pack(f"<{len(flat)}{_CODES[datatype]}", *flat)
            except _UNFIT:
                continue
            return Tensor(datatype, shape, packed)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    piece = text.encode()
    return Tensor("BYTES", [1], len(piece).to_bytes(4, "little") + piece)


def _numbers(value: Any) -> list[Any] | None:
    """All numbers of a number or nested list; None when there is anything else, or nothing."""
    flat: list[Any] = []
    level = [value]
    while level:
        part = level.pop()
        if isinstance(part, list):
            level.extend(reversed(part))
        elif isinstance(part, (int, float)):
            flat.append(part)
        else:
            return None
    return flat or None


def _shape(axes: list[int], count: int, *, scalar: bool) -> list[int] | None:
    """An output's shape with its open axes settled; None when `count` numbers do not fill it."""
    if scalar:
        return [1 if axis == -1 else axis for axis in axes]
    known = math.prod(axis for axis in axes if axis != -1)
    if -1 not in axes:
        return list(axes) if count == known else None
    if known == 0 or count % known:
        return None
    open_at = axes.index(-1)
    return [count // known if at == open_at else (1 if axis == -1 else axis) for at, axis in enumerate(axes)]


def _whole(number: Any) -> int:
    if isinstance(number, float) and not number.is_integer():
        raise ValueError(number)
    return int(number)
