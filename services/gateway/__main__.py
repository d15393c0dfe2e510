"""Wires one gateway: `infaas run gateway`."""

from bus.port import Bus
from bus.subjects import Subjects
from infaas.client import Client
from services.core.settings import Settings
from services.gateway.actor import Gateway
from services.gateway.edge import GatewayEdge, GatewayService, Server
from services.gateway.http.access import AccessControl, BadTokens
from services.gateway.http.app import build
from services.gateway.http.server import BadTls, HttpServer
from services.gateway.metrics import GatewayInsight
from services.gateway.registration import BadAllowedHosts
from services.shell.runtime.runtime import Runtime
from services.shell.settings import load


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One gateway; any number of them share a system. It listens from the runtime's start on."""
    subjects = Subjects(settings.prefix)
    door = GatewayService(settings.gateway, await Client(bus, prefix=settings.prefix).open())

    def make() -> Gateway:
        door.actor = Gateway(subjects)
        return door.actor

    servers: list[Server] = []
    try:
        keeper = AccessControl(settings.gateway)
        if settings.gateway.port:
            servers.append(HttpServer(build(door, keeper), settings.gateway))
        if settings.gateway.grpc_port:
            from services.gateway.rpc.server import GrpcServer  # noqa: PLC0415  (17 MB for those who have it off)

            servers.append(GrpcServer(door, keeper, settings.gateway))
    except (BadTokens, BadTls, BadAllowedHosts) as error:
        raise SystemExit(str(error)) from error
    runtime = Runtime(
        "gateway",
        make,
        bus,
        subjects,
        GatewayEdge(door, servers),
        insight=GatewayInsight(door.traffic, door.client, door.not_ready),
    )
    runtime.grace += settings.gateway.drain_s
    door.span = lambda span: runtime.spans(span) if runtime.spans is not None else None
    return [runtime]


if __name__ == "__main__":
    import sys

    from services.shell.runtime.serve import serve

    sys.exit(serve("gateway", load(), wire))
