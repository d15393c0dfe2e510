"""Queries with their answers, of apps whose owners let them be kept (`set-app --payloads`), go to a bucket of values that expire.

A batch costs a copy of the inputs that are kept. Once a second what was copied is stored, in tasks of their own. What does not fit is dropped.
"""

import asyncio
import logging
from collections import deque
from typing import Any

from numpy.typing import NDArray

from bus.codec import encode
from bus.messages.catalog import VariantRecord
from bus.messages.flow import Payload, Route, payload_key
from bus.messages.public import Tensor
from bus.port import Bus, BusError, KeyValue
from bus.subjects import Subjects
from bus.tensors import from_array
from services.executor.queue import QueuedQuery
from services.shell.runtime.runtime import unix_now

logger = logging.getLogger(__name__)

PERIOD = 1.0  # s between two times of storing
MOST_WAITING = 2**25  # bytes
TOGETHER = 100  # under way at a time: the server writes those that wait with one sync
LAST_S = 2.0  # in which those are stored that wait at the end
ROOM = 1024  # bytes of a message beside its arrays

KeptRow = tuple[Route, str, float, dict[str, NDArray[Any]], dict[str, Tensor]]


class PayloadKeeper:
    """Of one device. on: whether there is a bucket to keep them in."""

    def __init__(self, bus: Bus, subjects: Subjects, *, on: bool) -> None:
        self._bus, self._subjects, self._on = bus, subjects, on
        self._rows: deque[KeptRow] = deque()
        self._bytes = self._dropped = 0
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """A variant is loaded: from now on something may come."""
        if self._on and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Store what waits, and end."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        try:
            await asyncio.wait_for(self._store(), LAST_S)
        except (TimeoutError, BusError, ValueError) as error:
            logger.warning("payloads of the last second are not kept: %s", error)

    def take(
        self,
        record: VariantRecord,
        queries: list[QueuedQuery],
        inputs: dict[str, NDArray[Any]],
        outputs: list[dict[str, Tensor]],
    ) -> None:
        """Copy what is kept of a computed batch. inputs: by name, [items, ...]. outputs: by query."""
        if self._task is None or record.simulated or not any(query.route.keep for query in queries):
            return
        at, most = 0, self._bus.max_payload - ROOM
        for query, answer in zip(queries, outputs, strict=True):
            some = {name: one[at : at + query.items] for name, one in inputs.items()}
            at += query.items
            if not query.route.keep:
                continue
            size = sum(one.nbytes for one in some.values()) + sum(len(one.data) for one in answer.values())
            if size > most or self._bytes + size > MOST_WAITING:
                self._dropped += 1
                continue
            self._bytes += size
            copied = {name: one.copy() for name, one in some.items()}
            self._rows.append((query.route, record.variant, unix_now(), copied, answer))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            try:
                await self._store()
            except (BusError, ValueError) as error:  # also arrays that no tensor can be made of
                logger.warning("payloads are not kept: %s", error)

    async def _store(self) -> None:
        if self._dropped:
            logger.warning("%d payloads were not kept: they were too large, or too many at once", self._dropped)
        rows, self._bytes, self._dropped = [self._rows.popleft() for _ in range(len(self._rows))], 0, 0
        if not rows:
            return
        bucket = await self._bus.key_value(self._subjects.payloads_bucket, create=False)
        for at in range(0, len(rows), TOGETHER):
            packed = await asyncio.to_thread(_packed, rows[at : at + TOGETHER])
            await asyncio.gather(*(self._put(bucket, *one) for one in packed))

    async def _put(self, bucket: KeyValue, key: str, data: bytes) -> None:
        if len(data) > self._bus.max_payload - ROOM:  # of texts nobody knew the size
            self._dropped += 1
            return
        await bucket.put(key, data)


def _packed(rows: list[KeptRow]) -> list[tuple[str, bytes]]:
    """Their keys and values."""
    found = []
    for route, variant, time, inputs, outputs in rows:
        asked = route if route.origin is None else route.origin.route
        query, tensors = asked.uid.hex(), {name: from_array(one) for name, one in inputs.items()}
        payload = Payload(query=query, time=time, variant=variant, inputs=tensors, outputs=outputs, id=asked.id)
        found.append((payload_key(route.app, query, asked.id, route.uid.hex()), encode(payload)))
    return found
