"""The registrar: takes models in, has a worker inspect, build and profile them, and writes what works into the catalogue.

One registrar of the queue group takes a request and keeps it as `work.<id>` before it answers. When that registrar dies, another carries
the registration on. Every registration ends in exactly one `done` or `failed`. Operators' changes of the catalogue come here too.
"""

from collections.abc import Callable, Iterable

from msgspec import UNSET, Raw
from msgspec.structs import replace

from bus.codec import decode_kept
from bus.fields import filled, meant
from bus.messages.events import RegistrationEvent
from bus.messages.fleet import ExecutorExited, WorkerHeartbeat
from bus.messages.flow import ContextChanged
from bus.messages.public import (
    MOST_TASK,
    AdminDone,
    Error,
    Refusal,
    Register,
    RegistrationAccepted,
    RegistrationCancelled,
    RegistrationStatus,
)
from bus.messages.quality import ReleaseCounted
from bus.messages.scaling import Drain
from bus.messages.verbs import AdminVerb, DrainWorker, Prune
from bus.messages.work import (
    ModelInspected,
    PlaceContainer,
    RegistrarHeartbeat,
    VariantBuilt,
    VariantFailed,
    WorkFinished,
    WorkProgress,
)
from bus.subjects import REGISTRARS, Subjects
from services.core.actor import (
    NOTHING,
    After,
    Changed,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Handler,
    Inlet,
    Malformed,
    Publish,
    Record,
    Recorded,
    Started,
    Stopping,
    Synced,
    TableActor,
    Tick,
    TimedOut,
    Watch,
)
from services.core.catalog import Catalog
from services.core.metric import MetricFamily, gauge
from services.core.placement import REMOTE, container_kind
from services.core.requests import Commands, Retry, SyncGate, TakeOvers, answer, not_now, refuse
from services.core.settings import RegistrarSettings, Settings
from services.registrar.changes import not_now_for, refusal, told
from services.registrar.checks import Ceiling, measured_anew, registration_error, verb_asked
from services.registrar.commands import (
    AlreadyTaken,
    ClaimRegistration,
    ContextsDeleted,
    MarkCancelled,
    Noted,
    Pruned,
    PutStatus,
    RegistrationClaimed,
    RegistrationRecord,
    ReleaseMoved,
    error_of,
)
from services.registrar.hardware import SIMULATED, Extensions, SimulatedVariants
from services.registrar.policy import REGISTRAR_TIMEOUT_S, WORKER_TIMEOUT_S, next_version, place_of
from services.registrar.registration import KEPT, OVER, RegistrationStatuses
from services.registrar.registration import PREFIX as STATUS
from services.registrar.releases import KEEP, MOVE, ReleaseJudge, moved
from services.registrar.work import COMMAND_S, Registrations

TICK_S = 1.0
RETRY_S = 2.0
PRUNE_S = 30.0  # from a start or a deletion until workers hear once more which files are kept: of copies that are new they cannot tell
DAY_S, NIGHT_S = 24 * 3600.0, 3 * 3600.0  # s after midnight UTC at which files that no version has are deleted
WORK = "work."


class Registrar(TableActor):
    """name: a subject token, different for each process. new_id: makes registration ids where the client gave none.

    room: what the machines may hold.
    """

    def __init__(
        self,
        name: str,
        subjects: Subjects,
        settings: RegistrarSettings,
        new_id: Callable[[], str],
        room: Ceiling | None = None,
    ) -> None:
        self._name = name
        self._subjects = subjects
        self._settings = settings
        self._new_id = new_id
        self._room = room or Ceiling()
        self._catalog = Catalog()
        self._commands = Commands(RETRY_S)
        self._statuses = RegistrationStatuses(subjects, self._commands)
        self._registrations = Registrations(
            subjects, settings, self._catalog, self._statuses, self._commands, self._undelivered
        )
        self._simulated = SimulatedVariants(self._catalog, self._registrations.workers)
        self._extensions = Extensions(
            self._catalog, self._statuses, self._registrations.workers, joins=settings.cascades
        )
        self._releases = ReleaseJudge(subjects, self._catalog)
        self._gate = SyncGate((subjects.catalog_bucket, subjects.status_bucket, subjects.control_bucket))
        self._takeovers = TakeOvers(name, REGISTRAR_TIMEOUT_S, COMMAND_S)
        self._records: dict[str, RegistrationRecord] = {}  # all unfinished registrations, of all registrars
        # Never to be taken over: ended, refused or unreadable. The bucket may still bring a record of them.
        self._closed: dict[str, None] = {}
        self._claims: dict[str, tuple[RegistrationRecord, str]] = {}  # under way, with the reply subject
        self._changes: dict[int, tuple[str, str]] = {}  # operators' changes under way: reply subject and app, by number
        self._change_count = 0
        self._cancelling: dict[str, list[str]] = {}  # reply subjects of those who wait, by registration
        self._prune_at: float | None = None
        self._dismissing: dict[str, RegistrationStatus] = {}  # failed ones that are to be forgotten
        self._on: dict[type, Handler] = {
            Register: self._gate.after(self._register),
            Raw: self._gate.after(self._operate),
            PlaceContainer: self._gate.after(self._place_container),
            bytes: self._gate.after(self._status_request),
            Malformed: self._malformed,
            RegistrarHeartbeat: self._registrar_heartbeat,
            ReleaseCounted: self._gate.after(self._releases.heard),
            Changed: self._changed,
            Synced: self._gate.synced,
            Done: self._done,
            Failed: self._not_done,
            TimedOut: self._not_done,
            Retry: self._commands.retry,
            Tick: self._tick,
            Started: lambda _: (After("tick", TICK_S, Tick()), self._heartbeat()),
            Stopping: lambda _: (self._heartbeat(leaving=True),),
            Recorded: lambda _: NOTHING,
            **self._registrations.handlers,
        }
        s = subjects
        self.watches = tuple(Watch(bucket=one) for one in (s.catalog_bucket, s.status_bucket, s.control_bucket))
        self.inlets = (
            Inlet(subject=s.worker_heartbeat(), message=WorkerHeartbeat),
            Inlet(subject=s.exited(), message=ExecutorExited),
            Inlet(subject=s.registrar("alive"), message=RegistrarHeartbeat),
            Inlet(subject=s.registrar("inspected"), message=ModelInspected),
            Inlet(subject=s.registrar("built"), message=VariantBuilt),
            Inlet(subject=s.registrar("variant-failed"), message=VariantFailed),
            Inlet(subject=s.registrar("progress"), message=WorkProgress),
            Inlet(subject=s.registrar("finished"), message=WorkFinished),
            Inlet(subject=self._undelivered("*"), message=bytes),
            Inlet(subject=s.registration(), message=bytes, queue=REGISTRARS),
            Inlet(subject=s.registration_cancel(), message=bytes, queue=REGISTRARS),
            Inlet(subject=s.admin(), message=Raw, queue=REGISTRARS),
            Inlet(subject=s.registrar("container"), message=PlaceContainer, queue=REGISTRARS),
            self._releases.inlet,
            Inlet(subject=s.register(), message=Register, queue=REGISTRARS, malformed=True),
        )

    def _undelivered(self, registration: str) -> str:
        return self._subjects.registrar(f"undelivered.{self._name}.{registration}")

    # -- what the buckets hold

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        changed: Changed = envelope.message
        if changed.bucket == self._subjects.catalog_bucket:
            self._catalog.apply(changed.key, changed.value)
        elif changed.bucket == self._subjects.control_bucket:
            self._releases.changed(changed)
        elif changed.key.startswith(STATUS):
            self._statuses.apply(changed.key.removeprefix(STATUS), changed.value)
        elif changed.key.startswith(WORK):
            registration = changed.key.removeprefix(WORK)
            self._records.pop(registration, None)
            if changed.value is not None and registration not in self._closed:
                record = decode_kept(RegistrationRecord, changed.value)
                if record is None:
                    self._close(registration)  # a registrar of another release wrote it and carries it on
                    return NOTHING
                self._records[registration] = record
                if record.cancelled:
                    return self._registrations.cancel(registration, envelope.now)
        return NOTHING

    def _close(self, registration: str) -> None:
        self._records.pop(registration, None)
        self._closed[registration] = None
        if len(self._closed) > KEPT:  # the bucket is never so far behind
            del self._closed[next(iter(self._closed))]

    # -- requests

    def _register(self, envelope: Envelope) -> Iterable[Effect]:
        if not (envelope.message.object or envelope.reply):
            return self._registrations.announced(envelope.message, envelope.now)
        request = measured_anew(envelope.message, self._catalog)
        if isinstance(request, Error):
            return self._turn_away(envelope.reply, request, envelope.now)
        registration = request.registration or self._new_id()
        if (error := registration_error(request, self._settings)) is not None:
            return self._turn_away(envelope.reply, error, envelope.now, request)
        if registration in self._claims or registration in self._records or self._statuses.last(registration):
            return self._turn_away(envelope.reply, _taken("registration", request), envelope.now, request)
        app = self._catalog.app(request.app)
        if app is not None and (error := not_now_for(app, request)) is not None:
            return self._turn_away(envelope.reply, error, envelope.now, request)
        if request.version is not None and self._catalog.model(request.model, request.version) is not None:
            return self._turn_away(envelope.reply, _taken("version", request), envelope.now, request)
        record = RegistrationRecord(
            registration=registration,
            request=request,
            registrar=self._name,
            created=envelope.now,
            hardware=REMOTE if request.format == REMOTE else "cpu",
        )
        if request.container is not None and (version := request.remeasures) is not None:  # in place: it runs
            record = replace(record, version=version, hardware=container_kind(request.model, version))
        return (self._claim(record, envelope.reply),)

    def _malformed(self, envelope: Envelope) -> Iterable[Effect]:
        return self._turn_away(envelope.reply, error_of(envelope.message.error), envelope.now)

    def _turn_away(self, reply: str, error: Error, now: float, request: Register | None = None) -> tuple[Effect, ...]:
        """Refuse a registration that has not begun. It is recorded under a new id, which cannot be another registration's."""
        event = RegistrationEvent(
            time=now,
            registration=self._new_id(),
            app=_printable(request.app) if request is not None else "",
            model=_printable(request.model) if request is not None else "",
            version=_printable(request.version) if request is not None and request.version is not None else None,
            state="refused",
            reason=error.message,
            progress=0.0,
        )
        return (*refuse(reply, error), Record(event))

    def _claim(self, record: RegistrationRecord, reply: str) -> Effect:
        self._claims[record.registration] = (record, reply)
        first = next_version(self._catalog.versions(record.request.model))
        return Do(("claim", record.registration), ClaimRegistration(record=record, next_version=first), COMMAND_S)

    def _claimed(self, registration: str, result: RegistrationClaimed | AlreadyTaken, now: float) -> tuple[Effect, ...]:
        record, reply = self._claims.pop(registration)
        if isinstance(result, RegistrationClaimed):
            accepted = answer(reply, RegistrationAccepted(registration=registration))
            return (*accepted, *self._carry_on(result.record, now))
        if record.extends:
            return NOTHING  # another registrar was faster
        if result.field == "version":
            self._close(registration)
        return self._turn_away(reply, _taken(result.field, record.request), now, record.request)

    def _carry_on(self, record: RegistrationRecord, now: float) -> Iterable[Effect]:
        """Go on with a registration that is kept as this registrar's."""
        if record.version is None:
            return (self._claim(record, ""),)
        kept = self._records.get(record.registration)
        if kept is None or not kept.cancelled:  # since the edge has read it
            kept = self._records[record.registration] = record
        return self._registrations.add(kept, now)

    def _operate(self, envelope: Envelope) -> Iterable[Effect]:
        """An operator's verb, which the subject names."""
        if envelope.reply and any(envelope.reply == reply for reply, _ in self._changes.values()):
            return NOTHING  # sent again, since it takes long, and refused by what it has done already: the first answer is for both
        request = verb_asked(envelope.subject.rpartition(".")[2], envelope.message)
        if isinstance(request, Error):
            return refuse(envelope.reply, request)
        alive = self._registrations.workers.alive(envelope.now, WORKER_TIMEOUT_S)
        refused = refusal(request, self._catalog) or self._room.refuse(request, self._catalog, alive)
        if refused is not None:
            return refuse(envelope.reply, refused)
        if isinstance(request, DrainWorker):
            return self._drain(request, envelope.reply, [one.worker for one in alive])
        return (self._change(request, envelope.reply),)

    def _change(self, request: AdminVerb, reply: str) -> Effect:
        self._change_count += 1
        self._changes[self._change_count] = reply, getattr(request, "app", "")
        return Do(("admin", self._change_count), request, COMMAND_S)

    def _drain(self, request: DrainWorker, reply: str, alive: list[str]) -> Iterable[Effect]:
        """As an operator wants it: epoch 0, which no controller has."""
        if request.worker not in alive:
            known = ", ".join(sorted(alive)) or "none"
            return refuse(
                reply,
                error_of(f"worker: no worker {request.worker} runs: there are {known}{meant(request.worker, alive)}"),
            )
        order = Drain(epoch=0, reason="an operator's order", orderer="operator", resume=request.resume)
        return (Publish(self._subjects.worker(request.worker, "drain"), order), *answer(reply, AdminDone()))

    def _place_container(self, envelope: Envelope) -> Iterable[Effect]:
        place = place_of(envelope.message, self._catalog, self._settings.agreement)
        return refuse(envelope.reply, place) if isinstance(place, Error) else answer(envelope.reply, place)

    def _status_request(self, envelope: Envelope) -> Iterable[Effect]:
        """Registrars publish statuses on the same subject; only a message with a reply subject is a request."""
        registration = envelope.subject.rpartition(".")[2]
        if envelope.subject == self._subjects.registration_cancel(registration):
            return self._cancel(registration, envelope.reply)
        status = self._statuses.last(registration)
        if status is None:
            return refuse(envelope.reply, _unknown(registration))
        return answer(envelope.reply, status)

    def _cancel(self, registration: str, reply: str) -> Iterable[Effect]:
        status = self._statuses.last(registration)
        if status is not None and status.state == "failed":
            self._cancelling.setdefault(registration, []).append(reply)
            self._dismissing[registration] = status
            return (Do(("dismiss", registration), PutStatus(registration, None), COMMAND_S),)
        if status is not None and status.state in OVER:
            return refuse(reply, error_of(f"registration: {registration} has ended already: it is {status.state}"))
        if status is None and registration not in self._records:
            return refuse(reply, _unknown(registration))
        self._cancelling.setdefault(registration, []).append(reply)
        return (Do(("cancel", registration), MarkCancelled(registration), COMMAND_S),)

    def _cancelled(self, registration: str, error: Error | None) -> list[Effect]:
        said = RegistrationCancelled() if error is None else Refusal(error=error)
        return [effect for reply in self._cancelling.pop(registration, []) for effect in answer(reply, said)]

    def _dismissed(self, registration: str, now: float) -> Iterable[Effect]:
        """A failed registration is nobody's concern any more. The history keeps it."""
        self._statuses.forget(registration)
        status = self._dismissing.pop(registration, None)
        event = [] if status is None else [Record(filled(RegistrationEvent, status, time=now, state="dismissed"))]
        return [*self._cancelled(registration, None), *event]

    # -- results of commands

    def _done(self, envelope: Envelope) -> Iterable[Effect]:
        result, now = envelope.message.result, envelope.now
        kind, which = command = envelope.message.id
        if kind == "claim":
            return self._claimed(which, result, now)
        if kind == "takeover":
            self._takeovers.ended(which)
            return NOTHING if result is None else self._carry_on(result, now)
        if kind == "admin":
            reply, app = self._changes.pop(which)
            if isinstance(result, Error):
                return refuse(reply, told(result, app, self._catalog))
            if isinstance(result, Pruned):
                self._prune_at = now + PRUNE_S
                return (*self._kept(result), *answer(reply, AdminDone(note=result.note)))
            if isinstance(result, ContextsDeleted):
                gone = ContextChanged(result.app, result.key, 0, None)
                return (Publish(self._subjects.selection("changed"), gone), *answer(reply, AdminDone()))
            note = result.note if isinstance(result, Noted | ReleaseMoved) else ""
            return (*moved(result), *answer(reply, AdminDone(note=note or UNSET)))
        if kind == "cancel":
            return self._cancelled(which, result)
        if kind == "dismiss":
            return self._dismissed(which, now)
        if kind in (MOVE, KEEP):
            self._releases.ended(command, failed=False)
            return moved(result)
        if kind == "records":
            released = self._registrations.release_of(which) if result is None else ()
            written = self._registrations.written(which, result, now)
            return (*written, *(self._change(start, "") for start in released))
        if kind == "first":
            return self._registrations.first_written(which, result, now)
        if kind == "status":
            return self._registrations.saved(which)
        if kind == "finish":
            self._close(which)
            self._registrations.forgotten(which)
        if kind in ("finish", "prune"):
            return self._kept(result)
        if command == SIMULATED:
            self._simulated.ended()
        return NOTHING

    def _kept(self, result: Pruned | None) -> tuple[Effect, ...]:
        """Workers may delete their copies of all other files."""
        if result is None or result.kept is None:
            return NOTHING
        return (Publish(self._subjects.registrar("kept"), result.kept),)

    def _not_done(self, envelope: Envelope) -> Iterable[Effect]:
        """A request is refused; what must succeed is tried again."""
        kind, which = command = envelope.message.id
        if command == SIMULATED:
            self._simulated.ended()
        elif kind in (MOVE, KEEP):
            self._releases.ended(command, failed=True)
        elif kind in ("prune", "forget"):
            return NOTHING  # there is another night, or another start
        elif kind == "takeover":
            self._takeovers.ended(which)
        elif kind in ("cancel", "dismiss"):
            self._dismissing.pop(which, None)
            return self._cancelled(which, not_now("the registration cannot be marked", envelope.message, RETRY_S))
        elif kind in ("claim", "admin"):
            reply = self._claims.pop(which)[1] if kind == "claim" else self._changes.pop(which)[0]
            return refuse(reply, not_now("the catalogue cannot be written", envelope.message, RETRY_S))
        else:
            return self._commands.failed(command)
        return NOTHING

    # -- time

    def _heartbeat(self, *, leaving: bool = False) -> Effect:
        return Publish(self._subjects.registrar("alive"), RegistrarHeartbeat(registrar=self._name, leaving=leaving))

    def _registrar_heartbeat(self, envelope: Envelope) -> Iterable[Effect]:
        heartbeat: RegistrarHeartbeat = envelope.message
        self._takeovers.heard(heartbeat.registrar, envelope.now, leaving=heartbeat.leaving)
        return NOTHING

    def _tick(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        effects = [After("tick", TICK_S, envelope.message), self._heartbeat(), *self._registrations.check(now)]
        if not self._gate.unsynced:
            effects += self._take_over(now)
            effects += self._releases.check(now)
            effects += self._simulated.check(now)
            effects += self._statuses.forget_oldest(self._catalog)
            unfinished = (*self._records.values(), *(record for record, _ in self._claims.values()))
            effects += [self._claim(record, "") for record in self._extensions.due(now, self._name, unfinished)]
            if self._prune_at is None:
                self._prune_at = now + PRUNE_S
            if self._prune_at <= now:
                effects.append(Do(("prune", ""), Prune(), COMMAND_S))
                self._prune_at = (now // DAY_S + 1) * DAY_S + NIGHT_S
        return effects

    def _take_over(self, now: float) -> list[Do]:
        """Carry on unfinished registrations that nobody does."""
        busy = (self._registrations.open, self._claims, self._closed)
        idle = [(name, one.registrar) for name, one in self._records.items() if not any(name in ids for ids in busy)]
        return self._takeovers.start(idle, now, self._gate.synced_at)


def _printable(name: str) -> str:
    """A text that may be no valid name, as the database can keep it."""
    return name[:MOST_TASK].replace("\0", "\ufffd")


def _unknown(registration: str) -> Error:
    return error_of(f"registration: there is none with the id {registration}")


def _taken(field: str, request: Register) -> Error:
    if field == "version":
        named = f"version {request.version} of model {request.model}"
        text = f"version: {named} is registered already, or being registered, or was deleted; give another one, or none to get the next"
    else:
        text = "registration: this id is in use already; give another one, or none"
    return Error(code="bad_request", message=text, field=field)


def make_registrar(settings: Settings, subjects: Subjects, name: str, new_id: Callable[[], str]) -> Registrar:
    """A registrar. Parameters as for `Registrar`."""
    room = Ceiling(kinds=settings.machines.kinds, monitor=settings.monitor, cache_mb=settings.dispatcher.cache_mb)
    return Registrar(name, subjects, settings.registrar, new_id, room)


# -- metrics


def families(actor: Registrar) -> Iterable[MetricFamily]:
    unfinished = gauge("infaas_registrations_under_way", "Registrations that have not ended, all registrars'.")
    unfinished.add(len(actor._records))
    return (unfinished,)


def missing(actor: Registrar, _now: float) -> str:
    return "the catalogue" if actor._gate.unsynced else ""
