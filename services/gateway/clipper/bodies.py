"""Clipper's bodies: of queries, their typed inputs as tensors, and the replies that describe what there is. Pure."""

import base64
import binascii
import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from bus.codec import in_words
from bus.datatypes import DATATYPES
from bus.messages.catalog import AppRecord, ModelRecord, TensorSpec
from bus.tensors import pack_texts
from bus.values import Ragged, filled, flatten, packed
from services.core.catalog import Catalog
from services.gateway.errors import BadRequest

# -- Requests

ItemInput = Annotated[
    Any,
    "One item: a list of numbers (integers, floats, doubles), base64 (bytes), or a text (strings), as the app was registered.",
]
VersionOrNone = Annotated[str | int | None, "Version of the model."]
User = Annotated[str | int | None, "The user: the feedback's context."]


class PredictBody(Struct, frozen=True):
    """One item, or a batch of them."""

    input: ItemInput = None
    input_batch: Annotated[list[Any] | None, "Several items, which are one query."] = None
    version: VersionOrNone = None


class UpdateBody(Struct, frozen=True, kw_only=True):
    """The true label of an input, or of an earlier query."""

    label: Annotated[int | float | str | list[Any], "What the answer should have been."]
    uid: User = None
    input: ItemInput = None
    query_id: Annotated[str | int | None, "Query id of an answer, in place of its input."] = None


# -- Inputs: integers, floats, doubles, bytes (base64) and strings, checked before the query

_NUMBERS: dict[str, Any] = {"integers": list[int], "floats": list[float], "doubles": list[float]}
_JSON_TYPES = {
    "integers": "[int]",
    "floats": "[float]",
    "doubles": "[double]",
    "bytes": "base64 text",
    "strings": "text",
}


def input_type_of(app: AppRecord) -> str:
    """Clipper's type of an item of the app's inputs: as it was registered, else by its models' datatype."""
    if app.input_type is not None:
        return app.input_type
    spec = _spec(app)
    if spec is None:
        return "floats"
    row = DATATYPES[spec.datatype]
    return {"f": "doubles" if row.size == 8 else "floats", "O": "strings"}.get(row.kind, "integers")


def items_of(item: Any, batch: list[Any] | None) -> tuple[list[Any], bool]:
    """The items of a request, and whether they are a batch. None: not given. Raises BadRequest."""
    if (item is None) == (batch is None):
        raise BadRequest("give either `input`, one item, or `input_batch`, a list of them")
    if batch is None:
        return [item], False
    if not batch:
        raise BadRequest("input_batch: must be a list of at least one item")
    return batch, True


def tensors_of(app: AppRecord, items: list[Any]) -> dict[str, dict[str, Any]]:
    """Input name to tensor. Raises BadRequest, which names the item and what the app takes."""
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
    """The app's only input; None until a model has set it. Raises BadRequest where there are several."""
    if app.signature is None:
        return None
    if len(app.signature.inputs) != 1:
        names = ", ".join(spec.name for spec in app.signature.inputs)
        raise BadRequest(f"app {app.app} has several inputs ({names}): use POST /v2/models/{app.app}/infer")
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
            raise BadRequest(f"item {at}: a number does not fit {datatype}") from error
    return {"datatype": datatype, "shape": [len(items), *_shape(lengths, spec, kind)], "data": b"".join(pieces)}


def _flat(item: Any, kind: str, at: int) -> list[Any]:
    """All numbers of an item: of a list, as Clipper has it, or of nested lists."""
    try:
        shape, flat = flatten(item)
        whole = flat if shape or type(item) in (int, float) else item
        found: list[Any] = msgspec.convert(whole, _NUMBERS[kind])
    except Ragged as error:
        raise BadRequest(f"item {at}: {error}") from error
    except (msgspec.ValidationError, OverflowError) as error:
        said, _, where = in_words(str(error)).partition(" - at `$")
        raise BadRequest(
            f"item {at}: this application takes {kind}, {_JSON_TYPES[kind]}: {where.rstrip('`') or 'it'} {said}"
        ) from error
    if not found:
        raise BadRequest(f"item {at}: is empty")
    return found


def _bytes(items: list[Any], spec: TensorSpec | None) -> dict[str, Any]:
    pieces = []
    for at, item in enumerate(items):
        try:
            pieces.append(base64.b64decode(_text_of(item, "bytes", at), validate=True))
        except (binascii.Error, ValueError) as error:
            raise BadRequest(f"item {at}: this application takes bytes, base64 text, and this is none") from error
    if spec is not None and spec.datatype == "BYTES":
        return _texts(pieces, spec)
    lengths = {len(piece) for piece in pieces}
    return {"datatype": "UINT8", "shape": [len(items), *_shape(lengths, spec, "bytes")], "data": b"".join(pieces)}


def _strings(items: list[Any], spec: TensorSpec | None) -> dict[str, Any]:
    pieces = []
    for at, item in enumerate(items):
        try:
            pieces.append(_text_of(item, "strings", at).encode())
        except UnicodeEncodeError as error:
            raise BadRequest(f"item {at}: holds half a character (a lone surrogate)") from error
    return _texts(pieces, spec)


def _texts(pieces: list[bytes], spec: TensorSpec | None) -> dict[str, Any]:
    shape = [] if spec is None else [1 if axis == -1 else axis for axis in spec.shape]
    if math.prod(shape) != 1:
        raise BadRequest(f"an item has {math.prod(shape)} texts: use the Open Inference Protocol")
    return {"datatype": "BYTES", "shape": [len(pieces), *shape], "data": pack_texts(pieces)}


