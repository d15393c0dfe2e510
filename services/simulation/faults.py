"""A scenario's faults, each at its time."""

from collections.abc import Iterable
from math import inf, prod
from typing import Any

from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, BatchingRule, ModelRecord, VariantRecord
from bus.messages.quality import VersionRelease
from services.core.batching import batching_key
from services.core.catalog import app_key, key_of
from services.shell.host.watch import HUNG, LOOK
from services.simulation.clients import Clients
from services.simulation.connections import CLIENTS, Connections
from services.simulation.edges import LoadFault
from services.simulation.hardware import SimulatedMachine
from services.simulation.kernel import Kernel
from services.simulation.scenario.faults import RESTARTED_AFTER
from services.simulation.scenario.model import FaultKind, FaultSpec, MachineSpec
from services.simulation.system import SimulatedSystem, process_of, processes_of

OF_CONNECTIONS: frozenset[FaultKind] = frozenset(
    (
        "link-clogged",
        "link-lost",
        "process-stopped",
        "process-dies",
        "watch-late",
        "events-twice",
        "ack-lost",
        "stream-down",
        "clock-off",
        "lease-late",
    )
)  # fmt: skip  (kinds that only services.simulation.connections can have)
AT_ONCE: frozenset[FaultKind] = frozenset(("worker-dies", "worker-joins", "process-dies"))  # they do not end
STANDBY = 0.05  # s until a stand-by executor has taken over
MIRRORED = 0.5  # share of the queries that are copied to a version in the mirror
NEWER = "-next"  # after a version's name, and those of its variants

Entries = dict[tuple[str, str], bytes]  # by bucket and key


