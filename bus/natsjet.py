"""JetStream over core requests: its JSON API, durable publishing, and the streams and buckets that must exist.

API: https://docs.nats.io/reference/reference-protocols/nats_api_reference. Error codes: the server's errors.json.

Not nats-py's: it takes 140 µs of CPU for a durable message (80 µs here). Its readers would not do (`natsconsumers`,
`natsbuckets`). Without them, what lends it this connection and translates its errors is as long as the requests below.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from bus.port import Buffer, BusError, Delivery, Forbidden, NoResponders, NotFound, StreamSpec

MOST_REPLICAS = 3
NO_PEERS = (10005, 10023, 10074)  # too few servers, no server with room, or no cluster
NOT_YET = (10008, 10009)  # the cluster elects a leader
STREAM_EXISTS = 10058  # with another configuration
PATIENCE_S = 20.0  # for a leader, or for the service that may make the stream
PAUSE_S = 0.25
NANO = 1_000_000_000
API_S = 5.0
DUPLICATE_WINDOW_S = 600.0  # how long the server remembers a message id; beyond it, the reader has to know ids itself
NO_CONSUMER = 10014
NO_MESSAGE = 10037
NO_STREAM = 10059
WRONG_SEQUENCE = (10071, 10164)
_log = logging.getLogger("infaas.bus")


class JetError(BusError):
    """JetStream refused. code: the server's own error code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class LostStream(BusError):
    """A stream or bucket that existed is gone. The text says what to do."""


class Hidden(Forbidden):
    """The credentials do not allow to see whether it exists, so waiting changes nothing."""


class Streams:
    """The streams and buckets of one connection: found or made, brought in line, and copied to as many servers as there are.

    clustered: whether the server is one of several. replicas: how many copies; 0: as many as fit, up to 3. patience_s: how long to wait for
    the cluster's leader, or for the service that may make a stream. before(name) is awaited before a missing stream is made, and may
    raise. seen(name, created) is called when a stream was found or made, with the time of its creation as the server writes it.
    """

    def __init__(self, jet: "JetStream", clustered: Callable[[], bool]) -> None:
        self.replicas = 0
        self.patience_s = PATIENCE_S
        self.before: Callable[[str], Awaitable[None]] | None = None
        self.seen: Callable[[str, str], Awaitable[None]] | None = None
        self._jet = jet
        self._clustered = clustered
        self._kept: set[str] = set()  # names that this connection makes if they are missing
        self._others: set[str] = set()  # names that it may not make

    async def make(self, config: dict[str, Any], update: tuple[str, ...] = ()) -> None:
        """Make sure the stream exists; where it does with another configuration, the keys in `update` are brought in line."""
        name = config["name"]
        until = asyncio.get_running_loop().time() + self.patience_s
        while True:
            try:
                await self._made(config, update)
            except Hidden:
                raise
            except Forbidden:
                self._others.add(name)
                if asyncio.get_running_loop().time() > until:
                    raise BusError(
                        f"{name} is not there, and we may not make it: is the service that does, the registrar or recorder, running?"
                    ) from None
            except JetError as error:
                if error.code not in NOT_YET or asyncio.get_running_loop().time() > until:
                    raise
            except (LostStream, NotFound):
                raise
            except BusError:  # a cluster without a leader does not answer
                if not self._clustered() or asyncio.get_running_loop().time() > until:
                    raise
            else:
                self._kept.add(name)
                return
            await asyncio.sleep(PAUSE_S)

    async def created(self, name: str) -> str:
        """When a stream was made, as the server writes it. Raises NotFound."""
        return str((await self._jet.stream_info(name))["created"])

    async def _made(self, config: dict[str, Any], update: tuple[str, ...]) -> None:
        name = config["name"]
        made = False
        try:
            info = await self._jet.stream_info(name)
        except Forbidden as error:
            raise Hidden(f"{name} is not for us: {error}") from error
        except NotFound:
            if name in self._others:
                raise Forbidden(f"{name} is another service's to make") from None
            if self.before is not None:
                await self.before(name)
            try:
                info, made = await self._create(config), True
            except JetError as error:
                if error.code != STREAM_EXISTS:
                    raise
                info = await self._jet.stream_info(name)  # another process was faster
        if self.seen is not None:
            await self.seen(name, str(info["created"]))
        if made:
            return
        present = info["config"]
        if any(present.get(key) != config.get(key) for key in update):
            present |= {key: config[key] for key in update}
            with suppress(Forbidden):  # it belongs to another service
                await self._jet.call(f"STREAM.UPDATE.{name}", present)
        await self._copy(name, present)

    async def _create(self, config: dict[str, Any]) -> dict[str, Any]:
        numbers = self._wanted()
        for replicas in numbers:
            try:
                return await self._jet.call(f"STREAM.CREATE.{config['name']}", config | {"num_replicas": replicas})
            except JetError as error:
                if error.code not in NO_PEERS or replicas == numbers[-1]:
                    raise
        raise BusError(f"{config['name']} cannot be made")

    def _wanted(self) -> tuple[int, ...]:
        if self.replicas:
            return (self.replicas,)
        return tuple(range(MOST_REPLICAS, 0, -1)) if self._clustered() else (1,)

    # ---- servers join

    async def lift(self) -> None:
        """Copy streams with fewer replicas than possible to more servers, never to fewer."""
        if self._wanted() == (1,):
            return
        for name in sorted(self._kept):
            try:
                await self._copy(name, (await self._jet.stream_info(name))["config"])
            except BusError as error:
                _log.debug("replicas of %s: %s", name, error)

    async def _copy(self, name: str, present: dict[str, Any]) -> None:
        for replicas in self._wanted():
            if replicas <= present["num_replicas"]:
                return
            try:
                await self._jet.call(f"STREAM.UPDATE.{name}", present | {"num_replicas": replicas})
            except Forbidden:
                return  # it belongs to another service
            except JetError as error:
                if error.code not in NO_PEERS:
                    _log.warning("%s stays at %d replicas: %s", name, present["num_replicas"], error)
                    return
            else:
                _log.info("%s has %d replicas now, before %d", name, replicas, present["num_replicas"])
                return


# -- The API


class Requests(Protocol):
    """What JetStream needs of a bus."""

    def publish(self, subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> None: ...
    async def request(
        self, subject: str, data: Buffer, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Delivery: ...
    def new_inbox(self) -> str: ...
    def report(self, error: Exception) -> None: ...
    def listen(self, subject: str, handler: Callable[[Delivery], None]) -> Callable[[], None]:
        """Subscribe at once. Returns a function that ends the subscription at once."""


class JetStream:
    """The JetStream of one connection."""

    def __init__(self, bus: Requests, clustered: Callable[[], bool] = lambda: False) -> None:
        self.bus = bus
        self.streams = Streams(self, clustered)
        self.closed = False
        self.on_reconnect: set[Callable[[], None]] = set()  # called then, and when the connection is closed

    # ---- life: what waits for a consumer's messages hears of a reconnect, and of the end

    def close(self) -> None:
        self.closed = True
        self.reconnected()
        self.on_reconnect.clear()

    def reconnected(self) -> None:
        for callback in list(self.on_reconnect):
            callback()

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
        """Publish, and wait until a stream has it. Returns its sequence number there."""
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
            "duplicate_window": int(window * NANO),
            "allow_direct": True,
        }
        changeable = ("subjects", "max_bytes", "max_age", "discard", "duplicate_window", "retention", "storage")
        await self.streams.make(config, changeable)

    async def create_consumer(self, stream: str, config: dict[str, Any]) -> dict[str, Any]:
        """Create a consumer, or confirm that it exists. Returns its info."""
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
