"""Bodies of the Open Inference Protocol, as a client writes and reads them: JSON, with raw tensors behind it where the engine offers that.

Source: KServe, Open Inference Protocol v2 (REST), and Triton's extensions "binary tensor data" and "model configuration".
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from bus.datatypes import DATATYPES
from bus.messages.catalog import Signature, TensorSpec
from bus.messages.public import Tensor
from bus.tensors import BadTensor, from_array, to_array
from bus.values import from_list
from services.executor.backends.base import LoadFailed, RunFailed, plain

if TYPE_CHECKING:
    from numpy import ndarray

    Array = ndarray[Any, Any]

BINARY = "binary_tensor_data"
MOST_JSON = 2**26  # bytes of a reply without raw tensors
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _TensorMetadata(Struct):
    name: str
    datatype: str
    shape: list[int]


class _ModelMetadata(Struct):
    inputs: list[_TensorMetadata] = []
    outputs: list[_TensorMetadata] = []


class _ModelConfig(Struct):
    max_batch_size: int = 0


class _ServerMetadata(Struct):
    extensions: list[str] = []


class _GivenOutput(Struct):
    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class _InferReply(Struct):
    outputs: list[_GivenOutput]


class _ErrorReply(Struct):
    error: str = ""


# -- what an engine says about itself


class EngineModel(Struct, frozen=True):
    """A model as its engine describes it. fixed: it takes one item at a time. most: items of a batch at most; 0: not said."""

    signature: Signature
    fixed: bool
    most: int


def model_of(metadata: bytes, config: bytes | None) -> EngineModel:
    """config: None where the engine has none to offer. Raises LoadFailed."""
    try:
        found = msgspec.json.decode(metadata, type=_ModelMetadata)
    except _UNREADABLE as error:
        raise LoadFailed(f"the engine's description of the model cannot be read: {plain(error)}") from error
    if not found.inputs or not found.outputs:
        raise LoadFailed("the engine does not say the model's inputs and outputs; have it serve the model's metadata")
    first = {spec.shape[0] if spec.shape else 0 for spec in found.inputs}
    if not first <= {-1, 1}:
        shapes = ", ".join(f"{spec.name} {spec.shape}" for spec in found.inputs)
        raise LoadFailed(f"the first axis of each of the model's inputs must count items (-1, or 1), not {shapes}")
    most = 0
    if config is not None:
        try:
            most = max(0, msgspec.json.decode(config, type=_ModelConfig).max_batch_size)
        except _UNREADABLE:
            most = 0  # not Triton's
    signature = Signature(
        inputs=[_spec(spec) for spec in found.inputs], outputs=[_spec(spec) for spec in found.outputs]
    )
    return EngineModel(signature, 1 in first or most == 1, most)


def _spec(found: _TensorMetadata) -> TensorSpec:
    row = DATATYPES.get(found.datatype)
    if row is None or not row.native:
        raise LoadFailed(
            f"tensor {found.name[:80]!r} of the model is {found.datatype[:20]}, which is not supported here"
        )
    if any(length != -1 and length < 1 for length in found.shape):
        raise LoadFailed(
            f"tensor {found.name[:80]!r} of the model has shape {found.shape}: lengths must be -1, or above 0"
        )
    return TensorSpec(name=found.name, datatype=found.datatype, shape=found.shape[1:])


def offers_binary(server: bytes) -> bool:
    """Whether an engine that says this about itself takes raw tensors."""
    try:
        return BINARY in msgspec.json.decode(server, type=_ServerMetadata).extensions
    except _UNREADABLE:
        return False


def error_of(body: bytes) -> str:
    """The engine's own words in a reply that is an error; empty if there are none."""
    try:
        return plain(msgspec.json.decode(body, type=_ErrorReply).error)
    except _UNREADABLE:
        return ""


# -- inference


def infer_request(inputs: "Mapping[str, Array]", outputs: Iterable[str], *, binary: bool) -> tuple[bytes, int | None]:
    """The body, and the bytes of JSON in front of raw tensors; None: it is all JSON."""
    tensors = {name: from_array(array) for name, array in inputs.items()}
    heads: list[dict[str, Any]] = []
    for name, tensor in tensors.items():
        head: dict[str, Any] = {"name": name, "shape": tensor.shape, "datatype": tensor.datatype}
        if binary:
            head["parameters"] = {"binary_data_size": len(tensor.data)}
        else:
            head["data"] = inputs[name].reshape(-1).tolist()
        heads.append(head)
    wanted = [{"name": name, "parameters": {"binary_data": True}} if binary else {"name": name} for name in outputs]
    text = msgspec.json.encode({"inputs": heads, "outputs": wanted})
    if not binary:
        return text, None
    return b"".join((text, *(bytes(tensor.data) for tensor in tensors.values()))), len(text)


def infer_outputs(body: bytes, head: int | None) -> "dict[str, Array]":
    """The outputs in the engine's reply. Raises RunFailed."""
    if not 0 <= (len(body) if head is None else head) <= len(body) or (head is None and len(body) > MOST_JSON):
        raise RunFailed("the engine's reply has another length than it says, or is too long")
    try:
        found = msgspec.json.decode(body if head is None else body[:head], type=_InferReply)
    except _UNREADABLE as error:
        raise RunFailed(f"the engine's reply cannot be read: {plain(error)}") from error
    arrays: dict[str, Array] = {}
    at = len(body) if head is None else head
    for output in found.outputs:
        size, where = (output.parameters or {}).get("binary_data_size"), output.name[:80]
        try:
            if size is None:
                fields = from_list(output.datatype, output.shape, output.data, where)
                arrays[output.name] = to_array(Tensor(**fields), where)
                continue
            if not isinstance(size, int) or not 0 <= size <= len(body) - at:
                raise RunFailed(f"output {where!r} of the engine's reply is cut off")
            tensor = Tensor(datatype=output.datatype, shape=output.shape, data=body[at : at + size])
            arrays[output.name] = to_array(tensor, where)
            at += size
        except BadTensor as error:
            raise RunFailed(f"output {where!r} of the engine's reply is no tensor: {plain(error)}") from error
    return arrays
