"""What a process has said to clients, kept for those that ask again. Pure."""

from typing import NamedTuple

import msgspec

from bus.messages.flow import Route
from bus.messages.public import Answer, Refusal

KEPT = 8192
KEPT_BYTES = 2**26
_encode = msgspec.msgpack.Encoder().encode
Key = tuple[bytes, int]


class SentAnswer(NamedTuple):
    """An answer as it was sent. code: of a refusal, else ""."""

    body: bytes
    code: str


class RecentAnswers:
    """The last answers by (uid, part): at least KEPT of them or KEPT_BYTES, at most twice as many.

    They are kept encoded: at 20,000 answers a second, one object each instead of a dozen is measurably faster.
    """

    def __init__(self) -> None:
        # Two generations: dropping the older one whole is cheaper than dropping one at a time.
        self._young: dict[Key, bytes] = {}
        self._old: dict[Key, bytes] = {}
        self._bytes = 0  # of the young ones
        self._codes: dict[Key, str] = {}  # of those that were refused

    def get(self, key: Key) -> SentAnswer | None:
        body = self._young.get(key) or self._old.get(key)
        return None if body is None else SentAnswer(body, self._codes.get(key, ""))

    def keep(self, route: Route, answer: Answer | Refusal) -> bytes:
        """Remember an answer; returns it encoded."""
        key = (route.uid, route.part)
        body = self._young[key] = _encode(answer)
        if type(answer) is Refusal:
            self._codes[key] = answer.error.code
        self._bytes += len(body)
        if len(self._young) >= KEPT or self._bytes >= KEPT_BYTES:
            self._old, self._young, self._bytes = self._young, {}, 0
            self._codes = {known: code for known, code in self._codes.items() if known in self._old}
        return body
