"""What holds for every gRPC call: the right to make it, limits of number, size and time, and errors as gRPC's statuses."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from services.core import trace
from services.core.settings import GatewaySettings
from services.gateway.actor import RequestCounts
from services.gateway.edge import failure_from
from services.gateway.errors import BadRequest, RequestFailed, let_go, statuses_of
from services.gateway.http.access import AccessControl, Right
from services.shell.http.handler import max_buffered
from services.shell.runtime.runtime import unix_now

# Each so many bytes of the largest message give every message one more second: gRPC does not say how much of one has come.
MESSAGE_BYTES_PER_S = 2**20
PROTOCOL = "grpc"  # in metrics
MAX_STATUS = 6000  # bytes of a status's text: it is sent in a header, and clients take 8 KiB of headers
LATE_CHECK_S = 1.0  # between two checks for messages that do not come
LATE = RequestFailed(None, "the request's message did not come in time", code="deadline")
STOPPING = RequestFailed(None, "the gateway is being stopped: ask again, elsewhere", code="unavailable")


class Call:
    """What a call's client sent beside its message. Where metadata come twice, the first count."""

    __slots__ = ("_context", "credential", "only", "traceparent")

    def __init__(self, context: Any) -> None:
        self._context = context
        self.only = ""  # the app that its token is for; "": any
        self.credential: str | None = None
        self.traceparent: str | None = None
        for name, value in context.invocation_metadata():
            if name == "authorization" and self.credential is None:
                self.credential = value
            elif name == "traceparent" and self.traceparent is None and trace.read({name: value}) is not None:
                self.traceparent = value

    @property
    def deadline(self) -> float | None:
        """Unix seconds until which the client waits; None where it waits for ever."""
        left = self._context.time_remaining()
        return None if left is None else unix_now() + float(left)


Next = Callable[[], Awaitable[bytes | None]]
Unary = Callable[[bytes, Call], Awaitable[bytes]]
Write = Callable[[bytes], Awaitable[None]]
Stream = Callable[[Next, Write, Call], Awaitable[None]]


