"""Instances, workers and the cores that instances share, as a dispatcher sees them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus, InstanceStatus
from services.core.cost import LatencyTable
from services.core.lifecycle import SERVING

# A query that must wait is predicted to take so much longer than the profile says. The rate at which a queue drains is known only roughly
# (neighbours, the loop, the bus). Without a margin, an overloaded system admits every query to end exactly at its deadline, and whatever goes
# slower than predicted makes most of them late. An idle instance needs no margin.
CAUTION = 1.2
ROOM = 1.15  # times as much where a model's own queries fill scarce cores: a flood leaves room for the queries of quiet models
OVERHEAD = 0.0005  # s of a query for bus and dispatch, in addition to the model's own time
WAY = 0.0025  # s to the model and back, beyond OVERHEAD, as a busy machine may need them
DEFAULT_PRIORITY = 5
LOWEST = 9  # 1 is the highest priority
STALE = 1.0  # s; the largest age of a queue's length in a heartbeat, which comes by way of the monitor
MANY = 64  # instances that a decision looks at, each of them; of more, at some
SHUT = 1e9  # s; not infinity, since those that will join are counted in whole items
# Rounds, in each of which every model that waits has one batch; after so many a model goes before all deadlines.
TURNS = 8.0


# -- When a batch gets cores of its device: as its executor gives them out, and as a dispatcher predicts that.


def cores_free(total: float, needed: float, work: float, held: Iterable[tuple[float, float]]) -> float:
    """Seconds until so many of all cores are free, and free ones have done so much work first (seconds of cores). held: seconds until when batches
    under way keep how many cores. One keeps no others.
    """
    held = sorted(held)
    free, at = total - sum(cores for _, cores in held), 0.0
    for until, cores in held:
        if free >= needed and work <= free * (until - at):
            break
        work = max(0.0, work - free * (until - at))
        at, free = until, free + cores
    return at + work / free


# -- The instances themselves.


class Instance:
    """One loaded (or loading) variant on one device.

    own, others: items that this dispatcher, and other dispatchers, sent there and that are not done. running: how many of them are in the
    batch under way, which is predicted to end at free_at (0: none is known to run). waiting_s: seconds that the full batches after it take.
    rest: items after those, which a new query joins. most: items of a batch, by its policy; mixed: of one with several priorities, 0: the same.
    contexts: batches at a time; of several, `running` counts the items of all. latest: the last deadline that was sent there. highest: the
    highest priority of a query there. no_time: priority and seconds of a query that it had no time for, though others give way to it; its
    executor is told with the next one. Times: Unix seconds.
    """

    __slots__ = (
        "batch", "busy", "by_size", "contexts", "cores", "device", "factor", "free_at", "highest", "id", "idle", "latest", "levels", "mixed", "most", "no_time", "noted_at", "on_freed", "others", "own", "peak_before",
        "peak_now", "per_item", "price_per_s", "ready_at", "record", "rest", "running", "scarce", "served", "state", "status", "table",
        "takes", "theirs", "waiting_s", "worker",
    )  # fmt: skip

    def __init__(self, status: InstanceStatus, record: VariantRecord, worker: "Worker", device: DeviceStatus) -> None:
        self.id = status.instance
        self.record = record
        self.worker = worker
        self.device = device.device
        self.cores = SharedCores()
        self.table = LatencyTable(record)
        self.by_size, self.most = self.table.by_size, self.table.max_batch
        self.mixed = 0
        self.highest = LOWEST
        self.no_time: tuple[int, float] | None = None
        self.contexts = status.contexts
        self.served = status.load  # items/s
        self.per_item = self.table.seconds(self.table.max_batch) / self.table.max_batch
        self.price_per_s = 0.0
        self.own = self.others = 0
        self.levels = [0] * (LOWEST + 1)  # own items by priority
        self.theirs: Mapping[int, int] = {}  # others' items that waited by priority, when any did last
        self.on_freed: list[Callable[[Instance], None]] = []  # by the samplers of the lists that it is in
        self.idle = True  # nothing is there, and its cores are its own
        self.scarce = False
        self.takes: float = 1  # cores that a batch takes
        self.running = self.rest = 0
        self.free_at = self.waiting_s = 0.0
        self.latest = 0.0
        self.peak_now = self.peak_before = 0  # most own items at a time: since `noted_at`, and in the period before
        self.noted_at = 0.0
        self.batch = 1
        self.busy = 0.0  # share of the time that it computes, by the last heartbeat
        self.factor = 1.0
        self.ready_at = 0.0
        self.state = "Inactive"
        self.status = status

    def limit_batches(self, most: int, contexts: int) -> None:
        """Take over from a heartbeat the most items of a batch, 0: as many as the variant takes, and how many run at a time."""
        if contexts != self.contexts:
            self.contexts = contexts
            self.cores.count()
        limit = min(most, self.table.max_batch) if most else self.table.max_batch
        if limit != self.most:
            self.most = limit
            self.per_item = self.by_size[limit] / limit
            self._count()

    def predict(self, items: int, length: int | None, deadline: float, now: float, giving_way: int = 0) -> float:
        """Predicted seconds until this query is answered: the batch under way, full batches of what waits, then its own batch.

        Its batch holds the rest of what waits, and those that will join it, at the rate at which items were served of late. Without them,
        an overloaded instance admits each query to a batch that has no room to grow. A query that waits is charged CAUTION.
        giving_way: items that wait there but give way to this query.
        """
        wait = self.waiting_s
        together = self.rest + items
        if giving_way or self.scarce or length is not None or together > self.most:
            return self._predict_otherwise(items, length, deadline, now, giving_way)
        if self.free_at > now:
            wait += self.free_at - now
        if not wait:
            return self.by_size[together] * self.factor
        together += int(wait * self.served)
        return CAUTION * (wait + self.by_size[min(self.most, together)] * self.factor)

    def _predict_otherwise(self, items: int, length: int | None, deadline: float, now: float, giving_way: int) -> float:
        """As `predict`, for what is not the usual case."""
        wait, rest, table = self.waiting_s, self.rest, self.table
        served = self.served
        if giving_way:
            # Of those that run, as many give way as of all; so much is not known of what waits that none is charged for those that will join.
            there, served = self.own + self.others, 0.0
            full, rest = divmod(ceil((there - self.running) * max(0, there - giving_way) / there), self.most)
            wait = full * self.by_size[self.most] * self.factor / self.contexts if full else 0.0
        if self.free_at > now:
            wait += self.free_at - now
        if length is not None or rest + items > self.most:  # what waits is in another batch
            wait += self.by_size[rest] * self.factor
            table, together = table.at(length), items
        else:
            together = rest + items
        caution = CAUTION
        if self.scarce:
            wait, share = self.cores.ahead_of(self, deadline, now, wait)
            caution *= 1.0 + (ROOM - 1.0) * share
        if not wait:
            return table.seconds(together) * self.factor
        if together < self.most:
            together = min(self.most, together + int(wait * served))
        return caution * (wait + table.seconds(together) * self.factor)

    def alone_s(self, items: int, length: int | None) -> float:
        """Seconds that such a query takes there if nothing else is there."""
        return self.table.at(length).seconds(items) * self.factor

    def in_time_after(self, excess: float) -> float:
        """Seconds for which a prediction that is `excess` seconds too long stays too long, if nothing ends there.

        As time passes, the batch under way gets shorter, and fewer will join the query's own batch.
        """
        table = self.table
        step = (table.seconds(table.max_batch) - table.seconds(1)) / max(1, table.max_batch - 1) * self.factor
        return max(0.0, excess / CAUTION - 2.0 * step) / (1.0 + 2.0 * step * self.served)

    def outranked(self, priority: int) -> int:
        """Items there that give way to a query of this priority. Others' count in the proportions that the executor has told, else in those of own ones."""
        own = sum(self.levels[priority + 1 :])
        if not self.others:
            return own
        known = self.theirs or dict(enumerate(self.levels))
        return own + self.others * sum(known[p] for p in known if p > priority) // max(1, sum(known.values()))

    def observe_levels(self, levels: Mapping[int, int]) -> None:
        """Take over the items that wait there by priority, own ones included."""
        own = self.levels
        self.theirs = {p: items - own[p] for p, items in levels.items() if items > own[p]} or self.theirs

    def take(self, items: int, now: float, deadline: float, priority: int = DEFAULT_PRIORITY) -> None:
        """Count items that this dispatcher sends there."""
        idle = self.own + self.others < self.contexts  # one that waits for no batch
        self.own += items
        self.levels[priority] += items
        if priority < self.highest:
            self.highest = priority
        if self.own > self.peak_now:
            self.peak_now = self.own
        if deadline > self.latest:
            self.latest = deadline
        if idle and self.state != "Loading":
            self._begin_next(now)
        else:
            self._count()

    def release(self, items: int, priority: int = DEFAULT_PRIORITY) -> None:
        """Own items have come to an end, or are back."""
        self.ended(items, priority)
        self.recount()

    def ended(self, items: int, priority: int) -> None:
        """The same of one of several queries, after the last of which comes `recount`."""
        self.own -= items
        self.levels[priority] -= items

    def recount(self) -> None:
        """Own items have come to an end."""
        self._count()
        self._freed()

    def shut(self) -> None:
        """Nothing is in time here, until `reopen`."""
        self.waiting_s, self.idle = SHUT, False

    def reopen(self) -> None:
        self.recount()

    def _freed(self) -> None:
        """Something ended here, or is known better: predictions may be shorter than before."""
        for freed in self.on_freed:
            freed(self)
        if self.scarce:
            for other in self.cores.instances:
                for freed in other.on_freed:
                    freed(other)

    def observe_queue(self, queued: int, now: float) -> None:
        """Take over a heartbeat's number of items that wait or are computed there, own ones included.

        The number is up to STALE seconds old. Own items of that time are not counted as others', even if they are done now. Otherwise a
        queue that has just emptied would look full until the next heartbeat, and nothing would be sent there.
        """
        self.others = max(0, queued - max(self.peak_now, self.peak_before))
        if now - self.noted_at >= STALE:
            self.peak_before, self.peak_now, self.noted_at = self.peak_now, self.own, now
        self._count()
        if self.others and self.free_at <= now and self.state in SERVING:  # nobody said when their batch began
            self._begin_next(now)
        self._freed()

    def batch_done(self, queued: int, finished: float, now: float, mixed: int = 0) -> None:
        """The executor has computed a batch. So many items, own ones included, are still there. It begins the next at once."""
        self.mixed = mixed
        self.others = max(0, queued - self.own)
        self.running = 0
        self._count()
        self._begin_next(finished if queued else now)
        self._freed()

    def ended_without_batch(self, queued: int) -> None:
        """The executor has ended queries without computing them. So many items, own ones included, are still there."""
        self.others = max(0, queued - self.own)
        self._count()
        self._freed()

    def _begin_next(self, at: float) -> None:
        if self.scarce:
            self.cores.begin(at)
            self._count()
        else:
            self.begin(at, self.own + self.others)

    def begin(self, at: float, items: int) -> None:
        """A batch of these items, or of as many as it can hold, begins."""
        contexts, most = self.contexts, self.most
        if self.mixed and self.levels[self.highest] < self.own + self.others:
            most = min(most, self.mixed)
        if contexts == 1:
            self.running = min(items, most)
            self.free_at = at + self.table.seconds(self.running) * self.factor
        else:  # a query finds a free context, or waits for the first one that gets free
            self.running = min(items, most * contexts)
            each = self.table.seconds(-(-self.running // contexts)) * self.factor
            self.free_at = at + each / contexts if items >= contexts else 0.0
        self._count()

    def _count(self) -> None:
        """Divide what is there into the batch under way, full batches, and the rest."""
        waiting = self.own + self.others
        if self.running > waiting:
            self.running = waiting
        if not self.running:
            self.free_at = 0.0
        waits = waiting - self.running
        if waits < self.most:
            self.rest, self.waiting_s = waits, 0.0
        else:
            full, self.rest = divmod(waits, self.most)
            self.waiting_s = full * self.by_size[self.most] * self.factor / self.contexts
        self.idle = waiting < self.contexts and not self.scarce

    def cores_scarce(self, scarce: bool) -> None:
        """Whether the instances of its device cannot all run at a time. With more than MANY of them, that is not looked at."""
        self.scarce = scarce
        self._count()

    @property
    def ahead(self) -> float:
        """Seconds of work that wait here."""
        return (self.own + self.others) * self.per_item * self.factor

    def state_for(self, app: str) -> str:
        return self.status.app_states.get(app, self.status.state)


@dataclass(slots=True, eq=False)
class SharedCores:
    """The cores of one device, for which its instances' batches wait, as at the executor."""

    cores: float = 1
    instances: list[Instance] = field(default_factory=list)
    quiet: int = 0  # echoes of the dispatcher since the executor has said something, while it has queries

    def add(self, instance: Instance, device: DeviceStatus) -> None:
        """An instance was loaded on this device. One on which batches overlap makes none wait."""
        self.cores = max(1, device.cores) if device.exclusive else inf
        self.instances.append(instance)
        self.count()

    def remove(self, instance: Instance) -> None:
        self.instances.remove(instance)
        instance.cores_scarce(False)
        self.count()

    def count(self) -> None:
        """Whether all instances can run at a time, with all their contexts. Those of one instance share a GPU."""
        for instance in self.instances:
            instance.takes = max(1, min(instance.record.threads, self.cores))
        wanted = sum(i.takes * (i.contexts if i.record.hardware == "cpu" else 1) for i in self.instances)
        scarce = wanted > self.cores and len(self.instances) <= MANY
        for instance in self.instances:
            instance.cores_scarce(scarce)

    def begin(self, at: float) -> None:
        """Cores are free: the instances with the most urgent queries begin a batch."""
        free = self.cores
        ready = []
        for instance in self.instances:
            if instance.running:
                free -= instance.takes
            elif instance.own + instance.others:
                ready.append(instance)
        ready.sort(key=lambda i: i.latest - i.waiting_s)
        for instance in ready:
            if instance.takes <= free:
                free -= instance.takes
                instance.begin(at, instance.own + instance.others)

    def ahead_of(self, waiting: Instance, deadline: float, now: float, seconds: float) -> tuple[float, float]:
        """Seconds until the cores are this instance's for a query with this deadline, and which share of that are queries of its own model.
        seconds: until its own queue would let it begin.

        The executor begins the most urgent batch. So of what waits at other instances, the part with earlier deadlines goes
        first. Deadlines there count as evenly spread over as much time as their work takes, up to the last one sent. But each of its batches
        waits for TURNS rounds at most, and for the batch that runs then.
        """
        busy = needed = waiting.takes
        own = work = seconds * needed
        waits, held = 0.0, [(seconds, needed)]
        batch = waiting.by_size[waiting.most] * waiting.factor
        turns = batch * needed
        for other in self.instances:
            there = other.own + other.others
            if not there or other is waiting or other.waiting_s == SHUT:
                continue
            takes, factor = other.takes, other.factor
            busy += takes
            turns += other.by_size[min(other.most, there)] * factor * takes
            before = other.waiting_s + other.by_size[other.rest] * factor
            if other.latest > deadline:
                before = max(0.0, before + deadline - other.latest)
            waits += before * takes
            if other.free_at > now:
                held.append((other.free_at - now, takes))
                before += other.free_at - now
            work += before * takes
            if other.record.model == waiting.record.model:
                own += before * takes
        if busy <= self.cores:
            free = seconds
        else:
            longest = (TURNS + 1.0) * turns / self.cores * (1.0 + seconds // batch)
            free = max(seconds, min(longest, cores_free(self.cores, needed, waits, held)))
        return free, own / work if work else 0.0


@dataclass(slots=True, eq=False)
class Worker:
    """One worker, as its last heartbeat describes it.

    fullness: the share of its cores that its instances keep busy, by kind of device and whether that is simulated. Where several workers
    share a machine, each has its own share. spare_use: by GPU, the part of its time that reclaimable instances use. was_alive: a device of
    it has been alive.
    """

    name: str
    hardware: str
    incarnation: int = 0
    seen: float = 0.0
    skew: float = 0.0
    draining: bool = False
    quarantined: Mapping[str, str] = field(default_factory=dict)  # variants that it will not load, and why
    kind: str = ""
    was_alive: bool = False
    fullness: dict[tuple[str, bool], float] = field(default_factory=dict)
    spare_use: dict[str, float] = field(default_factory=dict)
    devices: dict[str, DeviceStatus] = field(default_factory=dict)
    cores: dict[str, SharedCores] = field(default_factory=dict)  # by device
    instances: dict[str, Instance] = field(default_factory=dict)

    def measure_fullness(self) -> None:
        """Compute `fullness` and `spare_use` from the latest figures of its instances."""
        found: dict[tuple[str, bool], float] = {}
        self.spare_use = {}
        for instance in self.instances.values():
            device = self.devices.get(instance.device)
            if device is not None and instance.busy > 0:
                kind = (device.kind, device.simulated)
                threads = max(1, instance.record.threads) if device.kind == "cpu" else 1
                found[kind] = found.get(kind, 0.0) + instance.busy * threads / max(1, device.cores)
                if device.kind == "gpu" and instance.status.reclaimable:
                    self.spare_use[device.device] = self.spare_use.get(device.device, 0.0) + instance.busy
        self.fullness = found

    def utilisation(self, kind: str, *, simulated: bool = False) -> float | None:
        """Utilisation of the least used living device of this kind, real or simulated. None when there is none.

        What reclaimable instances use of a GPU counts as free, as their place does.
        """
        used = [
            max(0.0, d.utilisation - self.spare_use.get(d.device, 0.0))
            for d in self.devices.values()
            if d.kind == kind and d.simulated == simulated and d.alive
        ]
        return min(used) if used else None
