"""The registrations that this registrar carries on: which worker has which order, what it reports, and the one end of each."""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from bus.fields import filled
from bus.messages.events import RegistrationEvent
from bus.messages.fleet import DeviceStatus, ExecutorExited, WorkerHeartbeat
from bus.messages.public import Error, Register
from bus.messages.verbs import StartRelease
from bus.messages.work import (
    CancelWork,
    InspectModel,
    ModelInspected,
    VariantBuilt,
    VariantFailed,
    WorkFinished,
    WorkProgress,
)
from bus.subjects import WITHOUT_APP, Subjects
from services.core.actor import NOTHING, Do, Effect, Envelope, Handler, Publish, Record, Undelivered
from services.core.catalog import Catalog, worded
from services.core.placement import REMOTE, is_container
from services.core.requests import Commands
from services.core.settings import RegistrarSettings
from services.registrar.changes import amend
from services.registrar.commands import AddVariants, Finish, PutRecords, RegistrationRecord
from services.registrar.policy import ATTEMPTS, SILENCE_S, WORKER_LOST_S, WORKER_TIMEOUT_S, plans, plans_for
from services.registrar.registration import OVER, Ended, Registration, RegistrationStatuses
from services.registrar.releases import MIRROR

COMMAND_S = 30.0
CANCELLED = "it was cancelled"
HOLD_S = 1.0  # without an order for a worker whose workshop does not listen yet
CPU = "cpu"


class Workers:
    """The workers that registrations may be assigned to, as their heartbeats describe them."""

    def __init__(self) -> None:
        self._heartbeats: dict[str, WorkerHeartbeat] = {}
        self._heard: dict[str, float] = {}
        self._not_before: dict[str, float] = {}

    def heard(self, heartbeat: WorkerHeartbeat, now: float) -> None:
        """Take a heartbeat."""
        self._heard[heartbeat.worker] = now
        for worker in [one for one, at in self._heard.items() if now - at > SILENCE_S]:
            del self._heartbeats[worker], self._heard[worker]
            self._not_before.pop(worker, None)
        self._heartbeats[heartbeat.worker] = heartbeat

    def hold(self, worker: str, until: float) -> None:
        """Give this worker no order before `until`."""
        self._not_before[worker] = until

    def silent_for(self, worker: str, now: float) -> float:
        """Seconds since its last heartbeat; infinite when that one said that it leaves."""
        heartbeat = self._heartbeats.get(worker)
        return inf if heartbeat is None or heartbeat.leaving else now - self._heard[worker]

    def any_alive(self, now: float, hardware: str = CPU, arithmetic: str = "") -> bool:
        """Whether a worker takes orders for such a device, now or when it is free."""
        return any(
            self._takes_orders(worker, now) and self._has(worker, hardware, arithmetic) for worker in self._heartbeats
        )

    def choose(
        self, now: float, busy: Container[str], avoid: str | None = None, hardware: str = CPU, arithmetic: str = ""
    ) -> str | None:
        """The least used worker with such a device that takes orders and is not in `busy`; `avoid` only if it is the only one."""
        free = [
            worker
            for worker in self._heartbeats
            if worker not in busy
            and self._takes_orders(worker, now)
            and now >= self._not_before.get(worker, 0.0)
            and self._has(worker, hardware, arithmetic)
        ]
        return min(free, key=lambda worker: (worker == avoid, self._utilisation(worker), worker), default=None)

    def cores(self, worker: str, hardware: str) -> int:
        """Cores of the worker's devices of this kind; 1 when unknown."""
        heartbeat = self._heartbeats.get(worker)
        devices = heartbeat.devices if heartbeat else ()
        return max((device.cores for device in devices if device.kind == hardware), default=1)

    def simulated_kinds(self, now: float, within: float) -> set[str]:
        """Device kinds that are simulated by workers heard in the last `within` seconds."""
        return {
            device.kind for heartbeat in self.alive(now, within) for device in heartbeat.devices if device.simulated
        }

    def alive(self, now: float, within: float) -> list[WorkerHeartbeat]:
        """The last heartbeats of workers heard in the last `within` seconds."""
        return [heartbeat for worker, heartbeat in self._heartbeats.items() if now - self._heard[worker] <= within]

    def accelerators(self, now: float, within: float) -> dict[str, str]:
        """Kinds of real device besides the CPU, of workers heard in the last `within` seconds that take orders.

        With each kind comes a text that changes when the first worker with that kind restarts.
        """
        found: dict[str, str] = {}
        for device, mark in self._real_devices(now, within):
            if device.alive and device.kind not in (CPU, REMOTE) and not is_container(device.kind):
                found.setdefault(device.kind, mark)
        return found

    def arithmetics(self, now: float, within: float) -> dict[str, str]:
        """How CPUs of such workers add small integers, each with a text that changes when the first worker of the kind restarts."""
        found: dict[str, str] = {}
        for device, mark in self._real_devices(now, within):
            if device.kind == CPU and device.arithmetic:
                found.setdefault(device.arithmetic, mark)
        return found

    def _real_devices(self, now: float, within: float) -> Iterator[tuple[DeviceStatus, str]]:
        """Those of workers that take orders, each with a text that changes when its worker restarts."""
        for worker, heartbeat in sorted(self._heartbeats.items()):
            if now - self._heard[worker] <= within and self._takes_orders(worker, now):
                yield from (
                    (one, f"{worker} {heartbeat.incarnation}") for one in heartbeat.devices if not one.simulated
                )

    def is_accelerator(self, worker: str, device: str) -> bool:
        """Whether this is another device than the worker's CPU; an unknown one counts as the CPU."""
        heartbeat = self._heartbeats.get(worker)
        return any(one.kind != CPU for one in heartbeat.devices if one.device == device) if heartbeat else False

    def _has(self, worker: str, hardware: str, arithmetic: str = "") -> bool:
        """Every worker has a CPU, except users' own processes (`infaas container`)."""
        devices = self._heartbeats[worker].devices
        if hardware == CPU:
            alike = not arithmetic or any(one.kind == CPU and one.arithmetic == arithmetic for one in devices)
            return alike and not any(is_container(one.kind) for one in devices)
        return any(one.kind == hardware and not one.simulated and one.alive for one in devices)

    def _takes_orders(self, worker: str, now: float) -> bool:
        return self.silent_for(worker, now) <= WORKER_TIMEOUT_S and not self._heartbeats[worker].draining

    def _utilisation(self, worker: str) -> float:
        return max(
            (device.utilisation for device in self._heartbeats[worker].devices if not device.simulated), default=0.0
        )


@dataclass(slots=True, eq=False)
class Registrations:
    """open: by id, from the claim of a registration until its edge has forgotten it.

    undelivered: the reply subject of an order, given the registration's id; what comes there says that no workshop took the order.
    """

    subjects: Subjects
    settings: RegistrarSettings
    catalog: Catalog
    statuses: RegistrationStatuses
    commands: Commands
    undelivered: Callable[[str], str]
    open: dict[str, Registration] = field(default_factory=dict)
    workers: Workers = field(default_factory=Workers)
    _queue: list[str] = field(default_factory=list)  # ids that wait for a worker, the first to be served first
    handlers: dict[type, Handler] = field(init=False)

    def __post_init__(self) -> None:
        self.handlers = {
            WorkerHeartbeat: self._worker_heartbeat,
            ExecutorExited: self._executor_exited,
            Undelivered: self._order_undelivered,
            ModelInspected: self._inspected,
            VariantBuilt: self._result,
            VariantFailed: self._result,
            WorkProgress: self._progress,
            WorkFinished: self._finished,
        }

    def add(self, record: RegistrationRecord, now: float) -> list[Effect]:
        """Carry on a claimed registration from its start, unless it has ended already."""
        registration = self.open[record.registration] = Registration(record, now)
        status = self.statuses.last(registration.id)
        if status is not None and status.state in OVER:
            registration.phase = "over"
            return [self._finish(registration)]
        if record.cancelled:
            return self.cancel(registration.id, now)
        if record.request.container is not None:
            registration.set_container(record.request.container, self.settings)
            obstacle = self._misfit(registration)
            return self._complete(registration, now) if obstacle is None else self._end(registration, now, obstacle)
        self._queue.append(registration.id)
        return [*self._publish(registration, now), *self._assign(now)]

    # -- assignment

    def _worker_heartbeat(self, envelope: Envelope) -> list[Effect]:
        self.workers.heard(envelope.message, envelope.now)
        return self._assign(envelope.now)

    def _assign(self, now: float) -> list[Effect]:
        """Give the registrations in the queue to workers that are free, new models before extensions of registered ones."""
        if not self._queue:
            return []
        effects: list[Effect] = []
        busy = {one.worker for one in self.open.values() if one.worker is not None}
        for registration in sorted(map(self.open.__getitem__, self._queue), key=lambda one: one.extends):
            arithmetic = registration.record.arithmetic
            worker = self.workers.choose(now, busy, registration.avoid, registration.hardware, arithmetic)
            if worker is None:
                continue
            self._queue.remove(registration.id)
            busy.add(worker)
            effects += self._order(registration, worker, now)
        return effects

    def _order(self, registration: Registration, worker: str, now: float) -> list[Effect]:
        order = registration.order(worker, now, self.settings)
        kind = "inspect" if registration.phase == "inspect" else "build"
        subject = self.subjects.workshop(worker, kind)
        return [*self._publish(registration, now), Publish(subject, order, reply=self.undelivered(registration.id))]

    def announced(self, request: Register, now: float) -> list[Effect]:
        """A model will come: the worker that would get it now, if one is free, gets ready. Nobody waits for that."""
        worker = self.workers.choose(now, {one.worker for one in self.open.values() if one.worker is not None})
        order = filled(InspectModel, request, registration=request.registration or "")
        return [] if worker is None else [Publish(self.subjects.workshop(worker, "inspect"), order)]

    def _order_undelivered(self, envelope: Envelope) -> list[Effect]:
        """The worker is alive but its workshop does not listen yet: most often it starts."""
        now = envelope.now
        registration = self.open.get(envelope.message.reply_subject.rpartition(".")[2])
        if registration is None or registration.worker is None:
            return []
        registration.undelivered_since = registration.undelivered_since or now
        if now - registration.undelivered_since > SILENCE_S:
            return self._end(registration, now, f"the workshop of worker {registration.worker} takes no orders")
        registration.attempts -= 1
        self.workers.hold(registration.worker, now + HOLD_S)
        return self._wait(registration, "waiting for a worker", now)

    def _wait(self, registration: Registration, step: str, now: float) -> list[Effect]:
        registration.wait(step, now)
        self._queue.insert(0, registration.id)
        return [*self._publish(registration, now), *self._assign(now)]

    def _executor_exited(self, envelope: Envelope) -> list[Effect]:
        exited: ExecutorExited = envelope.message
        if self.workers.is_accelerator(exited.worker, exited.device):
            return []  # a process with several devices reports each of them; the CPU's report stands for the workshop
        reason = f"the executor of worker {exited.worker} stopped: {exited.reason}"
        lost = [one for one in self.open.values() if one.worker == exited.worker]
        return [effect for one in lost for effect in self._lost(one, reason, envelope.now)]

    def _lost(self, registration: Registration, reason: str, now: float) -> list[Effect]:
        """The order was lost. It is given once more; after the last attempt the variants that are built must do."""
        if registration.phase == "build" and not registration.remaining:
            return self._complete(registration, now)
        if registration.attempts < ATTEMPTS:
            return self._wait(registration, f"once more: {reason}", now)
        if registration.phase == "build":
            registration.fail_remaining(reason)
            return self._complete(registration, now)
        return self._end(registration, now, reason)

    def check(self, now: float) -> list[Effect]:
        """Find registrations whose worker is silent, and assign those that wait."""
        effects = [effect for one in list(self.open.values()) for effect in self._check(one, now)]
        return [*effects, *self._assign(now)]

    def _check(self, registration: Registration, now: float) -> list[Effect]:
        worker, silence = registration.worker, now - registration.heard_at
        if registration.phase == "waiting":
            if self.workers.any_alive(now, registration.hardware, registration.record.arithmetic):
                registration.heard_at = now
            elif silence > (SILENCE_S if registration.hardware != REMOTE else self._others_heard(now)):
                return self._end(registration, now, registration.no_worker())
        elif worker is not None:
            if silence > SILENCE_S:
                return self._lost(registration, f"worker {worker} said nothing for {silence:.0f} s", now)
            if min(silence, self.workers.silent_for(worker, now)) > WORKER_LOST_S:
                return self._lost(registration, f"worker {worker} is gone", now)
        return []

    def _others_heard(self, now: float) -> float:
        """Seconds after which no worker is expected any more that may use engines: each that lives has been heard, unless none is."""
        return WORKER_TIMEOUT_S if self.workers.any_alive(now) else WORKER_LOST_S

    # -- reports from workshops

    def _reported(self, registration: str, worker: str, now: float, *phases: str) -> Registration | None:
        """The registration that a report is about; None unless it is open, in one of these phases, and assigned to this worker."""
        found = self.open.get(registration)
        if found is None or found.worker != worker or found.phase not in phases:
            return None
        found.heard_at, found.undelivered_since = now, None
        return found

    def _inspected(self, envelope: Envelope) -> list[Effect]:
        report: ModelInspected = envelope.message
        now, worker = envelope.now, report.worker
        registration = self._reported(report.registration, worker, now, "inspect")
        if registration is None:
            return []
        request = registration.record.request
        known = self.catalog.model(request.model, registration.version) or self.catalog.app(request.app)
        report = replace(
            report, signature=worded(report.signature, request, None if known is None else known.signature)
        )
        obstacle = None if registration.extends else self._misfit(registration, report)
        if obstacle is not None:
            return self._end(registration, now, obstacle)
        cores, joins = self.workers.cores(worker, report.hardware), registration.record.joins
        found = plans(request.model, registration.version, request.format, report, cores, self.settings)
        if registration.record.arithmetic:
            found = plans_for(registration.record.arithmetic, found, report)
        if not found:
            why = "; ".join(f"{name}: {reason}" for name, reason in report.frameworks.items() if reason)
            return self._end(registration, now, f"no framework on worker {worker} runs {request.format} models ({why})")
        if request.dry_run:
            registration.end_dry_run(report, found)
            return [*self._publish(registration, now), *self._assign(now)]
        registration.set_inspection(report, [] if joins else found)
        if joins and not registration.add_cascades(self.catalog, self.settings):
            return self._end(registration, now)
        return self._order(registration, worker, now)

    def _misfit(self, registration: Registration, report: ModelInspected | None = None) -> str | None:
        """Why the app cannot serve the inspected model; None if it can."""
        inspected = report or registration.inspected
        assert inspected is not None
        link = registration.link(inspected)
        refused = None if link is None else amend(self.catalog.app(link.app), link, self.catalog)
        return refused.message if isinstance(refused, Error) else None

    def _result(self, envelope: Envelope) -> tuple[Effect, ...]:
        report: VariantBuilt | VariantFailed = envelope.message
        registration = self._reported(report.registration, report.worker, envelope.now, "build")
        if registration is None or not registration.add_result(report, self.settings):
            return NOTHING
        return (*self._serve_first(registration), *self._publish(registration, envelope.now))

    def _serve_first(self, registration: Registration) -> tuple[Effect, ...]:
        """The first variant of a model that its app does not serve yet is written at once: the app answers while the others are built."""
        request = registration.record.request
        app = self.catalog.app(request.app)
        if registration.first or registration.extends or not registration.built or not registration.remaining:
            return NOTHING
        if request.app == WITHOUT_APP or (app is not None and request.model in app.links):
            return NOTHING
        registration.first = "writing"
        return (self._start("first", registration, registration.records(newest=True, held=self._held(registration))),)

    def first_written(self, registration: str, refused: Error | None, now: float) -> list[Effect]:
        """The first variant is in the catalogue. If it was refused, all of them are, when they are built."""
        self.commands.ended(("first", registration))
        found = self.open.get(registration)
        if found is None or found.phase == "over":  # it has failed meanwhile
            return []
        found.first = "written" if refused is None else ""
        if found.withdrawn:
            return self.cancel(registration, now)
        if found.phase == "write":
            return [self._write(found, now)]
        found.status = replace(found.status, step=found.ready())
        return [*self._publish(found, now)]

    def _progress(self, envelope: Envelope) -> tuple[Effect, ...]:
        report: WorkProgress = envelope.message
        registration = self._reported(report.registration, report.worker, envelope.now, "inspect", "build")
        if registration is None:
            return NOTHING
        registration.set_progress(report)
        return self._publish(registration, envelope.now)

    def _finished(self, envelope: Envelope) -> list[Effect]:
        report: WorkFinished = envelope.message
        registration = self._reported(report.registration, report.worker, envelope.now, report.order)
        if registration is None:
            return []
        if report.lost:
            return self._lost(registration, report.reason or f"worker {report.worker} gave it up", envelope.now)
        if registration.phase == "inspect":
            return self._end(registration, envelope.now, report.reason or "the inspection ended without a result")
        registration.fail_remaining(report.reason or "the worker gave no result")
        if registration.add_cascades(self.catalog, self.settings):
            return self._order(registration, report.worker, envelope.now)
        return self._complete(registration, envelope.now)

    # -- ends

    def _complete(self, registration: Registration, now: float) -> list[Effect]:
        """All variants have their result: write those that work."""
        if not registration.built:
            return self._end(registration, now, registration.no_variant())
        registration.phase, registration.worker = "write", None
        written = () if registration.first == "writing" else (self._write(registration, now),)
        return [*written, *self._assign(now)]

    def _write(self, registration: Registration, now: float) -> Effect:
        command: PutRecords | AddVariants
        if not registration.extends:
            registration.add_simulated(self.workers.simulated_kinds(now, WORKER_TIMEOUT_S))
        if registration.extends or registration.first == "written":
            command = registration.additions()
        else:
            command = registration.records(newest=self._newest(registration), held=self._held(registration))
        return self._start("records", registration, command)

    def _held(self, registration: Registration) -> bool:
        """Whether the app serves another version, which this one does not replace at once."""
        request = registration.record.request
        app = self.catalog.app(request.app)
        return request.release != "at-once" and app is not None and request.model in app.links

    def release_of(self, registration: str) -> Iterable[StartRelease]:
        """The release that was asked for with the registration, of a version that the app does not serve yet; else none."""
        found = self.open[registration]
        request = found.record.request
        if request.release not in ("mirror", "steps") or not self._held(found) or found.extends:
            return ()
        app = self.catalog.app(request.app)
        served = app is not None and app.serves(request.model, found.version)
        mirror = MIRROR if request.release == "mirror" else 0.0
        start = StartRelease(app=request.app, model=request.model, version=found.version, mirror=mirror)
        return () if served else (start,)

    def _newest(self, registration: Registration) -> bool:
        """Whether the app serves no version of the model that was asked for later."""
        request = registration.record.request
        app = self.catalog.app(request.app)
        linked = app.links.get(request.model) if app is not None else None
        serving = self.catalog.model(request.model, linked) if linked is not None else None
        return serving is None or serving.created <= registration.record.created

    def written(self, registration: str, refused: Error | None, now: float) -> list[Effect]:
        """The records are in the catalogue, or were refused."""
        self.commands.ended(("records", registration))
        return self._end(self.open[registration], now, refused.message if refused else None)

    def cancel(self, registration: str, now: float) -> list[Effect]:
        """End it, and have its worker stop. What is being written, or has ended, stays."""
        found = self.open.get(registration)
        if found is None or found.phase in ("write", "over"):
            return []
        if found.first == "writing":
            found.withdrawn = True
            return []
        order = CancelWork(registration=registration)
        stop = [] if found.worker is None else [Publish(self.subjects.workshop(found.worker, "cancel"), order)]
        return [*stop, *self._end(found, now, CANCELLED, state="cancelled")]

    def _end(
        self, registration: Registration, now: float, reason: str | None = None, state: Ended = "failed"
    ) -> list[Effect]:
        registration.end(reason, state)
        if registration.id in self._queue:
            self._queue.remove(registration.id)
        return [*self._publish(registration, now), *self._assign(now)]

    def saved(self, registration: str) -> tuple[Effect, ...]:
        """A status is saved. After the last one the registration is forgotten."""
        effects = self.statuses.saved(registration)
        ended = self.open[registration]
        return effects or ((self._finish(ended),) if ended.phase == "over" else NOTHING)

    def _finish(self, registration: Registration) -> Do:
        """Only uploads that are named after the registration are removed with it; their owner may use others again."""
        request = registration.record.request
        uploads = tuple(key for key in (request.object, request.validation) if key.startswith(f"{registration.id}."))
        command = Finish(
            registration=registration.id,
            model=request.model,
            version=registration.version,
            uploads=uploads,
            forget=request.dry_run,
            withdraw=registration.status.state == "cancelled" and not registration.extends,
        )
        return self._start("finish", registration, command)

    def forgotten(self, registration: str) -> None:
        """The edge has deleted what it kept of this registration."""
        self.commands.ended(("finish", registration))
        del self.open[registration]

    def _start(self, kind: str, registration: Registration, command: Struct) -> Do:
        return self.commands.start(Do((kind, registration.id), command, COMMAND_S))

    def _publish(self, registration: Registration, now: float) -> tuple[Effect, ...]:
        """Publish its status, and record an event when its state or step is new."""
        status = registration.status
        effects = self.statuses.publish(status, now)
        if registration.recorded == (status.state, status.step) or status.dry_run:
            return effects
        registration.recorded = (status.state, status.step)
        reason = status.reason if status.state in OVER else status.step
        return (*effects, Record(filled(RegistrationEvent, status, time=now, reason=reason)))
