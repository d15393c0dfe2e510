"""A sampler for variants with many instances.

Up to MANY instances, each query looks at all of them. Of more, it looks at a few, beginning one further than the last query. That finds an
idle instance, or one nearly as good as the best: two choices are exponentially better than one (Mitzenmacher 2001, "The power of two
choices"). Only if none of these is in time does the query look at all. If none of all is in time, the next queries look only where something
has ended since, or a batch under way has come so far that it may be.
"""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from services.core.selection.instances import CAUTION, MANY, Instance

SAMPLED = 16  # instances looked at while one of them is in time
PACKED = 0.25  # s for which the order of workers by fullness is kept; heartbeats change it every 0.5 s
PACK_BELOW = 0.8  # fullness of a worker up to which `pack` fills it
SLOW = 1.2  # live correction factor above which an idle instance is compared with others first


@dataclass(slots=True, eq=False)
class InstanceSampler:
    """Looks at some of a variant's instances, and remembers that none was in time. instances: the caller's list, which changes. turn: a number
    that grows from query to query, by which each looks at others.
    """

    instances: list[Instance]
    _packed: list[Instance] = field(default_factory=list)
    _packed_at: float = -inf
    _full: bool = False  # none was in time for `_items` items in `_slack`: only one of `_freed` and `_due` can be
    _slack: float = 0.0
    _items: int = 0
    _length: int | None = None
    _freed: dict[Instance, None] = field(default_factory=dict)
    # a heap by the time from which it may be in time
    _due: list[tuple[float, str, Instance]] = field(default_factory=list)

    def freed(self, instance: Instance) -> None:
        """Its predictions may be shorter than before, or it is new."""
        if self._full:
            self._freed[instance] = None

    def soonest(self, items: int, length: int | None, slack: float, now: float, turn: int) -> Instance | None:
        """An instance that answers soon, within `slack` seconds. None when none is in time. now: Unix seconds."""
        if self._full and slack <= self._slack and items == self._items and length == self._length:
            return self._soonest_freed(slack, now)
        instances = self.instances
        count = len(instances)
        best: Instance | None = None
        least = slack
        late: list[tuple[float, str, Instance]] = []
        at = turn % count
        for looked in range(count):
            instance = instances[at]
            at = at + 1 if at + 1 < count else 0
            if CAUTION * instance.waiting_s < least:
                seconds = instance.predict(items, length, now + slack, now)
                if seconds <= least:
                    best, least = instance, seconds
                    if instance.idle and instance.factor <= SLOW:
                        break
                elif best is None:
                    late.append((now + instance.in_time_after(seconds - slack), instance.id, instance))
            if best is not None and looked >= SAMPLED:
                break
        self._full = best is None
        if self._full:
            heapify(late)
            self._due, self._slack, self._items, self._length = late, slack, items, length
            self._freed.clear()
        return best

    def _soonest_freed(self, slack: float, now: float) -> Instance | None:
        """As `soonest`, while none can be in time but those where something has ended since, or enough time has passed."""
        while self._due and self._due[0][0] <= now:
            self._freed[heappop(self._due)[2]] = None
        best: Instance | None = None
        least = slack
        for looked, instance in enumerate(list(self._freed)):
            seconds = instance.predict(self._items, self._length, now + slack, now)
            if self.freed not in instance.on_freed:
                del self._freed[instance]  # it has left the list
            elif seconds <= least:
                best, least = instance, seconds
            elif seconds > self._slack:
                del self._freed[instance]
                heappush(self._due, (now + instance.in_time_after(seconds - self._slack), instance.id, instance))
            if best is not None and looked >= SAMPLED:
                break
        if len(self._freed) + len(self._due) > 2 * len(self.instances):
            self._full = False  # it would be remembered no more cheaply than it is found
        return best

    def some(self, count: int, turn: int) -> list[Instance]:
        """So many of them, different ones each turn."""
        at = turn * count % len(self.instances)
        return self.instances[at : at + count]

    def fullest(self, now: float) -> list[Instance]:
        """MANY instances on the fullest workers below PACK_BELOW, fullest first, then by name. Up to PACKED seconds old."""
        if now - self._packed_at >= PACKED:
            self._packed_at = now
            rows = []
            for instance in self.instances:
                used = instance.worker.fullness.get((instance.record.hardware, instance.record.simulated), 0.0)
                if max(used, instance.busy) < PACK_BELOW:
                    rows.append((-used, instance.worker.name, instance.id, instance))
            rows.sort()
            self._packed = [row[3] for row in rows[:MANY]]
        return self._packed
