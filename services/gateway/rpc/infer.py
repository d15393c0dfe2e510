"""ModelInferRequest as the protocol's inference, and an answer as ModelInferResponse: what oip/infer.py does for REST. Pure.

Large tensors stay beside their protobuf message, which would copy them into it and out of it again: `raw_input_contents` are views of
the received bytes, and responses are joined once. The rest of a request, its head, must be small: a protobuf message takes up to
fifteen times the memory of its bytes.

Messages and services are protobuf's classes of the files in proto/. They are made of protoc's descriptors and not generated modules because
they need a descriptor pool of their own: in protobuf's default pool they would collide with generated modules for the same names, such as
tritonclient's or KServe's. After a change of a file, with the package grpcio-tools, in proto/:

    python -m grpc_tools.protoc -I . --descriptor_set_out=services.binpb *.proto
"""

from collections.abc import Sequence
from importlib.resources import files
from math import prod
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from bus.datatypes import DATATYPES
from bus.messages.public import TensorView
from bus.port import Buffer
from bus.tensors import BadTensor, items, pack_texts, texts, unknown_datatype
from bus.values import TensorFields, from_bytes, packed, to_list
from infaas.answers import Answer
from services.gateway.errors import BadRequest, RequestFailed
from services.gateway.oip.infer import MAX_TENSORS, SHARED, InferRequest, WantedOutput, flag, output_of, wanted_outputs
from services.gateway.oip.parameters import ignored, parameters_of


class Schema:
    """The classes of one file: `schema.Point` is the class of its message Point."""

    def __init__(self, file: FileDescriptorProto) -> None:
        file.name = f"infaas/{file.name}"
        self._pool = DescriptorPool()
        self._pool.Add(file)
        self.descriptor = self._pool.FindFileByName(file.name)
        for name, message in self.descriptor.message_types_by_name.items():
            setattr(self, name, GetMessageClass(message))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.descriptor.package} has no message {name}")

    def requests(self, service: str) -> dict[str, Any]:
        """The classes of the requests of a service's methods, by their names."""
        return {one.name: GetMessageClass(one.input_type) for one in self.descriptor.services_by_name[service].methods}

    def has(self, symbol: str) -> bool:
        """Whether there is a message or service of this full name, or a field or method of one."""
        for name in (symbol, symbol.rpartition(".")[0]):
            try:
                self._pool.FindFileContainingSymbol(name)
            except KeyError:
                continue
            return True
        return False


_FILES = FileDescriptorSet.FromString((files(__package__) / "proto" / "services.binpb").read_bytes()).file
SCHEMAS = {file.package: Schema(file) for file in _FILES}
INFERENCE, HEALTH = SCHEMAS["inference"], SCHEMAS["grpc.health.v1"]
REFLECTIONS = SCHEMAS["grpc.reflection.v1"], SCHEMAS["grpc.reflection.v1alpha"]


SMALL = 64 * 1024  # bytes up to which protobuf parses a whole request
MAX_HEAD = 4 * 2**20  # bytes of a request without its raw contents
MAX_FIELDS = 4096  # fields of a large request: its inputs, their raw contents, its parameters and outputs
_RAW_INPUT = 7 << 3 | 2
_RAW_OUTPUT = bytes([6 << 3 | 2])
_UNREADABLE = "the request is not a ModelInferRequest"


def message_of(body: bytes, kind: Any) -> Any:
    """The message of this class in `body`. Raises BadRequest."""
    try:
        return kind.FromString(body)
    except Exception as error:  # protobuf's DecodeError, and what its implementations raise beside it
        raise BadRequest(f"the request is not a {kind.DESCRIPTOR.name}") from error


def read_request(body: bytes) -> tuple[Any, list[bytes | memoryview]]:
    """A ModelInferRequest and its raw contents, views of `body` where that is large. Raises RequestFailed."""
    if len(body) <= SMALL:
        request = message_of(body, INFERENCE.ModelInferRequest)
        return request, list(request.raw_input_contents)
    head, raw = _split(memoryview(body))
    return message_of(head, INFERENCE.ModelInferRequest), raw


