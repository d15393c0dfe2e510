"""An inference: the request read from bytes, the requirements of its query, the reply as bytes. Pure.

A body is JSON, with raw tensors behind it where the request says so (Triton's binary data extension).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from bus.codec import DECODE_ERRORS
from bus.datatypes import SIZES
from bus.messages.catalog import AppRecord, Signature
from bus.messages.public import MOST_TEXT, TensorView
from bus.port import Buffer
from bus.tensors import from_array, pack_texts
from bus.values import TensorFields, from_bytes, from_list, to_list
from infaas.answers import Answer
from infaas.tables import as_inputs
from services.gateway.errors import BadRequest, RequestFailed
from services.gateway.json_checks import UNKNOWN, find_duplicate, json_fault, may_have_more_names, quotes
from services.gateway.oip.models import ModelTarget
from services.gateway.oip.parameters import misplaced_need, parameters_of, requirements_of

MAX_TENSORS = 1024
HEAD_LENGTH = "Inference-Header-Content-Length"
SHARED = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")
_NONE: Mapping[str, Any] = {}


class GivenInput(Struct, frozen=True, gc=False):
    """An element of `inputs`."""

    name: str
    shape: list[int]
    datatype: str
    data: Raw = Raw()
    parameters: dict[str, Any] | None = None


class WantedOutput(Struct, frozen=True, gc=False):
    """An element of `outputs`."""

    name: str
    parameters: dict[str, Any] | None = None


class InferJson(Struct, frozen=True, gc=False):
    """The request's JSON."""

    inputs: list[GivenInput] = []
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[WantedOutput] | None = None
    rows: Annotated[
        list[Any] | None,
        "In place of `inputs`: the items as maps of the app's columns to values, as lists of numbers or as texts.",
    ] = None


class InferRequest(NamedTuple):
    """A request. outputs: names to whether their data is wanted raw; None: all outputs, as `raw` says."""

    inputs: dict[str, TensorFields]
    id: str | None
    parameters: Mapping[str, Any]
    outputs: dict[str, bool] | None
    raw: bool


_head = msgspec.json.Decoder(InferJson).decode
_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def read(body: bytes, head_length: int | None, signature: Signature | None) -> InferRequest:
    """The request in a body. head_length: bytes of JSON in front of raw data, as the header says. Raises BadRequest, BadTensor."""
    if head_length is None:
        return _read(body, memoryview(b""), signature)
    if not 0 <= head_length <= len(body):
        raise BadRequest(f"{HEAD_LENGTH} is {head_length}: the body has {len(body)} bytes")
    whole = memoryview(body)
    if head_length == 0:
        return _raw(whole, signature)
    return _read(body[:head_length], whole[head_length:], signature)


def _read(text: bytes, binary: memoryview, signature: Signature | None) -> InferRequest:
    try:
        head = _head(text)
    except DECODE_ERRORS as error:
        behind = (
            f"; raw data behind it needs the header {HEAD_LENGTH}"
            if "more follows" in (fault := json_fault(error, text))
            else ""
        )
        raise BadRequest(fault + behind) from error
    if head.rows and head.inputs:
        raise BadRequest("rows: are given in place of inputs; leave one of them out")
    if not head.inputs and not head.rows:
        unread = next((name for name in _fields(text) if name not in InferJson.__struct_fields__), "")
        raise BadRequest(
            "inputs is empty: give a tensor for each of the model's inputs, or rows"
            + (f"; nothing reads {unread[:80]!r}" if unread else "")
        )
    wanted = head.outputs or ()
    if len(head.inputs) > MAX_TENSORS or len(wanted) > MAX_TENSORS:
        raise BadRequest(f"inputs and outputs have at most {MAX_TENSORS} tensors each")
    inputs: dict[str, TensorFields] = {} if head.rows is None else _from_rows(head.rows, signature)
    at = 0
    for given in head.inputs:
        if given.name in inputs:
            raise BadRequest(f"inputs has two tensors named {given.name[:80]!r}")
        size = _binary_size(given)
        where = f"inputs.{given.name[:80]}"
        if size is None:
            inputs[given.name] = _from_json(given, where)
            continue
        if at + size > len(binary):
            raise BadRequest(
                f"{where}.parameters.binary_data_size is {size}: only {len(binary) - at} bytes follow the JSON"
            )
        inputs[given.name] = from_bytes(given.datatype, given.shape, binary[at : at + size], where)
        at += size
    if at != len(binary):
        raise BadRequest(f"{len(binary)} bytes follow the JSON; the inputs' binary_data_size add up to {at}")
    if may_have_more_names(text, _quotes(head)) and (wrong := find_duplicate(text) or _misplaced(text)):
        raise BadRequest(wrong)
    parameters = head.parameters or _NONE
    raw = flag(parameters, "binary_data_output", "parameters")
    return InferRequest(inputs, head.id, parameters, wanted_outputs(head.outputs, raw=raw), raw)


