"""What is copied of computed batches. Once a second it is counted or stored, beside the batches.

A sample of the queries is counted in the cells of its model's distribution (services/core/drift.py). The counts alone leave this process.
A batch costs a subtraction, a sampled query a copy of one item and its answer.

Queries with their answers, of apps whose owners let them be kept (`set-app --payloads`), go to a bucket of values that expire. A batch costs a
copy of the inputs that are kept. What does not fit is dropped.
"""

import asyncio
import logging
import random
from collections import defaultdict, deque
from functools import reduce
from math import log, log1p
from typing import Any
from zlib import compress

import numpy as np
from numpy.typing import NDArray

from bus.codec import BadMessage, encode
from bus.messages.catalog import VariantRecord
from bus.messages.flow import Payload, Route, payload_key
from bus.messages.jobs import OFFLINE
from bus.messages.public import Tensor
from bus.messages.scaling import QueriesSampled
from bus.port import Bus, BusError, KeyValue
from bus.subjects import Subjects
from bus.tensors import from_array
from services.core.drift import LEAST, CountedWindow, Distribution
from services.executor.queue import QueuedQuery
from services.shell.runtime.runtime import unix_now

Array = NDArray[Any]
Row = list[dict[str, Array]]  # an item's inputs and outputs, [1, ...] each

logger = logging.getLogger(__name__)

PERIOD = 1.0  # s between counts, and between two times of storing
MOST_ROWS, MOST_BYTES = 256, 2**24  # copied between two counts
SEND_S = 5.0  # s after which fewer than LEAST items are sent, too


class QuerySampler:
    """Of one device. share: of its queries, 0..1."""

    def __init__(self, bus: Bus, subjects: Subjects, share: float) -> None:
        self._bus, self._subjects, self._share = bus, subjects, share
        self._random = random.Random()  # noqa: S311  nobody gains by guessing which
        self._until = 1  # queries until the next one that is sampled
        self._rows: defaultdict[tuple[str, str, str], list[Row]] = defaultdict(list)  # by app, model and distribution
        self._count = self._bytes = 0
        self._full = True  # until something is loaded
        self._known: dict[str, Distribution | None] = {}
        self._counted: dict[tuple[str, str, str], CountedWindow] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self, record: VariantRecord) -> None:
        """A variant is loaded: from now on there is something to count, if its distribution is known."""
        if self._share > 0 and record.distribution and not record.simulated and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._full = False

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def take(
        self, record: VariantRecord, queries: list[QueuedQuery], inputs: dict[str, Array], outputs: dict[str, Array]
    ) -> None:
        """Copy what is sampled of a computed batch. inputs, outputs: by name, [items, ...]."""
        count = len(queries)
        if self._until > count or self._full:
            self._until = max(1, self._until - count)
            return
        chance = self._random.random
        while self._until <= count:
            place = self._until - 1
            self._until += 1 if self._share >= 1 else 1 + int(min(1e9, log(1 - chance()) / log1p(-self._share)))
            query = queries[place]
            if query.route.policy == OFFLINE or self._full:
                continue
            at = sum(one.items for one in queries[:place]) + int(chance() * query.items)
            row = [{name: one[at : at + 1].copy() for name, one in side.items()} for side in (inputs, outputs)]
            self._rows[query.route.app, record.model, record.distribution].append(row)
            self._count += 1
            self._bytes += sum(one.nbytes for side in row for one in side.values())
            self._full = self._count >= MOST_ROWS or self._bytes >= MOST_BYTES
        self._until -= count

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            rows, self._rows, self._count, self._bytes = self._rows, defaultdict(list), 0, 0
            self._full = False
            now = unix_now()
            for key, some in [*rows.items()]:
                distribution = await self._distribution(key[2])
                if distribution is not None:
                    await self._add(key, distribution, some, now)
            self._send(now)

    async def _add(self, key: tuple[str, str, str], distribution: Distribution, rows: list[Row], now: float) -> None:
        try:
            window = await asyncio.to_thread(_counted, distribution, rows, now)
        except (ValueError, KeyError, TypeError) as error:  # of another signature than its version has
            logger.warning("queries of %s are not compared with its validation set: %s", key[0], error)
            self._known[key[2]] = None
            return
        before = self._counted.get(key)
        self._counted[key] = window if before is None else before.with_(window)

    def _send(self, now: float) -> None:
        for key, window in [*self._counted.items()]:
            if window.counts[0].sum() < LEAST and now - window.start < SEND_S:
                continue
            del self._counted[key]
            app, model, distribution = key
            told = QueriesSampled(
                app=app, model=model, distribution=distribution, start=window.start, end=window.end,
                counts=compress(window.counts.astype(np.int64).tobytes(), 1),
                items=b"" if window.items is None else compress(window.items.tobytes(), 1),
            )  # fmt: skip
            self._bus.publish(self._subjects.controller("sampled"), encode(told))

    async def _distribution(self, key: str) -> Distribution | None:
        """None: it cannot be read."""
        if key not in self._known:
            try:
                artifacts = await self._bus.object_store(self._subjects.artifacts_bucket)
                self._known[key] = Distribution.read(await artifacts.get(key))
            except BadMessage as error:
                logger.warning("the distribution %s cannot be read: %s", key, error)
                self._known[key] = None
            except BusError as error:
                logger.warning("the distribution %s is not here yet: %s", key, error)
                return None
        return self._known[key]


def _counted(distribution: Distribution, rows: list[Row], now: float) -> CountedWindow:
    alike = defaultdict[Any, list[Row]](list)  # items' shapes may differ
    for row in rows:
        alike[tuple(one.shape for side in row for one in side.values())].append(row)
    parts = (
        [{name: np.concatenate([row[side][name] for row in some]) for name in some[0][side]} for side in (0, 1)]
        for some in alike.values()
    )
    windows = (distribution.tally(inputs, outputs, now - PERIOD, now) for inputs, outputs in parts)
    return reduce(CountedWindow.with_, windows)


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
