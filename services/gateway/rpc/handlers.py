"""`inference.GRPCInferenceService`: the Open Inference Protocol, and of Triton's extensions those that have a meaning here."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from services.gateway.edge import GatewayService
from services.gateway.errors import RequestFailed
from services.gateway.http.access import Right
from services.gateway.oip import models
from services.gateway.oip.infer import ask_model
from services.gateway.rpc import infer, wire
from services.gateway.rpc.calls import Call, Calls, Next, Write, problem_from
from services.gateway.rpc.messages import HEALTH, INFERENCE, REFLECTIONS, Schema
from services.gateway.rpc.wire import Unreadable, read
from services.gateway.statistics import statistics_json

SERVICE = "GRPCInferenceService"
_FREE = ("ServerLive", "ServerReady")  # of anybody


def inference_handlers(door: GatewayService, calls: Calls) -> dict[str, Any]:
    """The service's methods, by name."""
    service = InferenceService(door, calls)
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


class InferenceService:
    """The methods. Those that only look at the catalogue take a message and return one."""

    def __init__(self, door: GatewayService, calls: Calls) -> None:
        self._door = door
        self._calls = calls
        self._server = INFERENCE.ServerMetadataResponse(**models.server_metadata())

    # -- the server

    def ServerLive(self, _: Any) -> Any:  # noqa: N802  (methods have the protocol's names)
        return INFERENCE.ServerLiveResponse(live=True)

    def ServerReady(self, _: Any) -> Any:  # noqa: N802
        return INFERENCE.ServerReadyResponse(ready=self._door.ready)

    def ServerMetadata(self, _: Any) -> Any:  # noqa: N802
        return self._server

    def RepositoryIndex(self, request: Any) -> Any:  # noqa: N802
        ready = self._door.ready
        entries = () if request.ready and not ready else models.index(self._door.catalog, ready=ready)
        return INFERENCE.RepositoryIndexResponse(models=entries)

    def ModelStatistics(self, request: Any) -> Any:  # noqa: N802
        counted = self._door.statistics
        if request.name:
            self._known(request)
            target = models.target_of(request.name, request.version)
            entries = list(counted.of(target.app, target.model, target.variant, target.version))
        else:
            entries = [entry for app in counted.apps for entry in counted.of(app)]
        return _fitted(
            INFERENCE.ModelStatisticsResponse, {"model_stats": [statistics_json(*entry) for entry in entries]}
        )

    # -- one model

    def ModelReady(self, request: Any) -> Any:  # noqa: N802
        target = models.target_of(request.name, request.version)
        known = models.find(self._door.catalog, target) is not None
        return INFERENCE.ModelReadyResponse(ready=known and self._door.ready)

    def ModelMetadata(self, request: Any) -> Any:  # noqa: N802
        return INFERENCE.ModelMetadataResponse(**models.metadata(self._known(request)))

    def ModelConfig(self, request: Any) -> Any:  # noqa: N802
        return _fitted(INFERENCE.ModelConfigResponse, {"config": models.config(self._known(request))})

    def _known(self, request: Any) -> models.ServedModel:
        return models.served_model(self._door, request.name, models.target_of(request.name, request.version))

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
        target = models.target_of(request.model_name, request.model_version)
        answer = await ask_model(
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


# -- `grpc.health.v1.Health`: what load balancers and orchestrators ask. The whole server, and the inference service
# in it.

SERVICES = ("", "inference.GRPCInferenceService")
EVERY = 0.25  # s between looks for those who watch


def health_handlers(door: GatewayService, calls: Calls) -> dict[str, Any]:
    """The service's methods, by name."""
    service = HealthService(door, calls)
    return {"Check": calls.unary(service.check, Right.NONE), "Watch": calls.stream(service.watch, Right.NONE)}


class HealthService:
    """SERVING while queries can be answered; NOT_SERVING from the moment on that the gateway is stopped."""

    def __init__(self, door: GatewayService, calls: Calls) -> None:
        self._door = door
        self._calls = calls

    async def check(self, body: bytes, _: Call) -> bytes:
        service = read(body, HEALTH.HealthCheckRequest).service
        if service not in SERVICES:
            raise RequestFailed(None, f"there is no service {service[:80]!r}", code="unknown")
        return _told(self._status(service))

    async def watch(self, following: Next, write: Write, _: Call) -> None:
        """The status now, and whenever it is another."""
        body = await following()
        if body is None:
            raise Unreadable("the request has no message")
        service = read(body, HEALTH.HealthCheckRequest).service
        last = ""
        while True:
            status = self._status(service)
            if status != last:
                last = status
                await write(_told(status))
            await self._calls.rest(asyncio.sleep(EVERY))

    def _status(self, service: str) -> str:
        if service not in SERVICES:
            return "SERVICE_UNKNOWN"
        return "SERVING" if self._door.ready else "NOT_SERVING"


def _told(status: str) -> bytes:
    found: bytes = HEALTH.HealthCheckResponse(status=status).SerializeToString()
    return found


# -- Server reflection, v1 and v1alpha: tools such as grpcurl ask it what there is and need no .proto files.

FILES = (INFERENCE, HEALTH, *REFLECTIONS)


def reflection_handlers(schema: Schema, calls: Calls) -> dict[str, Any]:
    """The methods of one of the two, which differ in their package's name only."""

    async def answer(following: Next, write: Write, _: Any) -> None:
        while (body := await following()) is not None:
            request = read(body, schema.ServerReflectionRequest)
            await write(reply_to(schema, request).SerializeToString())

    return {"ServerReflectionInfo": calls.stream(answer, Right.ASK)}


def reply_to(schema: Schema, request: Any) -> Any:
    """The reply to one question."""
    reply = schema.ServerReflectionResponse(valid_host=request.host, original_request=request)
    asked = request.WhichOneof("message_request")
    if asked == "list_services":
        names = sorted(service.full_name for file in FILES for service in file.descriptor.services_by_name.values())
        reply.list_services_response.service.extend(schema.ServiceResponse(name=name) for name in names)
        return reply
    found = None
    if asked == "file_by_filename":
        found = next((file for file in FILES if file.descriptor.name == request.file_by_filename), None)
    elif asked == "file_containing_symbol":
        found = next((file for file in FILES if file.has(request.file_containing_symbol)), None)
    if found is None:
        code, _ = grpc.StatusCode.NOT_FOUND.value
        reply.error_response.error_code = code
        reply.error_response.error_message = "there is nothing of this name"
        return reply
    written = FileDescriptorProto()
    found.descriptor.CopyToProto(written)
    reply.file_descriptor_response.file_descriptor_proto.append(written.SerializeToString())
    return reply
