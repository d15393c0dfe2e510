"""The gRPC server: grpcio's asyncio server in the service's own event loop.

Its methods: inference (the Open Inference Protocol), health, and reflection.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Any

from msgspec import Struct

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core would log to stderr, unstructured

import grpc
import grpc.aio
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.json_format import ParseDict
from grpc._cython import cygrpc

from services.core.hosts import in_url
from services.core.settings import GatewaySettings
from services.gateway.edge import GatewayService, failure_from
from services.gateway.errors import BadRequest, RequestFailed
from services.gateway.http.access import AccessControl, Right, check_app
from services.gateway.oip import models
from services.gateway.oip.infer import answer_of, requirements
from services.gateway.rpc import infer
from services.gateway.rpc.calls import Call, Calls, Next, Write
from services.gateway.rpc.infer import HEALTH, INFERENCE, REFLECTIONS, Schema, message_of
from services.gateway.statistics import statistics_json
from services.shell.http.server import tls_context as checked
from services.shell.runtime.runtime import unix_now

SERVICE = "GRPCInferenceService"
_OPEN = ("ServerLive", "ServerReady")  # need no token
_LISTS = ("RepositoryIndex", "ModelStatistics")  # say no more than what the token is for


def inference_handlers(service: GatewayService, calls: Calls) -> dict[str, Any]:
    """The methods of `inference.GRPCInferenceService`, by name."""
    infer_service = InferenceService(service, calls)
    special = {
        "ModelInfer": calls.unary(infer_service.infer, Right.QUERY),
        "ModelStreamInfer": calls.stream(infer_service.stream, Right.QUERY),
    }
    return special | {
        name: calls.unary(
            _answering(request, getattr(infer_service, name), lists=name in _LISTS),
            Right.NONE if name in _OPEN else Right.QUERY,
        )
        for name, request in INFERENCE.requests(SERVICE).items()
        if name not in special
    }


def _answering(
    request: Any, answer: Callable[..., Any], *, lists: bool = False
) -> Callable[[bytes, Call], Awaitable[bytes]]:
    async def work(body: bytes, call: Call) -> bytes:
        asked = message_of(body, request)
        if name := getattr(asked, "name", ""):
            check_app(call.only, name.partition(".")[0])
        message = answer(asked, call.only) if lists else answer(asked)
        found: bytes = (await message if isawaitable(message) else message).SerializeToString()
        return found

    return work


class InferenceService:
    """The protocol's methods, and those of Triton's extensions that have a meaning here. Most take a message and return one."""

    def __init__(self, service: GatewayService, calls: Calls) -> None:
        self._service = service
        self._calls = calls
        self._server = INFERENCE.ServerMetadataResponse(**models.server_metadata(service.version))

    def ServerLive(self, _: Any) -> Any:  # noqa: N802  (methods have the protocol's names)
        return INFERENCE.ServerLiveResponse(live=True)

    async def ServerReady(self, _: Any) -> Any:  # noqa: N802
        return INFERENCE.ServerReadyResponse(ready=(await self._service.readiness()).ready)

    def ServerMetadata(self, _: Any) -> Any:  # noqa: N802
        return self._server

    async def RepositoryIndex(self, request: Any, only: str) -> Any:  # noqa: N802
        ready = (await self._service.readiness()).ready
        entries = () if request.ready and not ready else models.index(self._service.catalog, ready=ready, only=only)
        return INFERENCE.RepositoryIndexResponse(models=entries)

    def ModelStatistics(self, request: Any, only: str) -> Any:  # noqa: N802
        counted = self._service.statistics
        if request.name:
            self._known(request)
            target = models.target_of(request.name, request.version)
            entries = list(counted.of(target.app, target.model, target.variant, target.version))
        else:
            entries = list(counted.all(only))
        return _fitted(
            INFERENCE.ModelStatisticsResponse, {"model_stats": [statistics_json(*entry) for entry in entries]}
        )

    async def ModelReady(self, request: Any) -> Any:  # noqa: N802
        target = models.target_of(request.name, request.version)
        known = models.find(self._service.catalog, target) is not None
        return INFERENCE.ModelReadyResponse(ready=known and (await self._service.readiness()).ready)

    def ModelMetadata(self, request: Any) -> Any:  # noqa: N802
        return _fitted(INFERENCE.ModelMetadataResponse, models.metadata(self._known(request)))

    def ModelConfig(self, request: Any) -> Any:  # noqa: N802
        return _fitted(INFERENCE.ModelConfigResponse, {"config": models.config(self._known(request))})

    def _known(self, request: Any) -> models.ServedModel:
        return models.served_model(self._service.catalog, request.name, models.target_of(request.name, request.version))

    async def infer(self, body: bytes, call: Call) -> bytes:
        return await self._answer(*infer.read_request(body), call)

    async def stream(self, following: Next, write: Write, call: Call) -> None:
        """Answer the requests of a stream one after another. A failed request gets an error as its reply, and the stream goes on."""
        while await self._turn(following, write, call):
            pass  # no variable here keeps a request alive between turns

    async def _turn(self, following: Next, write: Write, call: Call) -> bool:
        body = await following()
        if body is None:
            return False
        reply = INFERENCE.ModelStreamInferResponse()
        try:
            answer = await self._calls.counted(body, partial(self._one, body, call, reply))
        except Exception as error:
            reply.error_message = failure_from(error).message
            await write(reply.SerializeToString())
        else:
            await write(b"".join((b"\x12", infer.varint(len(answer)), answer)))  # field 2, infer_response
        return True

    async def _one(self, body: bytes, call: Call, reply: Any) -> bytes:
        request, raw = infer.read_request(body)
        reply.infer_response.id = request.id
        return await self._answer(request, raw, call)

    async def _answer(self, request: Any, raw: list[Any], call: Call) -> bytes:
        service = self._service
        try:
            return await self._asked(request, raw, call)
        except Exception as error:
            failure = failure_from(error)
            service.client_errors.add(request.model_name.partition(".")[0], failure, unix_now())
            raise failure from None

    async def _asked(self, request: Any, raw: list[Any], call: Call) -> bytes:
        check_app(call.only, request.model_name.partition(".")[0])
        asked = infer.read(request, raw)
        target = models.target_of(request.model_name, request.model_version)
        service = self._service
        app = service.catalog.app(target.app)
        needed = requirements(asked, target, app, unix_now(), call.deadline)
        answer = await service.query(target.app, asked.inputs, needed, traceparent=call.traceparent, protocol="grpc")
        classes = [] if answer.labels is None or app is None else service.catalog.classes_of(app)
        return infer.write(asked, request.model_name, answer_of(asked, answer), classes)


def _fitted(message: Any, values: dict[str, Any]) -> Any:
    """The message, from those values for which it has fields."""
    return ParseDict(values, message(), ignore_unknown_fields=True)


# -- Health

SERVICES = ("", "inference.GRPCInferenceService")
WATCH_INTERVAL_S = 0.5  # between two comparisons of the status for a client that watches it


def health_handlers(service: GatewayService, calls: Calls) -> dict[str, Any]:
    """The methods of `grpc.health.v1.Health`, by name."""
    health = HealthService(service, calls)
    return {"Check": calls.unary(health.check, Right.NONE), "Watch": calls.stream(health.watch, Right.NONE)}


class HealthService(Struct, eq=False):
    """SERVING while queries can be answered; NOT_SERVING as soon as the gateway is being stopped.

    Load balancers and orchestrators ask for the whole server ("") or for the inference service.
    """

    service: GatewayService
    calls: Calls

    async def check(self, body: bytes, _: Call) -> bytes:
        name = message_of(body, HEALTH.HealthCheckRequest).service
        if name not in SERVICES:
            raise RequestFailed(None, f"there is no service {name[:80]!r}", code="unknown")
        return _health(await self._status(name))

    async def watch(self, following: Next, write: Write, _: Call) -> None:
        """The status now, and again after each change."""
        body = await following()
        if body is None:
            raise BadRequest("the request has no message")
        name = message_of(body, HEALTH.HealthCheckRequest).service
        last = ""
        while True:
            status = await self._status(name)
            if status != last:
                last = status
                await write(_health(status))
            await self.calls.rest(asyncio.sleep(WATCH_INTERVAL_S))

    async def _status(self, name: str) -> str:
        if name not in SERVICES:
            return "SERVICE_UNKNOWN"
        return "SERVING" if (await self.service.readiness()).ready else "NOT_SERVING"


def _health(status: str) -> bytes:
    found: bytes = HEALTH.HealthCheckResponse(status=status).SerializeToString()
    return found


# -- Reflection

FILES = (INFERENCE, HEALTH, *REFLECTIONS)


def reflection_handlers(schema: Schema, calls: Calls) -> dict[str, Any]:
    """The methods of reflection v1 or v1alpha: they differ in the name of their package only. Tools such as grpcurl use them."""

    async def answer(following: Next, write: Write, _: Any) -> None:
        while (body := await following()) is not None:
            request = message_of(body, schema.ServerReflectionRequest)
            await write(reply_to(schema, request).SerializeToString())

    return {"ServerReflectionInfo": calls.stream(answer, Right.QUERY)}


def reply_to(schema: Schema, request: Any) -> Any:
    """The reply to one request of reflection."""
    reply = schema.ServerReflectionResponse(valid_host=request.host, original_request=request)
    asked = request.WhichOneof("message_request")
    if asked == "list_services":
        names = sorted(one.full_name for file in FILES for one in file.descriptor.services_by_name.values())
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


MAX_STREAMS = 256  # at a time on one connection
LINGER_S = 0.2  # in which calls that come too late get an error
HEADROOM = 64 * 1024  # bytes beside the body that a message may have


class GrpcServer:
    """The gateway's server for gRPC. Raises BadTls; `open` raises OSError where it cannot listen."""

    def __init__(self, service: GatewayService, access: AccessControl, settings: GatewaySettings) -> None:
        self._service = service
        self._settings = settings
        self._credentials = credentials(settings.tls_certificate, settings.tls_key)
        self._server: Any = None
        self.calls = Calls(access, settings, service.counts)

    async def open(self) -> None:
        # It would log every text that a client sends and that is not UTF-8.
        logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
        settings, calls = self._settings, self.calls
        server = self._server = grpc.aio.server(options=options(settings))
        server._server = SafeAioServer(asyncio.get_running_loop(), None, (), (), options(settings), None)
        server.add_registered_method_handlers(f"inference.{SERVICE}", inference_handlers(self._service, calls))
        server.add_registered_method_handlers("grpc.health.v1.Health", health_handlers(self._service, calls))
        for schema in REFLECTIONS:
            (name,) = (service.full_name for service in schema.descriptor.services_by_name.values())
            server.add_registered_method_handlers(name, reflection_handlers(schema, calls))
        where = f"{in_url(settings.address)}:{settings.grpc_port}"
        try:
            bound = (
                server.add_insecure_port(where)
                if self._credentials is None
                else server.add_secure_port(where, self._credentials)
            )
        except RuntimeError as error:
            raise OSError(f"cannot listen on {where}, for gRPC") from error
        if not bound:
            raise OSError(f"cannot listen on {where}, for gRPC")
        await server.start()
        calls.open()

    async def close(self, grace: float) -> None:
        if self._server is None:
            return
        # The gateway refuses calls from here on, with a reason; gRPC's core would only cancel late ones.
        self.calls.refuse()
        until = time.monotonic() + grace
        await asyncio.sleep(min(LINGER_S, grace))
        while self.calls.running and time.monotonic() < until:  # noqa: ASYNC110  (once in a process's life)
            await asyncio.sleep(0.01)
        await self._server.stop(max(0.0, until - time.monotonic()))
        self.calls.close()

    async def retire(self, grace: float) -> None:
        """A successor takes the calls from now on: clients hear it (GOAWAY), and calls under way end."""
        if self._server is not None:
            await self._server.stop(grace)


