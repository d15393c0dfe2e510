"""The runner's edge: takes chunks from the queue, puts parts into their bucket."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from bus.codec import BadMessage, decode, encode
from bus.messages.jobs import Chunk, PartStored
from bus.port import Bus, Consumer, NotFound, ObjectStore, Stored
from bus.subjects import Subjects
from services.jobs.runner.chunks import ChunkKey, DropChunk, ExtendChunks, ReturnChunk, StorePart, TakeChunk

CONSUMER = "runners"
ACK_WAIT_S = 5.0  # after which the queue hands out again what a dead runner had taken
WAIT_S = 0.4  # that a fetch waits for a chunk


class RunnerEdge:
    """Carries out the commands of chunks.py. It opens nothing before there is a job."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects
        self._consumer: Consumer | None = None
        self._parts: ObjectStore | None = None
        self._taken: dict[ChunkKey, Stored] = {}
        self._commands: dict[type, Callable[[Any], Awaitable[Any]]] = {
            TakeChunk: self._take,
            ExtendChunks: self._extend,
            ReturnChunk: self._give_back,
            DropChunk: self._drop,
            StorePart: self._store,
        }

    async def perform(self, command: Any) -> Any:
        return await self._commands[type(command)](command)

    async def _take(self, _: TakeChunk) -> Chunk | None:
        try:
            if self._consumer is None:
                self._consumer = await self._bus.consumer(self._subjects.job_stream, CONSUMER, ack_wait_s=ACK_WAIT_S)
            found = await self._consumer.fetch(1, WAIT_S)
        except NotFound:
            self._consumer = None
            return None  # the coordinator has not made the queue yet
        for stored in found:
            try:
                chunk = decode(Chunk, stored.data)
            except BadMessage:
                await stored.ack()  # no chunk that this release knows
                continue
            self._taken[chunk.job, chunk.number] = stored  # only the latest of several deliveries can be acknowledged
            return chunk
        return None

    async def _extend(self, command: ExtendChunks) -> None:
        for key in command.keys:
            if key in self._taken:
                await self._taken[key].extend()

    async def _give_back(self, command: ReturnChunk) -> None:
        stored = self._taken.pop(command.key, None)
        if stored is not None:
            await stored.nak(command.delay)

    async def _drop(self, command: DropChunk) -> None:
        stored = self._taken.pop(command.key, None)
        if stored is not None:
            await stored.ack()

    async def _store(self, command: StorePart) -> None:
        part = command.part
        if command.ref is not None:
            answers = await self._bus.object_store(command.ref.bucket, create=False)
            outputs = await answers.get(command.ref.key)
            await answers.delete(command.ref.key)
            part = msgspec.structs.replace(part, outputs=msgspec.Raw(outputs))
        if self._parts is None:
            self._parts = await self._bus.object_store(self._subjects.parts_bucket, create=False)
        await self._parts.put(f"{part.job}/{part.number}", encode(part))
        self._bus.publish(self._subjects.offline("part"), encode(PartStored(job=part.job, number=part.number)))
        await self._drop(DropChunk((part.job, part.number)))
