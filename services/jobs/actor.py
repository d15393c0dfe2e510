"""The coordinator of offline jobs: takes them in, carries each to its one end, and tells how far it is.

One of the queue group takes a job and keeps it in the jobs bucket before it answers; whoever is alive goes on with the jobs of a
coordinator that died. Inputs are cut into chunks that workers take when they are calm (runner/); outputs are written in order.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from bus.messages.jobs import (
    OVER,
    JobAccepted,
    JobCancelled,
    JobRecord,
    JobsHeartbeat,
    JobStatus,
    PartStored,
    RunnerNote,
    SubmitJob,
)
from bus.messages.public import Code, Error, Listing, ListRequest, Refusal
from bus.rights import app_of
from bus.subjects import JOBS, Subjects
from services.core.actor import (
    After,
    Changed,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Inlet,
    Publish,
    Recorded,
    Started,
    Stopping,
    Synced,
    TimedOut,
    Watch,
)
from services.core.catalog import Catalog
from services.core.metric import MetricFamily
from services.jobs.commands import Abandon, Accept, CancelResult, ForgetJob, Keep, MarkCancelled, TakeOverJob
from services.jobs.job import ActiveJob
from services.jobs.policy import Limits, check, listed, record_of, route_of
from services.jobs.status import QUIET_S, JobStatuses

AGAIN_S = 2.0
NOTHING: tuple[Effect, ...] = ()
_decode = msgspec.msgpack.Decoder(JobRecord).decode


class Sweep(Struct, frozen=True):
    """Time to look for silence."""


class Again(Struct, frozen=True):
    """Time to do something that failed, or was put off."""

    effect: Do


class Coordinator:
    """name: different for each process. new_id: makes job ids where the client gave none."""

    def __init__(
        self, name: str, subjects: Subjects, limits: Limits, prices: Mapping[str, float], new_id: Callable[[], str]
    ) -> None:
        self._name = name
        self._subjects = subjects
        self._own_space = f"{subjects.prefix}."
        self._limits = limits
        self._prices = prices
        self._new_id = new_id
        self._catalog = Catalog()
        self._unsynced = {subjects.catalog_bucket, subjects.jobs_bucket}
        self._synced_at = 0.0
        self._held: list[Envelope] = []
        self._records: dict[str, JobRecord] = {}
        self._courses: dict[str, ActiveJob] = {}
        self._asked: dict[str, tuple[str, ActiveJob]] = {}  # being accepted: reply subject and course
        self._cancelling: dict[str, list[str]] = {}
        self._taking: set[str] = set()
        self._others: dict[str, float] = {}
        self._news = JobStatuses(subjects)
        self._doing: dict[Any, Do] = {}
        self._takes: dict[type, Callable[[Envelope], Iterable[Effect]]] = {
            SubmitJob: self._on_submit,
            ListRequest: self._on_list,
            bytes: self._on_question,
            PartStored: self._on_part,
            RunnerNote: self._on_note,
            JobsHeartbeat: self._on_other,
            Changed: self._on_changed,
            Synced: self._on_synced,
            Done: self._on_done,
            Failed: self._on_not_done,
            TimedOut: self._on_not_done,
            Again: lambda envelope: (self._do(envelope.message.effect),),
            Sweep: self._on_sweep,
            Started: lambda _: (After("sweep", limits.sweep_s, Sweep()), self._alive()),
            Stopping: lambda _: (self._alive(leaving=True),),
            Recorded: lambda _: NOTHING,
        }

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        s = self._subjects
        return (
            Inlet(subject=s.offline("alive"), message=JobsHeartbeat),
            Inlet(subject=s.offline("part"), message=PartStored),
            Inlet(subject=s.offline("note"), message=RunnerNote),
            Inlet(subject=s.job_status(), message=bytes, queue=JOBS),
            Inlet(subject=s.job_cancel(), message=bytes, queue=JOBS),
            Inlet(subject=s.list("jobs"), message=ListRequest, queue=JOBS),
            Inlet(subject=s.job(), message=SubmitJob, queue=JOBS),
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        return (Watch(bucket=self._subjects.catalog_bucket), Watch(bucket=self._subjects.jobs_bucket))

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        """Take one message; see services.core.actor."""
        if self._unsynced and isinstance(envelope.message, (SubmitJob, ListRequest, bytes)):
            self._held.append(envelope)
            return NOTHING
        return list(self._takes[type(envelope.message)](envelope))

    # -- requests

    def _answer(self, reply: str, message: Any) -> Iterator[Effect]:
        """To the sender's own inbox, never into the system."""
        if reply and not reply.startswith(self._own_space):
            yield Publish(reply, message)

    def _refuse(self, reply: str, code: Code, text: str) -> Iterator[Effect]:
        return self._answer(reply, Refusal(error=Error(code=code, message=text)))

    def _on_submit(self, envelope: Envelope) -> Iterator[Effect]:
        ask: SubmitJob = envelope.message
        app = envelope.subject.rpartition(".")[2]
        error = check(app, ask, self._catalog, self._subjects.prefix, self._prices, self._limits)
        if error is not None:
            yield from self._answer(envelope.reply, Refusal(error=error))
            return
        job = ask.job or self._new_id()
        known = self._records.get(job)
        if known is not None and _same(known.status, app, ask):
            yield from self._answer(envelope.reply, JobAccepted(job=job))  # the client asks again: its job is here
        elif (taking := self._asked.get(job)) is not None:
            if _same(taking[1].record.status, app, ask):
                self._asked[job] = (envelope.reply, taking[1])
            else:
                yield from self._refuse(envelope.reply, "bad_request", f"job: the id {job} is in use already")
        elif rival := next((r.status.job for r in self._running() if r.status.output == ask.output), ""):
            text = f"output: job {rival} writes there: choose another name, or wait"
            yield from self._refuse(envelope.reply, "bad_request", text)
        else:
            record = record_of(app, ask, job, self._name, envelope.now, self._catalog, self._prices, self._limits)
            route = route_of(record.status, self._catalog, self._subjects.prefix, self._limits)
            if route is None:
                text = f"app: {app} has no signature yet: nothing is known of its inputs"
                yield from self._refuse(envelope.reply, "unsatisfiable", text)
                return
            self._asked[job] = (envelope.reply, ActiveJob(record, route, self._limits.window))
            yield self._do(Do(("accept", job), Accept(route, record), 30.0))

    def _running(self) -> list[JobRecord]:
        own = [course.record for course in self._courses.values()] + [
            course.record for _, course in self._asked.values()
        ]
        return [r for r in (*self._records.values(), *own) if r.status.state not in OVER]

    def _on_list(self, envelope: Envelope) -> Iterator[Effect]:
        ask: ListRequest = envelope.message
        records = self._records | {job: course.record for job, course in self._courses.items()}
        items = [msgspec.to_builtins(status) for status in listed(records.values(), ask.app, ask.model)]
        yield from self._answer(envelope.reply, Listing(items=items))

    def _on_question(self, envelope: Envelope) -> Iterator[Effect]:
        """Our own statuses come by here too: only what carries a reply subject is a request."""
        if not envelope.reply:
            return
        job = envelope.subject.rpartition(".")[2]
        course = self._courses.get(job)
        record = course.record if course is not None else self._records.get(job)
        foreign = record is not None and app_of(envelope.reply) not in ("", record.status.app)
        if envelope.subject == self._subjects.job_cancel(job) and not foreign:
            self._cancelling.setdefault(job, []).append(envelope.reply)
            yield self._do(Do(("cancel", job), MarkCancelled(job, envelope.now), 10.0))
        elif record is None or foreign:
            yield from self._refuse(envelope.reply, "bad_request", f"job: there is none with the id {job}")
        else:
            yield from self._answer(envelope.reply, self._news.with_notes(record.status, envelope.now))

    # -- what the buckets hold

    def _on_changed(self, envelope: Envelope) -> Iterator[Effect]:
        changed: Changed = envelope.message
        if changed.bucket == self._subjects.catalog_bucket:
            self._catalog.apply(changed.key, changed.value)
            return
        self._records.pop(changed.key, None)
        if changed.value is None:
            return
        try:
            record = self._records[changed.key] = _decode(changed.value)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # another release wrote it, and knows what to do with it
        if record.status.state == "cancelled":
            yield from self._stop(record)
        elif record.owner != self._name:
            self._courses.pop(changed.key, None)

    def _stop(self, record: JobRecord) -> Iterator[Effect]:
        """The job was cancelled: nothing more of it is done here."""
        course = self._courses.pop(record.status.job, None)
        if course is not None:
            abandon = Do(("clean", course.job), Abandon(course.route, record.checkpoint, keep=False))
            yield After(abandon.id, self._limits.sweep_s, Again(abandon))  # once what is under way has ended

    def _on_synced(self, envelope: Envelope) -> Iterator[Effect]:
        self._unsynced.discard(envelope.message.bucket)
        if self._unsynced:
            return
        self._synced_at = envelope.now
        held, self._held = self._held, []
        for request in held:
            yield from self.handle(request)

    # -- what the edge did

    def _do(self, effect: Do) -> Do:
        self._doing[effect.id] = effect
        return effect

    def _follow(self, effects: Iterable[Effect]) -> Iterator[Effect]:
        """What a course wants done."""
        for effect in effects:
            yield self._do(effect) if isinstance(effect, Do) else effect

    def _on_done(self, envelope: Envelope) -> Iterator[Effect]:
        done: Done = envelope.message
        now, result = envelope.now, done.result
        what, job = done.id
        self._doing.pop(done.id, None)
        if what == "accept":
            yield from self._accepted(job, result, now)
        elif what == "cancel":
            yield from self._cancelled(job, result, now)
        elif what == "takeover":
            self._taking.discard(job)
            if result is not None:
                yield from self._adopt(result, now)
        course = self._courses.get(job)
        if course is None:
            return
        match what:
            case "read":
                effects = course.was_read(result, now)
            case "resume":
                effects = course.resumed(result)
            case "feed":
                effects = course.fed(result)
            case "assemble":
                effects = course.assembled(result, now)
            case "conclude":
                effects = course.concluded(result, now)
            case "abandon":
                effects = course.abandoned(result, now)
            case "keep" if result:
                self._records[job] = course.record
                yield from self._news.tell(course.status, now)
                effects = course.kept()
                if course.over:
                    del self._courses[job]
            case "keep":  # somebody else has it now
                del self._courses[job]
                return
            case _:
                return
        yield from self._follow(effects)

    def _accepted(self, job: str, error: Error | None, now: float) -> Iterator[Effect]:
        reply, course = self._asked.pop(job)
        if error is not None:
            yield from self._answer(reply, Refusal(error=error))
            return
        self._records[job] = course.record
        self._courses[job] = course
        course.moved = now
        yield from self._answer(reply, JobAccepted(job=job))
        yield from self._news.tell(course.status, now)
        yield from self._follow(course.begin())

    def _cancelled(self, job: str, result: CancelResult, now: float) -> Iterator[Effect]:
        replies = self._cancelling.pop(job, [])
        for reply in replies:
            yield from self._answer(reply, JobCancelled() if result.error is None else Refusal(error=result.error))
        if result.record is not None:
            self._records[job] = result.record
            yield from self._stop(result.record)
            yield from self._news.tell(result.record.status, now)

    def _on_not_done(self, envelope: Envelope) -> Iterator[Effect]:
        """The bus was away, mostly: a request is refused, a course tries again."""
        message: Failed | TimedOut = envelope.message
        what, job = message.id
        effect = self._doing.pop(message.id, None)
        why = message.error if isinstance(message, Failed) else "it took too long"
        error = Error(code="overloaded", message=f"jobs cannot be kept now, try again: {why}", retry_after_ms=2000.0)
        if what == "accept":
            yield from self._answer(self._asked.pop(job)[0], Refusal(error=error))
        elif what == "cancel":
            for reply in self._cancelling.pop(job, []):
                yield from self._answer(reply, Refusal(error=error))
        elif what == "takeover":
            self._taking.discard(job)
        elif effect is not None and what != "forget" and (job in self._courses or what == "clean"):
            yield After(message.id, AGAIN_S, Again(effect))

    # -- runners

    def _on_part(self, envelope: Envelope) -> Iterator[Effect]:
        stored: PartStored = envelope.message
        course = self._courses.get(stored.job)
        if course is not None:
            yield from self._follow(course.part(stored.number))

    def _on_note(self, envelope: Envelope) -> Iterable[Effect]:
        self._news.note(envelope.message, envelope.now)
        return NOTHING

    # -- life and silence

    def _alive(self, *, leaving: bool = False) -> Effect:
        return Publish(self._subjects.offline("alive"), JobsHeartbeat(coordinator=self._name, leaving=leaving))

    def _on_other(self, envelope: Envelope) -> Iterable[Effect]:
        beat: JobsHeartbeat = envelope.message
        self._others[beat.coordinator] = float("-inf") if beat.leaving else envelope.now
        return NOTHING

    def _on_sweep(self, envelope: Envelope) -> Iterator[Effect]:
        now = envelope.now
        yield After("sweep", self._limits.sweep_s, envelope.message)
        yield self._alive()
        if self._unsynced:
            return
        for course in list(self._courses.values()):
            yield from self._news.tell(course.status, now)
            if now - course.moved > QUIET_S:
                course.moved = now
                yield from self._follow(course.look())
        yield from self._look_for_orphans(now)
        yield from self._forget()

    def _look_for_orphans(self, now: float) -> Iterator[Effect]:
        """Jobs that nobody carries on: of coordinators that are gone, and ours from an earlier life."""
        for job, record in list(self._records.items()):
            if record.status.state in OVER or any(job in known for known in (self._courses, self._asked, self._taking)):
                continue
            silent = now - self._others.get(record.owner, self._synced_at)
            if record.owner == self._name or silent > self._limits.silence_s:
                self._taking.add(job)
                yield self._do(Do(("takeover", job), TakeOverJob(job, self._name, record.owner), 10.0))

    def _adopt(self, record: JobRecord, now: float) -> Iterator[Effect]:
        job = record.status.job
        route = route_of(record.status, self._catalog, self._subjects.prefix, self._limits)
        if route is None:
            reason = f"app: {record.status.app} was deleted, or has no models any more"
            status = msgspec.structs.replace(record.status, state="failed", step="", reason=reason, finished=now)
            self._records[job] = msgspec.structs.replace(record, status=status)
            yield self._do(Do(("close", job), Keep(self._records[job]), 10.0))
            yield from self._news.tell(status, now)
            return
        course = self._courses[job] = ActiveJob(record, route, self._limits.window)
        self._records[job] = record
        course.moved = now
        yield from self._news.tell(course.status, now)
        yield from self._follow(course.begin())

    def _forget(self) -> Iterator[Effect]:
        """Of jobs that have ended, the latest are remembered."""
        ended = [record.status for record in self._records.values() if record.status.state in OVER]
        if len(ended) > self._limits.keep:
            ended.sort(key=lambda status: status.finished or status.created)
            for status in ended[: len(ended) - self._limits.keep]:
                self._records.pop(status.job, None)
                yield self._do(Do(("forget", status.job), ForgetJob(status.job), 10.0))


def _same(status: JobStatus, app: str, ask: SubmitJob) -> bool:
    """Whether a job is the very one that is asked for."""
    fields = ("input", "output", "accuracy", "model", "variant")
    return status.app == app and all(getattr(status, field) == getattr(ask, field) for field in fields)


# -- metrics


def families(actor: Coordinator) -> Iterable[MetricFamily]:
    jobs = MetricFamily("infaas_jobs", "gauge", "Offline jobs that are remembered, by their state.")
    for state, count in Counter(record.status.state for record in actor._records.values()).items():
        jobs.add(count, state=state)
    return (jobs,)


def missing(actor: Coordinator, now: float) -> str:
    del now
    return "the catalogue and the jobs" if actor._unsynced else ""