class Faults:
    """begins: the kernel's time at which the scenario begins."""

    def __init__(
        self,
        kernel: Kernel,
        system: SimulatedSystem,
        faults: Iterable[FaultSpec],
        begins: float,
        clients: Clients | None = None,
    ) -> None:
        self._kernel = kernel
        self._system = system
        self._begins = begins
        self._delay = kernel.delay
        self._present: list[FaultSpec] = []
        self._rebooted: set[str] = set()
        self._written: Entries = {}  # what the registrar has written
        self._there: Entries = {}  # the same as the present changes leave it
        # by the fault's number: each process, and its generation then
        self._stopped: dict[int, list[tuple[str, int]]] = {}
        system.load_takes = self._load_takes
        if system.models is not None:
            system.models.wrong = self._errs
        system.appears = self._appears
        system.boots = self._boots
        system.booted = self._booted
        system.skew = self._skew
        if clients is not None:
            clients.resent = lambda app: self._delay_of("query-resent", app)
            clients.leaves = lambda app: self._delay_of("query-cancelled", app)
            clients.labels = lambda app: self._delay_of("labels-late", app)
        for number, fault in enumerate(faults):
            kernel.at(begins + fault.at_s - kernel.now, self._begin, (number, fault))
            if fault.until_s < inf and fault.kind not in AT_ONCE:
                kernel.at(begins + fault.until_s - kernel.now, self._end, (number, fault))

    def _begin(self, numbered: tuple[int, FaultSpec]) -> None:
        number, fault = numbered
        match fault.kind:
            case "worker-dies":
                victim = next((name for name, one in sorted(self._system.machines.items()) if _meant(fault, one)), None)
                if victim is not None:
                    self._system.stop(victim, goodbye=False)
                    if isinstance(self._kernel, Connections):
                        for process in processes_of(victim):
                            self._kernel.die(process)
            case "worker-joins":
                self._system.join(fault.worker, fault.hardware)
            case "process-dies":
                for process in self._processes(fault.process):
                    self._die(process, fault.delay_s)
            case _:
                self._present.append(fault)
                self._apply(number, fault, 1)

    def _end(self, numbered: tuple[int, FaultSpec]) -> None:
        number, fault = numbered
        self._present.remove(fault)
        self._apply(number, fault, -1)

    def _apply(self, number: int, fault: FaultSpec, change: int) -> None:
        """The fault is there from now on (change 1), or no more (-1)."""
        match fault.kind:
            case "messages-delayed":
                self._kernel.delay = self._delay + sum(one.delay_s for one in self._all("messages-delayed"))
            case "device-slow" | "profile-wrong":
                for machine in self._system.machines.values():
                    self._appears(machine)
            case "link-clogged" | "link-lost":
                block = self._net.block if change > 0 else self._net.unblock
                for process in self._processes(fault.process):
                    for into in (False, True):
                        if fault.direction in ("both", "in" if into else "out"):
                            block(process, into=into, lost=fault.kind == "link-lost")
            case "process-stopped":
                self._stop(number, fault, change)
            case "watch-late" | "events-twice" | "ack-lost" | "stream-down" | "lease-late":
                for name in self._processes(fault.process):
                    one = self._net.process(name)
                    one.late = sum(late.delay_s for late in self._of("watch-late", name))
                    one.twice = len(self._of("events-twice", name))
                    one.deaf = len(self._of("ack-lost", name))
                    one.unstored = len(self._of("stream-down", name))
                    ends = (late.until_s for late in self._of("lease-late", name))
                    one.served = max((self._begins + end for end in ends), default=0.0)
            case "clock-off":
                for name in processes_of(fault.worker):
                    self._net.process(name).skew = self._skew(fault.worker)
                    self._die(name, _begins_after(name))
            case "change":
                self._change()
            case _:
                pass  # it is asked for where it counts

    # -- processes

    @property
    def _net(self) -> Connections:
        assert isinstance(self._kernel, Connections), "Run chooses it where a scenario has such faults"
        return self._kernel

    def _processes(self, name: str) -> tuple[str, ...]:
        """The processes that a fault names."""
        if name == CLIENTS:
            return (CLIENTS,)
        known = process_of(name)
        if known == name and not name.startswith(("d-", "vm-", "monitor-", "executor-")):
            return processes_of(name)
        return (known,)

    def _of(self, kind: FaultKind, process: str) -> list[FaultSpec]:
        return [fault for fault in self._all(kind) if process in self._processes(fault.process)]

    def _stop(self, number: int, fault: FaultSpec, change: int) -> None:
        net = self._net
        if change > 0:
            names = self._processes(fault.process)
            self._stopped[number] = [(name, net.process(name).generation) for name in names]
            for name in names:
                net.stop(name)
                if len(names) == 1:  # a worker's supervisor is stopped with it
                    self._kernel.at(HUNG + LOOK, self._hangs, (number, name, net.process(name).generation))
            return
        for name, generation in self._stopped.pop(number):
            if net.process(name).generation == generation:
                net.go_on(name)

    def _hangs(self, what: tuple[int, str, int]) -> None:
        """The supervisor ends a process that is still stopped, and starts another."""
        number, name, generation = what
        if number in self._stopped and self._net.process(name).generation == generation:
            self._die(name, _begins_after(name))

    def _die(self, process: str, delay: float) -> None:
        net = self._net
        if net.process(process).members:
            self._system.died(process)
            net.die(process)
            self._kernel.at(delay, self._restart, (process, net.process(process).generation))

    def _restart(self, what: tuple[str, int]) -> None:
        process, generation = what
        if self._net.process(process).generation == generation:
            self._system.restart(process)

    def _skew(self, worker: str) -> float:
        return sum(fault.delay_s for fault in self._all("clock-off") if fault.worker == worker)

    # -- devices and machines

    def _appears(self, machine: SimulatedMachine) -> None:
        for device in machine.devices.values():
            slow = (
                fault.factor
                for fault in self._all("device-slow")
                if fault.hardware in ("", device.spec.kind) and fault.worker in ("", machine.worker)
            )
            device.slow = max(slow, default=1.0)
            device.wrong = self._wrong if self._all("profile-wrong") else None

    def _wrong(self, record: VariantRecord) -> float:
        return prod(fault.factor for fault in self._all("profile-wrong") if _concerns(fault, record))

    def _load_takes(self, record: VariantRecord, seconds: float) -> float:
        """Seconds of a load. Raises LoadFault."""
        for fault in self._present:
            if not _concerns(fault, record):
                continue
            if fault.kind == "load-fails":
                raise LoadFault(f"{record.variant} does not load: a fault of the scenario")
            if fault.kind == "load-slow":
                seconds *= fault.factor
            elif fault.kind == "load-hangs":
                seconds = max(seconds, self._begins + fault.until_s - self._kernel.now)
        return seconds

    def _boots(self, spec: MachineSpec) -> float:
        if any(fault.hardware == spec.kind for fault in self._all("boot-never")):
            return inf
        return spec.boot_s + sum(fault.delay_s for fault in self._all("boot-late") if fault.hardware == spec.kind)

    def _booted(self, worker: str, spec: MachineSpec) -> None:
        for fault in self._all("boot-twice"):
            if fault.hardware == spec.kind and worker not in self._rebooted:
                self._rebooted.add(worker)
                self._kernel.at(fault.delay_s, self._system.reboot, worker)

    def _errs(self, record: VariantRecord) -> bool:
        return any(fault.model == record.model for fault in self._all("model-errs"))

    # -- the catalogue

    def _change(self) -> None:
        """Make the catalogue what the registrar has written, and what the present changes make of that."""
        kernel, subjects = self._kernel, self._system.subjects
        buckets = (subjects.catalog_bucket, subjects.control_bucket)
        if not self._there:
            self._written = {(one, key): value for one in buckets for key, value in kernel.entries(one).items()}
            self._there = self._written
        before, self._there = self._there, dict(self._written)
        for fault in self._all("change"):
            self._apply_change(fault, self._there)
        changed = [at for at, value in self._there.items() if before.get(at) != value]
        gone = [at for at in before if at not in self._there]
        for bucket, key in [*sorted(changed, key=_is_app), *gone]:  # as the registrar: no app links what is not there
            kernel.put(bucket, key, self._there.get((bucket, key)))

    def _apply_change(self, fault: FaultSpec, entries: Entries) -> None:
        """What the registrar would write."""
        subjects = self._system.subjects
        catalog = subjects.catalog_bucket
        at = catalog, app_key(fault.app)
        if fault.what == "setting":
            rule = BatchingRule(policy="fixed", batch=max(1, round(fault.factor)))
            entries[subjects.control_bucket, batching_key("app", fault.app)] = encode(rule)
        elif fault.what == "model-deleted":
            _delete(fault.model, entries, catalog)
        elif fault.what == "version":
            _renew(fault.model, entries, catalog)
        elif fault.what in ("release", "mirror"):
            _renew(fault.model, entries, catalog, fault.factor if fault.what == "release" else 0.0)
        elif fault.what == "app-deleted":
            entries.pop(at, None)
        elif at in entries:
            app = decode(AppRecord, entries[at])
            app = replace(app, slo_target=fault.factor) if fault.what == "target" else replace(app, plan=None)
            entries[at] = encode(app)

    # -- clients

    def _delay_of(self, kind: FaultKind, app: str) -> float | None:
        return next((fault.delay_s for fault in self._all(kind) if fault.app in ("", app)), None)

    def _all(self, kind: FaultKind) -> list[FaultSpec]:
        return [fault for fault in self._present if fault.kind == kind]


