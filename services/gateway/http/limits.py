"""What a request may cost: requests at a time, the size of its body, the time that takes, what compressed bodies become.

The application sees a body in one piece, inflated, at its first `receive`; what is wrong with it is raised there, as a Problem.
"""

import asyncio
from io import BytesIO
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.door import Problem
from services.gateway.http.inflate import CODINGS, BadCoding, Inflater, TooMuch
from services.gateway.http.reply import Json

PACE = 64 * 2**10  # bytes of a body that earn it one more second
ALIVE = "/v2/health/"  # answered however many requests there are
_CLOSE = {"Connection": "close"}


class Allowance(NamedTuple):
    """Limits of requests. max_body: bytes, compressed and not. held: bytes of bodies in memory, of all requests."""

    max_body: int = 64 * 2**20
    body_timeout_s: float = 30.0
    in_flight: int = 1000
    held: int = 4 * 64 * 2**20


class Limits:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, allowance: Allowance) -> None:
        self._app = app
        self.allowance = allowance
        self.running = 0
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self.running >= self.allowance.in_flight and not scope["path"].startswith(ALIVE):
            busy = {"error": f"the gateway has {self.allowance.in_flight} requests under way: try again later"}
            await Json(busy, 503, {"Retry-After": "1"})(scope, receive, send)
            return
        body = _Body(self, scope, receive)
        self.running += 1
        try:
            await self._app(scope, body.receive, send)
        finally:
            self.running -= 1
            self.held -= body.held


class _Body:
    """One request's body as the application gets it."""

    __slots__ = ("_coding", "_declared", "_limits", "_receive", "_whole", "held")

    def __init__(self, limits: Limits, scope: Scope, receive: Receive) -> None:
        self._limits = limits
        self._receive = receive
        self._whole = False
        self._coding = ""
        self._declared = 0
        self.held = 0
        for name, value in scope["headers"]:
            if name == b"content-length":
                self._declared = int(value)
            elif name == b"content-encoding":
                self._coding += ("," if self._coding else "") + value.decode("latin-1").strip().lower()
        if self._coding:
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"content-encoding"]

    async def receive(self) -> Message:
        """The whole body, then whatever the server has to tell. Raises Problem."""
        if self._whole:
            return await self._receive()
        self._whole = True
        allowance = self._limits.allowance
        if self._declared > allowance.max_body:
            raise _too_large(f"the body may have {allowance.max_body} bytes, and is to have {self._declared}")
        inflater = self._inflater()
        try:
            async with asyncio.timeout(allowance.body_timeout_s) as limit:
                return await self._collect(inflater, limit)
        except TimeoutError as error:
            raise Problem(408, "the body did not come in time", headers=_CLOSE) from error
        except TooMuch as error:
            raise _too_large(str(error)) from error
        except BadCoding as error:
            raise Problem(400, str(error), headers=_CLOSE) from error

    def _inflater(self) -> Inflater | None:
        if self._coding in ("", "identity"):
            return None
        if self._coding not in CODINGS:
            raise Problem(
                415, f"Content-Encoding may be {' or '.join(CODINGS)}", headers={"Accept-Encoding": ", ".join(CODINGS)}
            )
        return Inflater(self._coding, self._limits.allowance.max_body)

    async def _collect(self, inflater: Inflater | None, limit: asyncio.Timeout) -> Message:
        whole = BytesIO()  # gives out what it holds without a copy; a list of pieces would be there twice when joined
        size = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                return message  # the client has left
            piece: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(piece)
            if size > self._limits.allowance.max_body:
                raise _too_large(f"the body may have {self._limits.allowance.max_body} bytes")
            if inflater is None:
                self._hold(len(piece))
                if not more and size == len(piece):
                    return _request(piece)
                whole.write(piece)
            else:
                for count, part in enumerate(inflater.feed(piece), 1):
                    self._hold(len(part))
                    whole.write(part)
                    if count % 4 == 0:
                        await asyncio.sleep(0)  # 1 MiB was made: others have their turn
            if not more:
                break
            if when := limit.when():
                limit.reschedule(when + len(piece) / PACE)
        if inflater is not None:
            inflater.end()
        return _request(whole.getvalue())

    def _hold(self, size: int) -> None:
        self.held += size
        self._limits.held += size
        if self._limits.held > self._limits.allowance.held:
            raise Problem(
                None,
                "the gateway holds as many bytes of requests as it may: try again later",
                code="overloaded",
                headers={"Retry-After": "1", **_CLOSE},
            )


def _request(body: bytes) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": False}


def _too_large(message: str) -> Problem:
    return Problem(None, message, code="too_large", headers=_CLOSE)
