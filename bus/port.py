"""The interface of a bus. It has two implementations: `bus.natsbus.NatsBus`, and `bus.memory.MemoryBus` within one process.

Core messages are delivered at most once, in order per publisher. Durable messages are acknowledged by the stream, and delivered at
least once. Handlers are plain functions. The event loop calls them in the order of arrival. They must not block.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")
OTHER_LOOP = (
    "this client belongs to the event loop in which it was connected, and this is another one: connect again in this one, or use "
    "infaas.connect_blocking(), which works anywhere"
)


class BusError(Exception):
    """An operation of the bus failed."""


class NoResponders(BusError):
    """Nobody listens on the subject of a request."""


class RequestTimeout(BusError):
    """No reply came in time."""


class PayloadTooLarge(BusError):
    """The body is larger than the server accepts. Large bodies are sent by reference (object store)."""


class BusClosed(BusError):
    """The connection is closed for good."""


class Forbidden(BusError):
    """The credentials have no right to this subject."""


class BadLogin(BusError):
    """The credentials cannot be read, or the server does not take them."""


class WrongRevision(BusError):
    """A compare-and-set operation found another revision."""


class NotFound(BusError):
    """The key, object, bucket or stream does not exist."""


class Delivery(NamedTuple):
    """One message as it arrived. status: "503" if the bus reports that nobody listens on the subject of a request."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] | None = None
    status: str = ""


DeliveryHandler = Callable[[Delivery], None]
ECHO = "Infaas-Echo"  # header of what `publish_behind` sends before the message itself (early), or instead of it (lost)


Buffer = bytes | bytearray | memoryview  # memoryviews of single bytes


def in_pieces(data: Buffer | Sequence[Buffer]) -> Sequence[Buffer]:
    """Data in one or several pieces, as a sequence of pieces."""
    return (data,) if isinstance(data, bytes | bytearray | memoryview) else data


class Subscription(Protocol):
    """An open subscription."""

    async def drain(self) -> None:
        """Take no new messages. Return once all delivered messages are handled."""


class KeyValueEntry(NamedTuple):
    """One state of one key. value: None if the key is deleted. revision: grows with every change in the bucket."""

    key: str
    value: bytes | None
    revision: int


class KeyValue(Protocol):
    """A bucket of small values. Each key has a revision."""

    async def put(self, key: str, value: bytes) -> int: ...
    async def get(self, key: str) -> KeyValueEntry:
        """Raises NotFound."""

    async def create(self, key: str, value: bytes) -> int:
        """Raises WrongRevision if the key exists."""

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Compare-and-set; raises WrongRevision."""

    async def delete(self, key: str) -> None:
        """What is not there leaves no mark."""

    async def keys(self, under: str = "") -> list[str]:
        """under: only keys that begin with this and a dot."""
        ...

    async def entries(self, under: str = "") -> list[KeyValueEntry]:
        """What these keys hold now, in the order in which they were written. It is read in one pass, however many they are."""
        ...

    async def watch(self, handler: Callable[[KeyValueEntry | None], None]) -> Subscription:
        """Call `handler` with the present entry of each key, then with None once, then with each change. A watch survives reconnects."""


class ObjectStore(Protocol):
    """A bucket of large values."""

    async def put(self, key: str, data: bytes | Path | Sequence[Buffer]) -> None:
        """Store bytes, in one or several pieces, or a file. A file is not read into memory as a whole. An existing object is overwritten."""

    async def get(self, key: str) -> bytes:
        """Raises NotFound."""

    async def get_to(self, key: str, path: Path) -> None:
        """Write the object to a file, piece by piece. The digest is checked. Raises NotFound."""

    async def exists(self, key: str) -> bool: ...
    async def delete(self, key: str) -> None: ...
    async def keys(self) -> list[str]: ...
    async def sizes(self) -> dict[str, int]:
        """Bytes of each object, by key."""
        ...


class Stored(Protocol):
    """One durable message that a consumer fetched."""

    subject: str
    data: bytes
    message_id: str
    deliveries: int

    async def ack(self) -> None: ...
    async def nak(self, delay: float) -> None: ...
    async def extend(self) -> None:
        """Restart the ack wait of the message, since the work on it continues."""


class Consumer(Protocol):
    """A named position in a stream. All that open it under the same name share it."""

    async def fetch(self, most: int, timeout: float) -> list[Stored]:
        """Up to `most` messages. The list is empty if none came in time."""


class StreamSpec(NamedTuple):
    """A stream that must exist.

    retention: "work" removes a message when it is acknowledged; "limits" removes messages by age or size.
    full: what happens when max_bytes is reached. "refuse" refuses new messages, and publishers hold them; "oldest" removes the oldest.
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
        """The size of the largest body, in bytes. Larger bodies raise PayloadTooLarge."""

    def publish(
        self,
        subject: str,
        data: bytes,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
        tail: Buffer | Sequence[Buffer] = b"",
    ) -> None:
        """Send without waiting. The message is buffered, and written at the end of this turn of the loop.

        Buffered messages survive a reconnect, up to a limit.
        tail: the rest of the body, in one or several pieces. It is sent after `data`, without a copy. The caller must not change it.
        """

    def publish_behind(self, subject: str, data: bytes) -> None:
        """Send on a subject that this connection hears, so that it comes behind all that any server had got before.

        Where there are several servers, it also comes through our own one alone, with header ECHO `early`, and if what a server had got may be lost,
        with `lost` instead of without.
        """

    async def request(
        self, subject: str, data: bytes, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Delivery:
        """Raises NoResponders, RequestTimeout."""

    async def subscribe(self, subject: str, handler: DeliveryHandler, queue: str = "") -> Subscription:
        """Call `handler` with each message on `subject` (wildcards * and >). In a queue group, each message goes to one member.

        An exception in the handler goes to the error callback of the bus. The subscription continues.
        """

    async def flush(self, timeout: float = 5.0) -> None:
        """Wait until all messages published before have reached the server."""

    async def publish_durable(self, subject: str, data: bytes, message_id: str, timeout: float = 5.0) -> None:
        """Return once the stream has the message on disk. A message with a repeated message_id is stored only once. Raises BusError."""

    async def ensure_stream(self, spec: StreamSpec) -> None: ...
    async def consumer(self, stream: str, name: str, subject: str = ">", *, ack_wait_s: float = 30.0) -> Consumer:
        """ack_wait_s: a fetched message is delivered again if it is not acknowledged within this time. Raises NotFound."""

    async def key_value(
        self, bucket: str, *, max_age_s: float = 0.0, max_bytes: int = 0, create: bool = True
    ) -> KeyValue:
        """max_age_s, max_bytes: beyond which the oldest values go; 0: none does. A bucket within one process keeps them."""
        ...

    async def object_store(self, bucket: str, *, max_age_s: float = 0.0, create: bool = True) -> ObjectStore: ...
    def new_inbox(self) -> str:
        """A subject that no other process knows."""

    def on_status(self, callback: Callable[[Status], None]) -> None: ...
    def on_denied(self, callback: Callable[[str], bool]) -> None:
        """Call `callback` with the subject of each message that is refused for lack of rights. It returns whether it reports the refusal."""

    async def drain(self) -> None:
        """Take no new messages, handle those that have arrived, send those that are buffered, then close."""

    async def close(self) -> None: ...


async def together(work: Callable[[T], Awaitable[R]], arguments: Sequence[T], at_once: int) -> list[R]:
    """What the work returns for each argument, in their order, with so many under way."""
    found: list[R] = []
    for at in range(0, len(arguments), at_once):
        found += await asyncio.gather(*map(work, arguments[at : at + at_once]))
    return found
