"""The gRPC server: grpcio's asyncio server in the service's own event loop."""

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its core would log to stderr, unstructured

import grpc
import grpc.aio
from grpc._cython import cygrpc

from services.core.settings import GatewaySettings
from services.gateway.edge import GatewayService
from services.gateway.http.access import AccessControl
from services.gateway.http.server import tls_context as checked
from services.gateway.rpc import handlers
from services.gateway.rpc.calls import Calls
from services.gateway.rpc.infer import REFLECTIONS

MAX_STREAMS = 256  # at a time on one connection
LINGER_S = 0.2  # in which calls that come too late get an error
HEADROOM = 64 * 1024  # bytes beside the body that a message may have


class GrpcServer:
    """The gateway's server for gRPC. Raises BadTls; `open` raises OSError where it cannot listen."""

    def __init__(self, service: GatewayService, access: AccessControl, settings: GatewaySettings) -> None:
        self._service = service
        self._access = access
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
        server.add_registered_method_handlers(
            f"inference.{handlers.SERVICE}", handlers.inference_handlers(self._service, calls)
        )
        server.add_registered_method_handlers("grpc.health.v1.Health", handlers.health_handlers(self._service, calls))
        for schema in REFLECTIONS:
            (name,) = (service.full_name for service in schema.descriptor.services_by_name.values())
            server.add_registered_method_handlers(name, handlers.reflection_handlers(schema, calls))
        address = f"[{settings.address}]" if ":" in settings.address else settings.address
        where = f"{address}:{settings.grpc_port}"
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
