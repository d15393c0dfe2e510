"""Traces of single queries: the W3C `traceparent` header of a query, and the spans that the services add.

A query without a trace causes no work here. Span ids are derived from the query's uid. So no random numbers are needed, and each
service knows the id of its parent span.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from msgspec import Struct

_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]{1,512}")
SAMPLED = 1


class Trace(Struct, frozen=True):
    """The trace context that a query's sender gives.

    trace, parent: hexadecimal. flags: bit 0 = the trace is recorded. state: the sender's `tracestate`.
    """

    trace: str
    parent: str
    flags: int
    state: str = ""

    @property
    def recorded(self) -> bool:
        return bool(self.flags & SAMPLED)

    def headers(self, span: str) -> dict[str, str]:
        """The headers of messages that this span sends."""
        parent = {"traceparent": f"00-{self.trace}-{span}-{self.flags:02x}"}
        return {**parent, "tracestate": self.state} if self.state else parent


class Span(Struct, frozen=True, kw_only=True):
    """An effect: one service's work for a query. start, end: Unix seconds. error: empty if the work succeeded."""

    trace: Trace
    span: str
    name: str
    kind: str
    start: float
    end: float
    attributes: dict[str, Any]
    error: str = ""


def read(headers: Mapping[str, str] | None) -> Trace | None:
    """The trace in a message's headers. None if there is none, or if it is not valid."""
    if not headers:
        return None
    given = headers.get("traceparent") or headers.get("Traceparent")
    found = _PARENT.fullmatch(given) if given else None
    if found is None or given is None or given.startswith("ff") or (given.startswith("00") and found[4]):
        return None
    trace, parent, flags = found[1], found[2], found[3]
    if not trace.strip("0") or not parent.strip("0"):
        return None
    state = headers.get("tracestate") or headers.get("Tracestate") or ""
    return Trace(trace, parent, int(flags, 16) & SAMPLED, state if _STATE.fullmatch(state) else "")


def span_id(uid: bytes, part: str) -> str:
    """The id of the span that a service creates for the query with this uid: 16 hexadecimal digits. part: the name of the part of the work."""
    return blake2b(uid, digest_size=8, person=part.encode()[:16]).hexdigest()