def _from_rows(rows: list[Any], signature: Signature | None) -> dict[str, TensorFields]:
    """The items as the app takes them. Raises BadInput, BadTensor."""
    found = as_inputs(rows, [] if signature is None else signature.inputs)
    named = found if isinstance(found, Mapping) else {"x": found}
    return {name: msgspec.structs.asdict(from_array(array)) for name, array in named.items()}


def _misplaced(text: bytes) -> str:
    """A sentence about a need beside `parameters`, where nothing reads it; "" when there is none."""
    others = (name for name in _fields(text) if name not in InferJson.__struct_fields__)
    return next(filter(None, map(misplaced_need, others)), "")


def _quotes(head: InferJson) -> int:
    """The number of quotation marks of the request's JSON, if it has no duplicate names and no fields that are not read."""
    if head.rows is not None:
        return UNKNOWN
    count = 2 + 4 * (head.id is not None) + 2 * (head.outputs is not None)
    for parameters in (
        head.parameters,
        *(one.parameters for one in head.inputs),
        *(one.parameters for one in head.outputs or ()),
    ):
        if parameters is not None:
            inside = quotes(parameters)
            if inside == UNKNOWN:
                return UNKNOWN
            count += 2 + inside
    for given in head.inputs:
        count += 10
        if len(given.data):
            count += 2 + 2 * (prod(given.shape) if given.datatype == "BYTES" else 0)
    return count + 4 * len(head.outputs or ())


