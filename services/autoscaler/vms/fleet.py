"""The workers of a cluster, by their heartbeats and by the records in the control bucket. Followers keep this view, too. Pure."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from bus.messages.scaling import MachineRecord
from services.autoscaler.vms.rules import Hardware, PricedKind, WorkerSummary
from services.core.cost import machine_price
from services.core.lifecycle import COUNTED, SERVING, needed
from services.core.placement import Device, device_of
from services.core.selection.cluster import busy_share

Threads = Callable[[str], int]
SILENT_S = 5.0  # s without a heartbeat after which a worker does not count as alive
REGISTRATION_S = 600.0  # s that building or profiling a model takes at most, unless the worker reports on it
READINGS = 3  # heartbeats in a row that must show a device busy, since a single one says little
ENDED_S = (
    600.0  # s for which a stopped worker is recognised, in case its heartbeats come after its name was given to another
)
MOST_VARIANTS = 8  # that a new machine is filled with
FORGET_S = 60.0  # s of silence after which a worker without a record is forgotten


class FleetWorker:
    """One worker. seen: when its last heartbeat came; 0: none has come. busy: when it served or loaded something last.

    since: when its monitor was heard first. ended: the incarnation of an earlier worker of this name, whose heartbeats may come late.
    threads: of a variant; given if the machine is shared. Then only what the worker's own instances compute counts as use of its
    CPU: what other workers and the system use there is no reason for one more worker.
    """

    def __init__(self, name: str, now: float, threads: Threads | None = None) -> None:
        self.name = name
        self._threads = threads
        self.heartbeat: WorkerHeartbeat | None = None
        self.record: MachineRecord | None = None
        self.seen = 0.0
        self.busy = now
        self.since = now
        self.registers_until = 0.0  # until when it builds or profiles a model
        self.draining_since = 0.0
        self.ended: int | None = None
        self._used: deque[dict[Hardware, float]] = deque(maxlen=READINGS)
        self._of: dict[str, list[InstanceStatus]] = {}  # by variant

    def heard(self, heartbeat: WorkerHeartbeat, now: float) -> None:
        if self.heartbeat is None or self.heartbeat.incarnation != heartbeat.incarnation:
            self.busy = self.since = now
            self._used.clear()
        if heartbeat.draining and not self.draining:
            self.draining_since = now
        self.heartbeat, self.seen, self._of = heartbeat, now, {}
        for status in heartbeat.instances:
            self._of.setdefault(status.variant, []).append(status)
        used: dict[Hardware, float] = {}
        for device in self.devices:
            one = (device.kind, device.simulated)
            used[one] = min(used.get(one, 1.0), self._use(device))
        self._used.append(used)
        if (
            now < self.registers_until
            or self.serves
            or any(one.load > 0 or one.mean_batch > 0 for one in self.instances)
        ):
            self.busy = now  # mean_batch shows offline work, too

    def _use(self, device: DeviceStatus) -> float:
        whole = device.utilisation - device.offline  # offline work gives way to queries
        if self._threads is None or device.kind != "cpu":
            return whole
        own = sum(
            min(1.0, busy_share(one)) * self._threads(one.variant)
            for one in self.instances
            if one.device == device.device
        )
        return min(whole, own / max(1, device.cores))

    def utilisation(self, now: float, settle_s: float) -> dict[Hardware, float]:
        """By kind, the use of its least used device, at the lowest of the last readings. A worker that has just come counts as unused."""
        if not self._used:
            return {}
        fresh = now - self.since < settle_s or len(self._used) < READINGS
        return {one: 0.0 if fresh else min(each.get(one, 0.0) for each in self._used) for one in self._used[-1]}

    def record_in(self, state: str, epoch: int, now: float, reason: str, order: str = "") -> MachineRecord:
        """This worker's record in another state. order: used if the present record has none."""
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

    # -- by its last heartbeat

    @property
    def devices(self) -> list[DeviceStatus]:
        return [device for device in self.heartbeat.devices if device.alive] if self.heartbeat is not None else []

    @property
    def instances(self) -> list[InstanceStatus]:
        return self.heartbeat.instances if self.heartbeat is not None else []

    def of(self, variant: str) -> list[InstanceStatus]:
        """This variant's instances that are loaded or loading, without reclaimable ones."""
        return [one for one in self._of.get(variant, ()) if needed(one)]

    def held(self, variant: str) -> list[InstanceStatus]:
        """The same with reclaimable ones, which serve on and are needed again without a load."""
        return [one for one in self._of.get(variant, ()) if one.state in COUNTED]

    def warm(self, variant: str) -> bool:
        """Whether one more instance of this variant would only be brought from host memory to a device."""
        return any(one.state == "Warm" for one in self._of.get(variant, ()))

    def hardware_of(self, status: InstanceStatus) -> Hardware | None:
        assert self.heartbeat is not None
        found = next((device for device in self.heartbeat.devices if device.device == status.device), None)
        return (found.kind, found.simulated) if found is not None else None

    def alive(self, now: float) -> bool:
        """Whether it was heard lately and has a device that works."""
        return now - self.seen <= SILENT_S and bool(self.devices) and not self.leaving

    @property
    def leaving(self) -> bool:
        return self.heartbeat is not None and self.heartbeat.leaving

    @property
    def draining(self) -> bool:
        return self.heartbeat is not None and self.heartbeat.draining

    @property
    def kind(self) -> str:
        if self.heartbeat is not None:
            return self.heartbeat.kind or self.heartbeat.hardware
        return self.record.kind if self.record is not None else ""

    @property
    def serves(self) -> bool:
        """Whether anything is queued, running or being loaded."""
        return any(one.queued > 0 or one.state == "Loading" for one in self.instances)


