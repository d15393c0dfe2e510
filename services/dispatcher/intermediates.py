"""Results that stages hand on by way of the object store: they go when the query ends that a client asked, and have a bound. Pure.

What nobody hears of, since its dispatcher died or its reply came too late, goes when the bucket's time is up. What a client fetches stays
until then, too: it is an object of its own.
"""

from collections import deque
from collections.abc import Iterable

from bus.messages.public import Error, ObjectRef
from services.core.actor import Do, Effect
from services.dispatcher.commands import DeleteResults

LINGER = 5.0  # s after the end of a query; until then another dispatcher may have started it again, if an executor did not hear of the end
TIMEOUT = 10.0  # s to delete some
RESULTS = "results"  # names the command


class Intermediates:
    """most_bytes: that there may be, of this dispatcher. bytes: that there are."""

    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        self._most = most_bytes
        self._held: dict[bytes, dict[str, int]] = {}  # bytes by key, by uid of the outermost query
        self._over: deque[tuple[float, dict[str, int]]] = deque()

    def hold(self, uid: bytes, ref: ObjectRef) -> None:
        """Keep a result until its outermost query, with this uid, ends."""
        for _, found in self._over:  # the same query was asked again
            self.bytes -= found.pop(ref.key, 0)
        ours = self._held.setdefault(uid, {})
        self.bytes += ref.bytes - ours.get(ref.key, 0)
        ours[ref.key] = ref.bytes

    def ended(self, uid: bytes, now: float) -> None:
        """The query has ended; also again, for what came late."""
        found = self._held.pop(uid, None)
        if found is not None:
            self._over.append((now + LINGER, found))

    def refusal(self) -> Error | None:
        """Why a query that has just added to them ends; None: there is room."""
        if self.bytes <= self._most:
            return None
        text = (
            f"results on their way between stages take {self.bytes / 1e6:.3g} MB, at most {self._most / 1e6:.3g} MB are kept"
            " (the setting dispatcher.max_stored): ask fewer at a time, or give smaller outputs"
        )
        return Error(code="overloaded", message=text, retry_after_ms=1000.0 * LINGER)

    def due(self, now: float) -> Iterable[Effect]:
        """Delete those whose time is over."""
        keys: list[str] = []
        while self._over and self._over[0][0] <= now:
            found = self._over.popleft()[1]
            self.bytes -= sum(found.values())
            keys += found
        return (Do((RESULTS, keys[0]), DeleteResults(tuple(keys)), TIMEOUT),) if keys else ()
