"""Many instances of one variant: looking at a bounded number of them for each query. Pure.

Up to MANY are all looked at. Of more, a glance at some, from where the last query left off, finds one that is idle or nearly as good as
the best (two choices are already exponentially better than one: Mitzenmacher 2001, "The power of two choices"); only when none of
those is in time are all looked at, and when that was in vain, not again for a moment.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.core.cluster import Instance

MANY = 64
GLANCE = 16  # instances looked at while one of them is in time
MOMENT = 0.005  # s for which all are taken to be full after all were looked at in vain
PACKED = 0.25  # s for which the order of workers by their fullness holds; heartbeats change it every 0.5 s
PACK_BELOW = 0.8  # part of a worker that instances keep busy, up to which `pack` keeps filling it
SLOW = 1.2  # live correction above which an idle instance is not taken at first sight


class Crowd:
    """More than MANY of a variant's instances (`instances`, the caller's list), and what the last queries found among them."""

    __slots__ = ("_full", "_instances", "_items", "_length", "_packed", "_packed_at", "_slack", "_turn")

    def __init__(self, instances: "list[Instance]") -> None:
        self._instances = instances
        self._turn = 0
        self._packed: list[Instance] = []
        self._packed_at = float("-inf")
        self._full = float("-inf")  # until when none is in time for so many items within `_slack`
        self._slack = 0.0
        self._items = 0
        self._length: int | None = None

    def soonest(self, items: int, length: int | None, slack: float, now: float) -> "Instance | None":
        """One that would answer soon, within `slack` seconds from now; None when none is in time."""
        if now < self._full and slack <= self._slack and items >= self._items and length == self._length:
            return None
        instances = self._instances
        count = len(instances)
        best: Instance | None = None
        least = slack
        at = self._turn % count
        for looked in range(count):
            instance = instances[at]
            at = at + 1 if at + 1 < count else 0
            seconds = instance.predict(items, length)
            if seconds <= least:
                best, least = instance, seconds
                if not instance.own and not instance.others and instance.factor <= SLOW:
                    break
            if best is not None and looked >= GLANCE:
                break
        self._turn = at
        if best is None:
            self._full, self._slack, self._items, self._length = now + MOMENT, slack, items, length
        return best

    def some(self) -> "list[Instance]":
        """MANY of them, each time others."""
        at = self._turn % len(self._instances)
        self._turn = at + MANY
        return self._instances[at : at + MANY]

    def fullest(self, now: float) -> "list[Instance]":
        """MANY on the fullest workers that are not yet full, fullest first, by name among equals; as of a moment ago."""
        if now - self._packed_at >= PACKED:
            self._packed_at = now
            rows = []
            for instance in self._instances:
                used = instance.worker.fullness.get((instance.record.hardware, instance.record.simulated), 0.0)
                if max(used, instance.busy) < PACK_BELOW:
                    rows.append((-used, instance.worker.name, instance.id, instance))
            rows.sort()
            self._packed = [row[3] for row in rows[:MANY]]
        return self._packed


def usual(batches: Iterable[int]) -> int:
    """The most frequent; the smaller of equals."""
    return min(Counter(batches).items(), key=lambda item: (-item[1], item[0]))[0]
