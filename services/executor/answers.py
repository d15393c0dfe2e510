"""Recent answers: a query that was answered is not computed again, and a client that asks again gets the same answer."""

from typing import NamedTuple

import msgspec

from bus.messages.flow import Route
from bus.messages.public import Answer, Refusal

KEPT = 8192
_encode = msgspec.msgpack.Encoder().encode
Key = tuple[bytes, int]


class Known(NamedTuple):
    """An answer as it was sent; code: of a refusal, else ""."""

    body: bytes
    code: str


class Answers:
    """The last answers by (uid, part): at least KEPT of them, at most twice as many.

    Kept encoded: one object each instead of a dozen, which the memory allocator notices at 20,000 a second.
    """

    def __init__(self) -> None:
        # Two generations: dropping the older one whole is cheaper than dropping one at a time.
        self._young: dict[Key, bytes] = {}
        self._old: dict[Key, bytes] = {}
        self._codes: dict[Key, str] = {}  # of those that were refused

    def get(self, key: Key) -> Known | None:
        body = self._young.get(key) or self._old.get(key)
        return None if body is None else Known(body, self._codes.get(key, ""))

    def keep(self, route: Route, answer: Answer | Refusal) -> bytes:
        """Remember an answer; returns it encoded."""
        key = (route.uid, route.part)
        body = self._young[key] = _encode(answer)
        if type(answer) is Refusal:
            self._codes[key] = answer.error.code
        if len(self._young) >= KEPT:
            self._old, self._young = self._young, {}
            self._codes = {known: code for known, code in self._codes.items() if known in self._old}
        return body
