"""The runner of one worker: takes chunks of offline jobs while the worker has capacity to spare, and is the dispatcher of their queries.

Each chunk is one query with a far deadline in the queue of its own worker's executor, so that online queries always go first. Whatever
fails meanwhile, a chunk stays in the jobs' queue until its part is in the bucket. Its uid is always the same, so it is charged once.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from msgspec import Raw

from bus.messages.fleet import ExecutorExited, LoadReply, WorkerHeartbeat
from bus.messages.flow import DoneBatch, Execute, HandBack, Trying
from bus.messages.jobs import Chunk, JobRecord, Part
from bus.messages.public import Error
from bus.subjects import Subjects
from services.core.actor import (
    NOTHING,
    After,
    Cancel,
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
    Undelivered,
    Watch,
)
from services.core.metric import MetricFamily, gauge
from services.core.outcomes import answered
from services.core.requests import Commands, Retry
from services.core.settings import JobsSettings, Settings
from services.jobs.runner.chunks import (
    ChunkAnswer,
    ChunkKey,
    DropChunk,
    ExtendChunks,
    LoadRequests,
    ReturnChunk,
    RunnerReports,
    StorePart,
    TakeChunk,
    TakenChunk,
)
from services.jobs.runner.policy import TICK_S, RunnerView

ATTEMPTS = 3  # of a chunk, before it counts as failed
EXTEND_S = 1.5
WAIT_S = 5.0  # that a chunk waits for a busy worker before another worker may have it
LOST_S = 60.0  # without an answer, after which a chunk is sent again; an executor that still has it knows it by its uid
RETRY_S = 1.0
MOST_SETTLING = 64  # chunks whose outcomes are on their way to the disk
COMMAND_S = 10.0
STORE_S = 60.0


class Runner(TableActor):
    """name: different for each process, as a dispatcher's is. prices: US$ an hour by device kind. simulated: the whole system is."""

    def __init__(
        self,
        name: str,
        worker: str,
        subjects: Subjects,
        prices: Mapping[str, float],
        settings: JobsSettings,
        *,
        simulated: bool = False,
    ) -> None:
        self.name = name
        self.worker = worker
        self._subjects = subjects
        self._settings = settings
        self._view = RunnerView(prices, settings, simulated=simulated)
        self._reports = RunnerReports(name, worker, subjects)
        self._loads = LoadRequests(name, worker, subjects)
        self._chunks: dict[ChunkKey, TakenChunk] = {}
        self._taking = False
        self._stopping = False
        self._extended = 0.0
        self._commands = Commands(RETRY_S)
        self._settling: deque[tuple[int, Do]] = deque()  # parts to be stored as soon as so many events are on disk
        self._on: dict[type, Handler] = {
            WorkerHeartbeat: self._worker_heartbeat,
            ExecutorExited: self._executor_exited,
            DoneBatch: self._done_batch,
            Undelivered: self._undelivered,
            Trying: self._trying,
            LoadReply: self._load_reply,
            HandBack: self._hand_back,
            ChunkAnswer: self._answered,
            Changed: self._changed,
            Synced: lambda _: NOTHING,
            Done: self._done,
            Failed: self._not_done,
            TimedOut: self._not_done,
            Retry: self._commands.retry,
            Recorded: self._recorded,
            Tick: self._tick,
            Started: lambda _: (After("tick", TICK_S, Tick()),),
            Stopping: self._stop,
        }
        s, name = self._subjects, self.name
        self.inlets = (
            Inlet(subject=s.worker_heartbeat(self.worker), message=WorkerHeartbeat),
            Inlet(subject=s.exited(self.worker), message=ExecutorExited),
            Inlet(subject=s.done(name), message=DoneBatch),
            Inlet(subject=s.undelivered(name), message=DoneBatch),
            Inlet(subject=s.trying(name), message=Trying),
            Inlet(subject=s.loads(name), message=LoadReply),
            Inlet(subject=s.resubmit(name), message=HandBack),
            Inlet(subject=s.offline_answer(self.worker), message=ChunkAnswer),
        )
        self.watches = (Watch(bucket=self._subjects.catalog_bucket), Watch(bucket=self._subjects.jobs_bucket))

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        changed: Changed = envelope.message
        if changed.bucket == self._subjects.catalog_bucket:
            self._view.catalog.apply(changed.key, changed.value)
        elif self._view.changed(changed.key, changed.value):
            return self._take(envelope.now)
        return NOTHING

    # -- taking a chunk

    def _take(self, now: float) -> Iterable[Effect]:
        """Take a chunk from the queue if there is room for one."""
        running = self._view.running()
        room = self._settings.in_flight - (len(self._chunks) - len(self._settling))
        if not running or self._stopping:
            return NOTHING
        why = self._view.obstacle(running, now)
        effects = self._reports.note(why, self._kept_off(running, now), now)
        if why or self._taking or room <= 0 or len(self._settling) >= MOST_SETTLING:
            return effects
        self._taking = True
        return (*effects, Do("take", TakeChunk(), COMMAND_S))

    def _kept_off(self, running: list[JobRecord], now: float) -> dict[str, str]:
        """Why nothing of some jobs is computed here, by job."""
        computed = sorted({chunk.chunk.job for chunk in self._chunks.values() if chunk.state != "waiting"})
        found: dict[str, str] = {}
        for record in running:
            job, candidates = record.status.job, self._view.candidates(record)
            if job in computed:
                continue
            active = any(
                one.state == "Active" for v, device in candidates for one in self._view.instances(v.variant, device)
            )
            why = self._view.obstacle([record], now)
            why = why or ("" if active else self._loads.missing([v.variant for v, _ in candidates], now))
            if not why and computed and not record.status.done:
                why = f"computes {', '.join(computed)} first"
            if why:
                found[job] = why
        return found

    def _took(self, chunk: Chunk, now: float) -> Iterable[Effect]:
        key = (chunk.job, chunk.number)
        decision = self._view.decide(chunk)
        effects: Iterable[Effect] = NOTHING
        if decision == "drop":
            effects = (_drop(key),)
        elif not isinstance(decision, JobRecord):
            effects = (_return(key, TICK_S),)
        elif key not in self._chunks:
            taken = self._chunks[key] = TakenChunk(chunk, decision.status, now)
            effects = self._place(taken, now)
        return (*effects, *self._take(now))

    def _place(self, chunk: TakenChunk, now: float) -> Iterable[Effect]:
        """Send a waiting chunk to an instance, or have one loaded."""
        record = self._view.job(chunk.chunk.job)
        if record is None or self._view.is_over(chunk.chunk.job):
            return self._give_up(chunk, _drop(chunk.key))
        if self._view.obstacle([record], now):
            waits = now - chunk.waits_since <= WAIT_S
            return NOTHING if waits else self._give_up(chunk, _return(chunk.key, 0.0))
        for variant, device in self._view.candidates(record):
            if self._loads.is_refused(variant.variant, now):
                continue
            instances = self._view.instances(variant.variant, device)
            active = next((one for one in instances if one.state == "Active"), None)
            if active is not None:
                chunk.variant, chunk.device = variant.variant, device
                self._loads.used(variant.variant, now)
                return self._send(chunk, active.instance, now)
            if any(one.state == "Loading" for one in instances):  # a Warm one comes to the device by the same order
                return NOTHING
            chunk.waits_since = now
            return self._loads.request(variant, chunk.status.app, now)
        return self._give_up(chunk, _return(chunk.key, RETRY_S))

    def _send(self, chunk: TakenChunk, instance: str, now: float) -> Iterable[Effect]:
        """The heartbeat goes first: an executor must know a dispatcher before it works for it."""
        self._reports.active(now)
        heartbeat = self._reports.heartbeat(now)
        uid = chunk.uid.hex()
        live = self._view.production(chunk.status.app, chunk.variant)
        route = chunk.send(self.name, instance, self._subjects.offline_answer(self.worker, uid), now, live)
        reply = self._subjects.undelivered(self.name, f"{uid}-0")
        subject = self._subjects.execute(self.worker, chunk.device)
        return (*heartbeat, Publish(subject, Execute(route, chunk.chunk.body), reply))

    def _give_up(self, chunk: TakenChunk, command: Do) -> tuple[Effect, ...]:
        self._chunks.pop(chunk.key, None)
        return (command,)

    # -- answers

    def _by_uid(self, uid: bytes) -> TakenChunk | None:
        return next((one for one in self._chunks.values() if one.uid == uid and one.state != "storing"), None)

    def _answered(self, envelope: Envelope) -> Iterable[Effect]:
        answer: ChunkAnswer = envelope.message
        now = envelope.now
        try:
            chunk = self._by_uid(bytes.fromhex(envelope.subject.rpartition(".")[2]))
        except ValueError:
            return NOTHING
        if chunk is None:
            return NOTHING
        effects: list[Effect] = []
        code = answer.error.code if answer.error is not None else ""
        variant = self._view.catalog.variant(answer.variant or chunk.variant)
        if variant is not None and code not in ("deadline", "overloaded"):
            # Without a route it was sent in an earlier life of this runner.
            route = chunk.route or chunk.send(self.name, "", envelope.subject, now)
            event = answered(
                route,
                variant,
                worker=self.worker,
                started=now,
                finished=now,
                batch=answer.batch,
                cost_per_item=answer.cost / chunk.chunk.items,
                code=code,
            )
            effects.append(self._reports.history.record(event))
        if answer.error is not None:
            return [*effects, *self._refused(chunk, answer.error, now)]
        effects += self._store(chunk, answer, answer.variant)
        return [*effects, *self._take(now)]

    def _refused(self, chunk: TakenChunk, error: Error, now: float) -> Iterable[Effect]:
        if error.code in ("deadline", "overloaded"):
            chunk.wait(now + RETRY_S)
        elif chunk.refused() >= ATTEMPTS:
            return self._store_failure(chunk, f"{error.code}: {error.message}")
        else:
            chunk.wait(now + TICK_S)
        return NOTHING

    def _store_failure(self, chunk: TakenChunk, error: str) -> Iterable[Effect]:
        return self._store(chunk, ChunkAnswer(), chunk.variant, error)

    def _store(self, chunk: TakenChunk, answer: ChunkAnswer, variant: str, error: str = "") -> Iterable[Effect]:
        """Store the part after its outcome is on disk: a job that is done has all its rows in history, whatever fails meanwhile."""
        chunk.state = "storing"
        part = Part(
            job=chunk.chunk.job,
            number=chunk.chunk.number,
            items=chunk.chunk.items,
            outputs=Raw(bytes(answer.outputs)),
            worker=self.worker,
            variant=variant,
            cost=answer.cost,
            labels=answer.labels,
            error=error,
        )
        store = Do(("store", chunk.key), StorePart(part, answer.outputs_ref), STORE_S)
        self._settling.append((self._reports.history.recorded, store))
        return self._settled()

    def _settled(self) -> list[Effect]:
        """Store the parts whose outcomes are on disk."""
        effects: list[Effect] = []
        while self._settling and self._reports.history.on_disk(self._settling[0][0]):
            effects.append(self._commands.start(self._settling.popleft()[1]))
        return effects

    def _done_batch(self, envelope: Envelope) -> Iterable[Effect]:
        """The answers came before this message; it says which outcomes the executor wants confirmed."""
        self._reports.history.covers(envelope.message, envelope.now)
        return NOTHING

    def _recorded(self, envelope: Envelope) -> Iterable[Effect]:
        self._reports.history.stored(envelope.message.through)
        return self._settled()

    def _trying(self, envelope: Envelope) -> Iterable[Effect]:
        chunk = self._by_uid(envelope.message.uid)
        if chunk is not None:
            chunk.computing = True
        return NOTHING

    # -- failures

    def _undelivered(self, envelope: Envelope) -> Iterable[Effect]:
        token = envelope.message.reply_subject.rpartition(".")[2]
        chunk = next((one for one in self._chunks.values() if one.uid.hex() == token[:32]), None)
        if chunk is not None and chunk.state == "flying":
            chunk.wait(envelope.now + TICK_S)
        return NOTHING

    def _hand_back(self, envelope: Envelope) -> Iterable[Effect]:
        returned: HandBack = envelope.message
        chunk = self._by_uid(returned.route.uid)
        if chunk is None or chunk.state != "flying":
            return NOTHING
        if returned.reason == "crashed":
            chunk.computing = True
            return self._lost(chunk, envelope.now)
        chunk.wait(envelope.now + TICK_S / 2)
        return NOTHING

    def _executor_exited(self, envelope: Envelope) -> Iterable[Effect]:
        exited: ExecutorExited = envelope.message
        lost = [one for one in self._chunks.values() if one.state == "flying" and one.device == exited.device]
        return [effect for chunk in lost for effect in self._lost(chunk, envelope.now)]

    def _lost(self, chunk: TakenChunk, now: float) -> Iterable[Effect]:
        """The executor ended while it had the chunk. Only repetition shows whether the chunk was the cause."""
        chunk.crashes += chunk.computing
        if chunk.crashes >= ATTEMPTS:
            return self._store_failure(chunk, "model_error: the model's process ended each time it was computed")
        chunk.wait(now)
        return NOTHING

    def _load_reply(self, envelope: Envelope) -> Iterable[Effect]:
        self._loads.replied(envelope.message, envelope.now)
        return NOTHING

    # -- time

    def _worker_heartbeat(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        heartbeat: WorkerHeartbeat = envelope.message
        self._view.heard(heartbeat, now)
        self._loads.seen(heartbeat)
        present = {instance.instance for instance in heartbeat.instances}
        lost = [one for one in self._chunks.values() if one.state == "flying" and one.instance not in present]
        effects = [effect for chunk in lost for effect in self._lost(chunk, now)]
        return [*effects, *self._send_waiting(now)]

    def _send_waiting(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for chunk in list(self._chunks.values()):
            if chunk.state == "flying" and now - chunk.sent > LOST_S:
                chunk.wait(now)
            if chunk.state == "waiting" and chunk.due <= now:
                effects += self._place(chunk, now)
        return effects

    def _tick(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        effects: list[Effect] = [After("tick", TICK_S, envelope.message)]
        if self._chunks:
            self._reports.active(now)
            if now - self._extended >= EXTEND_S:
                self._extended = now
                effects.append(Do("extend", ExtendChunks(list(self._chunks)), COMMAND_S))
        effects += self._reports.heartbeat(now)
        effects += self._send_waiting(now)
        effects += self._take(now)
        running = self._view.running()
        wanted = {variant.variant for record in running for variant, _ in self._view.candidates(record)[:1]}
        return [*effects, *self._loads.release(wanted | {one.variant for one in self._chunks.values()}, now)]

    def _stop(self, envelope: Envelope) -> Iterable[Effect]:
        """Another runner computes what is not stored yet; the executor records the outcomes that it still reaches."""
        self._stopping = True
        unfinished = [one for one in self._chunks.values() if one.state != "storing"]
        returned = [effect for chunk in unfinished for effect in self._give_up(chunk, _return(chunk.key, 0.0))]
        return [Cancel("tick"), *returned, *self._reports.goodbye(envelope.now)]

    # -- results of commands

    def _done(self, envelope: Envelope) -> Iterable[Effect]:
        done: Done = envelope.message
        if done.id == "take":
            self._taking = False
            return NOTHING if done.result is None else self._took(done.result, envelope.now)
        if done.id[0] == "store":
            self._commands.ended(done.id)
            self._chunks.pop(done.id[1], None)
            return self._take(envelope.now)
        return NOTHING

    def _not_done(self, envelope: Envelope) -> Iterable[Effect]:
        """The bus was away. A part that is not stored is stored later; the rest repeats itself."""
        message: Failed | TimedOut = envelope.message
        if message.id == "take":
            self._taking = False
        elif message.id[0] == "store":
            store, chunk = self._commands.get(message.id), self._chunks.get(message.id[1])
            if chunk is None or store is None:
                return NOTHING
            if store.command.ref is None or not isinstance(message, Failed):
                return self._commands.failed(message.id)
            chunk.wait(envelope.now + RETRY_S)  # the outputs may have expired: compute them again
        return NOTHING


def _drop(key: ChunkKey) -> Do:
    """Nobody needs the chunk any more."""
    return Do(("drop", key), DropChunk(key), COMMAND_S)


def _return(key: ChunkKey, delay: float) -> Do:
    """Another runner may have the chunk after so many seconds."""
    return Do(("return", key), ReturnChunk(key, delay), COMMAND_S)


def make_runner(
    settings: Settings,
    subjects: Subjects,
    name: str,
    worker: str,
    prices: Mapping[str, float],
    *,
    simulated: bool = False,
) -> Runner:
    """A runner. Parameters as for `Runner`."""
    return Runner(name, worker, subjects, prices, settings.jobs, simulated=simulated)


# -- metrics


def families(actor: Runner) -> Iterable[MetricFamily]:
    chunks = gauge("infaas_offline_chunks_held", "Chunks of offline jobs that a worker has taken, by their state.")
    for state, count in Counter(chunk.state for chunk in actor._chunks.values()).items():
        chunks.add(count, worker=actor.worker, state=state)
    return (chunks,)


def missing(_actor: Runner, _now: float) -> str:
    return ""