class Calls:
    """Makes the handlers of all methods. running: requests under way. streams: open ones. buffered: bytes of messages under way."""

    def __init__(self, access: AccessControl, settings: GatewaySettings, counts: RequestCounts) -> None:
        self._access = access
        self._counts = counts
        self._settings = settings
        self._most_buffered = max_buffered(settings)
        self._awaited: dict[asyncio.Task[Any], float] = {}  # tasks that wait for a message: until when (monotonic)
        self._idle_streams: set[asyncio.Task[Any]] = set()  # streams without a request under way
        self._ended: dict[asyncio.Task[Any], RequestFailed] = {}  # tasks that were cancelled here, and why
        self._late_check: asyncio.Task[None] | None = None
        self.closing = False
        self.running = 0
        self.streams = 0
        self.buffered = 0

    def open(self) -> None:
        """Begin to check for messages that do not come."""
        self._late_check = asyncio.get_running_loop().create_task(self._end_late())

    def refuse(self) -> None:
        """Refuse new requests, and end idle streams; a stream with a request under way ends after it."""
        self.closing = True
        for task in self._idle_streams:
            self._end(task, STOPPING)

    def close(self) -> None:
        """Stop the checks."""
        if self._late_check is not None:
            self._late_check.cancel()

    # -- handlers

    def unary(self, work: Unary, right: Right) -> Any:
        """A handler of one request and one reply. It reads the message itself, so that it can stop to wait for one."""

        async def handle(_: Any, context: Any) -> bytes:
            began = time.perf_counter()
            taken = sent = size = 0
            status = "CANCELLED"  # the client has left, unless the code below finds otherwise
            body = b""
            try:
                call = Call(context)
                call.only = self._access.check(right, call.credential)
                body = await self._message(context)
                size = len(body)
                taken = self._take(size, right)
                if call.traceparent is not None:
                    context.set_trailing_metadata((("traceparent", call.traceparent),))
                reply = await work(body, call)
            except BaseException as error:
                failure = self._failure(error)
                if failure is None:
                    raise
                status = statuses_of(failure.code).grpc
            else:
                sent, status = len(reply), "OK"
                return reply
            finally:
                if taken:
                    self._give_back(taken)
                body = b""  # the exception, and with it this frame, lives as long as the call's context
                self._counts.ended(PROTOCOL, status, time.perf_counter() - began, size, sent)
            return await abort(context, failure)

        return grpc.stream_unary_rpc_method_handler(handle)

    def stream(self, work: Stream, right: Right) -> Any:
        """A handler of a stream of requests and replies.

        work: gets a function that reads the next request (None at the end), one that writes a reply, and the call.
        """

        async def handle(_: Any, context: Any) -> None:
            self.streams += 1
            try:
                call = Call(context)
                call.only = self._access.check(right, call.credential)
                self._room()
                await work(lambda: self.rest(_read(context)), context.write, call)
            except BaseException as error:
                failure = self._failure(error)
                if failure is None:
                    raise
            else:
                return
            finally:
                self.streams -= 1
            await abort(context, failure)

        return grpc.stream_stream_rpc_method_handler(handle)

    async def rest(self, waiting: Awaitable[Any]) -> Any:
        """Wait while a stream is idle: closing the server ends it. Raises RequestFailed."""
        task = asyncio.current_task()
        assert task is not None
        self._idle_streams.add(task)
        try:
            if self.closing:
                self._end(task, STOPPING)
            return await waiting
        finally:
            self._idle_streams.discard(task)

    async def counted(self, body: bytes, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """The reply to one request of a stream, within the limits, and counted. Raises RequestFailed."""
        began = time.perf_counter()
        taken = self._take(len(body), Right.QUERY)
        sent, status = 0, "CANCELLED"
        try:
            reply = await work()
        except Exception as error:
            failure = failure_from(error)
            status = statuses_of(failure.code).grpc
            raise failure from error
        else:
            sent, status = len(reply), "OK"
            return reply
        finally:
            self._give_back(taken)
            self._counts.ended(PROTOCOL, status, time.perf_counter() - began, len(body), sent)

    # -- parts

    def _room(self) -> None:
        """Check that there is room for one more stream. Raises RequestFailed."""
        if self.streams > self._settings.connections:
            raise RequestFailed(None, f"there are {self.streams - 1} streams: try again later", code="overloaded")

    async def _message(self, context: Any) -> bytes:
        """The bytes of the request's message. Raises RequestFailed."""
        settings = self._settings
        if len(self._awaited) >= settings.in_flight + settings.connections:
            raise RequestFailed(None, "too many requests wait for their messages: try again later", code="overloaded")
        task = asyncio.current_task()
        assert task is not None
        self._awaited[task] = time.monotonic() + settings.body_timeout_s + settings.max_body / MESSAGE_BYTES_PER_S
        try:
            found = await _read(context)
        finally:
            del self._awaited[task]
        if found is None:
            raise BadRequest("the request has no message")
        return found

    def _take(self, size: int, right: Right) -> int:
        """Count a request with so many bytes; returns what `_give_back` takes. Probes of health have no limit. Raises RequestFailed."""
        if right is not Right.NONE:
            if self.closing:
                raise RequestFailed(None, STOPPING.message, code=STOPPING.code)
            if self.running >= self._settings.in_flight:
                text = f"the gateway has {self.running} requests under way: try again later"
                raise RequestFailed(None, text, code="overloaded")
            if self.buffered + size > self._most_buffered:
                text = "the gateway holds as many bytes of requests as it may: try again later"
                raise RequestFailed(None, text, code="overloaded")
        self.running += 1
        self._counts.running[PROTOCOL] += 1
        self.buffered += size
        return size + 1

    def _give_back(self, taken: int) -> None:
        self.running -= 1
        self._counts.running[PROTOCOL] -= 1
        self.buffered -= taken - 1

    def _end(self, task: asyncio.Task[Any], why: RequestFailed) -> None:
        self._ended[task] = why
        task.cancel()

    async def _end_late(self) -> None:
        while True:
            await asyncio.sleep(LATE_CHECK_S)
            moment = time.monotonic()
            for task in [task for task, until in self._awaited.items() if until < moment]:
                self._end(task, LATE)

    def _failure(self, error: BaseException) -> RequestFailed | None:
        """The failure that the client gets; None where it gets none: it has left, or the process ends."""
        task = asyncio.current_task()
        assert task is not None
        why = self._ended.pop(task, None)
        if isinstance(error, asyncio.CancelledError):
            if why is not None:
                task.uncancel()
            return why
        if isinstance(error, grpc.aio.BaseError | GeneratorExit | KeyboardInterrupt | SystemExit):
            return None
        found = failure_from(error)
        let_go(found, error)  # grpcio keeps this exception
        return found


async def _read(context: Any) -> bytes | None:
    found = await context.read()
    return found if type(found) is bytes else None


async def abort(context: Any, failure: RequestFailed) -> NoReturn:
    """End a call with a failure. Trailing metadata give the system's code, and the delay of a retry as gRPC's clients read it."""
    trailing = [("infaas-code", failure.code)]
    if (after := failure.more.get("retry_after_ms")) is not None:
        trailing.append(("grpc-retry-pushback-ms", f"{max(0.0, after):.0f}"))
    await context.abort(grpc.StatusCode[statuses_of(failure.code).grpc], shortened(failure.message), tuple(trailing))
    raise AssertionError("a call that was ended goes on")


def shortened(message: str) -> str:
    """As much of the text as a status may have. gRPC sends three bytes for each byte of a character outside ASCII."""
    most = MAX_STATUS if message.isascii() else MAX_STATUS // 12
    return message if len(message) <= most else f"{message[: most - 1]}…"
