"""An engine on another machine as a variant: it speaks the Open Inference Protocol over HTTP, and holds the model.

The artifact is a small JSON file with the model's URL. A device of the kind "remote" stands for the hosts that the operator names; they are
its address. The engine need not be there when the variant is loaded, and may go and come back: what fails meanwhile is a failed run.

Bodies are as a client writes and reads them: JSON, with raw tensors behind it where the engine offers that.

Source: KServe, Open Inference Protocol v2 (REST), and Triton's extensions "binary tensor data" and "model configuration".
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from bus.datatypes import DATATYPES
from bus.messages.catalog import Signature, TensorSpec
from bus.messages.public import Tensor
from bus.tensors import BadTensor, from_array, to_array
from bus.values import from_list
from services.core.placement import REMOTE
from services.executor.backends.base import (
    BackendUnavailable,
    LoadFailed,
    LoadSpec,
    RunFailed,
    checked_outputs,
    in_order,
    plain,
)
from services.executor.backends.remote_http import (
    EngineUrl,
    HttpEngine,
    RelayedEngine,
    RemoteEngine,
    RemoteReply,
    check_host,
    engine_url,
)

if TYPE_CHECKING:
    from bus.tensors import Array


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


RELAY = "INFAAS_ENGINE_RELAY"  # variable of a sandbox: the descriptor of its relay
MOST_FILE = 4096  # bytes


class EngineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The artifact. url: of the model, as http://host:port/v2/models/NAME."""

    url: str


def engine_file(path: Path) -> EngineUrl:
    """The URL in an artifact. Raises LoadFailed."""
    with path.open("rb") as file:
        data = file.read(MOST_FILE + 1)
    try:
        if len(data) > MOST_FILE:
            raise LoadFailed(f"the file of a remote engine has at most {MOST_FILE} bytes")
        return engine_url(msgspec.json.decode(data, type=EngineFile).url)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LoadFailed(
            f'the file of a remote engine must be {{"url": "http://host:port/v2/models/NAME"}}: {error}'
        ) from error


class RemoteHandle:
    """A `Handle` with a connection of its own. The engine says at the first run whether it takes raw tensors, and again after an error."""

    def __init__(self, engine: RemoteEngine, url: EngineUrl, signature: Signature) -> None:
        self.proof = f"a remote engine at {url.place}"
        self.memory_mb = 0.0
        self.one_at_a_time = "it has one connection to its engine"
        self.inputs = tuple(spec.name for spec in signature.inputs)
        self.outputs = tuple(spec.name for spec in signature.outputs)
        self._signature = signature
        self._engine = engine
        self._place = url.place
        self._binary: bool | None = None
        self._closed = False

    def run(self, inputs: "dict[str, Array]") -> "dict[str, Array]":
        """Raises InputRejected, RunFailed, Cancelled."""
        if self._closed:
            raise RunFailed("the model is no longer loaded")
        n = len(in_order(inputs, self.inputs)[0])
        try:
            return checked_outputs(self._asked(inputs), self._signature, n, f"the engine at {self._place}")
        except RunFailed:
            self._binary = None
            raise

    def run_single(self, array: "Array") -> "list[Array]":
        return in_order(self.run({self.inputs[0]: array}), self.outputs)

    def cancel(self) -> None:
        self._engine.cancel()

    def close(self) -> None:
        self._closed = True
        self._engine.close()

    def _asked(self, inputs: "dict[str, Array]") -> "dict[str, Array]":
        if self._binary is None:
            server = self._engine.call("server")
            self._binary = server.status == 200 and offers_binary(server.body)
        try:
            body, head = infer_request(inputs, self.outputs, binary=self._binary)
        except BadTensor as error:
            raise RunFailed(str(error)) from error
        reply = _ok(self._engine.call("infer", body, head), self._place)
        return infer_outputs(reply.body, reply.head)


class RemoteBackend:
    """See `Backend`. A device's address are the hosts that the operator names."""

    name = REMOTE
    hardware = REMOTE
    formats = (REMOTE,)
    executed = True

    def probe(self, device: str) -> str:
        if device in ("", "cpu"):
            raise BackendUnavailable("no hosts of engines are named here: executor.remote_hosts")
        return "Open Inference Protocol 2"

    def load(self, artifact: Path, spec: LoadSpec) -> RemoteHandle:
        url = engine_file(artifact)
        engine = _engine(url, spec.device)
        return RemoteHandle(engine, url, spec.signature or described(engine, url).signature)

    def describe(self, artifact: Path) -> EngineModel:
        """What the engine says of the model. Raises LoadFailed, RunFailed."""
        url = engine_file(artifact)
        engine = _engine(url, "cpu")
        try:
            return described(engine, url)
        finally:
            engine.close()


def described(engine: RemoteEngine, url: EngineUrl) -> EngineModel:
    """What the engine says of the model. Raises LoadFailed, RunFailed."""
    metadata = _ok(engine.call("model"), url.place)
    config = engine.call("config")  # an extension, which not every engine has
    return model_of(metadata.body, config.body if config.status == 200 else None)


def _engine(url: EngineUrl, device: str) -> RemoteEngine:
    fd = os.environ.get(RELAY)
    if fd is not None:
        return RelayedEngine(int(fd))
    check_host(url, "" if device == "cpu" else device)
    return HttpEngine(url)


def _ok(reply: RemoteReply, place: str) -> RemoteReply:
    """The reply, if it is a success. Raises RunFailed."""
    if reply.status != 200:
        said = error_of(reply.body)
        raise RunFailed(f"the engine at {place} answered {reply.status}{f': {said}' if said else ''}")
    return reply
