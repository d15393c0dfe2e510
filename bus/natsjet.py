"""JetStream over core requests: its JSON API, durable publishing, streams.

API: https://docs.nats.io/reference/reference-protocols/nats_api_reference. Error codes: the server's errors.json.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from bus.natsstreams import JetError, Streams
from bus.port import Buffer, BusError, Delivery, NoResponders, NotFound, StreamSpec

__all__ = ["NANO", "WRONG_SEQUENCE", "JetError", "JetStream", "Requests"]

NANO = 1_000_000_000
API_S = 5.0
DUPLICATE_WINDOW_S = 600.0  # a message id is remembered so long; beyond it the reader has to know ids itself

NO_CONSUMER = 10014
NO_MESSAGE = 10037
NO_STREAM = 10059
WRONG_SEQUENCE = (10071, 10164)


class Requests(Protocol):
    """What JetStream needs of a bus."""

    def publish(self, subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> None: ...
    async def request(
        self, subject: str, data: Buffer, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Delivery: ...
    def new_inbox(self) -> str: ...
    def report(self, error: Exception) -> None: ...
    def listen(self, subject: str, handler: Callable[[Delivery], None]) -> Callable[[], None]:
        """Subscribe at once; returns what ends it at once."""


class JetStream:
    """The JetStream of one connection."""

    def __init__(self, bus: Requests, clustered: Callable[[], bool] = lambda: False) -> None:
        self.bus = bus
        self.streams = Streams(self, clustered)
        self.closed = False
        self._on_reconnect: set[Callable[[], None]] = set()

    # ---- life: push consumers have to be made again after a reconnect

    def close(self) -> None:
        self.closed = True
        self._on_reconnect.clear()

    def reconnected(self) -> None:
        for callback in list(self._on_reconnect):
            callback()

    def follow(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after every reconnect; returns what ends that."""
        self._on_reconnect.add(callback)
        return lambda: self._on_reconnect.discard(callback)

    # ---- requests

    async def call(self, verb: str, body: Any = None, timeout: float = API_S) -> dict[str, Any]:
        """One API request. Raises NotFound (stream, consumer or message), JetError, BusError."""
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            reply = await self.bus.request(f"$JS.API.{verb}", data, timeout)
        except NoResponders:
            raise BusError("this NATS server has no JetStream, or it is not ready yet") from None
        return _result(reply.data)

    async def publish(
        self, subject: str, data: Buffer, headers: Mapping[str, str] | None = None, timeout: float = API_S
    ) -> int:
        """Publish and wait until a stream has it; returns its sequence number there."""
        try:
            reply = await self.bus.request(subject, data, timeout, headers)
        except NoResponders:
            raise BusError(f"no stream keeps {subject}") from None
        return int(_result(reply.data)["seq"])

    async def last_message(self, stream: str, subject: str) -> tuple[int, bytes, str]:
        """Sequence, body and raw headers of the last message on `subject`. Raises NotFound."""
        answer = await self.call(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
        message = msgspec.convert(answer["message"], _Message)
        return message.seq, message.data, message.hdrs.decode("utf-8", "replace")

    # ---- streams

    async def stream_info(self, stream: str) -> dict[str, Any]:
        return await self.call(f"STREAM.INFO.{stream}")

    async def create_stream(self, config: dict[str, Any], update: tuple[str, ...] = ()) -> None:
        """Make sure the stream exists; where it does with another configuration, the keys in `update` are brought in line."""
        await self.streams.make(config, update)

    async def ensure_stream(self, spec: StreamSpec) -> None:
        window = min(DUPLICATE_WINDOW_S, spec.max_age_s) if spec.max_age_s else DUPLICATE_WINDOW_S
        config = {
            "name": spec.name,
            "subjects": list(spec.subjects),
            "retention": "workqueue" if spec.retention == "work" else "limits",
            "max_bytes": spec.max_bytes,
            "max_age": int(spec.max_age_s * NANO),
            "discard": "new" if spec.full == "refuse" else "old",
            "storage": "memory" if spec.memory else "file",
            "max_consumers": -1,
            "max_msgs": -1,
            "duplicate_window": int(window * NANO),
            "allow_direct": True,
        }
        changeable = ("subjects", "max_bytes", "max_age", "discard", "duplicate_window", "retention", "storage")
        await self.create_stream(config, changeable)

    async def create_consumer(self, stream: str, config: dict[str, Any]) -> dict[str, Any]:
        """Create a consumer, or confirm that it is there; returns its info."""
        verb = f"CONSUMER.CREATE.{stream}.{config['name']}"
        if config.get("filter_subject"):
            verb = f"{verb}.{config['filter_subject']}"
        return await self.call(verb, {"stream_name": stream, "config": config})


class _Message(msgspec.Struct):
    seq: int
    data: bytes = b""  # base64 in JSON
    hdrs: bytes = b""


def _result(data: bytes) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        raise BusError("JetStream's answer is not understood") from None
    error = answer.get("error")
    if error:
        code = int(error.get("err_code", 0))
        text = str(error.get("description", "unknown error"))
        if code in (NO_CONSUMER, NO_MESSAGE, NO_STREAM):
            raise NotFound(text)
        raise JetError(f"JetStream: {text}", code)
    return answer
