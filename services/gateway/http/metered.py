"""Counts what goes in and out, around everything else."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.traffic import Traffic

PROTOCOL = "infaas.protocol"  # in the scope, once a dialect's route has been found
UNKNOWN = "http"  # requests that no dialect has taken
OPEN = "http"  # of requests under way: their dialect is not known yet


class Metered:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        status = received = sent = 0

        async def taken() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def told(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        traffic = self._traffic
        traffic.running[OPEN] += 1
        try:
            await self._app(scope, taken, told)
        finally:
            traffic.running[OPEN] -= 1
            # No status: the client has left before it was told.
            protocol = scope.get(PROTOCOL, UNKNOWN)
            traffic.ended(protocol, str(status or 499), time.perf_counter() - began, received, sent)