def _text_of(item: Any, kind: str, at: int) -> str:
    if not isinstance(item, str):
        raise BadRequest(f"item {at}: this application takes {kind}, {_JSON_TYPES[kind]}, not {_called(item)}")
    return item


def _called(item: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(item), "null")


def _shape(lengths: set[int], spec: TensorSpec | None, kind: str) -> list[int]:
    """An item's shape. lengths: the numbers of elements of the items."""
    if len(lengths) != 1:
        raise BadRequest(f"the items of a batch must be equally long, not {', '.join(map(str, sorted(lengths)))}")
    [count] = lengths
    if spec is None:
        return [count]
    shape = filled(spec.shape, count)
    if shape is None:
        known = math.prod(axis for axis in spec.shape if axis != -1)
        raise BadRequest(f"an item must have {known} {kind} (shape {spec.shape}), not {count}")
    return shape


# -- Replies


class ClipperPrediction(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to one item. default_explanation: why it is the default."""

    query_id: int
    output: Annotated[Any, "Of this item; a map of names where the model has several outputs."]
    default: bool
    label: Annotated[str | UnsetType, "The name of its class, where the model has such names."] = UNSET
    default_explanation: Annotated[str | UnsetType, "Why the output is the default."] = UNSET
    target: Annotated[str | UnsetType, "What a regressor's number is called, if its owner has said it."] = UNSET
    unit: Annotated[str | UnsetType, "Its unit."] = UNSET
    model: str | UnsetType = UNSET
    version: str | UnsetType = UNSET
    variant: str | UnsetType = UNSET


class ClipperApplication(Struct, frozen=True, kw_only=True):
    """An application as it was registered. A latency that was not given is 0."""

    name: str
    input_type: str
    default_output: str
    latency_slo_micros: int
    linked_models: list[str]


class ClipperModel(Struct, frozen=True, kw_only=True):
    """One version of a model. is_current_version: an application serves it, or no application serves the model and it is the newest.

    batch_size: of its instances; not there where none is loaded, or where they differ.
    """

    model_name: str
    model_version: str
    is_current_version: bool
    input_type: str
    labels: list[str]
    container_name: str
    model_data_path: str
    serving: list[str]
    variants: list[str]
    batch_size: int | UnsetType = UNSET


class ClipperContainer(Struct, frozen=True, kw_only=True):
    """A loaded instance. model_replica_id: its number within its version. batch_size: -1: as large as deadlines allow."""

    model_id: str
    model_name: str
    model_version: str
    model_replica_id: int
    batch_size: int
    variant: str
    worker: str
    device: str
    state: str


def describe_app(app: AppRecord) -> ClipperApplication:
    """An application's description."""
    try:
        kind = input_type_of(app)
    except BadRequest:
        kind = "floats"
    return ClipperApplication(
        name=app.app,
        input_type=kind,
        default_output=_text(app.default_output),
        latency_slo_micros=round((app.latency_ms or 0.0) * 1000.0),
        linked_models=sorted(app.links),
    )


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def describe_model(record: ModelRecord, catalog: Catalog, loaded: Iterable[ClipperContainer]) -> ClipperModel:
    """A version's description. loaded: all instances."""
    sizes = {one.batch_size for one in loaded if one.model_id == model_id(record)}
    linking = catalog.apps_linking(record.model)
    serving = sorted(app for app in linking if _links(catalog, app, record))
    inputs = record.signature.inputs
    return ClipperModel(
        model_name=record.model,
        model_version=record.version,
        is_current_version=bool(serving) or (not linking and catalog.model(record.model) is record),
        input_type=input_type_of(AppRecord(app="_", links={}, signature=record.signature))
        if len(inputs) == 1
        else "floats",
        labels=record.labels,
        container_name=record.format,
        model_data_path=record.source,
        serving=serving,
        variants=[variant.variant for variant in catalog.variants_at(record.model, record.version)],
        batch_size=sizes.pop() if len(sizes) == 1 else UNSET,
    )


def _links(catalog: Catalog, app: str, record: ModelRecord) -> bool:
    found = catalog.app(app)
    return found is not None and found.links.get(record.model) == record.version


def all_models(catalog: Catalog) -> Iterator[ModelRecord]:
    """All versions of all models, sorted."""
    yield from sorted(catalog.models, key=lambda record: (record.model, record.created, record.version))


def model_id(record: ModelRecord) -> str:
    """Clipper's id of a version."""
    return f"{record.model}:{record.version}"


def list_containers(catalog: Catalog, workers: Iterable[dict[str, Any]]) -> list[ClipperContainer]:
    """Every loaded instance. workers: the rows of `infaas.list.workers`."""
    found: list[ClipperContainer] = []
    counted: dict[str, int] = {}
    loaded = [(worker["worker"], instance) for worker in workers for instance in worker["instances"]]
    for where, instance in sorted(loaded, key=lambda pair: pair[1]["instance"]):
        variant = catalog.variant(instance["variant"])
        if variant is None:
            continue
        version = f"{variant.model}:{variant.version}"
        number = counted[version] = counted.get(version, -1) + 1
        found.append(
            ClipperContainer(
                model_id=version,
                model_name=variant.model,
                model_version=variant.version,
                model_replica_id=number,
                batch_size=instance["batch_limit"] if instance.get("batching") == "fixed" else -1,
                variant=variant.variant,
                worker=where,
                device=instance["device"],
                state=instance["state"],
            )
        )
    return found