def _begins_after(process: str) -> float:
    """Seconds until another process takes the place of one that has died."""
    return STANDBY if process.startswith("executor-") else RESTARTED_AFTER


def _is_app(at: tuple[str, str]) -> bool:
    return at[1].startswith("app.")


def _records(entries: Entries, bucket: str, of: type[Any]) -> list[Any]:
    kind = of.__name__.removesuffix("Record").lower()
    return [decode(of, value) for (one, key), value in entries.items() if one == bucket and key.startswith(f"{kind}.")]


def _delete(model: str, entries: Entries, bucket: str) -> None:
    """Unlink a model, and delete its versions and variants."""
    for app in _records(entries, bucket, AppRecord):
        if model in app.links:
            links = {name: version for name, version in app.links.items() if name != model}
            entries[bucket, key_of(app)] = encode(replace(app, links=links))
    for record in (*_records(entries, bucket, ModelRecord), *_records(entries, bucket, VariantRecord)):
        if record.model == model:
            del entries[bucket, key_of(record)]


def _renew(model: str, entries: Entries, bucket: str, share: float | None = None) -> None:
    """Register another version of a model beside each that there is, and link it in its place. Its variants are as fast. share: of the queries that
    a release gives it instead; 0: it answers copies.
    """
    for record in (*_records(entries, bucket, ModelRecord), *_records(entries, bucket, VariantRecord)):
        if record.model == model:
            newer = replace(record, version=f"{record.version}{NEWER}")
            if isinstance(newer, VariantRecord):
                newer = replace(newer, variant=f"{newer.variant}{NEWER}")
            entries[bucket, key_of(newer)] = encode(newer)
    for app in _records(entries, bucket, AppRecord):
        if model in app.links:
            newer = f"{app.links[model]}{NEWER}"
            changed = replace(app, links=app.links | {model: newer})
            if share is not None:
                changed = replace(app, release=_release(model, app.links[model], newer, share))
            entries[bucket, key_of(app)] = encode(changed)


def _release(model: str, old: str, new: str, share: float) -> VersionRelease:
    found = VersionRelease(
        model=model, version=new, old_version=old, steps=[share], least=0.0, margin=0.005, release=f"{model}-{new}"
    )
    return found if share else replace(found, state="mirror", step=-1, mirror=MIRRORED)


def _concerns(fault: FaultSpec, record: VariantRecord) -> bool:
    return fault.variant in ("", record.variant) and fault.hardware in ("", record.hardware)


def _meant(fault: FaultSpec, machine: SimulatedMachine) -> bool:
    if fault.worker:
        return machine.worker == fault.worker
    return fault.hardware in ("", machine.spec.kind)
