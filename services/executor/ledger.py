"""What an executor remembers of queries that it has ended: so that none is answered twice, and none is missing from history."""

from collections import OrderedDict, deque
from typing import Any

from bus.messages.flow import DoneBatch, Route

ANSWERS = 8192  # recent answers kept, to be sent again when a client asks again with the same retry key
BATCHES = 20_000  # unacknowledged done batches kept per dispatcher


class Answers:
    """Recent answers by (uid, part): a query that was answered is not computed again."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[bytes, int], Any] = OrderedDict()

    def get(self, route: Route) -> Any:
        return self._kept.get((route.uid, route.part))

    def keep(self, route: Route, answer: Any) -> None:
        self._kept[route.uid, route.part] = answer
        if len(self._kept) > ANSWERS:
            self._kept.popitem(last=False)


class Owner:
    """One dispatcher as an executor knows it: alive or not, and the done batches whose outcomes it has not yet stored."""

    __slots__ = ("alive", "pending", "seen", "seq")

    def __init__(self, now: float) -> None:
        self.alive = True
        self.seen = now
        self.seq = 0
        self.pending: deque[tuple[DoneBatch, list[Route]]] = deque(maxlen=BATCHES)

    def flushed(self, seq: int) -> None:
        """Its outcomes up to this batch are on disk."""
        while self.pending and self.pending[0][0].seq <= seq:
            self.pending.popleft()
