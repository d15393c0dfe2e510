"""The recorder's hands: fetch from a stream, write to the database in a thread of its own, acknowledge what is committed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import psycopg

from bus.port import Bus, BusError, Consumer, Stored, StreamSpec
from services.recorder.actor import Ingest, Maintain, Mirror, Tidy
from services.recorder.keeper import Keeper
from services.recorder.ledger import Ledger, Message
from services.recorder.mirror import CatalogMirror
from services.recorder.policy import MOST
from services.shell.store import Store, StoreError, one_line

log = logging.getLogger(__name__)

R = TypeVar("R")

NAME = "recorder"
WAIT = 1.0  # s that a fetch waits for the first message; also what a stop may have to wait for
CHECK = 5.0  # s without a message after which the stream is made sure of again


class RecorderEdge:
    """Carries out `Ingest`, `Mirror`, `Tidy` and `Maintain`.

    streams: by the names that `Ingest` uses. What was fetched and could not be written is held and written first next time;
    it is not acknowledged before, so the stream keeps it too. One thing at a time is done in the database.
    """

    def __init__(self, bus: Bus, store: Store, streams: Mapping[str, StreamSpec], prices: Mapping[str, float]) -> None:
        self._bus = bus
        self._ledger = Ledger(store)
        self._keeper = Keeper(store)
        self._mirror = CatalogMirror(store, prices)
        self._streams = streams
        self._consumers: dict[str, Consumer] = {}
        self._check_at: dict[str, float] = {}
        self._held: dict[str, list[Stored]] = {}
        self._writing = asyncio.Lock()
        self._commands: dict[type, Callable[[Any], Awaitable[Any]]] = {
            Ingest: self._ingest,
            Mirror: self._write_mirror,
            Tidy: self._tidy,
            Maintain: self._maintain,
        }

    async def perform(self, command: Any) -> Any:
        return await self._commands[type(command)](command)

    async def _ingest(self, command: Ingest) -> int:
        stream = command.stream
        messages = self._held.get(stream)
        if not messages:
            messages = await self._fetch(stream)
        if not messages:
            return 0
        self._held[stream] = messages
        bodies = [Message(message.subject, message.data) for message in messages]
        await self._in_database(self._ledger.write, bodies)
        self._held[stream] = []
        for message in messages:
            try:
                await message.ack()
            except BusError as error:  # it comes again, and is known then
                log.warning("could not acknowledge: %s", error)
        return len(messages)

    async def _fetch(self, stream: str) -> list[Stored]:
        now = asyncio.get_running_loop().time()
        if now >= self._check_at.get(stream, 0.0):
            spec = self._streams[stream]
            await self._bus.ensure_stream(spec)
            consumer = await self._bus.consumer(spec.name, NAME)
            self._consumers.setdefault(stream, consumer)
        # A server that lost its disk comes back without our streams: what keeps coming proves that they are there.
        messages = await self._consumers[stream].fetch(MOST, WAIT)
        if messages or stream not in self._check_at or now >= self._check_at[stream]:
            self._check_at[stream] = now + CHECK
        return messages

    async def _write_mirror(self, command: Mirror) -> None:
        await self._in_database(self._mirror.write, command.changes, command.present)

    async def _tidy(self, _: Tidy) -> None:
        await self._in_database(self._ledger.tidy)

    async def _maintain(self, _: Maintain) -> bool:
        return await self._in_database(self._keeper.maintain)

    async def _in_database(self, work: Callable[..., R], *arguments: Any) -> R:
        """One thing at a time, off the loop; raises StoreError, in one line, when the database cannot do it now."""
        async with self._writing:
            try:
                return await asyncio.to_thread(work, *arguments)
            except psycopg.Error as error:
                raise StoreError(f"the database is away or not ready: {one_line(error)}") from None
