"""The coordinator of offline jobs: takes them in, carries each to its one end, and publishes how far it is.

One coordinator of the queue group takes a job and keeps it in the jobs bucket before it answers. When that coordinator dies, another
carries the job on. Inputs are cut into chunks that workers take when they have capacity to spare (runner/); outputs are written in order.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec

from bus.codec import decode_kept
from bus.messages.jobs import (
    OVER,
    JobAccepted,
    JobCancelled,
    JobRecord,
    JobsHeartbeat,
    PartStored,
    RunnerNote,
    SubmitJob,
)
from bus.messages.public import Error, Listing, ListRequest
from bus.rights import app_of
from bus.subjects import JOBS, Subjects
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
    Publish,
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
from services.core.requests import Commands, Retry, SyncGate, TakeOvers, answer, not_now, refuse
from services.core.settings import JobsSettings, Settings
from services.jobs.commands import Abandon, Accept, CancelResult, ForgetJob, Keep, MarkJobCancelled
from services.jobs.job import ActiveJob, JobStatuses
from services.jobs.policy import JobPolicy, is_same, listed

RETRY_S = 2.0
TICK_S = 1.0
SILENCE_S = 3.0  # a coordinator without a heartbeat for so long is gone
QUIET_S = 5.0  # without progress of a job, after which the bucket of parts is read
COMMAND_S = 10.0
ACCEPT_S = 30.0


class Coordinator(TableActor):
    """name: different for each process. prices: US$ an hour by device kind. new_id: makes job ids where the client gave none.

    simulated: the whole system is simulated.
    """

    def __init__(
        self,
        name: str,
        subjects: Subjects,
        settings: JobsSettings,
        prices: Mapping[str, float],
        new_id: Callable[[], str],
        *,
        simulated: bool = False,
        tick_s: float = TICK_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._name = name
        self._subjects = subjects
        self._settings = settings
        self._new_id = new_id
        self._tick_s = tick_s
        self._catalog = Catalog()
        self._policy = JobPolicy(self._catalog, subjects, prices, settings, simulated=simulated)
        self._gate = SyncGate((subjects.catalog_bucket, subjects.jobs_bucket))
        self._takeovers = TakeOvers(name, silence_s, COMMAND_S)
        self._commands = Commands(RETRY_S)
        self._statuses = JobStatuses(subjects)
        self._records: dict[str, JobRecord] = {}  # all jobs, of all coordinators
        self._active: dict[str, ActiveJob] = {}  # that this coordinator carries on
        self._accepting: dict[str, tuple[str, ActiveJob]] = {}  # with the reply subject
        self._cancelling: dict[str, list[str]] = {}  # reply subjects
        self._on: dict[type, Handler] = {
            SubmitJob: self._gate.after(self._submit),
            ListRequest: self._gate.after(self._list),
            bytes: self._gate.after(self._status_or_cancel),
            PartStored: self._part_stored,
            RunnerNote: self._note,
            JobsHeartbeat: self._other_heartbeat,
            Changed: self._changed,
            Synced: self._gate.synced,
            Done: self._done,
            Failed: self._not_done,
            TimedOut: self._not_done,
            Retry: self._commands.retry,
            Tick: self._tick,
            Started: lambda _: (After("tick", tick_s, Tick()), self._heartbeat()),
            Stopping: lambda _: (self._heartbeat(leaving=True),),
            Recorded: lambda _: NOTHING,
        }
        s = self._subjects
        self.inlets = (
            Inlet(subject=s.offline("alive"), message=JobsHeartbeat),
            Inlet(subject=s.offline("part"), message=PartStored),
            Inlet(subject=s.offline("note"), message=RunnerNote),
            Inlet(subject=s.job_status(), message=bytes, queue=JOBS),
            Inlet(subject=s.job_cancel(), message=bytes, queue=JOBS),
            Inlet(subject=s.list("jobs"), message=ListRequest, queue=JOBS),
            Inlet(subject=s.job(), message=SubmitJob, queue=JOBS),
        )
        self.watches = (Watch(bucket=self._subjects.catalog_bucket), Watch(bucket=self._subjects.jobs_bucket))

    # -- requests

    def _submit(self, envelope: Envelope) -> Iterable[Effect]:
        ask: SubmitJob = envelope.message
        reply, app = envelope.reply, envelope.subject.rpartition(".")[2]
        error = self._policy.error(app, ask)
        if error is not None:
            return refuse(reply, error)
        job = ask.job or self._new_id()
        known = self._records.get(job)
        if known is not None and is_same(known.status, app, ask):
            return answer(reply, JobAccepted(job=job))  # the client asks again
        accepting = self._accepting.get(job)
        if accepting is not None:
            if not is_same(accepting[1].status, app, ask):
                return _refuse(reply, f"job: the id {job} is in use already")
            self._accepting[job] = (reply, accepting[1])
            return NOTHING
        target = self._policy.target(app, ask.output)
        rivals = (r.status for r in self._running())
        rival = next((one.job for one in rivals if self._policy.target(one.app, one.output) == target), "")
        if rival:
            return _refuse(reply, f"output: job {rival} writes there: choose another name, or wait")
        record = self._policy.record_of(app, ask, job, self._name, envelope.now)
        route = self._policy.route_of(record.status)
        if route is None:
            text = f"app: {app} has no signature yet: nothing is known of its inputs"
            return refuse(reply, Error(code="unsatisfiable", message=text))
        self._accepting[job] = (reply, ActiveJob(record, route, self._settings.window))
        return (self._commands.start(Do(("accept", job), Accept(route, record), ACCEPT_S)),)

    def _running(self) -> list[JobRecord]:
        own = (*self._active.values(), *(active for _, active in self._accepting.values()))
        records = (*self._records.values(), *(active.record for active in own))
        return [record for record in records if record.status.state not in OVER]

    def _list(self, envelope: Envelope) -> Iterable[Effect]:
        ask: ListRequest = envelope.message
        records = self._records | {job: active.record for job, active in self._active.items()}
        statuses = [
            self._statuses.with_notes(one, envelope.now) for one in listed(records.values(), ask.app, ask.model)
        ]
        items = [msgspec.to_builtins(status) for status in statuses]
        return answer(envelope.reply, Listing(items=items))

    def _status_or_cancel(self, envelope: Envelope) -> Iterable[Effect]:
        """Coordinators publish statuses on the same subject; only a message with a reply subject is a request."""
        reply = envelope.reply
        if not reply:
            return NOTHING
        job = envelope.subject.rpartition(".")[2]
        active = self._active.get(job)
        record = active.record if active is not None else self._records.get(job)
        foreign = record is not None and app_of(reply) not in ("", record.status.app)
        if envelope.subject == self._subjects.job_cancel(job) and not foreign:
            self._cancelling.setdefault(job, []).append(reply)
            return (self._commands.start(Do(("cancel", job), MarkJobCancelled(job, envelope.now), COMMAND_S)),)
        if record is None or foreign:
            return _refuse(reply, f"job: there is none with the id {job}: see infaas.list.jobs")
        return answer(reply, self._statuses.with_notes(record.status, envelope.now))

    # -- what the buckets hold

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        changed: Changed = envelope.message
        if changed.bucket == self._subjects.catalog_bucket:
            self._catalog.apply(changed.key, changed.value)
            return NOTHING
        self._records.pop(changed.key, None)
        record = decode_kept(JobRecord, changed.value)
        if record is None:
            return NOTHING  # it is gone, or a coordinator of another release wrote it and carries it on
        self._records[changed.key] = record
        if record.status.state == "cancelled":
            return self._stop(record)
        if record.owner != self._name:
            self._let_go(changed.key)
        return NOTHING

    def _let_go(self, job: str) -> ActiveJob | None:
        """Another carries it on, or nobody."""
        self._statuses.forget(job)
        return self._active.pop(job, None)

    def _stop(self, record: JobRecord) -> tuple[Effect, ...]:
        """The job was cancelled. What it leaves behind is cleared away after its command under way has ended."""
        active = self._let_go(record.status.job)
        if active is None:
            return NOTHING
        abandon = Do(("clean", active.job), Abandon(active.route, record.checkpoint, keep=False))
        return (After(abandon.id, self._tick_s, Retry(abandon)),)

    # -- results of commands

    def _start_all(self, commands: Iterable[Do]) -> list[Do]:
        return [self._commands.start(command) for command in commands]

    def _done(self, envelope: Envelope) -> Iterable[Effect]:
        done: Done = envelope.message
        now, result = envelope.now, done.result
        what, job = done.id
        self._commands.ended(done.id)
        if what == "accept":
            return self._accepted(job, result, now)
        if what == "cancel":
            return self._cancelled(job, result, now)
        if what == "takeover":
            self._takeovers.ended(job)
            return NOTHING if result is None else self._carry_on(result, now)
        active = self._active.get(job)
        if active is None:
            return NOTHING
        if what == "keep":
            return self._kept(active, kept=result, now=now)
        go_on: dict[str, Callable[[], list[Do]]] = {
            "read": lambda: active.was_read(result, now),
            "resume": lambda: active.resumed(result),
            "feed": lambda: active.fed(result),
            "assemble": lambda: active.assembled(result, now),
            "conclude": lambda: active.concluded(result, now),
            "abandon": lambda: active.abandoned(result, now),
        }
        return self._start_all(go_on[what]()) if what in go_on else NOTHING

    def _kept(self, active: ActiveJob, *, kept: bool, now: float) -> Iterable[Effect]:
        if not kept:  # another coordinator has taken it over
            self._let_go(active.job)
            return NOTHING
        self._records[active.job] = active.record
        effects = self._statuses.publish(active.status, now)
        commands = active.kept()
        if active.status.state in OVER:
            del self._active[active.job]
        return [*effects, *self._start_all(commands)]

    def _accepted(self, job: str, error: Error | None, now: float) -> Iterable[Effect]:
        reply, active = self._accepting.pop(job)
        if error is not None:
            return refuse(reply, error)
        return [*answer(reply, JobAccepted(job=job)), *self._activate(active, now)]

    def _activate(self, active: ActiveJob, now: float) -> list[Effect]:
        self._records[active.job] = active.record
        self._active[active.job] = active
        active.advanced_at = now
        return [*self._statuses.publish(active.status, now), *self._start_all(active.begin())]

    def _cancelled(self, job: str, result: CancelResult, now: float) -> Iterable[Effect]:
        error, record = result.error, result.record
        effects = [
            effect
            for reply in self._cancelling.pop(job, [])
            for effect in (answer(reply, JobCancelled()) if error is None else refuse(reply, error))
        ]
        if record is not None:
            self._records[job] = record
            effects += self._stop(record)
            effects += self._statuses.publish(record.status, now)
        return effects

    def _not_done(self, envelope: Envelope) -> Iterable[Effect]:
        """Most often the bus was away. A request is refused; a command of a job is given again."""
        command = envelope.message.id
        what, job = command
        error = not_now("jobs cannot be kept", envelope.message, RETRY_S)
        if what not in ("accept", "cancel", "takeover", "forget") and (job in self._active or what == "clean"):
            return self._commands.failed(command)
        self._commands.ended(command)
        if what == "accept":
            return refuse(self._accepting.pop(job)[0], error)
        if what == "cancel":
            return [effect for reply in self._cancelling.pop(job, []) for effect in refuse(reply, error)]
        if what == "takeover":
            self._takeovers.ended(job)
        return NOTHING

    # -- runners

    def _part_stored(self, envelope: Envelope) -> Iterable[Effect]:
        stored: PartStored = envelope.message
        active = self._active.get(stored.job)
        return NOTHING if active is None else self._start_all(active.part_stored(stored.number))

    def _note(self, envelope: Envelope) -> Iterable[Effect]:
        self._statuses.note(envelope.message, envelope.now)
        return NOTHING

    # -- time

    def _heartbeat(self, *, leaving: bool = False) -> Effect:
        return Publish(self._subjects.offline("alive"), JobsHeartbeat(coordinator=self._name, leaving=leaving))

    def _other_heartbeat(self, envelope: Envelope) -> Iterable[Effect]:
        heartbeat: JobsHeartbeat = envelope.message
        self._takeovers.heard(heartbeat.coordinator, envelope.now, leaving=heartbeat.leaving)
        return NOTHING

    def _tick(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        effects: list[Effect] = [After("tick", self._tick_s, envelope.message), self._heartbeat()]
        if self._gate.unsynced:
            return effects
        for active in list(self._active.values()):
            effects += self._statuses.publish(active.status, now)
            if now - active.advanced_at > QUIET_S:
                active.advanced_at = now
                effects += self._start_all(active.check())
        return [*effects, *self._take_over(now), *self._forget()]

    def _take_over(self, now: float) -> list[Do]:
        """Carry on jobs that nobody does."""
        idle = [
            (job, record.owner)
            for job, record in self._records.items()
            if record.status.state not in OVER and job not in self._active and job not in self._accepting
        ]
        return self._takeovers.start(idle, now, self._gate.synced_at)

    def _carry_on(self, record: JobRecord, now: float) -> Iterable[Effect]:
        job = record.status.job
        route = self._policy.route_of(record.status)
        if route is not None:
            return self._activate(ActiveJob(record, route, self._settings.window), now)
        reason = f"app: {record.status.app} was deleted, or has no models any more"
        status = msgspec.structs.replace(record.status, state="failed", step="", reason=reason, finished=now)
        self._records[job] = msgspec.structs.replace(record, status=status)
        close = self._commands.start(Do(("close", job), Keep(self._records[job]), COMMAND_S))
        return [close, *self._statuses.publish(status, now)]

    def _forget(self) -> list[Do]:
        """Of jobs that have ended, only the latest are remembered."""
        ended = [record.status for record in self._records.values() if record.status.state in OVER]
        if len(ended) <= self._settings.keep:
            return []
        ended.sort(key=lambda status: status.finished or status.created)
        oldest = [status.job for status in ended[: len(ended) - self._settings.keep]]
        for job in oldest:
            self._records.pop(job, None)
        return self._start_all(Do(("forget", job), ForgetJob(job), COMMAND_S) for job in oldest)


def _refuse(reply: str, text: str) -> tuple[Effect, ...]:
    return refuse(reply, Error(code="bad_request", message=text))


def make_coordinator(
    settings: Settings,
    subjects: Subjects,
    name: str,
    prices: Mapping[str, float],
    new_id: Callable[[], str],
    *,
    simulated: bool = False,
) -> Coordinator:
    """A coordinator. Parameters as for `Coordinator`."""
    return Coordinator(name, subjects, settings.jobs, prices, new_id, simulated=simulated)


# -- metrics


def families(actor: Coordinator) -> Iterable[MetricFamily]:
    states = Counter(record.status.state for record in actor._records.values())
    return (gauge("infaas_jobs", "Offline jobs that are remembered, by their state.").add_all(states, "state"),)


def missing(actor: Coordinator, _now: float) -> str:
    return "the catalogue and the jobs" if actor._gate.unsynced else ""
