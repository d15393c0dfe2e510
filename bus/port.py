"""What a bus can do. Two real implementations: `bus.memory.MemoryBus` (one process) and `bus.natsbus.NatsBus`.

Core messages are at most once, in order per publisher. Durable messages are acknowledged by the stream and delivered at
least once. Handlers are plain functions, called in the order of arrival on the event loop; they must not block.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol


class BusError(Exception):
    """The bus could not do what was asked."""


class NoResponders(BusError):
    """Nobody listens on the subject of a request."""


class RequestTimeout(BusError):
    """Nobody answered in time."""


class PayloadTooLarge(BusError):
    """The body is larger than the server takes; send large bodies by reference (object store)."""


class BusClosed(BusError):
    """The connection is closed for good."""


class Forbidden(BusError):
    """The credentials have no right to this subject."""


class WrongRevision(BusError):
    """A compare-and-set found another revision."""


class NotFound(BusError):
    """No such key, object, bucket or stream."""


class Delivery(NamedTuple):
    """One message as it arrived. status: "503" when the bus says that nobody was listening on a forwarded subject."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] | None = None
    status: str = ""


DeliveryHandler = Callable[[Delivery], None]


Buffer = bytes | bytearray | memoryview  # memoryviews of single bytes


def in_pieces(data: Buffer | Sequence[Buffer]) -> Sequence[Buffer]:
    """Data in one piece or several, as a sequence of pieces."""
    return (data,) if isinstance(data, bytes | bytearray | memoryview) else data


class Subscription(Protocol):
    """An open subscription."""

    async def drain(self) -> None:
        """Take nothing new; return once everything already delivered was handled."""


class KeyValueEntry(NamedTuple):
    """One state of one key. value None: deleted. revision grows with every change in the bucket."""

    key: str
    value: bytes | None
    revision: int


class KeyValue(Protocol):
    """A bucket of small values, each key with a revision."""

    async def put(self, key: str, value: bytes) -> int: ...
    async def get(self, key: str) -> KeyValueEntry:
        """Raises NotFound."""

    async def create(self, key: str, value: bytes) -> int:
        """Raises WrongRevision when the key is there already."""

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Compare-and-set; raises WrongRevision."""

    async def delete(self, key: str) -> None: ...
    async def keys(self) -> list[str]: ...
    async def watch(self, handler: Callable[[KeyValueEntry | None], None]) -> Subscription:
        """Every key's present value first, then None once, then each change; it survives reconnects."""


class ObjectStore(Protocol):
    """A bucket of large values."""

    async def put(self, key: str, data: bytes | Path | Sequence[Buffer]) -> None:
        """Store bytes, in one piece or several, or a file without reading it whole into memory. Overwrites."""

    async def get(self, key: str) -> bytes:
        """Raises NotFound."""

    async def get_to(self, key: str, path: Path) -> None:
        """Write the object to a file, piece by piece; the digest is checked. Raises NotFound."""

    async def exists(self, key: str) -> bool: ...
    async def delete(self, key: str) -> None: ...
    async def keys(self) -> list[str]: ...


class Stored(Protocol):
    """One durable message being consumed."""

    subject: str
    data: bytes
    message_id: str
    deliveries: int

    async def ack(self) -> None: ...
    async def nak(self, delay: float) -> None: ...
    async def extend(self) -> None:
        """Begin its ack wait again: it is still being worked on."""


class Consumer(Protocol):
    """A named position in a stream, shared by all that open it under the same name."""

    async def fetch(self, most: int, timeout: float) -> list[Stored]:
        """Up to `most` messages; an empty list when none came in time."""


class StreamSpec(NamedTuple):
    """A stream that must exist. retention "work": a message is removed when acknowledged; "limits": by age or size.

    full "refuse": publishers are refused (and hold) when max_bytes is reached; "oldest": the oldest go.
    """

    name: str
    subjects: tuple[str, ...]
    retention: Literal["work", "limits"]
    max_bytes: int
    max_age_s: float = 0.0
    full: Literal["refuse", "oldest"] = "refuse"
    memory: bool = False


Status = Literal["connected", "disconnected", "reconnected", "closed"]


class Bus(Protocol):
    """A connection to the bus."""

    @property
    def max_payload(self) -> int:
        """Bytes; larger bodies raise PayloadTooLarge."""

    def publish(
        self,
        subject: str,
        data: bytes,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
        tail: Buffer | Sequence[Buffer] = b"",
    ) -> None:
        """Send without waiting. The message is buffered, and written at the end of this turn of the loop. A reconnect keeps it, up to a bound.

        tail: the rest of the body, in one piece or several, sent behind `data` without being copied to it; it must not change.
        """

    async def request(
        self, subject: str, data: bytes, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Delivery:
        """Raises NoResponders, RequestTimeout."""

    async def subscribe(self, subject: str, handler: DeliveryHandler, queue: str = "") -> Subscription:
        """Call `handler` with every message on `subject` (wildcards * and >), or with a share of the queue group's. An exception in it goes
        to the bus's error callback, and ends nothing.
        """

    async def flush(self, timeout: float = 5.0) -> None:
        """Wait until everything published before has reached the server."""

    async def publish_durable(self, subject: str, data: bytes, message_id: str, timeout: float = 5.0) -> None:
        """Return once the stream has the message on disk. A repeated message_id is stored once. Raises BusError."""

    async def ensure_stream(self, spec: StreamSpec) -> None: ...
    async def consumer(self, stream: str, name: str, subject: str = ">", *, ack_wait_s: float = 30.0) -> Consumer:
        """ack_wait_s: what was fetched and not acknowledged for so long is delivered again. Raises NotFound."""

    async def key_value(self, bucket: str, *, create: bool = True) -> KeyValue: ...
    async def object_store(self, bucket: str, *, max_age_s: float = 0.0, create: bool = True) -> ObjectStore: ...
    def new_inbox(self) -> str:
        """A subject that no other process knows."""

    def on_status(self, callback: Callable[[Status], None]) -> None: ...
    def on_denied(self, callback: Callable[[str], bool]) -> None:
        """Call back with the subject of a message that was refused for lack of rights. The callback returns whether it reports this."""

    async def drain(self) -> None:
        """Stop taking messages, handle what has come, send what is buffered, then close."""

    async def close(self) -> None: ...