def write_response(response: Any, raw: Sequence[Buffer]) -> bytes:
    """The bytes of a ModelInferResponse with these raw contents."""
    parts: list[Buffer] = [response.SerializeToString()]
    for data in raw:
        parts += (_RAW_OUTPUT, varint(len(data)), data)
    return b"".join(parts)


def varint(number: int) -> bytes:
    """A number >= 0 as protobuf's varint."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def _split(view: memoryview) -> tuple[bytes, list[bytes | memoryview]]:
    at, size, fields, head_bytes = 0, len(view), 0, 0
    head: list[memoryview] = []
    raw: list[bytes | memoryview] = []
    while at < size:
        begins = at
        tag, at = _number(view, at)
        if tag & 7 == 2:
            length, at = _number(view, at)
            begins_data, at = at, at + length
        elif tag & 7 == 0:
            _, at = _number(view, at)
        elif tag & 7 in (1, 5):
            at += 8 if tag & 7 == 1 else 4
        else:
            raise BadRequest(_UNREADABLE)
        fields += 1
        if at > size:
            raise BadRequest(f"{_UNREADABLE}: it ends in the middle of a field")
        if fields > MAX_FIELDS:
            raise RequestFailed(None, f"the request has more than {MAX_FIELDS} fields", code="too_large")
        if tag == _RAW_INPUT:
            raw.append(view[begins_data:at])
            continue
        head.append(view[begins:at])
        head_bytes += at - begins
        if head_bytes > MAX_HEAD:
            text = f"the request has more than {MAX_HEAD:,} bytes beside `raw_input_contents`: send large inputs there, not as `contents`"
            raise RequestFailed(None, text, code="too_large")
    return b"".join(head), raw


def _number(view: memoryview, at: int) -> tuple[int, int]:
    """A varint and where it ends."""
    number = shift = 0
    while shift < 70 and at < len(view):
        byte = view[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
        shift += 7
    raise BadRequest(_UNREADABLE)


# -- Typed contents

_CONTENTS = INFERENCE.InferTensorContents.DESCRIPTOR.fields_by_name
# By datatype, the tag of a field whose packed form is the elements' own bytes (wire type 2).
_PACKED = {
    name: varint(_CONTENTS[row.contents].number << 3 | 2)
    for name, row in DATATYPES.items()
    if row.contents and row.kind in "bf"
}


def to_data(contents: Any, datatype: str, shape: list[int], where: str) -> bytes:
    """The elements of InferTensorContents as bytes: little endian, in row-major order.

    They must fit the shape and be in the datatype's own field. Raises BadTensor.
    """
    row = DATATYPES.get(datatype)
    if row is None:
        raise unknown_datatype(datatype, where)
    name = row.contents
    if not name:
        raise BadTensor(f"field `{where}.contents` cannot hold {datatype}: send it in `raw_input_contents`")
    for field, _ in contents.ListFields():
        if field.name != name:
            raise BadTensor(f"field `{where}.contents.{field.name}`: the elements of {datatype} belong into `{name}`")
    elements = getattr(contents, name)
    count = items(shape, where)
    if len(elements) != count:
        raise BadTensor(
            f"field `{where}.contents.{name}` has {len(elements)} elements: shape {shape} of {datatype} needs {count}"
        )
    if datatype == "BYTES":
        return pack_texts(elements)
    if datatype in _PACKED:
        contents.DiscardUnknownFields()
        whole: bytes = contents.SerializeToString()
        return whole[-count * row.size :]
    try:
        return packed(datatype, elements)
    except OverflowError as error:
        raise BadTensor(f"field `{where}.contents.{name}` holds integers that do not fit {datatype}") from error


def fill(contents: Any, tensor: TensorView) -> None:
    """Put the tensor's elements into InferTensorContents. Its datatype must have a field there."""
    datatype, data = tensor.datatype, tensor.data
    if datatype in _PACKED:
        contents.MergeFromString(b"".join((_PACKED[datatype], varint(len(data)), data)))
        return
    elements = getattr(contents, DATATYPES[datatype].contents)
    if datatype == "BYTES":
        elements.extend(texts(data, prod(tensor.shape), "outputs"))
    else:
        elements.extend(to_list(tensor, "outputs"))


