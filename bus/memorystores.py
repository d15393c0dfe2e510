"""Streams with consumers, key-value buckets and object buckets of the bus within one process. They exist as long as their broker."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from bus.port import Buffer, BusError, KeyValueEntry, NotFound, Stored, StreamSpec, WrongRevision, in_pieces
from bus.subjects import check_key, matches

Report = Callable[[Exception], None]
REPEATED_S = 120.0  # within which a message with a repeated id is dropped, as on NATS


class MemoryStored:
    """One message that a consumer has fetched. It is delivered again if it is not acknowledged within the consumer's ack wait."""

    def __init__(self, consumer: "MemoryConsumer", sequence: int, record: "StreamRecord", deliveries: int) -> None:
        self._consumer = consumer
        self._sequence = sequence
        self.subject = record.subject
        self.data = record.data
        self.message_id = record.message_id
        self.deliveries = deliveries

    async def ack(self) -> None:
        self._consumer.ack(self._sequence)

    async def nak(self, delay: float) -> None:
        self._consumer.nak(self._sequence, delay)

    async def extend(self) -> None:
        self._consumer.extend(self._sequence)


class StreamRecord(Struct, eq=False):
    """One message in a stream."""

    subject: str
    data: bytes
    message_id: str
    at: float

    @property
    def size(self) -> int:
        return len(self.subject) + len(self.data) + len(self.message_id)


