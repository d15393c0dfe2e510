"""A gateway's hands: opens and closes its servers with the actor's life."""

import asyncio
from typing import Any, Protocol

from services.gateway.actor import Close, Serve
from services.gateway.door import Door


class Server(Protocol):
    """One protocol's server."""

    async def open(self) -> None:
        """Listen. Raises OSError."""

    async def close(self, grace: float) -> None:
        """Take nothing new, finish what is under way within so many seconds, close."""


class GatewayEdge:
    """servers: opened in this order, closed side by side."""

    def __init__(self, door: Door, servers: list[Server]) -> None:
        self._door = door
        self._closed = list(servers)
        self._open: list[Server] = []

    async def perform(self, command: Any) -> Any:
        match command:
            case Serve():
                await self._serve()
            case Close(grace):
                await self._close(grace)
            case _:
                raise TypeError(f"a gateway has no {type(command).__name__}")

    async def _serve(self) -> None:
        while self._closed:  # none where the actor was started again: its servers never stopped
            await self._closed[0].open()
            self._open.append(self._closed.pop(0))
        self._door.listening = True

    async def _close(self, grace: float) -> None:
        self._door.draining = True
        notice = min(self._door.settings.drain_s, grace)
        if self._open:
            await asyncio.sleep(notice)  # whoever deals requests out sees that it is not ready, and goes elsewhere
        await asyncio.gather(*(server.close(grace - notice) for server in self._open))
        self._open.clear()
        await self._door.client.close()
