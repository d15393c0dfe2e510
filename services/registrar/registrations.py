"""The registrations under way: which worker has which order, what comes back, and how each of them ends, exactly once."""

from collections.abc import Callable, Container, Iterable, Iterator
from math import inf
from typing import Any

from bus.messages.events import RegistrationEvent
from bus.messages.fleet import ExecutorExited, WorkerHeartbeat
from bus.messages.work import ModelInspected, VariantBuilt, VariantFailed, WorkFinished, WorkProgress
from bus.subjects import Subjects
from services.core.actor import Do, Effect, Envelope, Publish, Record, Undelivered
from services.core.catalog import Catalog
from services.registrar.changes import amend
from services.registrar.commands import ChangeRefused, Command, Finish, RegistrationRecord
from services.registrar.policy import Rules, plans
from services.registrar.registration import Registration
from services.registrar.status import OVER, RegistrationStatuses

COMMAND_S = 30.0
HOLD_S = 1.0  # no order for so long to a worker whose workshop does not listen yet


class Registrations:
    """Jobs by registration id, from their claim until the edge has forgotten them.

    undelivered: reply subject of an order, given the registration; what comes back there says that nobody took it.
    """

    def __init__(
        self,
        subjects: Subjects,
        rules: Rules,
        catalog: Catalog,
        statuses: RegistrationStatuses,
        undelivered: Callable[[str], str],
    ) -> None:
        self.jobs: dict[str, Registration] = {}
        self._subjects = subjects
        self._rules = rules
        self._catalog = catalog
        self._statuses = statuses
        self._undelivered = undelivered
        self._workers = Workers(rules.worker_timeout_s)
        self.simulated_kinds = self._workers.simulated_kinds
        self.accelerators = self._workers.accelerators
        self._queue: list[str] = []  # waiting for a worker, first come first served
        self._commands: dict[Any, Command] = {}  # under way; repeated until they succeed
        self.takes: dict[type, Callable[[Envelope], Iterable[Effect]]] = {
            WorkerHeartbeat: self._on_worker,
            ExecutorExited: self._on_exit,
            Undelivered: self._on_undelivered,
            ModelInspected: self._on_inspected,
            VariantBuilt: self._on_result,
            VariantFailed: self._on_result,
            WorkProgress: self._on_progress,
            WorkFinished: self._on_finished,
        }

    def add(self, work: RegistrationRecord, now: float) -> Iterator[Effect]:
        """Go on with a claimed registration from its start, unless it has ended already."""
        job = self.jobs[work.registration] = Registration(work, now)
        status = self._statuses.last(job.id)
        if status is not None and status.state in OVER:
            job.phase = "over"
            yield self._finish(job)
            return
        yield from self._tell(job, now)
        self._queue.append(job.id)
        yield from self._assign(now)

    # -- orders

    def _on_worker(self, envelope: Envelope) -> Iterator[Effect]:
        self._workers.heard(envelope.message, envelope.now)
        if self._queue:
            yield from self._assign(envelope.now)

    def _assign(self, now: float) -> Iterator[Effect]:
        busy = {job.worker for job in self.jobs.values() if job.worker is not None}
        # Whoever waits for a new model comes before what is made of an old one.
        for job in sorted(map(self.jobs.__getitem__, self._queue), key=lambda job: job.fitting):
            worker = self._workers.choose(now, busy, job.avoid, job.hardware)
            if worker is None:
                continue
            self._queue.remove(job.id)
            busy.add(worker)
            yield from self._order(job, worker, now)

    def _order(self, job: Registration, worker: str, now: float) -> Iterator[Effect]:
        order = job.order(worker, now, self._rules)
        yield from self._tell(job, now)
        kind = "inspect" if job.phase == "inspect" else "build"
        yield Publish(self._subjects.workshop(worker, kind), order, reply=self._undelivered(job.id))

    def _on_undelivered(self, envelope: Envelope) -> Iterator[Effect]:
        """The worker is alive but its workshop does not listen yet: a start-up, most often."""
        now = envelope.now
        job = self.jobs.get(envelope.message.reply_subject.rpartition(".")[2])
        if job is None or job.worker is None:
            return
        if job.unheard_since is None:
            job.unheard_since = now
        if now - job.unheard_since > self._rules.silence_s:
            yield from self._end(job, now, f"the workshop of worker {job.worker} takes no orders")
            return
        job.attempts -= 1
        self._workers.hold(job.worker, now + HOLD_S)
        yield from self._wait(job, "waiting for a worker", now)

    def _wait(self, job: Registration, step: str, now: float) -> Iterator[Effect]:
        job.wait(step, now)
        self._queue.insert(0, job.id)
        yield from self._tell(job, now)
        yield from self._assign(now)

    def _on_exit(self, envelope: Envelope) -> Iterator[Effect]:
        exited: ExecutorExited = envelope.message
        if self._workers.beside(exited.worker, exited.device):
            return  # told of each device of one process; the workshop goes by the CPU
        for job in [job for job in self.jobs.values() if job.worker == exited.worker]:
            yield from self._lost(job, f"the executor of worker {exited.worker} stopped: {exited.reason}", envelope.now)

    def _lost(self, job: Registration, reason: str, now: float) -> Iterator[Effect]:
        """The order was lost: it is given once more, then what is there must do."""
        if job.phase == "build" and not job.remaining:
            yield from self._complete(job, now)
        elif job.attempts < self._rules.attempts:
            yield from self._wait(job, f"once more: {reason}", now)
        elif job.phase == "build":
            job.give_up_remaining(reason)
            yield from self._complete(job, now)
        else:
            yield from self._end(job, now, reason)

    def sweep(self, now: float) -> Iterator[Effect]:
        """Look for silence."""
        for job in list(self.jobs.values()):
            yield from self._check(job, now)
        if self._queue:
            yield from self._assign(now)

    def _check(self, job: Registration, now: float) -> Iterator[Effect]:
        quiet = now - job.heard
        if job.phase == "waiting":
            if self._workers.any_alive(now, job.hardware):
                job.heard = now
            elif quiet > self._rules.silence_s:
                yield from self._end(job, now, job.nobody())
        elif job.worker is not None:
            if quiet > self._rules.silence_s:
                yield from self._lost(job, f"worker {job.worker} said nothing for {quiet:.0f} s", now)
            elif min(quiet, self._workers.silent_for(job.worker, now)) > self._rules.worker_lost_s:
                yield from self._lost(job, f"worker {job.worker} is gone", now)

    # -- facts from the workshop

    def _ordered(self, registration: str, worker: str, now: float, *phases: str) -> Registration | None:
        """The job that this fact belongs to; None when it is not ours, over, or somebody else's by now."""
        job = self.jobs.get(registration)
        if job is None or job.worker != worker or job.phase not in phases:
            return None
        job.heard, job.unheard_since = now, None
        return job

    def _on_inspected(self, envelope: Envelope) -> Iterator[Effect]:
        fact: ModelInspected = envelope.message
        now = envelope.now
        job = self._ordered(fact.registration, fact.worker, now, "inspect")
        if job is None:
            return
        request = job.work.request
        link = None if job.fitting else job.link(fact.signature, now)
        unfit = None if link is None else amend(self._catalog.app(request.app), link)
        if isinstance(unfit, ChangeRefused):
            yield from self._end(job, now, unfit.message)
            return
        cores = self._workers.cores(fact.worker, fact.hardware)
        found = plans(request.model, job.version, request.format, fact, cores, self._rules)
        if not found:
            why = "; ".join(f"{name}: {reason}" for name, reason in fact.frameworks.items() if reason)
            yield from self._end(job, now, f"no framework on worker {fact.worker} runs {request.format} models ({why})")
            return
        job.take_inspection(fact, found)
        yield from self._order(job, fact.worker, now)

    def _on_result(self, envelope: Envelope) -> Iterator[Effect]:
        fact: VariantBuilt | VariantFailed = envelope.message
        job = self._ordered(fact.registration, fact.worker, envelope.now, "build")
        if job is not None and job.take_result(fact, self._rules):
            yield from self._tell(job, envelope.now)

    def _on_progress(self, envelope: Envelope) -> Iterator[Effect]:
        fact: WorkProgress = envelope.message
        job = self._ordered(fact.registration, fact.worker, envelope.now, "inspect", "build")
        if job is not None:
            job.take_progress(fact)
            yield from self._tell(job, envelope.now)

    def _on_finished(self, envelope: Envelope) -> Iterator[Effect]:
        fact: WorkFinished = envelope.message
        job = self._ordered(fact.registration, fact.worker, envelope.now, fact.order)
        if job is None:
            return
        if fact.lost:
            yield from self._lost(job, fact.reason or f"worker {fact.worker} laid it down", envelope.now)
        elif job.phase == "inspect":
            yield from self._end(job, envelope.now, fact.reason or "the inspection ended without a result")
        else:
            job.give_up_remaining(fact.reason or "the worker gave no result")
            yield from self._complete(job, envelope.now)

    # -- ends

    def _complete(self, job: Registration, now: float) -> Iterator[Effect]:
        """All variants have their result: write what works."""
        if not job.built:
            yield from self._end(job, now, job.no_variant())
            return
        job.phase, job.worker = "write", None
        if job.fitting:
            yield self._persistently(("records", job.id), job.additions())
        else:
            job.simulate(self.simulated_kinds(now, self._rules.worker_timeout_s))
            yield self._persistently(("records", job.id), job.records(now, newest=self._newest(job)))
        yield from self._assign(now)

    def _newest(self, job: Registration) -> bool:
        """Whether no version of the model that was asked for later serves the app already."""
        request = job.work.request
        app = self._catalog.app(request.app)
        linked = app.links.get(request.model) if app is not None else None
        serving = self._catalog.model(request.model, linked) if linked is not None else None
        return serving is None or serving.created <= job.work.created

    def written(self, registration: str, refused: ChangeRefused | None, now: float) -> Iterator[Effect]:
        """The records are in the catalogue, or not allowed there."""
        del self._commands["records", registration]
        yield from self._end(self.jobs[registration], now, refused.message if refused else None)

    def _end(self, job: Registration, now: float, reason: str | None = None) -> Iterator[Effect]:
        job.end(reason)
        if job.id in self._queue:
            self._queue.remove(job.id)
        yield from self._tell(job, now)
        yield from self._assign(now)

    def saved(self, registration: str) -> Effect | None:
        """A status is kept: the next step of keeping, and after the last one, of forgetting."""
        effect = self._statuses.saved(registration)
        job = self.jobs[registration]
        return self._finish(job) if effect is None and job.phase == "over" else effect

    def _finish(self, job: Registration) -> Effect:
        """Uploads under the registration's own name are ours to remove; others may serve their owner once more."""
        request = job.work.request
        uploads = tuple(key for key in (request.object, request.validation) if key.startswith(f"{job.id}."))
        command = Finish(registration=job.id, model=request.model, version=job.work.version, uploads=uploads)
        return self._persistently(("finish", job.id), command)

    def forgotten(self, registration: str) -> None:
        """The edge has forgotten it; so do we."""
        del self._commands["finish", registration]
        del self.jobs[registration]

    def again(self, id: Any) -> Effect:
        """A command that must succeed failed: once more."""
        if id[0] == "status":
            return self._statuses.again(id[1])
        return Do(id, self._commands[id], COMMAND_S)

    def _persistently(self, id: Any, command: Command) -> Effect:
        self._commands[id] = command
        return Do(id, command, COMMAND_S)

    def _tell(self, job: Registration, now: float) -> Iterator[Effect]:
        status = job.status
        yield from self._statuses.tell(status, now)
        if job.recorded == status.state:
            return
        job.recorded = status.state
        yield Record(
            RegistrationEvent(
                time=now,
                registration=job.id,
                app=status.app,
                model=status.model,
                version=status.version,
                state=status.state,
                reason=status.reason,
                progress=status.progress,
            )
        )


