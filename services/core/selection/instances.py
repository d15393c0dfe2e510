"""Instances and workers as a dispatcher sees them, and a sampler for variants with many instances."""

from collections import Counter
from collections.abc import Iterable

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus, InstanceStatus
from services.core.cost import LatencyTable

# A queue is filled to 1/1.3 of what deadlines allow. The rate at which it drains is known to some tens of percent only (neighbours,
# the loop, the bus). Without this margin, an overloaded system admits every query to end exactly at its deadline. Whatever then goes
# slower than predicted makes most of them late, and their work is wasted. A shorter queue costs no throughput.
CAUTION = 1.3
STALE = (
    1.0  # s; the largest age of a queue's length in a heartbeat, which travels from the executor through its monitor
)


class Instance:
    """One loaded (or loading) variant on one device.

    own, others: items that this dispatcher, and other dispatchers, sent there and that are not done.
    """

    __slots__ = (
        "batch",
        "busy",
        "device",
        "factor",
        "id",
        "noted_at",
        "others",
        "own",
        "peak_before",
        "peak_now",
        "per_item",
        "per_queued",
        "price_per_s",
        "ready_at",
        "record",
        "state",
        "status",
        "table",
        "worker",
    )  # fmt: skip

    def __init__(self, status: InstanceStatus, record: VariantRecord, worker: "Worker", device: DeviceStatus) -> None:
        self.id = status.instance
        self.record = record
        self.worker = worker
        self.device = device.device
        self.table = LatencyTable(record)
        self.per_item = self.table.seconds(self.table.max_batch) / self.table.max_batch
        self.per_queued = CAUTION * self.per_item
        self.price_per_s = 0.0
        self.own = 0
        self.others = 0
        self.peak_now = self.peak_before = 0  # most own items at a time: since `noted_at`, and in the period before
        self.noted_at = 0.0
        self.batch = 1
        self.busy = 0.0  # share of the time that it computes, by the last heartbeat
        self.factor = 1.0
        self.ready_at = 0.0
        self.state = "Inactive"
        self.status = status

    def predict(self, items: int, length: int | None = None) -> float:
        """Predicted seconds until these items are answered: the queue ahead (with CAUTION), then their own batch."""
        table = self.table if length is None else self.table.at(length)
        return ((self.own + self.others) * self.per_queued + table.seconds(items)) * self.factor

    def take(self, items: int) -> None:
        """Count items that this dispatcher sends there."""
        self.own += items
        self.peak_now = max(self.peak_now, self.own)

    def observe_queue(self, queued: int, now: float) -> None:
        """Take over a heartbeat's number of items that wait or are computed there, own ones included.

        The number is up to STALE seconds old. Own items of that time are not counted as others', even if they are done now. Otherwise a
        queue that has just emptied would look full until the next heartbeat, and nothing would be sent there.
        """
        self.others = max(0, queued - max(self.peak_now, self.peak_before))
        if now - self.noted_at >= STALE:
            self.peak_before, self.peak_now, self.noted_at = self.peak_now, self.own, now

    def batch_done(self, queued: int) -> None:
        """The executor has computed a batch. So many items, own ones included, are still there."""
        self.others = max(0, queued - self.own)

    @property
    def ahead(self) -> float:
        """Seconds of work that wait here."""
        return (self.own + self.others) * self.per_item * self.factor

    def state_for(self, app: str) -> str:
        return self.status.app_states.get(app, self.status.state)


class Worker:
    """One worker, as its last heartbeat describes it.

    fullness: the share of its cores that its instances keep busy, by kind of device and whether that is simulated. Where several workers
    share a machine, each has its own share. was_alive: a device of it has been alive.
    """

    __slots__ = (
        "devices", "draining", "fullness", "hardware", "incarnation", "instances", "kind", "name", "quarantined", "seen",
        "skew", "was_alive",
    )  # fmt: skip

    def __init__(self, name: str, hardware: str) -> None:
        self.name = name
        self.hardware = hardware
        self.incarnation = 0
        self.seen = 0.0
        self.skew = 0.0
        self.draining = False
        self.quarantined: dict[str, str] = {}  # variants that it will not load, and why
        self.kind = ""
        self.was_alive = False
        self.fullness: dict[tuple[str, bool], float] = {}
        self.devices: dict[str, DeviceStatus] = {}
        self.instances: dict[str, Instance] = {}

    def measure_fullness(self) -> None:
        """Compute `fullness` from the latest figures of its instances."""
        found: dict[tuple[str, bool], float] = {}
        for instance in self.instances.values():
            device = self.devices.get(instance.device)
            if device is not None and instance.busy > 0:
                kind = (device.kind, device.simulated)
                threads = max(1, instance.record.threads) if device.kind == "cpu" else 1
                found[kind] = found.get(kind, 0.0) + instance.busy * threads / max(1, device.cores)
        self.fullness = found

    def utilisation(self, kind: str, *, simulated: bool = False) -> float | None:
        """Utilisation of the least used living device of this kind, real or simulated. None when there is none."""
        used = [d.utilisation for d in self.devices.values() if d.kind == kind and d.simulated == simulated and d.alive]
        return min(used) if used else None


# -- Many instances of one variant
#
# Up to MANY instances, each query looks at all of them. Of more, it looks at a few, beginning where the last query stopped. That finds an
# idle instance, or one nearly as good as the best: two choices are exponentially better than one (Mitzenmacher 2001, "The power of two
# choices"). Only if none of these is in time does the query look at all. If none of all is in time, no query looks at all for a moment.

MANY = 64
SAMPLED = 16  # instances looked at while one of them is in time
MOMENT = 0.005  # s for which all count as full after none was found in time
PACKED = 0.25  # s for which the order of workers by fullness is kept; heartbeats change it every 0.5 s
PACK_BELOW = 0.8  # fullness of a worker up to which `pack` fills it
SLOW = 1.2  # live correction factor above which an idle instance is compared with others first


class InstanceSampler:
    """Looks at some of a variant's instances, and remembers what the last queries found. instances: the caller's list, which changes."""

    __slots__ = ("_full", "_instances", "_items", "_length", "_packed", "_packed_at", "_slack", "_turn")

    def __init__(self, instances: "list[Instance]") -> None:
        self._instances = instances
        self._turn = 0
        self._packed: list[Instance] = []
        self._packed_at = float("-inf")
        self._full = float("-inf")  # until then, none is in time for `_items` items within `_slack`
        self._slack = 0.0
        self._items = 0
        self._length: int | None = None

    def soonest(self, items: int, length: int | None, slack: float, now: float) -> "Instance | None":
        """An instance that answers soon, within `slack` seconds. None when none is in time. now: Unix seconds."""
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
            if best is not None and looked >= SAMPLED:
                break
        self._turn = at
        if best is None:
            self._full, self._slack, self._items, self._length = now + MOMENT, slack, items, length
        return best

    def some(self) -> "list[Instance]":
        """MANY of them, different ones each time."""
        at = self._turn % len(self._instances)
        self._turn = at + MANY
        return self._instances[at : at + MANY]

    def fullest(self, now: float) -> "list[Instance]":
        """MANY instances on the fullest workers below PACK_BELOW, fullest first, then by name. Up to PACKED seconds old."""
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
    """The most frequent batch size; among equally frequent ones, the smallest."""
    return min(Counter(batches).items(), key=lambda item: (-item[1], item[0]))[0]
