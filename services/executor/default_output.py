"""Queries whose app has a default output: at their deadline they go back to the dispatcher, whatever they wait for here. Pure."""

import heapq

from msgspec import Struct

from services.core.actor import After, Effect
from services.core.outcomes import default_at
from services.executor.queue import QueuedQuery

Key = tuple[bytes, int]
FEW = 1024  # deadlines that are kept whatever became of their queries


class DefaultOutputDue(Struct, frozen=True):
    """Timer: the first of them has come to its deadline."""


class DefaultOutputDeadlines:
    """Deadlines of what is watched, the first first. Keys only: whoever was answered in time is not kept alive by this."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, Key]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, work: QueuedQuery, now: float, pending: dict[Key, QueuedQuery]) -> tuple[Effect, ...]:
        """A query was taken: wake up at its deadline. pending: all that have no end yet."""
        if len(self._heap) > FEW + 2 * len(pending):  # mostly of queries that were answered long before a late deadline
            self._heap = [entry for entry in self._heap if entry[1] in pending]
            heapq.heapify(self._heap)
        entry = (_due_at(work), (work.route.uid, work.route.part))
        heapq.heappush(self._heap, entry)
        return self.wake(now) if self._heap[0] is entry else ()

    def wake(self, now: float) -> tuple[Effect, ...]:
        """The one timer, set to the first deadline there is."""
        return (After("lapse", max(0.0, self._heap[0][0] - now), DefaultOutputDue()),) if self._heap else ()

    def due(self, now: float, pending: dict[Key, QueuedQuery]) -> list[QueuedQuery]:
        """Take out of `pending` what has come to its deadline; it is marked, so that its result is nobody's any more."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            key = heapq.heappop(self._heap)[1]
            work = pending.get(key)
            if work is not None and _due_at(work) <= now:
                del pending[key]
                work.lapsed = True
                found.append(work)
        return found


def _due_at(work: QueuedQuery) -> float:
    return default_at(work.route.arrived, work.route.deadline)