def _raw(binary: memoryview, signature: Signature | None) -> InferRequest:
    """The request of a body without JSON: the data of the only input. Its size gives the number of items."""
    if signature is None or len(signature.inputs) != 1 or -1 in signature.inputs[0].shape:
        raise BadRequest("a body of nothing but raw data needs a model with one input of fixed shape")
    spec = signature.inputs[0]
    if spec.datatype == "BYTES":
        shape, data = [1, *spec.shape], memoryview(pack_texts([bytes(binary)]))
    else:
        item = SIZES[spec.datatype] * prod(spec.shape)
        if not len(binary) or len(binary) % item:
            raise BadRequest(f"the body has {len(binary)} bytes: one item of {spec.name!r} has {item}")
        shape, data = [len(binary) // item, *spec.shape], binary
    tensor = from_bytes(spec.datatype, shape, data, f"inputs.{spec.name}")
    return InferRequest({spec.name: tensor}, None, _NONE, None, raw=True)


def _binary_size(given: GivenInput) -> int | None:
    parameters = given.parameters
    if not parameters:
        return None
    where = f"inputs.{given.name[:80]}"
    if any(name in parameters for name in SHARED):
        raise BadRequest(f"{where}.parameters: shared memory is not offered; send the data itself")
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise BadRequest(f"{where}.parameters.binary_data_size must be a number of bytes")
    if len(given.data):
        raise BadRequest(f"{where} has data and binary_data_size: only one of them can hold its elements")
    return size


def _from_json(given: GivenInput, where: str) -> TensorFields:
    if not len(given.data):
        raise BadRequest(f"{where}.data is missing (or parameters.binary_data_size, for raw data)")
    try:
        data = _any(given.data)
    except DECODE_ERRORS as error:
        raise BadRequest(f"{where}.data cannot be read: {json_fault(error, given.data)}") from error
    return from_list(given.datatype, given.shape, data, where)


def wanted_outputs(outputs: list[WantedOutput] | None, *, raw: bool) -> dict[str, bool] | None:
    """Names of the requested outputs, and whether each is wanted raw; None: all. Raises BadRequest."""
    if not outputs:
        return None
    found: dict[str, bool] = {}
    for output in outputs:
        where = f"outputs.{output.name[:80]}"
        if output.name in found:
            raise BadRequest(f"outputs has {output.name[:80]!r} twice")
        parameters = output.parameters or _NONE
        if any(name in parameters for name in SHARED):
            raise BadRequest(f"{where}.parameters: shared memory is not offered")
        if parameters.get("classification"):
            raise BadRequest(f"{where}.parameters.classification is not offered: ask for the output itself")
        found[output.name] = flag(parameters, "binary_data", f"{where}.parameters", raw)
    return found


def flag(parameters: Mapping[str, Any], name: str, where: str, default: bool = False) -> bool:
    """A parameter that must be true or false. Raises BadRequest."""
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise BadRequest(f"{where}.{name} must be true or false")
    return value


def write(
    asked: InferRequest, model: str, answer: Answer, more: Mapping[str, Any], classes: Sequence[str] = ()
) -> tuple[bytes, list[Buffer]]:
    """The reply: its JSON, and the raw tensors behind it. more: parameters beside those of the answer. classes: of the app. Raises BadTensor."""
    outputs: list[dict[str, Any]] = []
    binary: list[Buffer] = []
    for name in asked.outputs or answer.tensors:
        tensor = output_of(answer, name)
        output: dict[str, Any] = {"name": name, "datatype": tensor.datatype, "shape": tensor.shape}
        if asked.raw if asked.outputs is None else asked.outputs[name]:
            output["parameters"] = {"binary_data_size": len(tensor.data)}
            binary.append(tensor.data)
        else:
            output["data"] = to_list(tensor, f"outputs.{name}")
        outputs.append(output)
    head = {"model_name": model, "model_version": answer.version}
    if asked.id is not None:
        head["id"] = asked.id
    return _encode({**head, "parameters": {**parameters_of(answer, classes), **more}, "outputs": outputs}), binary


def output_of(answer: Answer, name: str) -> TensorView:
    """An output of an answer. Raises BadTensor."""
    found = answer.tensors[name]
    if not isinstance(found, list):
        return found
    tensor = from_array(answer.outputs[name])  # imports numpy; no executor sends such outputs
    return TensorView(tensor.datatype, tensor.shape, memoryview(tensor.data))


def requirements(
    asked: InferRequest, target: ModelTarget, app: AppRecord | None, now: float, deadline: float | None = None
) -> dict[str, Any]:
    """The requirements of a request's query. now: Unix seconds. deadline: Unix seconds until which the client waits.

    Raises BadRequest.
    """
    if asked.outputs is not None and app is not None and app.signature is not None:
        _check_outputs(asked.outputs, [spec.name for spec in app.signature.outputs])
    found = requirements_of(asked.parameters, now) if asked.parameters else {}
    for name, value in target.requirements().items():
        if found.get(name, value) != value:
            raise BadRequest(f"parameters.{name} is {found[name][:80]!r}, but the model's name says {value!r}")
        found[name] = value
    if asked.id is not None:
        if len(asked.id) > MOST_TEXT:
            raise BadRequest(f"id may have {MOST_TEXT} characters, not {len(asked.id)}")
        found["id"] = asked.id
    if deadline is not None:
        found["deadline"] = min(deadline, found.get("deadline", deadline))
    return found


def answer_of(asked: InferRequest, answer: Answer) -> Answer:
    """The answer to a request, with all outputs that it asks for. Raises RequestFailed."""
    if asked.outputs is not None:
        if answer.default and not asked.outputs.keys() <= answer.tensors.keys():
            text = f"the app's default output is one of {', '.join(answer.tensors)} only; {answer.reason}"
            raise RequestFailed(None, text, code="deadline")
        _check_outputs(asked.outputs, answer.tensors)
    return answer


def _check_outputs(wanted: Iterable[str], names: Collection[str]) -> None:
    for name in wanted:
        if name not in names:
            raise BadRequest(f"outputs.{name[:80]}: the model has {', '.join(names)}")
