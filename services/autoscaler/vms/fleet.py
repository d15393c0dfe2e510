"""The workers of a cluster, folded from their heartbeats and from the leader's notes; followers keep it up to date, too. Pure."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from bus.messages.scaling import MachineRecord
from services.autoscaler.vms.policy import Hardware, PricedKind, WorkerSummary
from services.core.lifecycle import COUNTED, SERVING
from services.core.selection.cluster import busy_share

Threads = Callable[[str], int]
SILENT_S = 5.0  # s without a heartbeat after which nothing is expected of a worker
ERRAND_S = (
    600.0  # s for which a worker that builds or profiles a model is taken to be at it, unless it says that it is done
)
GLANCES = 3  # heartbeats in a row that must show a device busy: one, every 0.5 s, says little
ENDED_S = 600.0  # s for which one that was stopped is known again, should it come back when its name has been given to another
FORGET_S = 60.0  # s after which it is taken to be gone, if nobody has noted that it should be there


class FleetWorker:
    """One worker. seen: when its last heartbeat came (0: none yet); busy: when it last served or loaded something.

    threads: of a variant, where its machine is not its own: then only what its instances compute counts as use of its CPU,
    since what neighbours, other workers and the system itself use there is no reason for another worker.
    """

    def __init__(self, name: str, now: float, threads: Threads | None = None) -> None:
        self.name = name
        self._threads = threads
        self.beat: WorkerHeartbeat | None = None
        self.record: MachineRecord | None = None
        self.seen = 0.0
        self.busy = now
        self.since = now
        self.errand = 0.0  # until when it is taken to do registration work
        self.draining_since = 0.0
        self.ended: int | None = (
            None  # incarnation of an earlier worker of this name, of which late heartbeats may come
        )
        self._used: deque[dict[Hardware, float]] = deque(maxlen=GLANCES)

    def heard(self, beat: WorkerHeartbeat, now: float) -> None:
        """A heartbeat has come."""
        if self.beat is None or self.beat.incarnation != beat.incarnation:
            self.busy = self.since = now
            self._used.clear()
        if beat.draining and not self.draining:
            self.draining_since = now
        self.beat, self.seen = beat, now
        used: dict[Hardware, float] = {}
        for device in self.devices:
            one = (device.kind, device.simulated)
            used[one] = min(used.get(one, 1.0), self._use(device))
        self._used.append(used)
        if now < self.errand or self.serves or any(one.load > 0 or one.mean_batch > 0 for one in self.instances):
            self.busy = now  # mean_batch: offline work, too

    def _use(self, device: DeviceStatus) -> float:
        whole = device.utilisation - device.offline  # offline work makes way by itself
        if self._threads is None or device.kind != "cpu":
            return whole
        own = sum(
            min(1.0, busy_share(one)) * self._threads(one.variant)
            for one in self.instances
            if one.device == device.device
        )
        return min(whole, own / max(1, device.cores))

    def utilisation(self, now: float, settle_s: float) -> dict[Hardware, float]:
        """Of the least used living device of each kind, at the least lately; a worker that has only just come is not used yet."""
        if not self._used:
            return {}
        fresh = now - self.since < settle_s or len(self._used) < GLANCES
        return {one: 0.0 if fresh else min(each.get(one, 0.0) for each in self._used) for one in self._used[-1]}

    def note(self, state: str, epoch: int, now: float, reason: str, order: str = "") -> MachineRecord:
        """A record of this worker in another state. order: of a worker that was not ordered."""
        old = self.record
        return MachineRecord(
            worker=self.name,
            kind=self.kind,
            epoch=epoch,
            state=state,
            at=now,
            reason=reason,
            order=old.order if old is not None and old.order else order,
            bought=old is not None and old.bought,
        )

    # -- as its heartbeat tells

    @property
    def devices(self) -> list[DeviceStatus]:
        return [device for device in self.beat.devices if device.alive] if self.beat is not None else []

    @property
    def instances(self) -> list[InstanceStatus]:
        return list(self.beat.instances) if self.beat is not None else []

    def of(self, variant: str) -> list[InstanceStatus]:
        """This variant's instances that are there or on their way."""
        return [one for one in self.instances if one.variant == variant and one.state in COUNTED]

    def hardware_of(self, status: InstanceStatus) -> Hardware | None:
        assert self.beat is not None
        found = next((device for device in self.beat.devices if device.device == status.device), None)
        return (found.kind, found.simulated) if found is not None else None

    def alive(self, now: float) -> bool:
        """Whether it was heard lately and has a living device."""
        return now - self.seen <= SILENT_S and bool(self.devices) and not self.leaving

    @property
    def leaving(self) -> bool:
        return self.beat is not None and self.beat.leaving

    @property
    def draining(self) -> bool:
        return self.beat is not None and self.beat.draining

    @property
    def kind(self) -> str:
        if self.beat is not None:
            return self.beat.kind or self.beat.hardware
        return self.record.kind if self.record is not None else ""

    @property
    def serves(self) -> bool:
        """Whether anything is queued, running or being loaded."""
        return any(one.queued > 0 or one.state == "Loading" for one in self.instances)


