"""One earliest-deadline queue for all instances of a planned variant (InferLine, paper 004, section 3.6). Pure.

An instance takes the head of the queue, and with it as many as wait, up to the planned batch. It gets nothing more until `done` has come
for all of them, which is its credit. So fast and slow instances share the queries by their speed. Each dispatcher has queues of its own.

From the moment at which an idle instance gets a batch until `done` comes, it takes longer than its profile says: for the messages, and for
what they wait in processes. Plans reckon with that time, the hop, so it is measured here.
"""

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from msgspec import Struct

from bus.messages.catalog import PlannedStage
from bus.messages.flow import DoneBatch
from bus.messages.public import Error
from services.core.actor import NOTHING, After, Effect
from services.core.lifecycle import SERVING
from services.core.pipelines.estimator import MeasuredHop
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask
from services.core.selection.instances import Instance
from services.core.selection.refusals import too_little_time
from services.dispatcher.inflight import InFlight
from services.dispatcher.query import Query

PASSED_OVER = 64  # queries that a slow instance looks at beyond those that it can answer in time
FULL = Error(code="overloaded", message="too many queries wait for a worker: ask again later", retry_after_ms=1000.0)
LATE = Error(code="deadline", message="the queue ahead was too long: allow more time or ask again")

HOPS = 1000  # batches of which the hops are kept: the last ones

Entry = tuple[float, int, Query]  # deadline, order of arrival


class PullDue(Struct, frozen=True):
    """Timer: give out what waits for a variant."""

    variant: str


class GivenBatch(NamedTuple):
    """The last batch of an instance. idle: nothing else was there when it was given."""

    uids: list[bytes]
    at: float
    idle: bool

    def is_all_of(self, batch: DoneBatch) -> bool:
        """Whether it was computed as one batch, with nothing else."""
        return batch.codes is None and sorted(batch.uids) == sorted(self.uids)


class Dispatch(Protocol):
    """Sends a query to an instance. more: the next one belongs to the same batch."""

    def __call__(self, query: Query, instance: Instance, now: float, *, more: bool) -> Effect: ...


