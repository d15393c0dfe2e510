"""Classes of an app's recorded queries, few enough for one load each: equal needs, or nearly equal needs if there are too many classes.

Needs that differ by less than a step are one class, with the strictest of them: no query asks for less than it did. Steps grow until
there are at most MOST classes. A class's items are its mean, rounded.
"""

from array import array
from math import inf, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bus.messages.public import Requirements

MOST = 64  # classes of one app
HELD = 2048  # classes of one app while queries are read
# Ratio of items, ratio of latency and cost, and difference of accuracy within which queries count as equal. Sizes come first: a class
# of mean size is nearly the same work, while stricter needs may need another variant.
STEPS = (
    (1.0, 1.0, 0.0),
    (1.25, 1.0, 0.0),
    (2.0, 1.0, 0.0),
    (inf, 1.0, 0.0),
    (inf, 1.02, 0.002),
    (inf, 1.05, 0.005),
    (inf, 1.1, 0.01),
    (inf, 1.25, 0.02),
    (inf, 1.5, 0.05),
    (inf, 2.0, 0.1),
    (inf, 4.0, 0.25),
    (inf, inf, 2.0),
)

Key = tuple[float, float, float, float]  # latency_ms (inf: none), accuracy, cost (inf: none), items


class QueryClass(NamedTuple):
    """Queries with equal needs. times: of arrival, rising."""

    needs: Requirements
    items: int
    times: NDArray[np.float64]


class _Cell:
    """Queries that are one class so far."""

    __slots__ = ("accuracy", "cost", "count", "items", "latency")

    def __init__(self, key: Key) -> None:
        self.latency, self.accuracy, self.cost, self.items = key
        self.count = 1

    @property
    def key(self) -> Key:
        return self.latency, self.accuracy, self.cost, self.items / self.count

    def join(self, other: "_Cell") -> None:
        self.latency = min(self.latency, other.latency)
        self.accuracy = max(self.accuracy, other.accuracy)
        self.cost = min(self.cost, other.cost)
        self.items += other.items
        self.count += other.count


class QueryClasses:
    """The classes of one app."""

    def __init__(self) -> None:
        self._step = 0
        self._cells: list[_Cell] = []
        self._of: dict[Key, int] = {}
        self._times = array("d")
        self._which = array("q")

    @property
    def folded(self) -> str:
        """What was merged although it differs: "" (nothing), "sizes" or "needs"."""
        if self._step == 0:
            return ""
        return "needs" if STEPS[self._step][1] > 1.0 else "sizes"

    def add(
        self, time: float, latency_ms: float | None, accuracy: float | None, cost: float | None, items: int
    ) -> None:
        """Add a query. Times do not decrease."""
        key = (latency_ms or inf, accuracy or 0.0, inf if cost is None else cost, float(items))
        place = _place(key, self._step)
        which = self._of.get(place)
        if which is None:
            if len(self._cells) >= HELD:
                self._fold(HELD // 2)
                place = _place(key, self._step)
            which = self._of.get(place)
        if which is None:
            which = self._of[place] = len(self._cells)
            self._cells.append(_Cell(key))
        else:
            self._cells[which].join(_Cell(key))
        self._times.append(time)
        self._which.append(which)

    def __len__(self) -> int:
        return len(self._times)

    def found(self) -> list[QueryClass]:
        """At most MOST classes, the most demanding first."""
        self._fold(MOST)
        times, which = np.array(self._times, np.float64), np.array(self._which, np.int64)
        order = sorted(range(len(self._cells)), key=lambda i: self._cells[i].key)
        return [_kind(self._cells[i], times[which == i]) for i in order]

    def _fold(self, most: int) -> None:
        """Increase the step until there are at most `most`."""
        while len(self._cells) > most and self._step + 1 < len(STEPS):
            self._step += 1
            cells: list[_Cell] = []
            places: dict[Key, int] = {}
            now = np.empty(len(self._cells), np.int64)
            for i, cell in enumerate(self._cells):
                place = _place(cell.key, self._step)
                new = places.setdefault(place, len(cells))
                if new == len(cells):
                    cells.append(cell)
                else:
                    cells[new].join(cell)
                now[i] = new
            which = now[np.array(self._which, np.int64)]
            self._cells, self._of, self._which = cells, places, array("q", which.tobytes())


def _place(key: Key, step: int) -> Key:
    """A key that is equal for needs that count as equal."""
    size, ratio, difference = STEPS[step]
    latency, accuracy, cost, items = key
    return (
        _level(latency, ratio),
        accuracy // difference if difference else accuracy,
        _level(cost, ratio),
        _level(items, size),
    )


def _level(value: float, ratio: float) -> float:
    if ratio == inf:
        return 0.0
    if ratio == 1.0 or value in {0.0, inf}:
        return value
    return float(log(value) // log(ratio))


def _kind(cell: _Cell, times: NDArray[np.float64]) -> QueryClass:
    needs = Requirements(
        latency_ms=None if cell.latency == inf else cell.latency,
        accuracy=cell.accuracy or None,
        cost=None if cell.cost == inf else cell.cost,
    )
    return QueryClass(needs, max(1, round(cell.items / cell.count)), times)