class Fleet:
    """kinds: of machine that may be started here; workers of other kinds are counted and left alone. threads: see FleetWorker."""

    def __init__(self, kinds: Mapping[str, PricedKind], threads: Threads | None = None) -> None:
        self._threads = threads
        self.workers: dict[str, FleetWorker] = {}
        self._kinds = kinds
        self._ended: dict[
            str, tuple[int, float]
        ] = {}  # of those stopped lately: incarnation, and when it was last heard

    def heartbeat(self, beat: WorkerHeartbeat, now: float) -> None:
        worker = self.workers.get(beat.worker)
        if worker is None:
            worker = self.workers[beat.worker] = FleetWorker(beat.worker, now, self._threads)
        if beat.incarnation != worker.ended:
            worker.heard(beat, now)

    def errand(self, name: str, now: float, *, over: bool) -> None:
        """A worker was sent on registration work, goes on with it, or is done."""
        worker = self.workers.get(name)
        if worker is not None:
            worker.errand = 0.0 if over else now + ERRAND_S
            worker.busy = now

    def noted(self, name: str, record: MachineRecord | None, now: float) -> None:
        """The leader's note about a machine is this now, or has gone."""
        worker = self.workers.get(name)
        if worker is None:
            if record is None:
                return
            worker = self.workers[name] = FleetWorker(name, now, self._threads)
            worker.ended = self._ended.get(name, (None, 0.0))[0]
        if worker.beat is not None and _begins(worker, record) and (worker.leaving or now - worker.seen > SILENT_S):
            ended = worker.beat.incarnation  # the name is used again: nothing of who had it concerns this one
            worker = self.workers[name] = FleetWorker(name, now, self._threads)
            worker.ended = ended
        worker.record = record
        if record is None and worker.beat is None:
            del self.workers[name]

    def forget(self, name: str) -> None:
        """It has been stopped."""
        worker = self.workers.pop(name, None)
        if worker is not None and worker.beat is not None:
            self._ended[name] = worker.beat.incarnation, worker.seen

    def tidy(self, now: float) -> None:
        """Forget workers that are long gone and that no note speaks of; at once those that have said goodbye or were stopped."""
        for worker in list(self.workers.values()):
            silent = now - worker.seen
            over = worker.leaving or self._stopped(worker)
            if worker.record is None and (silent > FORGET_S or (over and silent > SILENT_S)):
                del self.workers[worker.name]
        self._ended = {name: one for name, one in self._ended.items() if now - one[1] < ENDED_S}

    def _stopped(self, worker: FleetWorker) -> bool:
        """Whether it is one that was stopped, of which late heartbeats came."""
        return worker.beat is not None and self._ended.get(worker.name, (None, 0.0))[0] == worker.beat.incarnation

    # -- as the rules see it

    def seen(self, now: float, settle_s: float) -> list[WorkerSummary]:
        return [self._seen(worker, now, settle_s) for worker in self.workers.values()]

    def state(self, worker: FleetWorker, now: float, settle_s: float = 0.0) -> str:
        record = worker.record
        if record is not None and record.state == "Booting":
            return "Booting"
        if record is not None and record.state == "Stopping":
            return "Silent"  # given up; until it is stopped it may be there, and costs
        if worker.draining and record is not None and record.state == "Ready" and now - record.at < SILENT_S:
            return "Booting"  # its drain has been taken back, which it will have heard in a moment
        if worker.draining or (record is not None and record.state == "Draining"):
            return "Draining"
        if not worker.alive(now):
            return "Silent"
        if record is not None and record.state == "Ready" and now - record.at < settle_s:
            return "Booting"
        return "Ready"

    def _seen(self, worker: FleetWorker, now: float, settle_s: float) -> WorkerSummary:
        state = self.state(worker, now, settle_s)
        kind = self._kinds.get(worker.kind)
        if worker.beat is None:
            price = kind.price_per_hour if kind is not None else 0.0
            hardware = kind.hardware if kind is not None else frozenset()
            return WorkerSummary(
                name=worker.name, kind=worker.kind, state=state, price_per_hour=price, hardware=hardware
            )
        overloaded = self._troubled(worker, "Overloaded")
        memory = sum(device.memory_mb for device in worker.devices)
        taken = sum(device.memory_used_mb for device in worker.devices)
        return WorkerSummary(
            name=worker.name,
            kind=worker.kind,
            state=state,
            price_per_hour=sum(device.price_per_hour for device in worker.beat.devices),
            hardware=frozenset((device.kind, device.simulated) for device in worker.beat.devices),
            utilisation=worker.utilisation(now, settle_s),
            interfered=frozenset(self._troubled(worker, "Interfered")),
            overloaded=overloaded,
            idle_s=now - worker.busy,
            used=taken / memory if memory > 0 else 0.0,
        )

    @staticmethod
    def _troubled(worker: FleetWorker, state: str) -> dict[Hardware, int]:
        found: Counter[Hardware] = Counter()
        for one in worker.instances:
            hardware = worker.hardware_of(one)
            if hardware is not None and in_state(one, state):
                found[hardware] += 1
        return dict(found)

    def ready(self, now: float) -> list[FleetWorker]:
        """Workers that take new work."""
        return [w for w in self.workers.values() if w.alive(now) and self.state(w, now) == "Ready"]

    def serving(self, variants: Iterable[str], workers: Iterable[FleetWorker]) -> int:
        """How many instances of these variants serve on these workers."""
        wanted = set(variants)
        return sum(one.variant in wanted and one.state in SERVING for worker in workers for one in worker.instances)


def _begins(worker: FleetWorker, record: MachineRecord | None) -> bool:
    """Whether this note is about a new machine, not about the one that is known."""
    if record is None or record.state != "Booting":
        return False
    return worker.record is None or (worker.record.order, worker.record.at) != (record.order, record.at)


def in_state(status: InstanceStatus, state: str) -> bool:
    """Whether the instance is in this state, for itself or for one of its apps."""
    return status.state == state or state in status.app_states.values()
