"""Clipper's typed inputs as tensors: integers, floats, doubles, bytes (base64) and strings, checked before the query. Pure."""

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from bus.datatypes import DATATYPES
from bus.messages.catalog import AppRecord, TensorSpec
from bus.tensors import pack_texts
from bus.values import Ragged, filled, flatten, packed

_NUMBERS: dict[str, Any] = {"integers": list[int], "floats": list[float], "doubles": list[float]}
_JSON_TYPES = {
    "integers": "[int]",
    "floats": "[float]",
    "doubles": "[double]",
    "bytes": "base64 text",
    "strings": "text",
}


class WrongInput(ValueError):
    """The application does not take these inputs; the text says what it takes."""


def input_type_of(app: AppRecord) -> str:
    """Clipper's type of an item of the app's inputs: as it was registered, else by its models' datatype."""
    if app.input_type is not None:
        return app.input_type
    spec = _spec(app)
    if spec is None:
        return "floats"
    row = DATATYPES[spec.datatype]
    return {"f": "doubles" if row.size == 8 else "floats", "O": "strings"}.get(row.kind, "integers")


def items_of(body: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """The items of a request, and whether they are a batch. Raises WrongInput."""
    if ("input" in body) == ("input_batch" in body):
        raise WrongInput("give either `input`, one item, or `input_batch`, a list of them")
    if "input" in body:
        return [body["input"]], False
    batch = body["input_batch"]
    if not isinstance(batch, list) or not batch:
        raise WrongInput("input_batch: must be a list of at least one item")
    return batch, True


def tensors_of(app: AppRecord, items: list[Any]) -> dict[str, dict[str, Any]]:
    """Input name to tensor. Raises WrongInput, which names the item and what the app takes."""
    spec = _spec(app)
    kind = input_type_of(app)
    if app.input_type is None and kind == "integers" and all(isinstance(item, str) for item in items):
        kind = "bytes"
    name = "x" if spec is None else spec.name
    if kind == "strings":
        return {name: _strings(items, spec)}
    if kind == "bytes":
        return {name: _bytes(items, spec)}
    return {name: _numbers(items, spec, kind)}


def _spec(app: AppRecord) -> TensorSpec | None:
    """The app's only input; None until a model has set it. Raises WrongInput where there are several."""
    if app.signature is None:
        return None
    if len(app.signature.inputs) != 1:
        names = ", ".join(spec.name for spec in app.signature.inputs)
        raise WrongInput(f"app {app.app} has several inputs ({names}): use POST /v2/models/{app.app}/infer")
    return app.signature.inputs[0]


def _numbers(items: list[Any], spec: TensorSpec | None, kind: str) -> dict[str, Any]:
    datatype = {"integers": "INT64", "floats": "FP32", "doubles": "FP64"}[kind]
    if kind == "integers" and spec is not None and DATATYPES[spec.datatype].kind in "iu":
        datatype = spec.datatype
    pieces = []
    lengths = set()
    for at, item in enumerate(items):
        flat = _flat(item, kind, at)
        lengths.add(len(flat))
        try:
            pieces.append(packed(datatype, flat))
        except OverflowError as error:
            raise WrongInput(f"item {at}: a number does not fit {datatype}") from error
    return {"datatype": datatype, "shape": [len(items), *_shape(lengths, spec, kind)], "data": b"".join(pieces)}


def _flat(item: Any, kind: str, at: int) -> list[Any]:
    """All numbers of an item: of a list, as Clipper has it, or of nested lists."""
    try:
        shape, flat = flatten(item)
        whole = flat if shape or type(item) in (int, float) else item
        found: list[Any] = msgspec.convert(whole, _NUMBERS[kind])
    except Ragged as error:
        raise WrongInput(f"item {at}: {error}") from error
    except (msgspec.ValidationError, OverflowError) as error:
        raise WrongInput(f"item {at}: this application takes {kind}, {_JSON_TYPES[kind]}: {error}") from error
    if not found:
        raise WrongInput(f"item {at}: is empty")
    return found


def _bytes(items: list[Any], spec: TensorSpec | None) -> dict[str, Any]:
    pieces = []
    for at, item in enumerate(items):
        try:
            pieces.append(base64.b64decode(_text(item, "bytes", at), validate=True))
        except (binascii.Error, ValueError) as error:
            if isinstance(error, WrongInput):
                raise
            raise WrongInput(f"item {at}: this application takes bytes, base64 text: {error}") from error
    if spec is not None and spec.datatype == "BYTES":
        return _texts(pieces, spec)
    lengths = {len(piece) for piece in pieces}
    return {"datatype": "UINT8", "shape": [len(items), *_shape(lengths, spec, "bytes")], "data": b"".join(pieces)}


def _strings(items: list[Any], spec: TensorSpec | None) -> dict[str, Any]:
    pieces = []
    for at, item in enumerate(items):
        try:
            pieces.append(_text(item, "strings", at).encode())
        except UnicodeEncodeError as error:
            raise WrongInput(f"item {at}: holds half a character (a lone surrogate)") from error
    return _texts(pieces, spec)


def _texts(pieces: list[bytes], spec: TensorSpec | None) -> dict[str, Any]:
    shape = [] if spec is None else [1 if axis == -1 else axis for axis in spec.shape]
    if math.prod(shape) != 1:
        raise WrongInput(f"an item has {math.prod(shape)} texts: use the Open Inference Protocol")
    return {"datatype": "BYTES", "shape": [len(pieces), *shape], "data": pack_texts(pieces)}


def _text(item: Any, kind: str, at: int) -> str:
    if not isinstance(item, str):
        raise WrongInput(f"item {at}: this application takes {kind}, {_JSON_TYPES[kind]}, not {_called(item)}")
    return item


def _called(item: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(item), "null")


def _shape(lengths: set[int], spec: TensorSpec | None, kind: str) -> list[int]:
    """An item's shape. lengths: the numbers of elements of the items."""
    if len(lengths) != 1:
        raise WrongInput(f"the items of a batch must be equally long, not {', '.join(map(str, sorted(lengths)))}")
    [count] = lengths
    if spec is None:
        return [count]
    shape = filled(spec.shape, count)
    if shape is None:
        known = math.prod(axis for axis in spec.shape if axis != -1)
        raise WrongInput(f"an item must have {known} {kind} (shape {spec.shape}), not {count}")
    return shape
