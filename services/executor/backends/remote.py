"""An engine on another machine as a variant: it speaks the Open Inference Protocol over HTTP, and holds the model.

The artifact is a small JSON file with the model's URL. A device of the kind "remote" stands for the hosts that the operator names; they are
its address. The engine need not be there when the variant is loaded, and may go and come back: what fails meanwhile is a failed run.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bus.messages.catalog import Signature
from bus.tensors import BadTensor
from services.core.placement import REMOTE
from services.executor.backends.base import (
    BackendUnavailable,
    LoadFailed,
    LoadSpec,
    RunFailed,
    checked_outputs,
    in_order,
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
from services.executor.backends.remote_tensors import (
    EngineModel,
    error_of,
    infer_outputs,
    infer_request,
    model_of,
    offers_binary,
)

if TYPE_CHECKING:
    from numpy import ndarray

    Array = ndarray[Any, Any]

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

    def describe(self, artifact: Path, device: str = "cpu") -> EngineModel:
        """What the engine says of the model. Raises LoadFailed, RunFailed."""
        url = engine_file(artifact)
        engine = _engine(url, device)
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
