"""The cores of one device, for which its instances' batches wait: as its executor gives them out, and as a dispatcher predicts that."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from bus.messages.fleet import DeviceStatus

if TYPE_CHECKING:
    from services.core.selection.instances import Instance

MANY = 64  # instances that a decision looks at, each of them; of more, at some
SHUT = 1e9  # s; not infinity, since those that will join are counted in whole items
PATIENCE_S = 1.0  # waited by all models alike, in the order of deadlines
STRETCH = 100.0  # times as long as its queue takes, a quiet model waits


def urgent_at(deadline: float, arrived: float, seconds: float) -> float:
    """The time by which a device's executor orders the batches of several models, Unix seconds: the first deadline of each. But a quiet one is not
    to wait for all that another one's flood has put before it: it takes a hundredth of that time. seconds: of all that waits in its queue.
    """
    return min(deadline, arrived + PATIENCE_S + STRETCH * seconds)


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


@dataclass(slots=True, eq=False)
class SharedCores:
    """The cores of one device, for which its instances' batches wait, as at the executor."""

    cores: float = 1
    instances: "list[Instance]" = field(default_factory=list)
    quiet: int = 0  # echoes of the dispatcher since the executor has said something, while it has queries

    def add(self, instance: "Instance", device: DeviceStatus) -> None:
        """An instance was loaded on this device. One on which batches overlap makes none wait."""
        self.cores = max(1, device.cores) if device.exclusive else inf
        self.instances.append(instance)
        self.count()

    def remove(self, instance: "Instance") -> None:
        self.instances.remove(instance)
        instance.cores_scarce(False)
        self.count()

    def count(self) -> None:
        """Whether all instances can run at a time, with all their contexts. Those of one instance share a GPU."""
        wanted = (self.needed(i) * (i.contexts if i.record.hardware == "cpu" else 1) for i in self.instances)
        scarce = sum(wanted) > self.cores and len(self.instances) <= MANY
        for instance in self.instances:
            instance.cores_scarce(scarce)

    def needed(self, instance: "Instance") -> float:
        """Cores that a batch of this instance takes."""
        return max(1, min(instance.record.threads, self.cores))

    def begin(self, at: float) -> None:
        """Cores are free: the instances with the most urgent queries begin a batch."""
        free = self.cores
        ready = []
        for instance in self.instances:
            if instance.running:
                free -= self.needed(instance)
            elif instance.own + instance.others:
                ready.append(instance)
        ready.sort(key=lambda i: i.latest - i.waiting_s)
        for instance in ready:
            if self.needed(instance) <= free:
                free -= self.needed(instance)
                instance.begin(at, instance.own + instance.others)

    def ahead_of(self, waiting: "Instance", urgent: float, now: float, seconds: float) -> tuple[float, float]:
        """Seconds until the cores are this instance's for a query that is urgent at this time (`urgent_at`), and which share of that are queries of
        its own model. seconds: until its own queue would let it begin.

        The executor begins the most urgent batch. So of what waits at other instances, the part with earlier deadlines goes
        first. Deadlines there count as evenly spread over as much time as their work takes, up to the last one sent.
        """
        busy = needed = self.needed(waiting)
        own, waits, held = seconds * needed, 0.0, [(seconds, needed)]
        for other in self.instances:
            if other is waiting or not (other.own or other.others) or other.waiting_s == SHUT:
                continue
            takes = self.needed(other)
            busy += takes
            before = other.waiting_s + other.table.seconds(other.rest) * other.factor
            before = max(0.0, min(before, urgent - other.latest + before))
            under_way = max(0.0, other.free_at - now)
            held.append((under_way, takes))
            waits += before * takes
            own += (before + under_way) * takes if other.record.model == waiting.record.model else 0.0
        work = waits + sum(until * cores for until, cores in held)
        free = seconds if busy <= self.cores else max(seconds, cores_free(self.cores, needed, waits, held))
        return free, own / work if work else 0.0
