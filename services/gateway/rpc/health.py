"""`grpc.health.v1.Health`: what load balancers and orchestrators ask. The whole server, and the inference service in it."""

import asyncio
from typing import Any

from services.gateway.door import Door, Problem
from services.gateway.http.access import Right
from services.gateway.rpc.calls import Call, Calls, Next, Write
from services.gateway.rpc.messages import HEALTH
from services.gateway.rpc.wire import Unreadable, read

SERVICES = ("", "inference.GRPCInferenceService")
EVERY = 0.25  # s between looks for those who watch


def handlers(door: Door, calls: Calls) -> dict[str, Any]:
    """The service's methods, by name."""
    service = Health(door, calls)
    return {"Check": calls.unary(service.check, Right.NONE), "Watch": calls.stream(service.watch, Right.NONE)}


class Health:
    """SERVING while queries can be answered; NOT_SERVING from the moment on that the gateway is stopped."""

    def __init__(self, door: Door, calls: Calls) -> None:
        self._door = door
        self._calls = calls

    async def check(self, body: bytes, _: Call) -> bytes:
        service = read(body, HEALTH.HealthCheckRequest).service
        if service not in SERVICES:
            raise Problem(None, f"there is no service {service[:80]!r}", code="unknown")
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
