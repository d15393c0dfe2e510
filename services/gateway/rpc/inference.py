"""`inference.GRPCInferenceService`: the Open Inference Protocol, and of Triton's extensions those that have a meaning here."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from services.gateway.door import Door
from services.gateway.http.access import Right
from services.gateway.oip import asking
from services.gateway.oip import metadata as described
from services.gateway.rpc import infer, wire
from services.gateway.rpc.calls import Call, Calls, Next, Write, problem_from
from services.gateway.rpc.messages import INFERENCE
from services.gateway.statistics import told

SERVICE = "GRPCInferenceService"
_FREE = ("ServerLive", "ServerReady")  # of anybody


def handlers(door: Door, calls: Calls) -> dict[str, Any]:
    """The service's methods, by name."""
    service = Inference(door, calls)
    special = {
        "ModelInfer": calls.unary(service.infer, Right.ASK),
        "ModelStreamInfer": calls.stream(service.stream, Right.ASK),
    }
    return special | {
        method.name: calls.unary(
            _answering(method.request, getattr(service, method.name)), Right.NONE if method.name in _FREE else Right.ASK
        )
        for method in INFERENCE.methods(SERVICE)
        if method.name not in special
    }


def _answering(request: Any, answer: Callable[[Any], Any]) -> Callable[[bytes, Call], Awaitable[bytes]]:
    async def work(body: bytes, _: Call) -> bytes:
        found: bytes = answer(wire.read(body, request)).SerializeToString()
        return found

    return work


class Inference:
    """The methods. Those that only look at the catalogue take a message and return one."""

    def __init__(self, door: Door, calls: Calls) -> None:
        self._door = door
        self._calls = calls
        self._server = INFERENCE.ServerMetadataResponse(**asking.server())

    # -- the server

    def ServerLive(self, _: Any) -> Any:  # noqa: N802  (methods have the protocol's names)
        return INFERENCE.ServerLiveResponse(live=True)

    def ServerReady(self, _: Any) -> Any:  # noqa: N802
        return INFERENCE.ServerReadyResponse(ready=self._door.ready)

    def ServerMetadata(self, _: Any) -> Any:  # noqa: N802
        return self._server

    def RepositoryIndex(self, request: Any) -> Any:  # noqa: N802
        ready = self._door.ready
        models = () if request.ready and not ready else described.index(self._door.catalog, ready=ready)
        return INFERENCE.RepositoryIndexResponse(models=models)

    def ModelStatistics(self, request: Any) -> Any:  # noqa: N802
        counted = self._door.statistics
        if request.name:
            self._known(request)
            target = asking.target_of(request.name, request.version)
            entries = list(counted.of(target.app, target.model, target.variant, target.version))
        else:
            entries = [entry for app in counted.apps for entry in counted.of(app)]
        return _fitted(INFERENCE.ModelStatisticsResponse, {"model_stats": [told(*entry) for entry in entries]})

    # -- one model

    def ModelReady(self, request: Any) -> Any:  # noqa: N802
        target = asking.target_of(request.name, request.version)
        known = described.find(self._door.catalog, target) is not None
        return INFERENCE.ModelReadyResponse(ready=known and self._door.ready)

    def ModelMetadata(self, request: Any) -> Any:  # noqa: N802
        return INFERENCE.ModelMetadataResponse(**described.metadata(self._known(request)))

    def ModelConfig(self, request: Any) -> Any:  # noqa: N802
        return _fitted(INFERENCE.ModelConfigResponse, {"config": described.config(self._known(request))})

    def _known(self, request: Any) -> described.Known:
        return asking.known(self._door, request.name, asking.target_of(request.name, request.version))

    # -- inference

    async def infer(self, body: bytes, call: Call) -> bytes:
        return await self._answer(*wire.read_request(body), call)

    async def stream(self, following: Next, write: Write, call: Call) -> None:
        """Requests in turn. What is wrong with one is told in its reply, and the stream goes on."""
        while await self._turn(following, write, call):
            pass  # between turns nothing of a request is held

    async def _turn(self, following: Next, write: Write, call: Call) -> bool:
        body = await following()
        if body is None:
            return False
        failure = INFERENCE.ModelStreamInferResponse()
        try:
            answer = await self._calls.counted(body, partial(self._one, body, call, failure))
        except Exception as error:
            failure.error_message = problem_from(error).message
            await write(failure.SerializeToString())
        else:
            await write(b"".join((b"\x12", wire.varint(len(answer)), answer)))  # field 2, infer_response
        return True

    async def _one(self, body: bytes, call: Call, failure: Any) -> bytes:
        request, raw = wire.read_request(body)
        failure.infer_response.id = request.id
        return await self._answer(request, raw, call)

    async def _answer(self, request: Any, raw: list[Any], call: Call) -> bytes:
        asked = infer.read(request, raw)
        target = asking.target_of(request.model_name, request.model_version)
        answer = await asking.ask(
            self._door, target, asked, protocol="grpc", traceparent=call.traceparent, deadline=call.deadline
        )
        return infer.write(asked, request.model_name, answer)


def _fitted(message: Any, told: dict[str, Any]) -> Any:
    """The message with what it has fields for."""
    return message(**_known_parts(message.DESCRIPTOR, told))


def _known_parts(descriptor: Any, told: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in told.items():
        field = descriptor.fields_by_name.get(name)
        if field is None:
            continue
        part = field.message_type
        if part is None or part.GetOptions().map_entry:
            found[name] = value
        elif isinstance(value, list):
            found[name] = [_known_parts(part, one) for one in value]
        else:
            found[name] = _known_parts(part, value)
    return found