# -- Requests and responses

_INT64 = 2**63


def read(request: Any, raw: list[Any]) -> InferRequest:
    """The inference of a request. raw: its `raw_input_contents`. Raises BadRequest, BadTensor."""
    given = request.inputs
    if not given:
        raise BadRequest("inputs is empty: give a tensor for each of the model's inputs")
    if len(given) > MAX_TENSORS or len(request.outputs) > MAX_TENSORS:
        raise BadRequest(f"inputs and outputs have at most {MAX_TENSORS} tensors each")
    if raw and len(raw) != len(given):
        raise BadRequest(f"raw_input_contents has {len(raw)} elements: give one for each of the {len(given)} inputs")
    inputs: dict[str, TensorFields] = {}
    for at, one in enumerate(given):
        name = one.name
        where = f"inputs.{name[:80]}"
        if name in inputs:
            raise BadRequest(f"inputs has two tensors named {name[:80]!r}")
        if one.parameters and any(shared in one.parameters for shared in SHARED):
            raise BadRequest(f"{where}.parameters: shared memory is not offered; send the data itself")
        inputs[name] = _tensor(one, raw[at] if raw else None, where)
    parameters = _read_all(request.parameters, "parameters")
    wants_raw = flag(parameters, "binary_data_output", "parameters", bool(raw))
    wanted = [
        WantedOutput(one.name, _read_all(one.parameters, f"outputs.{one.name[:80]}.parameters"))
        for one in request.outputs
    ]
    return InferRequest(inputs, request.id or None, parameters, wanted_outputs(wanted, raw=wants_raw), wants_raw)


def write(asked: InferRequest, model: str, answer: Answer, classes: Sequence[str] = ()) -> bytes:
    """The bytes of the ModelInferResponse. classes: of the app. Its outputs are all raw, or none: raw where one of them is wanted so or can only be sent so."""
    response = INFERENCE.ModelInferResponse(model_name=model, model_version=answer.version)
    if asked.id is not None:
        response.id = asked.id
    values = parameters_of(answer, classes)
    if unread := ignored(asked.parameters):
        values["ignored"] = unread
    for name, value in values.items():
        _set(response.parameters[name], value)
    tensors = {name: output_of(answer, name) for name in asked.outputs or answer.tensors}
    wants_raw = asked.raw if asked.outputs is None else any(asked.outputs.values())
    in_raw = wants_raw or any(not DATATYPES[tensor.datatype].contents for tensor in tensors.values())
    raw: list[Buffer] = []
    for name, tensor in tensors.items():
        output = response.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        if in_raw:
            raw.append(tensor.data)
        else:
            fill(output.contents, tensor)
    return write_response(response, raw)


def _tensor(given: Any, raw: Any, where: str) -> TensorFields:
    shape = list(given.shape)
    typed = given.HasField("contents")
    if raw is not None:
        if typed and given.contents.ByteSize():
            raise BadRequest(f"{where} has contents and raw_input_contents: only one of them can hold its elements")
        return from_bytes(given.datatype, shape, raw, where)
    if not typed:
        raise BadRequest(f"{where} has neither contents nor an element of raw_input_contents")
    return {"datatype": given.datatype, "shape": shape, "data": to_data(given.contents, given.datatype, shape, where)}


def _read_all(parameters: Any, where: str) -> dict[str, Any]:
    return {name: _value(value, f"{where}.{name[:80]}") for name, value in parameters.items()}


def _value(parameter: Any, where: str) -> Any:
    chosen = parameter.WhichOneof("parameter_choice")
    if chosen is None:
        raise BadRequest(f"{where} has no value: give one, as string_param")
    return getattr(parameter, chosen)


def _set(parameter: Any, value: Any) -> None:
    """The value in the oneof's field for its type; a fraction as a text, since KServe's clients know no double."""
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and -_INT64 <= value < _INT64:
        parameter.int64_param = value
    else:
        parameter.string_param = str(value)