class Fleet(Struct, eq=False):
    """kinds: of machines that may be started. Workers of other kinds are counted and left alone. threads: see FleetWorker."""

    kinds: Mapping[str, PricedKind]
    threads: Threads | None = None
    workers: dict[str, FleetWorker] = {}
    _ended: dict[str, tuple[int, float]] = {}  # of workers stopped lately: incarnation, and when it was heard last

    def heartbeat(self, heartbeat: WorkerHeartbeat, now: float) -> None:
        name = heartbeat.worker
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = FleetWorker(name, now, self.threads)
        if heartbeat.incarnation != worker.ended:
            worker.heard(heartbeat, now)

    def registers(self, name: str, now: float, *, finished: bool) -> None:
        """A worker begins to build or profile a model, goes on with it, or has finished."""
        worker = self.workers.get(name)
        if worker is not None:
            worker.registers_until = 0.0 if finished else now + REGISTRATION_S
            worker.busy = now

    def record_changed(self, name: str, record: MachineRecord | None, now: float) -> None:
        """The record of a machine has this value now; None: it was deleted."""
        worker = self.workers.get(name)
        if worker is None:
            if record is None:
                return
            worker = self.workers[name] = FleetWorker(name, now, self.threads)
            worker.ended = self._ended.get(name, (None, 0.0))[0]
        if (
            worker.heartbeat is not None
            and _begins(worker, record)
            and (worker.leaving or now - worker.seen > SILENT_S)
        ):
            ended = worker.heartbeat.incarnation  # the name is used again, for a new worker
            worker = self.workers[name] = FleetWorker(name, now, self.threads)
            worker.ended = ended
        worker.record = record
        if record is None and worker.heartbeat is None:
            del self.workers[name]

    def forget(self, name: str) -> None:
        """This worker has been stopped."""
        worker = self.workers.pop(name, None)
        if worker is not None and worker.heartbeat is not None:
            self._ended[name] = worker.heartbeat.incarnation, worker.seen

    def forget_gone(self, now: float) -> None:
        """Forget workers without a record that are long silent; those that left or were stopped after a shorter silence."""
        for worker in list(self.workers.values()):
            silent = now - worker.seen
            over = worker.leaving or self._stopped(worker)
            if worker.record is None and (silent > FORGET_S or (over and silent > SILENT_S)):
                del self.workers[worker.name]
        self._ended = {name: one for name, one in self._ended.items() if now - one[1] < ENDED_S}

    def _stopped(self, worker: FleetWorker) -> bool:
        """Whether it was stopped, and its heartbeats came late."""
        return (
            worker.heartbeat is not None
            and self._ended.get(worker.name, (None, 0.0))[0] == worker.heartbeat.incarnation
        )

    # -- for the rules

    def summaries(self, now: float, settle_s: float) -> list[WorkerSummary]:
        return [self._summary(worker, now, settle_s) for worker in self.workers.values()]

    def state(self, worker: FleetWorker, now: float, settle_s: float = 0.0) -> str:
        record = worker.record
        if record is not None and record.state == "Booting":
            return "Booting"
        if record is not None and record.state == "Stopping":
            return "Silent"  # given up; it may run and cost money until it is stopped
        if worker.draining and record is not None and record.state == "Ready" and now - record.at < SILENT_S:
            return "Booting"  # its drain has just been taken back, which it has not heard yet
        if worker.draining or (record is not None and record.state == "Draining"):
            return "Draining"
        if not worker.alive(now):
            return "Silent"
        if record is not None and record.state == "Ready" and now - record.at < settle_s:
            return "Booting"
        return "Ready"

    def _summary(self, worker: FleetWorker, now: float, settle_s: float) -> WorkerSummary:
        state = self.state(worker, now, settle_s)
        kind = self.kinds.get(worker.kind)
        if worker.heartbeat is None:
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
            price_per_hour=machine_price(worker.heartbeat.devices),
            hardware=frozenset((device.kind, device.simulated) for device in worker.heartbeat.devices),
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

    def available(self, kind: str, now: float, *, booting: bool = True) -> int:
        """How many machines of a kind serve, or, with those that boot, will serve soon."""
        states = ("Ready", "Booting") if booting else ("Ready",)
        return sum(one.kind == kind and self.state(one, now) in states for one in self.workers.values())

    def ready(self, now: float) -> list[FleetWorker]:
        """Workers that take new work."""
        return [w for w in self.workers.values() if w.alive(now) and self.state(w, now) == "Ready"]

    def serving(self, variants: Iterable[str], workers: Iterable[FleetWorker]) -> int:
        """How many instances of these variants serve on these workers, without reclaimable ones."""
        found = (one for worker in workers for variant in set(variants) for one in worker.of(variant))
        return sum(one.state in SERVING for one in found)

    def troubled(self, hardware: Hardware, now: float) -> list[tuple[str, str]]:
        """Variants that a new machine with this hardware takes load from, and an app of each: troubled ones, else the busiest."""
        rows: dict[str, tuple[bool, float, str]] = {}
        for worker in self.ready(now):
            for one in worker.instances:
                if worker.hardware_of(one) != hardware:
                    continue
                troubled = in_state(one, "Overloaded") or in_state(one, "Interfered")
                before, load, app = rows.get(one.variant, (False, 0.0, ""))
                rows[one.variant] = (troubled or before, load + one.load, next(iter(one.app_states), app))
        found = sorted(rows.items(), key=lambda row: (not row[1][0], -row[1][1], row[0]))
        only = [row for row in found if row[1][0]] or [row for row in found[:1] if row[1][1] > 0]
        return [(variant, app) for variant, (_, _, app) in only[:MOST_VARIANTS]]


def _begins(worker: FleetWorker, record: MachineRecord | None) -> bool:
    """Whether this record is about a new machine, not about the known one."""
    if record is None or record.state != "Booting":
        return False
    return worker.record is None or (worker.record.order, worker.record.at) != (record.order, record.at)


def in_state(status: InstanceStatus, state: str) -> bool:
    """Whether the instance is in this state, as a whole or for one of its apps."""
    return status.state == state or state in status.app_states.values()


def shape_of(worker: FleetWorker) -> tuple[object, ...]:
    """What workers that are alike have in common."""
    return tuple(sorted((d.kind, d.simulated, d.cores, round(d.memory_mb), d.arithmetic) for d in worker.devices))


def devices_of(worker: FleetWorker) -> tuple[Device, ...]:
    return tuple(map(device_of, worker.devices))
