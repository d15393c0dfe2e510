"""Earliest deadline first, in batches as large as the deadlines allow (Clockwork's and InferLine's queue; Nexus' early drop).

Pure: the queue is a heap by deadline; `form` takes from it what runs next and what cannot be served in time any more.
"""

import heapq
from collections.abc import Iterator

from bus.messages.jobs import OFFLINE
from services.core.cost import LatencyTable
from services.executor.work import Work

Heap = list[tuple[float, int, Work]]


class EdfQueue:
    """One instance's queue. table: profiled latency by batch size; factor: live correction of it.

    items: waiting; offline: how many of them are offline work, which lets everything else go first.
    """

    __slots__ = ("_heap", "_order", "factor", "items", "max_batch", "offline", "table")

    def __init__(self, table: LatencyTable, max_batch: int) -> None:
        self.table = table
        self.max_batch = max_batch
        self.factor = 1.0
        self.items = 0
        self.offline = 0
        self._heap: Heap = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Work]:
        return (work for _, _, work in self._heap)

    def push(self, work: Work) -> None:
        self._order += 1
        self.items += work.items
        if work.route.policy == OFFLINE:
            self.offline += work.items
        heapq.heappush(self._heap, (work.route.deadline, self._order, work))

    @property
    def most_urgent(self) -> float:
        """Deadline of the first, Unix seconds; infinity when there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def oldest(self) -> float | None:
        """Arrival of the query that waits longest, Unix seconds."""
        return min((work.route.arrived for _, _, work in self._heap), default=None)

    def form(self, now: float) -> tuple[list[Work], list[Work]]:
        """The next batch, and what has to go because it would be late. Both leave the queue.

        The first by deadline sets the limit: the largest batch that is predicted to end before it. Only queries with
        equal shapes join it; what may share no batch runs alone; a query larger than max_batch runs alone, in pieces.
        """
        heap = self._heap
        late: list[Work] = []
        while heap:
            deadline, _, first = heap[0]
            heapq.heappop(heap)
            self.items -= first.items
            if first.route.policy == OFFLINE:  # it runs alone: none is taken below
                self.offline -= first.items
            slack = (deadline - now) / self.factor
            table = self.table.at(first.route.length)
            if table.seconds(first.items) > slack:
                late.append(first)
                continue
            batch = [first]
            if first.alone or first.items >= self.max_batch or not heap:
                return batch, late
            room = min(self.max_batch, table.largest_batch_within(slack)) - first.items
            aside: Heap = []
            while heap and room > 0:
                entry = heapq.heappop(heap)
                work = entry[2]
                if work.items <= room and work.shape == first.shape and not work.alone:
                    batch.append(work)
                    self.items -= work.items
                    room -= work.items
                else:
                    aside.append(entry)
                    if len(aside) > 64:  # a mixed queue: do not turn it over for every batch
                        break
            for entry in aside:
                heapq.heappush(heap, entry)
            return batch, late
        return [], late

    def overdue(self, now: float) -> list[Work]:
        """Take out what is first by deadline and could not be served in time any more, though it began now."""
        late: list[Work] = []
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

    def drop(self) -> list[Work]:
        """Empty the queue."""
        works = [work for _, _, work in self._heap]
        self._heap.clear()
        self.items = self.offline = 0
        return works
