"""One instance's queue: earliest deadline first, in batches as large as the deadlines allow (Clockwork's and InferLine's queue; Nexus' early drop)."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, hypot, sqrt
from typing import Any

import msgspec
from msgspec import Raw, Struct

from bus.messages.flow import Route
from bus.messages.jobs import OFFLINE
from bus.messages.public import QueryInputs, TensorView
from services.core.cost import LatencyTable
from services.core.selection.instances import CAUTION

Inputs = TensorView | dict[str, TensorView | list[Any]] | list[Any]


class QueuedQuery(Struct, eq=False):
    """One query in an instance's queue. shape: what it may share a batch with (equal means compatible)."""

    route: Route
    body: Raw
    inputs: Inputs | None
    items: int
    shape: Any
    alone: bool = False  # it shares no batch
    abandoned: bool = False  # it has ended without its result, which is not used
    fetched: bool = False  # its inputs came from the object store
    storing: bool = False  # it is computed, and its outputs are on their way to the object store
    reported: int = 0  # of its routes that are storing: whose senders have been told that it has ended
    # The same query, sent again while this one waits: one answer, and `done` goes to all senders.
    also: tuple[Route, ...] = ()
    headers: Mapping[str, str] | None = None  # that came with it, if it is traced
    taken: float = 0.0  # when, if it is traced; Unix seconds
    said: list[Any] | None = None  # as in `DoneBatch`, once it is computed

    @property
    def routes(self) -> tuple[Route, ...]:
        """The routes of all dispatches of this query."""
        return (self.route, *self.also)

    def only_of(self, dispatcher: str, attempt: int) -> bool:
        """Whether nobody waits for it once this dispatcher takes back this attempt: it has given up those before, and no other one has sent it."""
        return all(route.dispatcher == dispatcher and route.attempt <= attempt for route in self.routes)


# -- decoding inputs; tensors' bytes are not copied: they stay views of the message's body

inputs_of = msgspec.msgpack.Decoder(QueryInputs).decode
_tensor = msgspec.msgpack.Decoder(TensorView).decode
_tensors = msgspec.msgpack.Decoder(dict[str, TensorView | list[Any]]).decode
_list = msgspec.msgpack.Decoder(list[Any]).decode


def queued_query(route: Route, body: msgspec.Raw, inputs: msgspec.Raw | bytes) -> QueuedQuery:
    """Decode one query's inputs. Raises msgspec.DecodeError, or IndexError if there are none."""
    try:
        tensor = _tensor(inputs)
    except msgspec.ValidationError:
        first = memoryview(inputs)[0]
        if first & 0xF0 == 0x90 or first in (0xDC, 0xDD):
            numbers = _list(inputs)
            return QueuedQuery(route, body, numbers, max(1, len(numbers)), route.uid, route.alone)
        return _named(route, body, _tensors(inputs))
    sizes = tensor.shape
    items = (sizes[0] or 1) if sizes else 1
    return QueuedQuery(route, body, tensor, items, (tensor.datatype, *sizes[1:]), route.alone)


def unread_query(route: Route, body: msgspec.Raw, headers: Mapping[str, str] | None, taken: float) -> QueuedQuery:
    """A query whose inputs are not here yet, or cannot be read."""
    query = QueuedQuery(route, body, None, route.items, None, route.alone)
    query.headers, query.taken = headers, taken
    return query


def _named(route: Route, body: msgspec.Raw, named: dict[str, TensorView | list[Any]]) -> QueuedQuery:
    """A query whose inputs have names. If one of them is a plain list, the query shares no batch: lists carry no datatype."""
    views = {name: one for name, one in named.items() if isinstance(one, TensorView)}
    if len(views) < len(named):
        items = next(len(one) for one in named.values() if isinstance(one, list))
        return QueuedQuery(route, body, named, max(1, items), route.uid, route.alone)
    items = next((view.shape[0] for view in views.values() if view.shape), 1)
    shape = tuple((name, v.datatype, *v.shape[1:]) for name, v in sorted(views.items()))
    return QueuedQuery(route, body, named, max(1, items), shape, route.alone)


# -- the queue

Heap = list[tuple[float, int, QueuedQuery]]
LOOKED_AT = 128  # queries that are compared when not all can be in time, the most urgent ones
MOST_LOOKED_AT = 2048  # the same where one beyond those would be late for queries that give way to it


RECENT = 10.0  # s for which queries of a level are expected to come again
MEMORY = 5.0  # s over which their rate is averaged
BURST = 2.0  # standard deviations of a Poisson count by which more may come while a batch computes
RISES = 1.05  # a query; so the shortest time of late counts where queries of one level have different ones


class Level(Struct, eq=False):
    """Queries of one priority, as they came of late. last: when. rate: items/s. time_s: the shortest that one had, from its arrival."""

    last: float
    rate: float = 0.0
    time_s: float = float("inf")

    def came(self, items: int, time_s: float, at: float) -> None:
        self.rate = self.rate_at(at) + items / MEMORY
        self.last = max(self.last, at)
        self.time_s = min(time_s, RISES * self.time_s)

    def rate_at(self, now: float) -> float:
        return self.rate * exp(min(0.0, self.last - now) / MEMORY)


@dataclass(slots=True, eq=False)
class EdfQueue:
    """One instance's queue, a heap by deadline. table: profiled latency by batch size. factor: live correction of it.
    max_batch: the most items of a batch; where a rule says how to batch (batching.py), it changes. contexts: batches at a time.

    While queries of a higher priority come, now or again within `RECENT`, a batch with lower ones leaves them room: one that comes just as it
    begins is in time after it. mixed: items of such a batch, at most, as of the last one; 0: nothing higher comes. Where all have one priority, nothing of that counts.

    items: waiting. offline: how many of them are offline work, which lets all other queries go first.
    """

    table: LatencyTable
    max_batch: int
    mixed: int = 0
    factor: float = 1.0
    contexts: int = 1
    items: int = 0
    offline: int = 0
    _heap: Heap = field(default_factory=list)
    _order: int = 0
    _only: int = 0  # the priority of all queries so far
    _last: Route | None = None  # of the last query
    _levels: dict[int, Level] = field(default_factory=dict)  # by priority, once there are several
    _bounded: dict[int, int] = field(default_factory=dict)  # `_bounds` of the batch that is being formed

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[QueuedQuery]:
        return (query for _, _, query in self._heap)

    @property
    def levels(self) -> dict[int, int]:
        """Items that wait, without offline work, by priority."""
        waiting = self.items - self.offline
        if not waiting or not self._levels:
            return {self._only: waiting} if waiting else {}
        found = Counter[int]()
        for query in self:
            if query.route.policy != OFFLINE:
                found[query.route.priority] += query.items
        return dict(found)

    def push(self, query: QueuedQuery) -> None:
        self._order += 1
        self.items += query.items
        route = query.route
        if route.policy == OFFLINE:
            self.offline += query.items
        if route.priority != self._only or self._levels or route.higher is not None:
            self._came(route)
        self._last = route
        heapq.heappush(self._heap, (route.deadline, self._order, query))

    def _came(self, route: Route) -> None:
        """A query came that is not of the only priority so far."""
        if self._last is None:
            self._only = route.priority
            if route.higher is None:
                return
        elif not self._levels:  # there are several from now on
            for one in [query.route for query in self] or [self._last]:
                self._note(one.priority, one.items, one.deadline - one.arrived, one.arrived)
        self._note(route.priority, route.items, route.deadline - route.arrived, route.arrived)
        if route.higher is not None:
            self._note(route.higher[0], 1, route.higher[1], route.arrived)

    def _note(self, priority: int, items: int, time_s: float, at: float) -> None:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = Level(at)
        level.came(items, time_s, at)

    def _bounds(self, table: LatencyTable, now: float) -> dict[int, int]:
        """By priority: the most items of a batch whose lowest priority that is. Empty: there is one level, or nothing higher comes.

        After a batch of T seconds, a query that came as it began is in a batch with those of its level, or higher, that are here and that come meanwhile.
        """
        if len(self._levels) < 2:
            return {}
        for priority in [priority for priority, level in self._levels.items() if now - level.last >= RECENT]:
            del self._levels[priority]
        here = Counter[int]()
        for query in self:
            here[query.route.priority] += query.items
        found: dict[int, int] = {}
        most, above, rate = self.max_batch, 1, 0.0
        for priority, lower in pairwise(sorted(self._levels)):
            level = self._levels[priority]
            above, rate = above + here[priority], rate + level.rate_at(now)
            low, high = 0, most
            while low < high:
                middle = (low + high + 1) // 2
                takes = table.seconds(middle) * self.factor
                come = rate * takes
                after = table.seconds(above + int(come + BURST * sqrt(come))) * self.factor
                low, high = (middle, high) if CAUTION * (takes + after) <= level.time_s else (low, middle - 1)
            most = low
            found[lower] = max(1, most)
        return found

    @property
    def first(self) -> QueuedQuery | None:
        """The query with the earliest deadline. None if there is none."""
        return self._heap[0][2] if self._heap else None

    @property
    def most_urgent(self) -> float:
        """Deadline of the first query, Unix seconds. Infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    @property
    def seconds_of_next(self) -> float:
        """What one batch of what waits takes, as it is measured now."""
        return self.table.seconds(min(self.items, self.max_batch)) * self.factor

    def oldest(self) -> float | None:
        """Arrival of the query that waits longest, Unix seconds. None if there is none."""
        return min([query.route.arrived for _, _, query in self._heap]) if self._heap else None

    def form(
        self, now: float, moves: Callable[[Route], bool] = lambda _: False
    ) -> tuple[list[QueuedQuery], list[QueuedQuery]]:
        """The next batch, and the queries that would be late. Both leave the queue. moves: whether a query may still go to another instance.

        The first deadline is the limit: the batch is the largest that is predicted to end before it. Only queries with equal
        shapes join. A query that may share no batch runs alone; so does one larger than max_batch, in pieces. Where not all that wait can be
        in time any more, some leave at once (`_give_way`).
        """
        heap = self._heap
        late = self._give_way(now, moves)
        while heap:
            deadline, _, first = heap[0]
            table = self.table.at(first.route.length)
            bounds = self._bounded if table is self.table else self._bounds(table, now)
            heapq.heappop(heap)
            self.items -= first.items
            if first.route.policy == OFFLINE:  # it runs alone: none is taken below
                self.offline -= first.items
            slack = (deadline - now) / self.factor
            if table.seconds(first.items) > slack:
                late.append(first)
                continue
            batch = [first]
            self.mixed = min(bounds.values()) if bounds else 0
            if first.alone or first.items >= self.max_batch or not heap:
                return batch, late
            items, lowest = first.items, first.route.priority
            most = self._limit(table, slack, lowest, bounds)
            aside: Heap = []
            while heap and items < most:
                entry = heapq.heappop(heap)
                query = entry[2]
                limit = most
                if bounds and query.route.priority > lowest:
                    limit = min(most, bounds.get(query.route.priority, most))
                more = items + query.items
                if more <= limit and query.shape == first.shape and not query.alone:
                    batch.append(query)
                    self.items -= query.items
                    items = more
                    if bounds:
                        lowest, most = max(lowest, query.route.priority), limit
                else:
                    aside.append(entry)
                    if len(aside) > 64:  # a mixed queue: do not turn it over for every batch
                        break
            for entry in aside:
                heapq.heappush(heap, entry)
            return batch, late
        return [], late

    def _limit(self, table: LatencyTable, slack: float, lowest: int, bounds: Mapping[int, int]) -> int:
        """The most items of a batch with this lowest priority whose first query has so many seconds left, without the factor.

        Where higher ones come, it is to be in time though it takes CAUTION times as long: all that wait for it have a margin then.
        """
        if not bounds:
            return min(self.max_batch, table.largest_batch_within(slack))
        return min(self.max_batch, table.largest_batch_within(slack / CAUTION), bounds.get(lowest, self.max_batch))

    def _give_way(self, now: float, moves: Callable[[Route], bool]) -> list[QueuedQuery]:
        """Remove the queries that cannot be in time, and those that would make others late. None while all can be in time.

        Those with the larger `priority` give way first. Among equals, as many as possible are kept: usually all but those that come too late
        in the order of deadlines; but a first one that allows only a small batch leaves if that keeps more of the others (Nexus' early drop).
        Those that come too late make nobody else late. They leave while another instance may do them in time. Those that do not move stay as
        long as they could be in time alone: it may go faster than predicted.
        """
        heap = self._heap
        if not heap:
            return []
        bounds = self._bounded = self._bounds(self.table, now) if self._levels else {}
        most = min(bounds.values()) if bounds else self.max_batch
        margin = (CAUTION - 1.0) * self.table.seconds(most) if bounds else 0.0
        if (self._seconds_of_all(most) + margin) * self.factor <= heap[0][0] - now:
            return []  # all can be in time before the first deadline
        entries = self._threatened(now)
        if not entries:
            return []
        levels: dict[int, Heap] = {}
        for entry in entries:
            levels.setdefault(entry[2].route.priority, []).append(entry)
        kept: Heap = []
        stays: set[int] = set()
        for level in sorted(levels):
            kept, last = self._kept(kept, levels[level], now)
            stays.update(entry[1] for entry in last if not (moves(entry[2].route) or self._lost([entry], now)))
        stays.update(entry[1] for entry in kept)
        left = [entry for entry in entries if entry[1] not in stays]
        if left:
            leaves = {entry[1] for entry in left}
            heap[:] = [entry for entry in heap if entry[1] not in leaves]
            heapq.heapify(heap)
            self.items -= sum(entry[2].items for entry in left)
        return [entry[2] for entry in left]

    def _threatened(self, now: float) -> Heap:
        """The first queries by deadline, some of which would be late. Empty if none would be."""
        if len(self._heap) > LOOKED_AT and len({entry[2].route.priority for entry in self._heap}) > 1:
            many = [e for e in heapq.nsmallest(MOST_LOOKED_AT, self._heap) if e[2].route.policy != OFFLINE]
            lowest = max((entry[2].route.priority for entry in many), default=0)
            if any(entry[2].route.priority < lowest for entry in self._lost(many, now)):
                return many
        few = [e for e in heapq.nsmallest(LOOKED_AT, self._heap) if e[2].route.policy != OFFLINE]
        return few if self._lost(few, now) else []

    def _seconds_of_all(self, most: int) -> float:
        """Seconds that all items take in batches of so many, without the factor."""
        full, rest = divmod(self.items, most)
        last = self.table.seconds(rest) if rest else 0.0
        if self.contexts > 1:
            last = last or self.table.seconds(most)
            return full * self.table.seconds(most) / self.contexts + last
        return full * self.table.seconds(most) + last

    def _kept(self, before: Heap, more: Heap, now: float) -> tuple[Heap, Heap]:
        """`before`, and as many of `more` as can be in time beside it, by deadline; and those that only come too late themselves."""
        kept, last = sorted(before + more), []
        ours = {entry[1] for entry in more}
        while (lost := self._lost(kept, now)) and all(entry[1] in ours for entry in lost):
            gone = {entry[1] for entry in lost}
            kept = [entry for entry in kept if entry[1] not in gone]
            last += lost
        if lost:  # they make those before late: the fewest of them leave that must, rather the last ones
            ways = (lambda count: more[: len(more) - count], lambda count: more[count:])
            found = [self._fewest(before, way, len(more), now) or before for way in ways]
            return max(found, key=len), []
        # Without the fewest of the first ones all others may be in time; only if that halves the loss, as times are not exact.
        fewer = self._fewest(before, lambda count: more[count:], len(last) // 2, now)
        return (kept, last) if fewer is None else (fewer, [])

    def _fewest(self, before: Heap, left: Callable[[int], Heap], most: int, now: float) -> Heap | None:
        """`before` and what is left of others without the fewest of them, at most so many, that leave all in time. None: that is not enough."""
        low, high = 1, most
        found: Heap | None = None
        while low <= high:
            middle = (low + high) // 2
            tried = sorted(before + left(middle))
            if self._lost(tried, now):
                low = middle + 1
            else:
                found, high = tried, middle - 1
        return found

    def _lost(self, entries: Heap, now: float) -> Heap:
        """Those of these queries, sorted by deadline, that would be late if the executor went through them from now on.

        One that others of a lower priority go before needs a margin, since a batch may take longer: CAUTION times as long, the longest one.
        """
        lost: Heap = []
        at, count = 0, len(entries)
        lowest, margin = 0, 0.0
        while at < count:
            deadline, _, first = entries[at]
            slack = (deadline - now) / self.factor
            table = self.table.at(first.route.length)
            items, of_batch, here = first.items, first.route.priority, at
            if table.seconds(items) > slack - (margin if of_batch < lowest else 0.0):
                lost.append(entries[at])
                at += 1
                continue
            at += 1
            if not first.alone:
                bounds = self._bounded
                room = self._limit(table, slack, of_batch, bounds)
                while at < count:
                    query = entries[at][2]
                    if bounds and query.route.priority > of_batch:
                        of_batch = query.route.priority
                        room = min(room, bounds.get(of_batch, room))
                    if items + query.items > room:
                        break
                    items += query.items
                    at += 1
            takes = table.seconds(items)
            if self._bounded:
                lowest, margin = max(lowest, of_batch), hypot(margin, (CAUTION - 1.0) * takes)
                due = now + (takes + margin) * self.factor
                lost += [entry for entry in entries[here:at] if entry[2].route.priority < lowest and entry[0] < due]
            now += takes * self.factor / self.contexts
        return lost

    def overdue(self, now: float) -> list[QueuedQuery]:
        """Remove the queries that would be late even if they began now, from the first deadline on."""
        late: list[QueuedQuery] = []
        while self._heap:
            deadline, _, first = self._heap[0]
            if self.table.at(first.route.length).seconds(first.items) <= (deadline - now) / self.factor:
                break
            heapq.heappop(self._heap)
            self.items -= first.items
            if first.route.policy == OFFLINE:
                self.offline -= first.items
            late.append(first)
        return late

    def forget(self, gone: set[bytes]) -> None:
        """Remove the queries with these uids."""
        left = [entry for entry in self._heap if entry[2].route.uid in gone]
        if left:
            self._heap = [entry for entry in self._heap if entry[2].route.uid not in gone]
            heapq.heapify(self._heap)
            self.items -= sum(entry[2].items for entry in left)
            self.offline -= sum(entry[2].items for entry in left if entry[2].route.policy == OFFLINE)

    def drop(self) -> list[QueuedQuery]:
        """Empty the queue."""
        queries = [query for _, _, query in self._heap]
        self._heap.clear()
        self.items = self.offline = 0
        return queries
