"""Key-value buckets on JetStream, in the layout that every NATS client shares (ADR-8): stream KV_<bucket>, subject $KV.<bucket>.<key>."""

from collections.abc import Callable

from bus.natsjet import NANO, WRONG_SEQUENCE, JetError, JetStream
from bus.natswatch import OrderedReader, read_all
from bus.patterns import check_key
from bus.port import Delivery, Entry, NotFound, Subscription, WrongRevision

_OPERATION = "KV-Operation"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"


class NatsKeyValue:
    """One bucket; revisions are the stream's sequence numbers."""

    def __init__(self, jet: JetStream, bucket: str) -> None:
        self._jet = jet
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    async def open(self, *, create: bool) -> None:
        if not create:
            await self._jet.stream_info(self._stream)
            return
        await self._jet.create_stream(
            {
                "name": self._stream,
                "subjects": [f"{self._prefix}>"],
                "max_msgs_per_subject": 1,
                "max_msgs": -1,
                "max_bytes": -1,
                "max_consumers": -1,
                "max_msg_size": -1,
                "max_age": 0,
                "discard": "new",
                "storage": "file",
                "duplicate_window": 120 * NANO,
                "allow_rollup_hdrs": True,
                "deny_delete": True,
                "allow_direct": True,
            }
        )

    async def put(self, key: str, value: bytes) -> int:
        return await self._jet.publish(self._subject(key), value)

    async def get(self, key: str) -> Entry:
        entry = await self._last(key)
        if entry.value is None:
            raise NotFound(f"key {key!r} was deleted")
        return entry

    async def create(self, key: str, value: bytes) -> int:
        try:
            return await self.update(key, value, 0)
        except WrongRevision:
            last = await self._last(key)
            if last.value is not None:
                raise WrongRevision(f"key {key!r} is there already, at revision {last.revision}") from None
            return await self.update(key, value, last.revision)  # over the mark that a deletion left

    async def update(self, key: str, value: bytes, revision: int) -> int:
        try:
            return await self._jet.publish(self._subject(key), value, {_EXPECTED: str(revision)})
        except JetError as error:
            if error.code in WRONG_SEQUENCE:
                raise WrongRevision(f"key {key!r} is not at revision {revision}") from None
            raise

    async def delete(self, key: str) -> None:
        await self._jet.publish(self._subject(key), b"", {_OPERATION: "DEL"})

    async def keys(self) -> list[str]:
        found: dict[str, None] = {}

        def take(delivery: Delivery, _: int) -> None:
            key = delivery.subject.removeprefix(self._prefix)
            if _deleted(delivery):
                found.pop(key, None)
            else:
                found[key] = None

        await read_all(self._jet, self._stream, f"{self._prefix}>", take, headers_only=True)
        return list(found)

    async def watch(self, handler: Callable[[Entry | None], None]) -> Subscription:
        def take(delivery: Delivery, revision: int) -> None:
            value = None if _deleted(delivery) else delivery.data
            handler(Entry(delivery.subject.removeprefix(self._prefix), value, revision))

        reader = OrderedReader(self._jet, self._stream, f"{self._prefix}>", take, lambda: handler(None))
        await reader.start()
        return reader

    async def _last(self, key: str) -> Entry:
        try:
            revision, value, headers = await self._jet.last_message(self._stream, self._subject(key))
        except NotFound:
            raise NotFound(f"no key {key!r}") from None
        return Entry(
            key, None if f"{_OPERATION}: " in headers or "Nats-Marker-Reason: " in headers else value, revision
        )

    def _subject(self, key: str) -> str:
        check_key(key)
        return self._prefix + key


def _deleted(delivery: Delivery) -> bool:
    headers = delivery.headers or {}
    return headers.get(_OPERATION) in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers
