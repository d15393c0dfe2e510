"""The registrar: takes models in, has a worker inspect, build and profile them, and writes what works into the catalogue.

One of the queue group takes a request and keeps it as `work.<id>` before it answers; whoever is alive goes on with the work of
a registrar that died. Every registration ends in exactly one `done` or `failed`. Operators' verbs for the catalogue come here too.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from bus.messages.events import RegistrationEvent
from bus.messages.fleet import ExecutorExited, WorkerHeartbeat
from bus.messages.public import AdminDone, AdminRequest, Code, Error, Refusal, Register, RegistrationAccepted
from bus.messages.work import (
    ModelInspected,
    RegistrarHeartbeat,
    VariantBuilt,
    VariantFailed,
    WorkFinished,
    WorkProgress,
)
from bus.subjects import REGISTRARS, Subjects
from services.core.actor import (
    After,
    Changed,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Inlet,
    Malformed,
    Publish,
    Record,
    Recorded,
    Started,
    Stopping,
    Synced,
    TimedOut,
    Watch,
)
from services.core.catalog import Catalog
from services.core.metric import MetricFamily
from services.registrar.changes import change_for
from services.registrar.checks import MOST_TEXT, registration_error
from services.registrar.commands import (
    AlreadyTaken,
    Change,
    ChangeApp,
    ChangeRefused,
    ClaimRegistration,
    RegistrationClaimed,
    RegistrationRecord,
    TakeOverRegistration,
)
from services.registrar.hardware import SIMULATED, Extensions, SimulatedVariants
from services.registrar.policy import Rules, next_version
from services.registrar.registrations import COMMAND_S, Registrations
from services.registrar.status import PREFIX as STATUS
from services.registrar.status import RegistrationStatuses

SWEEP_S = 1.0
AGAIN_S = 2.0
WORK = "work."
NOTHING: tuple[Effect, ...] = ()

_decode_work = msgspec.msgpack.Decoder(RegistrationRecord).decode


class Sweep(Struct, frozen=True):
    """Time to look for silence."""


class Again(Struct, frozen=True):
    """Time to repeat a command that failed."""

    id: Any


class Registrar:
    """name: a subject token, different for each process. new_id: makes registration ids where the client gave none."""

    def __init__(self, name: str, subjects: Subjects, rules: Rules, new_id: Callable[[], str]) -> None:
        self._name = name
        self._subjects = subjects
        self._own_space = f"{subjects.prefix}."
        self._rules = rules
        self._new_id = new_id
        self._catalog = Catalog()
        self._statuses = RegistrationStatuses(subjects)
        self._floor = Registrations(subjects, rules, self._catalog, self._statuses, self._undelivered)
        self._simulating = SimulatedVariants(self._catalog, rules, self._floor.simulated_kinds)
        self._fitting = Extensions(self._catalog, self._statuses, rules, self._floor.accelerators)
        self._unsynced = {subjects.catalog_bucket, subjects.status_bucket}
        self._synced_at = 0.0
        self._held: list[Envelope] = []  # requests that came before the catalogue was known
        self._works: dict[str, RegistrationRecord] = {}  # all unfinished registrations, ours and others'
        self._closed: set[str] = (
            set()
        )  # not ours to adopt: ended, refused or unreadable; the bucket's news may come late
        self._claims: dict[str, tuple[RegistrationRecord, str]] = {}  # being claimed, with the reply subject
        self._taking: set[str] = set()
        self._registrars: dict[str, float] = {}
        self._asked: dict[int, str] = {}  # operator's change -> reply subject
        self._changes = 0
        self._takes: dict[type, Callable[[Envelope], Iterable[Effect]]] = {
            Register: self._on_register,
            Malformed: self._on_malformed,
            AdminRequest: self._on_admin,
            bytes: self._on_status_request,
            RegistrarHeartbeat: self._on_registrar,
            Changed: self._on_changed,
            Synced: self._on_synced,
            Done: self._on_done,
            Failed: self._on_not_done,
            TimedOut: self._on_not_done,
            Again: self._on_again,
            Sweep: self._on_sweep,
            Started: self._on_started,
            Stopping: self._on_stopping,
            Recorded: lambda _: NOTHING,
            **self._floor.takes,
        }

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        s = self._subjects
        return (
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
            Inlet(subject=s.admin(), message=AdminRequest, queue=REGISTRARS),
            Inlet(subject=s.register(), message=Register, queue=REGISTRARS, malformed=True),
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        return (Watch(bucket=self._subjects.catalog_bucket), Watch(bucket=self._subjects.status_bucket))

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        """Take one message; see services.core.actor."""
        if self._unsynced and isinstance(envelope.message, (Register, AdminRequest, bytes)):
            self._held.append(envelope)
            return NOTHING
        return list(self._takes[type(envelope.message)](envelope))

    def _undelivered(self, registration: str) -> str:
        return self._subjects.registrar(f"undelivered.{self._name}.{registration}")

    # -- what the buckets hold

    def _on_changed(self, envelope: Envelope) -> Iterable[Effect]:
        changed: Changed = envelope.message
        if changed.bucket == self._subjects.catalog_bucket:
            self._catalog.apply(changed.key, changed.value)
        elif changed.key.startswith(STATUS):
            self._statuses.fold(changed.key.removeprefix(STATUS), changed.value)
        elif changed.key.startswith(WORK):
            registration = changed.key.removeprefix(WORK)
            self._works.pop(registration, None)
            if changed.value is not None and registration not in self._closed:
                try:
                    self._works[registration] = _decode_work(changed.value)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    self._closed.add(registration)  # another release wrote it, and knows what to do with it
        return NOTHING

    def _on_synced(self, envelope: Envelope) -> Iterator[Effect]:
        self._unsynced.discard(envelope.message.bucket)
        if self._unsynced:
            return
        self._synced_at = envelope.now
        held, self._held = self._held, []
        for request in held:
            yield from self.handle(request)

    # -- requests

    def _answer(self, reply: str, message: Any) -> Iterator[Effect]:
        """To the sender's own inbox, never into the system."""
        if reply and not reply.startswith(self._own_space):
            yield Publish(reply, message)

    def _refuse(self, reply: str, code: Code, text: str) -> Iterator[Effect]:
        return self._answer(reply, Refusal(error=Error(code=code, message=text)))

    def _on_register(self, envelope: Envelope) -> Iterator[Effect]:
        request: Register = envelope.message
        registration = request.registration or self._new_id()
        error = registration_error(request, self._rules)
        if error is not None:
            yield from self._turn_away(envelope.reply, error, envelope.now, request)
        elif registration in self._claims or registration in self._works or self._statuses.last(registration):
            yield from self._turn_away(envelope.reply, _taken("registration", request), envelope.now, request)
        elif request.version is not None and self._catalog.model(request.model, request.version) is not None:
            yield from self._turn_away(envelope.reply, _taken("version", request), envelope.now, request)
        else:
            work = RegistrationRecord(
                registration=registration, request=request, registrar=self._name, created=envelope.now
            )
            yield self._claim(work, envelope.reply)

    def _on_malformed(self, envelope: Envelope) -> Iterator[Effect]:
        error = Error(code="bad_request", message=envelope.message.error)
        return self._turn_away(envelope.reply, error, envelope.now)

    def _turn_away(self, reply: str, error: Error, now: float, request: Register | None = None) -> Iterator[Effect]:
        """Refuse a registration that has not begun; it is counted under an id of ours, which cannot be anybody else's."""
        yield from self._answer(reply, Refusal(error=error))
        yield Record(
            RegistrationEvent(
                time=now,
                registration=self._new_id(),
                app=_printable(request.app) if request is not None else "",
                model=_printable(request.model) if request is not None else "",
                version=_printable(request.version) if request is not None and request.version is not None else None,
                state="refused",
                reason=error.message,
                progress=0.0,
            )
        )

    def _claim(self, work: RegistrationRecord, reply: str) -> Effect:
        self._claims[work.registration] = (work, reply)
        first = next_version(self._catalog.versions(work.request.model))
        return Do(("claim", work.registration), ClaimRegistration(work=work, next_version=first), COMMAND_S)

    def _on_claimed(
        self, registration: str, result: RegistrationClaimed | AlreadyTaken, now: float
    ) -> Iterator[Effect]:
        work, reply = self._claims.pop(registration)
        if isinstance(result, RegistrationClaimed):
            yield from self._answer(reply, RegistrationAccepted(registration=registration))
            yield from self._adopt(result.work, now)
            return
        if work.hardware != "cpu":
            return  # another registrar was faster
        if result.field == "version":
            self._closed.add(registration)
            self._works.pop(registration, None)
        yield from self._turn_away(reply, _taken(result.field, work.request), now, work.request)

    def _adopt(self, work: RegistrationRecord, now: float) -> Iterator[Effect]:
        """Go on with a registration that is kept as ours."""
        if work.version is None:
            yield self._claim(work, "")
        else:
            self._works[work.registration] = work
            yield from self._floor.add(work, now)

    def _on_admin(self, envelope: Envelope) -> Iterator[Effect]:
        verb = envelope.subject.rpartition(".")[2]
        change = change_for(verb, envelope.message, self._catalog, envelope.now)
        if isinstance(change, Error):
            yield from self._refuse(envelope.reply, change.code, change.message)
            return
        self._changes += 1
        self._asked[self._changes] = envelope.reply
        command = ChangeApp(change) if isinstance(change, Change) else change
        yield Do(("admin", self._changes), command, COMMAND_S)

    def _on_status_request(self, envelope: Envelope) -> Iterator[Effect]:
        """Our own statuses come by here too: only what carries a reply subject is a request."""
        if not envelope.reply:
            return
        registration = envelope.subject.rpartition(".")[2]
        status = self._statuses.last(registration)
        if status is None:
            text = f"registration: there is none with the id {registration}"
            yield from self._refuse(envelope.reply, "bad_request", text)
        else:
            yield from self._answer(envelope.reply, status)

    # -- what the edge did

    def _on_done(self, envelope: Envelope) -> Iterator[Effect]:
        done: Done = envelope.message
        kind, which = done.id
        if done.id == SIMULATED:
            self._simulating.ended()
        elif kind == "claim":
            yield from self._on_claimed(which, done.result, envelope.now)
        elif kind == "takeover":
            self._taking.discard(which)
            if done.result is not None:
                yield from self._adopt(done.result, envelope.now)
        elif kind == "admin":
            refused: ChangeRefused | None = done.result
            reply = self._asked.pop(which)
            if refused is None:
                yield from self._answer(reply, AdminDone())
            else:
                yield from self._refuse(reply, refused.code, refused.message)
        elif kind == "records":
            yield from self._floor.written(which, done.result, envelope.now)
        elif kind == "status":
            effect = self._floor.saved(which)
            if effect is not None:
                yield effect
        elif kind == "finish":
            self._closed.add(which)
            self._works.pop(which, None)
            self._floor.forgotten(which)

    def _on_not_done(self, envelope: Envelope) -> Iterator[Effect]:
        message: Failed | TimedOut = envelope.message
        kind, which = message.id
        if message.id == SIMULATED:
            self._simulating.ended()
        elif kind == "takeover":
            self._taking.discard(which)
        elif kind in ("claim", "admin"):
            reply = self._claims.pop(which)[1] if kind == "claim" else self._asked.pop(which)
            why = message.error if isinstance(message, Failed) else "it took too long"
            text = f"the catalogue cannot be written now, try again: {why}"
            yield from self._answer(
                reply, Refusal(error=Error(code="overloaded", message=text, retry_after_ms=AGAIN_S * 1000))
            )
        else:
            yield After(message.id, AGAIN_S, Again(message.id))

    def _on_again(self, envelope: Envelope) -> Iterator[Effect]:
        yield self._floor.again(envelope.message.id)

    # -- life and silence

    def _on_started(self, _envelope: Envelope) -> Iterable[Effect]:
        return (After("sweep", SWEEP_S, Sweep()), self._alive())

    def _on_stopping(self, _envelope: Envelope) -> Iterable[Effect]:
        return (self._alive(leaving=True),)

    def _alive(self, *, leaving: bool = False) -> Effect:
        return Publish(self._subjects.registrar("alive"), RegistrarHeartbeat(registrar=self._name, leaving=leaving))

    def _on_registrar(self, envelope: Envelope) -> Iterable[Effect]:
        beat: RegistrarHeartbeat = envelope.message
        self._registrars[beat.registrar] = float("-inf") if beat.leaving else envelope.now
        return NOTHING

    def _on_sweep(self, envelope: Envelope) -> Iterator[Effect]:
        yield After("sweep", SWEEP_S, envelope.message)
        yield self._alive()
        yield from self._floor.sweep(envelope.now)
        if not self._unsynced:
            yield from self._look_for_orphans(envelope.now)
            yield from self._simulating.sweep(envelope.now)
            unfinished = (*self._works.values(), *(work for work, _ in self._claims.values()))
            for work in self._fitting.due(envelope.now, self._name, unfinished):
                yield self._claim(work, "")

    def _look_for_orphans(self, now: float) -> Iterator[Effect]:
        """Unfinished registrations that nobody works on: ours from an earlier life, and those of registrars that are gone."""
        for registration, work in list(self._works.items()):
            if any(registration in known for known in (self._floor.jobs, self._claims, self._taking, self._closed)):
                continue
            if work.registrar == self._name:
                yield from self._adopt(work, now)
            elif now - self._registrars.get(work.registrar, self._synced_at) > self._rules.registrar_timeout_s:
                self._taking.add(registration)
                command = TakeOverRegistration(registration=registration, registrar=self._name, previous=work.registrar)
                yield Do(("takeover", registration), command, COMMAND_S)


def _printable(name: str) -> str:
    """A name that may be none, as history can keep it."""
    return name[:MOST_TEXT].replace("\0", "\ufffd")


def _taken(field: str, request: Register) -> Error:
    if field == "version":
        named = f"version {request.version} of model {request.model}"
        text = f"version: {named} is registered already, or being registered, or was deleted; give another one, or none to get the next"
    else:
        text = "registration: this id is in use already; give another one, or none"
    return Error(code="bad_request", message=text)


# -- metrics


def families(actor: Registrar) -> Iterable[MetricFamily]:
    works = MetricFamily(
        "infaas_registrations_under_way", "gauge", "Registrations that have not ended, all registrars'."
    )
    works.add(len(actor._works))
    return (works,)


def missing(actor: Registrar, now: float) -> str:
    del now
    return "the catalogue" if actor._unsynced else ""