class CentralQueues(Struct, eq=False):
    """Queries that wait here are in `in_flight.waiting`, too, which removes those whose deadline is over.

    decide: as for a query without a plan. refuse: ends a query.
    """

    view: ClusterView
    in_flight: InFlight
    dispatch: Dispatch
    decide: Callable[[Query, float], Iterable[Effect]]
    refuse: Callable[[Query, Error, float], Iterable[Effect]]
    _queues: dict[str, list[Entry]] = {}  # by variant
    _queued: set[bytes] = set()  # uids of all entries, also of those that wait no more
    _due: set[str] = set()  # variants whose PullDue comes
    _levels: dict[str, set[int]] = {}  # by variant: priorities of what waits, or has waited in this queue
    _given: dict[str, GivenBatch] = {}  # by instance
    _hops: dict[str, deque[float]] = {}  # by variant, ms
    _order: int = 0

    def __contains__(self, query: Query) -> bool:
        """Whether it waits in one of these queues, and not for any instance at all."""
        return query.uid in self._queued and self._waits(query)

    def instances(self, variant: str) -> list[Instance]:
        """Those that serve."""
        return [one for one in self.view.by_variant.get(variant, {}).values() if one.state in SERVING]

    def waiting(self, variant: str) -> int:
        """Items that wait for an instance of this variant."""
        return sum(query.ask.items for _, _, query in self._queues.get(variant, ()) if self._waits(query))

    def depths(self) -> dict[str, int]:
        """`waiting` of each variant that anything has waited for."""
        return {variant: self.waiting(variant) for variant in self._queues}

    def serves(self, stage: PlannedStage, ask: Ask) -> bool:
        """Whether a query of this stage can wait here: its variant meets the query's needs, and an instance of it serves."""
        app = self.view.apps.get(ask.app)  # it may have been deleted meanwhile
        return bool(self.instances(stage.variant)) and app is not None and app.eligibility(ask).allows(stage.variant)

    @property
    def hops(self) -> dict[str, MeasuredHop]:
        """By variant, what its last batches took beyond their profiles."""
        return {name: MeasuredHop.of(last) for name, last in self._hops.items()}

    def done(self, batch: DoneBatch, now: float) -> list[Effect]:
        """A batch has ended: its instance may get the next one."""
        given = self._given.get(batch.instance)
        instance = self.view.instances.get(batch.instance) if given is not None else None
        if given is not None and instance is not None and given.idle and given.is_all_of(batch):
            hop = max(0.0, now - given.at - instance.table.seconds(batch.batch))
            self._hops.setdefault(batch.variant, deque(maxlen=HOPS)).append(1000.0 * hop)
        return self.pull(batch.variant, now) if self._queues else []

    def push(self, query: Query) -> Iterable[Effect]:
        """A query begins to wait here: until the end of this turn of the loop, so that those that come together go in one batch."""
        assert query.planned is not None, "a plan provides for it"
        variant = query.planned.variant
        self._order += 1
        self._levels.setdefault(variant, set()).add(query.ask.priority)
        self.in_flight.wait(query)
        self._queued.add(query.uid)
        heappush(self._queues.setdefault(variant, []), (query.ask.deadline, self._order, query))
        if variant in self._due:
            return NOTHING
        self._due.add(variant)
        return (After(("pull", variant), 0.0, PullDue(variant)),)

    def due(self, variant: str, now: float) -> list[Effect]:
        """Give out what has come."""
        self._due.discard(variant)
        return self.pull(variant, now)

    def pull(self, variant: str, now: float) -> list[Effect]:
        """Give instances of this variant that have their credit what waits for it: those with least work first, then the fastest."""
        queue = self._queues.get(variant)
        if not queue:
            return []
        effects: list[Effect] = []
        late: list[Query] = []
        instances = self.instances(variant)
        fastest = min(instances, key=_seconds, default=None)
        if len(self._levels[variant]) > 1:
            late += self._give_way(variant, instances, now)
        free = [one for one in instances if not self._owes(one)]
        for instance in sorted(free, key=lambda one: (one.own + one.others, _seconds(one))):
            assert fastest is not None, "there is at least one"
            batch = self._batch(queue, instance, fastest, now, late)
            last = len(batch) - 1
            if batch:
                idle = not instance.own + instance.others
                self._given[instance.id] = GivenBatch([query.uid for query in batch], now, idle)
            effects.extend(self.dispatch(query, instance, now, more=i < last) for i, query in enumerate(batch))
            if not queue:
                break
        for query in late:
            left, takes = query.ask.deadline - query.arrived, 0.0 if fastest is None else _takes(query, fastest)
            effects.extend(self.refuse(query, LATE if takes <= left else too_little_time(left, takes), now))
        return effects

    def serve(self, now: float) -> list[Effect]:
        """Instances have come or gone: give out what waits. Where no instance serves any more, decide as for queries without a plan."""
        effects: list[Effect] = []
        for gone in [one for one in self._given if one not in self.view.instances]:
            del self._given[gone]
        for variant, queue in list(self._queues.items()):
            if not self.instances(variant):
                for table in (self._queues, self._levels, self._hops):
                    table.pop(variant, None)
                self._queued.difference_update(query.uid for _, _, query in queue)
                for _, _, query in queue:
                    if self._waits(query):
                        del self.in_flight.waiting[query.uid]
                        effects.extend(self.decide(query, now))
            else:
                effects.extend(self.pull(variant, now))
        return effects

    def _batch(
        self, queue: list[Entry], instance: Instance, fastest: Instance, now: float, late: list[Query]
    ) -> list[Query]:
        """Remove the next batch for an instance. late: gets those that not even the fastest one can answer in time.

        Those that this one is too slow for stay.
        """
        batch: list[Query] = []
        aside: list[Entry] = []
        items, room = 0, instance.most
        while queue and len(aside) < PASSED_OVER:
            entry = queue[0]
            query = entry[2]
            if not self._waits(query):
                heappop(queue)
                self._queued.discard(query.uid)
                continue
            assert query.planned is not None, "a plan provides for it"
            room = min(room, query.planned.batch)
            if batch and items + query.ask.items > room:
                break
            heappop(queue)
            if not _in_time(query, instance, now):
                if instance is not fastest and _in_time(query, fastest, now):
                    aside.append(entry)
                    continue
                late.append(query)
            else:
                batch.append(query)
                items += query.ask.items
            del self.in_flight.waiting[query.uid]
            self._queued.discard(query.uid)
        for entry in aside:
            heappush(queue, entry)
        return batch

    def _give_way(self, variant: str, instances: list[Instance], now: float) -> list[Query]:
        """Remove queries of lower priority that would make others late. None while all can be in time.

        The queue is taken to go through the instances at the throughput of full batches, in the order of deadlines. Where a query would be late, the
        last one of the lowest priority before it leaves, which is best where all are of one size (Moore, 1968).
        """
        queue = self._queues[variant]
        waiting = [entry for entry in queue if self._waits(entry[2])]
        batches = [_full_batch(one, queue[0][2]) for one in instances]
        if not batches or not waiting:
            return []
        rate = sum(items / seconds for items, seconds in batches)
        begin = now + max(seconds for _, seconds in batches)  # what is under way ends first
        if begin + sum(entry[2].ask.items for entry in waiting) / rate <= waiting[0][0]:
            return []
        gone: list[Query] = []
        kept: list[tuple[int, float, int, Query]] = []
        ahead = begin
        for deadline, order, query in sorted(waiting):
            ahead += query.ask.items / rate
            heappush(kept, (-query.ask.priority, -deadline, -order, query))
            while ahead > deadline and -kept[0][0] > query.ask.priority:
                leaves = heappop(kept)[3]
                ahead -= leaves.ask.items / rate
                gone.append(leaves)
        for query in gone:
            del self.in_flight.waiting[query.uid]
        self._levels[variant] = {query.ask.priority for _, _, _, query in kept}
        return gone

    def _owes(self, instance: Instance) -> bool:
        """Whether it has some of its last batch still. What clients ask of it besides does not count: there may always be such queries."""
        given = self._given.get(instance.id)
        if given is None:
            return False
        for uid in given.uids:
            query = self.in_flight.dispatched.get(uid)
            if query is not None and query.instance is not None and query.instance.id == instance.id:
                return True
        del self._given[instance.id]
        return False

    def _waits(self, query: Query) -> bool:
        return self.in_flight.waiting.get(query.uid) is query


def _seconds(instance: Instance) -> float:
    """Of one item."""
    return instance.table.seconds(1) * instance.factor


def _full_batch(instance: Instance, query: Query) -> tuple[int, float]:
    """Items and seconds of a full batch of the plan."""
    assert query.planned is not None, "a plan provides for it"
    items = min(instance.most, query.planned.batch)
    return items, instance.table.seconds(items) * instance.factor


def _in_time(query: Query, instance: Instance, now: float) -> bool:
    """Whether an instance answers it before its deadline, if nothing else is there."""
    return now + _takes(query, instance) <= query.ask.deadline


def _takes(query: Query, instance: Instance) -> float:
    """Seconds of a query alone."""
    return instance.table.at(query.ask.length).seconds(query.ask.items) * instance.factor
