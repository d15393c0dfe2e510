"""Wires one gateway: `infaas run gateway`."""

import os

from bus.port import Bus
from bus.subjects import Subjects
from infaas.client import Client
from services.core.settings import Settings
from services.gateway.actor import Gateway, GatewayInsight, make_gateway
from services.gateway.edge import GatewayEdge, GatewayService, Server
from services.gateway.http.access import AccessControl, BadTokens
from services.gateway.http.app import build
from services.gateway.registration import BadAllowedHosts
from services.shell.host.machine import NO_GRPC, has_grpc
from services.shell.host.running import inherited
from services.shell.http.server import BadTls, HttpServer
from services.shell.metrics.counts import process_families
from services.shell.metrics.system import PAGE, SystemPage
from services.shell.runtime.runtime import Runtime


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One gateway; any number of them share a system. It listens from the runtime's start on."""
    running = inherited()
    service = GatewayService(settings.gateway, await Client(bus, prefix=settings.prefix).open())

    def make() -> Gateway:
        service.actor = make_gateway(settings)
        return service.actor

    servers: list[Server] = []
    try:
        access = AccessControl(settings.gateway)
        if settings.gateway.port:
            servers.append(HttpServer(build(service, access), settings.gateway))
        if settings.gateway.grpc_port and not has_grpc():
            raise SystemExit(f"gRPC: {NO_GRPC}")
        if settings.gateway.grpc_port:
            from services.gateway.rpc.server import GrpcServer  # noqa: PLC0415  (17 MB that a gateway without gRPC does not need)

            servers.append(GrpcServer(service, access, settings.gateway))
    except (BadTokens, BadTls, BadAllowedHosts) as error:
        raise SystemExit(str(error)) from error
    runtime = Runtime(
        "gateway",
        make,
        bus,
        Subjects(settings.prefix),
        GatewayEdge(service, servers, succeeds=running is not None and running.role != 0),
        insight=GatewayInsight(service.counts, lambda: service.client.resent, service.not_ready),
    )
    runtime.grace += settings.gateway.drain_s
    service.span = lambda span: runtime.spans(span) if runtime.spans is not None else None
    service.record = runtime.record
    service.families = lambda: (*process_families(), *runtime.families())
    if page := os.environ.get(PAGE):
        service.page = SystemPage(page)
    service.dashboard = settings.dashboard.public_url
    return [runtime]