# -- the workers that could do registration work, as their heartbeats tell

CPU = "cpu"


class Workers:
    """Who is alive, and who takes the next order. timeout: seconds without a heartbeat after which a worker gets no orders."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._beats: dict[str, WorkerHeartbeat] = {}
        self._heard: dict[str, float] = {}
        self._not_before: dict[str, float] = {}

    def heard(self, beat: WorkerHeartbeat, now: float) -> None:
        """Take a heartbeat."""
        self._beats[beat.worker] = beat
        self._heard[beat.worker] = now

    def hold(self, worker: str, until: float) -> None:
        """Give this worker no order before `until`."""
        self._not_before[worker] = until

    def silent_for(self, worker: str, now: float) -> float:
        """Seconds since its last heartbeat; infinite when it has said goodbye."""
        beat = self._beats.get(worker)
        return inf if beat is None or beat.leaving else now - self._heard[worker]

    def any_alive(self, now: float, hardware: str = CPU) -> bool:
        """Whether there is a worker at all that could take orders for such a device, now or when it is free."""
        return any(self._takes_orders(worker, now) and self._has(worker, hardware) for worker in self._beats)

    def choose(self, now: float, busy: Container[str], avoid: str | None = None, hardware: str = CPU) -> str | None:
        """The idlest worker with such a device that takes orders and is not busy with one.

        `avoid` only where there is no other.
        """
        free = [
            worker
            for worker in self._beats
            if worker not in busy
            and self._takes_orders(worker, now)
            and now >= self._not_before.get(worker, 0.0)
            and self._has(worker, hardware)
        ]
        return min(free, key=lambda worker: (worker == avoid, self._utilisation(worker), worker), default=None)

    def cores(self, worker: str, hardware: str) -> int:
        """Cores of the worker's devices of this kind; 1 when unknown."""
        beat = self._beats.get(worker)
        return max((device.cores for device in beat.devices if device.kind == hardware), default=1) if beat else 1

    def simulated_kinds(self, now: float, within: float) -> set[str]:
        """Device kinds that workers heard in the last so many seconds simulate."""
        heard = [beat for worker, beat in self._beats.items() if now - self._heard[worker] <= within]
        return {device.kind for beat in heard for device in beat.devices if device.simulated}

    def accelerators(self, now: float, within: float) -> dict[str, str]:
        """Kinds of real device besides the CPU, of workers heard in the last so many seconds that take orders.

        With each a text that is another one as soon as its first worker has started anew.
        """
        found: dict[str, str] = {}
        for worker in sorted(self._beats):
            beat = self._beats[worker]
            if now - self._heard[worker] <= within and self._takes_orders(worker, now):
                for device in beat.devices:
                    if device.kind != CPU and not device.simulated and device.alive:
                        found.setdefault(device.kind, f"{worker} {beat.incarnation}")
        return found

    def beside(self, worker: str, device: str) -> bool:
        """Whether this is a device beside the worker's CPU; one that is not known counts as the CPU."""
        beat = self._beats.get(worker)
        return any(one.kind != CPU for one in beat.devices if one.device == device) if beat else False

    def _has(self, worker: str, hardware: str) -> bool:
        """Every worker has a CPU."""
        devices = self._beats[worker].devices
        return hardware == CPU or any(one.kind == hardware and not one.simulated and one.alive for one in devices)

    def _takes_orders(self, worker: str, now: float) -> bool:
        return self.silent_for(worker, now) <= self._timeout and not self._beats[worker].draining

    def _utilisation(self, worker: str) -> float:
        return max((device.utilisation for device in self._beats[worker].devices if not device.simulated), default=0.0)