class MemoryStream:
    """A stream: messages in order of arrival, within the limits of its spec."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.records: dict[int, StreamRecord] = {}
        self.consumers: dict[str, MemoryConsumer] = {}
        self._next = 1
        self._bytes = 0
        self._known: dict[str, tuple[int, float]] = {}

    @property
    def spec(self) -> StreamSpec:
        return self._spec

    @spec.setter
    def spec(self, spec: StreamSpec) -> None:
        self._spec = spec
        self._wild = {pattern for pattern in spec.subjects if "*" in pattern or ">" in pattern}
        self._plain = set(spec.subjects) - self._wild
        self._heads = tuple(pattern.partition("*")[0].partition(">")[0] for pattern in self._wild)

    def takes(self, subject: str) -> bool:
        if subject in self._plain:
            return True
        return subject.startswith(self._heads) and any(matches(pattern, subject) for pattern in self._wild)

    def add(self, subject: str, data: bytes, message_id: str = "") -> int:
        """Store one message. Returns its sequence number; for a repeated id, that of the first message. Raises BusError if it is full."""
        now = asyncio.get_running_loop().time()
        self._expire(now)
        if message_id in self._known:
            return self._known[message_id][0]
        record = StreamRecord(subject, data, message_id, now)
        if 0 < self.spec.max_bytes < self._bytes + record.size:
            if self.spec.full == "refuse":
                raise BusError(f"stream {self.spec.name} is full: {self._bytes} of {self.spec.max_bytes} bytes")
            while self.records and self._bytes + record.size > self.spec.max_bytes:
                self.remove(next(iter(self.records)))
        sequence = self._next
        self._next += 1
        self.records[sequence] = record
        self._bytes += record.size
        if message_id:
            self._known[message_id] = sequence, now
        for consumer in self.consumers.values():
            consumer.arrived(sequence, record)
        return sequence

    def remove(self, sequence: int) -> None:
        record = self.records.pop(sequence, None)
        if record is not None:
            self._bytes -= record.size

    def _expire(self, now: float) -> None:
        while self._known and now - self._known[first := next(iter(self._known))][1] > REPEATED_S:
            del self._known[first]
        if self.spec.max_age_s:
            old = [s for s, record in self.records.items() if now - record.at > self.spec.max_age_s]
            for sequence in old:
                self.remove(sequence)


class MemoryConsumer:
    """A named position in a stream. All that opened it share it."""

    def __init__(self, stream: MemoryStream, pattern: str, ack_wait_s: float) -> None:
        self._stream = stream
        self._pattern = pattern
        self._ack_wait = ack_wait_s
        self._ready: deque[int] = deque()
        self._deliveries: dict[int, int] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()
        for sequence, record in stream.records.items():
            self.arrived(sequence, record)

    def arrived(self, sequence: int, record: StreamRecord) -> None:
        if matches(self._pattern, record.subject):
            self._again(sequence)

    def ack(self, sequence: int) -> None:
        self._stop_timer(sequence)
        self._deliveries.pop(sequence, None)
        if self._stream.spec.retention == "work":
            self._stream.remove(sequence)

    def nak(self, sequence: int, delay: float) -> None:
        if sequence in self._timers:
            self._stop_timer(sequence)
            self._timers[sequence] = asyncio.get_running_loop().call_later(delay, self._again, sequence)

    def extend(self, sequence: int) -> None:
        if sequence in self._timers:
            self._stop_timer(sequence)
            self._timers[sequence] = asyncio.get_running_loop().call_later(self._ack_wait, self._again, sequence)

    async def fetch(self, most: int, timeout: float) -> list[Stored]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                while True:
                    batch: list[Stored] = []
                    while self._ready and len(batch) < most:
                        sequence = self._ready.popleft()
                        record = self._stream.records.get(sequence)
                        if record is None:
                            continue  # the stream removed it by age or size
                        count = self._deliveries[sequence] = self._deliveries.get(sequence, 0) + 1
                        self._timers[sequence] = loop.call_later(self._ack_wait, self._again, sequence)
                        batch.append(MemoryStored(self, sequence, record, count))
                    if batch:
                        return batch
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return []

    def _again(self, sequence: int) -> None:
        self._timers.pop(sequence, None)
        self._ready.append(sequence)
        self._wake.set()

    def _stop_timer(self, sequence: int) -> None:
        timer = self._timers.pop(sequence, None)
        if timer is not None:
            timer.cancel()


class MemoryWatch:
    """One open watch of a bucket."""

    def __init__(
        self, watches: "list[MemoryWatch]", handler: Callable[[KeyValueEntry | None], None], report: Report
    ) -> None:
        self._watches = watches
        self._handler = handler
        self._report = report
        watches.append(self)

    def send(self, entry: KeyValueEntry | None) -> None:
        asyncio.get_running_loop().call_soon(self._deliver, entry)

    async def drain(self) -> None:
        if self in self._watches:
            self._watches.remove(self)

    def _deliver(self, entry: KeyValueEntry | None) -> None:
        if self in self._watches:
            try:
                self._handler(entry)
            except Exception as error:
                self._report(error)


class MemoryKeyValue:
    """One key-value bucket. Its keys have the same grammar as those of NATS."""

    def __init__(self, report: Report) -> None:
        self._entries: dict[str, KeyValueEntry] = {}
        self._watches: list[MemoryWatch] = []
        self._revision = 0
        self._report = report

    async def put(self, key: str, value: bytes) -> int:
        return self._set(key, value)

    async def get(self, key: str) -> KeyValueEntry:
        check_key(key)
        entry = self._entries.get(key)
        if entry is None or entry.value is None:
            raise NotFound(f"no key {key!r}")
        return entry

    async def create(self, key: str, value: bytes) -> int:
        entry = self._entries.get(key)
        if entry is not None and entry.value is not None:
            raise WrongRevision(f"key {key!r} is there already, at revision {entry.revision}")
        return self._set(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        entry = self._entries.get(key)
        if (0 if entry is None else entry.revision) != revision:
            raise WrongRevision(f"key {key!r} is not at revision {revision}")
        return self._set(key, value)

    async def delete(self, key: str) -> None:
        check_key(key)
        entry = self._entries.get(key)
        if entry is not None and entry.value is not None:
            self._set(key, None)

    async def keys(self, under: str = "") -> list[str]:
        return [entry.key for entry in await self.entries(under)]

    async def entries(self, under: str = "") -> list[KeyValueEntry]:
        first = f"{under}." if under else ""
        found = [e for e in self._entries.values() if e.value is not None and e.key.startswith(first)]
        return sorted(found, key=lambda entry: entry.revision)

    async def watch(self, handler: Callable[[KeyValueEntry | None], None]) -> MemoryWatch:
        watch = MemoryWatch(self._watches, handler, self._report)
        for entry in sorted(self._entries.values(), key=lambda entry: entry.revision):
            watch.send(entry)
        watch.send(None)
        return watch

    def _set(self, key: str, value: bytes | None) -> int:
        check_key(key)
        self._revision += 1
        entry = self._entries[key] = KeyValueEntry(key, value, self._revision)
        for watch in list(self._watches):
            watch.send(entry)
        return self._revision


class MemoryObjectStore:
    """One bucket of large values. Each value has the event loop's time at which it was stored."""

    def __init__(self, max_age_s: float) -> None:
        self._objects: dict[str, tuple[float, bytes]] = {}
        self._max_age = max_age_s

    async def put(self, key: str, data: bytes | Path | Sequence[Buffer]) -> None:
        content = await asyncio.to_thread(data.read_bytes) if isinstance(data, Path) else b"".join(in_pieces(data))
        self._objects[key] = (asyncio.get_running_loop().time(), content)

    async def get(self, key: str) -> bytes:
        self._expire()
        if key not in self._objects:
            raise NotFound(f"no object {key!r}")
        return self._objects[key][1]

    async def get_to(self, key: str, path: Path) -> None:
        await asyncio.to_thread(path.write_bytes, await self.get(key))

    async def exists(self, key: str) -> bool:
        self._expire()
        return key in self._objects

    async def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    async def keys(self) -> list[str]:
        return [*await self.sizes()]

    async def sizes(self) -> dict[str, int]:
        self._expire()
        return {key: len(content) for key, (_, content) in self._objects.items()}

    def _expire(self) -> None:
        if self._max_age:
            limit = asyncio.get_running_loop().time() - self._max_age
            for key in [key for key, (at, _) in self._objects.items() if at < limit]:
                del self._objects[key]
