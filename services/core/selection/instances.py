"""Many instances of one variant: looking at a bounded number of them for each query. Pure.

Up to MANY are all looked at. Of more, a glance at some, from where the last query left off, finds one that is idle or nearly as good as
the best (two choices are already exponentially better than one: Mitzenmacher 2001, "The power of two choices"); only when none of
those is in time are all looked at, and when that was in vain, not again for a moment.
"""

from collections import Counter
from collections.abc import Iterable

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus, InstanceStatus
from services.core.cost import LatencyTable

# Queues are filled to 1/1.3 of what deadlines allow and no further. What a queue drains at is known to some tens of percent only
# (neighbours, the loop, the bus); without this, under overload every query is admitted to end exactly at its deadline, and
# whatever goes slower than predicted makes most of them late: work done for nothing. A shorter queue costs no throughput.
CAUTION = 1.3


STALE = 1.0  # s; what a heartbeat tells of a queue is up to so old: an executor reports to its monitor, which tells us


class Instance:
    """One loaded (or loading) variant on one device. own, others: items dispatched there and not yet done."""

    __slots__ = (
        "batch", "busy", "device", "factor", "id", "most_before", "most_lately", "noted", "others", "own", "per_item",
        "per_queued", "price_per_s", "ready_at", "record", "state", "status", "table", "worker",
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
        self.most_lately = self.most_before = 0  # of our own items at a time, since `noted` and in the time before
        self.noted = 0.0
        self.batch = 1
        self.busy = 0.0  # share of the time that it computes, as last told
        self.factor = 1.0
        self.ready_at = 0.0
        self.state = "Inactive"
        self.status = status

    def predict(self, items: int, length: int | None = None) -> float:
        """Seconds until these items would be answered, with caution: the queue ahead, then their own batch."""
        table = self.table if length is None else self.table.at(length)
        return ((self.own + self.others) * self.per_queued + table.seconds(items)) * self.factor

    def take(self, items: int) -> None:
        """We dispatch so many items there."""
        self.own += items
        self.most_lately = max(self.most_lately, self.own)

    def told(self, queued: int, now: float) -> None:
        """A heartbeat says how many items wait or are computed there, ours too: as it was up to STALE ago.

        Ours that were there then are not others', even if they are done by now: else a queue that has just emptied would
        look full until the next heartbeat, and nothing would be sent there to correct it.
        """
        self.others = max(0, queued - max(self.most_lately, self.most_before))
        if now - self.noted >= STALE:
            self.most_before, self.most_lately, self.noted = self.most_lately, self.own, now

    def batch_done(self, queued: int) -> None:
        """The executor has computed a batch; so many items, ours too, are still there."""
        self.others = max(0, queued - self.own)

    @property
    def ahead(self) -> float:
        """Seconds of work that wait here."""
        return (self.own + self.others) * self.per_item * self.factor

    def state_for(self, app: str) -> str:
        return self.status.app_states.get(app, self.status.state)


class Worker:
    """One worker as its monitor last described it. fullness: by kind of device (and whether simulated), the part of its cores
    that its instances keep busy: of a machine that workers share, each one's own part. was_alive: a device of it has lived.
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

    def weigh(self) -> None:
        """Its fullness by the latest figures of its instances."""
        found: dict[tuple[str, bool], float] = {}
        for instance in self.instances.values():
            device = self.devices.get(instance.device)
            if device is not None and instance.busy > 0:
                kind = (device.kind, device.simulated)
                threads = max(1, instance.record.threads) if device.kind == "cpu" else 1
                found[kind] = found.get(kind, 0.0) + instance.busy * threads / max(1, device.cores)
        self.fullness = found

    def utilisation(self, kind: str, *, simulated: bool = False) -> float | None:
        """Of the worker's least used living device of this kind, real or simulated; None when it has none."""
        used = [d.utilisation for d in self.devices.values() if d.kind == kind and d.simulated == simulated and d.alive]
        return min(used) if used else None


# -- Many instances of one variant: looking at a bounded number of them for each query. Pure.

MANY = 64
SAMPLED = 16  # instances looked at while one of them is in time
MOMENT = 0.005  # s for which all are taken to be full after all were looked at in vain
PACKED = 0.25  # s for which the order of workers by their fullness holds; heartbeats change it every 0.5 s
PACK_BELOW = 0.8  # part of a worker that instances keep busy, up to which `pack` keeps filling it
SLOW = 1.2  # live correction above which an idle instance is not taken at first sight


class InstanceSampler:
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
            if best is not None and looked >= SAMPLED:
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