class SafeAioServer(cygrpc.AioServer):  # type: ignore[misc]
    """grpcio's server, which one request could end: a method's name that is not UTF-8 raises in its main loop.

    Registered methods do not get there. Calls of all other methods are refused here, before their names are decoded.
    """

    async def _request_call(self) -> None:
        loop = asyncio.get_running_loop()
        under_way: set[asyncio.Task[None]] = set()
        while True:
            state = await super()._request_call()
            task = loop.create_task(_refuse_unknown(state, loop))
            under_way.add(task)
            task.add_done_callback(under_way.discard)


async def _refuse_unknown(state: Any, loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(grpc.aio.AbortError, grpc.aio.BaseError):
        await cygrpc._ServicerContext(state, None, None, loop).abort(
            grpc.StatusCode.UNIMPLEMENTED, "there is no such method"
        )


def options(settings: GatewaySettings) -> tuple[tuple[str, int], ...]:
    """The settings as options of gRPC's core."""
    return (
        ("grpc.so_reuseport", int(settings.reuse_port)),
        ("grpc.max_receive_message_length", settings.max_body + HEADROOM),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", settings.max_header),
        ("grpc.absolute_max_metadata_size", settings.max_header),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", settings.connections),
        ("grpc.server_handshake_timeout_ms", int(1000 * settings.head_timeout_s)),
        ("grpc.max_connection_idle_ms", int(1000 * settings.idle_timeout_s)),
        ("grpc.keepalive_time_ms", int(1000 * settings.idle_timeout_s)),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),  # clients may send keepalive pings so often
    )


def credentials(certificate: str, key: str) -> Any:
    """The settings' certificate and key as gRPC's credentials; None where there are none. Raises BadTls."""
    if checked(certificate, key) is None:
        return None
    return grpc.ssl_server_credentials([(Path(key).read_bytes(), Path(certificate).read_bytes())])
