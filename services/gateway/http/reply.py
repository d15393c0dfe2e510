"""Replies in JSON, written by msgspec."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

_encode = msgspec.json.Encoder().encode


class Json:
    """A reply whose body is the JSON of `content`."""

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.body = _encode(content)
        self.status = status
        self.headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body))]
        if self.headers:
            headers += [
                (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()
            ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})
