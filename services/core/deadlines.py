"""Deadlines of what waits, with one timer for all of them: the earliest first, or only when to look at all."""

import heapq
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from msgspec import Struct

from services.core.actor import NOTHING, After, Effect

FEW = 1024  # deadlines that are kept whatever became of their items
Key = TypeVar("Key")
Item = TypeVar("Item")


class DeadlineReached(Struct, frozen=True):
    """Timer: the earliest deadline has come. of: which deadlines, if an actor has several kinds."""

    of: str = "deadline"


LOOK_S = 2e-6  # s between two looks, for each item that is looked at: so looks take a tenth of the time at most


class EarliestDeadline:
    """When to look at all items of an owner, of which thousands come and go in a second. An item costs a comparison.

    at: no item is due before. Who adds an item lowers it: `if due < earliest.at: earliest.at = due`. set_for: when the timer rings. At the end of each
    turn, its owner sets it anew where `at` is before that.
    """

    __slots__ = ("at", "set_for")

    def __init__(self) -> None:
        self.set_for = self.at = float("inf")

    def timer(self, now: float) -> After:
        """The timer, set to `at`."""
        self.set_for = self.at
        return After("deadline", max(0.0, self.at - now), DeadlineReached("deadline"))

    def looked(self, earliest: float, items: int, now: float) -> None:
        """All items have been looked at. earliest: when the next of those that stay is due, infinity: none stays."""
        self.set_for = float("inf")
        self.at = max(earliest, now + LOOK_S * items)


class Deadlines(Generic[Key, Item]):
    """Deadlines by key. The items themselves stay with their owner, who passes those that still wait with each call.

    at: an item's deadline, in Unix seconds. An item may come again with another one. of: tells these deadlines from an actor's others.
    """

    def __init__(self, at: Callable[[Item], float], of: str = "deadline") -> None:
        self._at = at
        self._of = of
        self._heap: list[tuple[float, Key]] = []
        self._kept: dict[Key, float] = {}  # of each key the earliest

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, key: Key, item: Item, now: float, waiting: Mapping[Key, Item]) -> tuple[Effect, ...]:
        """The item waits from now on. Returns the timer if its deadline is the earliest."""
        at = self._at(item)
        if at >= self._kept.get(key, float("inf")):
            return NOTHING  # looked at again when the earlier one comes
        if len(self._heap) > FEW + 2 * len(waiting):  # mostly of items that ended long before their deadlines
            self._heap = [entry for entry in self._heap if entry[1] in waiting]
            self._kept = {kept: due for kept, due in self._kept.items() if kept in waiting}
            heapq.heapify(self._heap)
        entry = (at, key)
        self._kept[key] = at
        heapq.heappush(self._heap, entry)
        return self.timer(now) if self._heap[0] is entry else NOTHING

    def due(self, now: float, waiting: Mapping[Key, Item]) -> list[Item]:
        """The items of `waiting` whose deadline has come, earliest first. They are watched no longer; the caller removes them."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            at, key = heapq.heappop(self._heap)
            if self._kept.get(key) != at:
                continue  # the key had an earlier deadline as well
            del self._kept[key]
            item = waiting.get(key)
            if item is None:
                continue
            if self._at(item) <= now:
                found.append(item)
            else:
                self.watch(key, item, now, waiting)
        return found

    def timer(self, now: float) -> tuple[Effect, ...]:
        """The one timer, set to the earliest deadline; nothing where there is none."""
        return (
            (After(self._of, max(0.0, self._heap[0][0] - now), DeadlineReached(self._of)),) if self._heap else NOTHING
        )
