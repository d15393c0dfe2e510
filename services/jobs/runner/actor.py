"""The runner of one worker: takes chunks of offline jobs while the worker is calm, and is the dispatcher of their queries.

Each chunk is one query with a far deadline in its own worker's executor queue, so that online queries always go first. Whatever
dies meanwhile, a chunk stays in the jobs' queue until its part is in the bucket; its uid is always the same, so it is charged once.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Raw, Struct

from bus.messages.fleet import ExecutorExited, LoadReply, WorkerHeartbeat
from bus.messages.flow import DoneBatch, Execute, HandBack, Trying
from bus.messages.jobs import Chunk, JobRecord, Part
from bus.messages.public import Error, ObjectRef
from bus.subjects import Subjects
from services.core.actor import (
    After,
    Cancel,
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
    Undelivered,
    Watch,
)
from services.core.metric import MetricFamily
from services.core.outcomes import answered
from services.jobs.runner.chunks import (
    NO_OUTPUTS,
    ChunkAnswer,
    DropChunk,
    ExtendChunks,
    ReturnChunk,
    StorePart,
    TakeChunk,
    TakenChunk,
)
from services.jobs.runner.control import LoadRequests, RunnerReports
from services.jobs.runner.policy import LOOK_S, Knobs, RunnerView

TRIES = 3  # of a chunk, before it counts as failed
EXTEND_S = 1.5
PATIENCE_S = 5.0  # that a chunk waits for a busy worker before another one may have it
LOST_S = 60.0  # without an answer, after which a chunk is sent once more; the executor knows it if it still has it
AGAIN_S = 1.0
SETTLING = 64  # chunks at most whose outcomes are on their way to the disk
NOTHING: tuple[Effect, ...] = ()


class Look(Struct, frozen=True):
    """Time to look again."""


class Again(Struct, frozen=True):
    """Time to do something that failed."""

    effect: Do


class Runner:
    """name: different for each process, as a dispatcher's is. prices: US$ an hour by device kind."""

    def __init__(self, name: str, worker: str, subjects: Subjects, prices: Mapping[str, float], knobs: Knobs) -> None:
        self.name = name
        self.worker = worker
        self._subjects = subjects
        self._in_flight = knobs.in_flight
        self._view = RunnerView(prices, knobs)
        self._told = RunnerReports(name, worker, subjects)
        self._loads = LoadRequests(name, worker, subjects)
        self._held: dict[tuple[str, int], TakenChunk] = {}
        self._taking = False
        self._stopping = False
        self._extended = 0.0
        self._doing: dict[Any, Do] = {}
        self._settling: deque[tuple[int, Do]] = deque()  # parts to be stored once so many events are on disk
        self._takes: dict[type, Callable[[Envelope], Iterable[Effect]]] = {
            WorkerHeartbeat: self._on_heartbeat,
            ExecutorExited: self._on_exited,
            DoneBatch: self._on_batch,
            Undelivered: self._on_undelivered,
            Trying: self._on_trying,
            LoadReply: self._on_load_reply,
            HandBack: self._on_hand_back,
            ChunkAnswer: self._on_heard,
            Changed: self._on_changed,
            Synced: lambda _: NOTHING,
            Done: self._on_done,
            Failed: self._on_not_done,
            TimedOut: self._on_not_done,
            Again: lambda envelope: (envelope.message.effect,),
            Recorded: self._on_recorded,
            Look: self._on_look,
            Started: lambda _: (After("look", LOOK_S, Look()),),
            Stopping: self._on_stopping,
        }

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        s, name = self._subjects, self.name
        return (
            Inlet(subject=s.worker_heartbeat(self.worker), message=WorkerHeartbeat),
            Inlet(subject=s.exited(self.worker), message=ExecutorExited),
            Inlet(subject=s.done(name), message=DoneBatch),
            Inlet(subject=s.undelivered(name), message=DoneBatch),
            Inlet(subject=s.trying(name), message=Trying),
            Inlet(subject=s.loads(name), message=LoadReply),
            Inlet(subject=s.resubmit(name), message=HandBack),
            Inlet(subject=s.offline_answer(self.worker), message=ChunkAnswer),
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        return (Watch(bucket=self._subjects.catalog_bucket), Watch(bucket=self._subjects.jobs_bucket))

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        """TakeChunk one message; see services.core.actor."""
        return list(self._takes[type(envelope.message)](envelope))

    # -- what there is

    def _on_changed(self, envelope: Envelope) -> Iterator[Effect]:
        changed: Changed = envelope.message
        if changed.bucket == self._subjects.catalog_bucket:
            self._view.catalog.apply(changed.key, changed.value)
            return
        if self._view.changed(changed.key, changed.value):
            yield from self._take(envelope.now)

    # -- taking

    def _take(self, now: float) -> Iterator[Effect]:
        running = self._view.running()
        busy = len(self._held) - len(self._settling)
        if not running or self._taking or self._stopping or busy >= self._in_flight or len(self._settling) >= SETTLING:
            return
        why = self._view.obstacle(running, now)
        yield from self._told.note(why, now)
        if not why:
            self._taking = True
            yield Do("take", TakeChunk(), 10.0)

    def _took(self, chunk: Chunk, now: float) -> Iterator[Effect]:
        key = (chunk.job, chunk.number)
        fate = self._view.fate(chunk)
        if fate == "drop":
            yield Do(("drop", key), DropChunk(key), 10.0)
        elif not isinstance(fate, JobRecord):
            yield Do(("give", key), ReturnChunk(key, LOOK_S), 10.0)
        elif key not in self._held:
            held = self._held[key] = TakenChunk(chunk, fate.status, now)
            yield from self._place(held, now)
        yield from self._take(now)

    def _place(self, held: TakenChunk, now: float) -> Iterator[Effect]:
        """Send a waiting chunk to an instance, or see to it that there is one."""
        record = self._view.job(held.chunk.job)
        if record is None or self._view.is_over(held.chunk.job):
            yield from self._let_go(held, None)
            return
        if self._view.obstacle([record], now):
            if now - held.began > PATIENCE_S:
                yield from self._let_go(held, 0.0)
            return
        for variant, device in self._view.candidates(record):
            if self._loads.is_refused(variant.variant, now):
                continue
            instances = self._view.instances(variant.variant, device)
            active = next((i for i in instances if i.state == "Active"), None)
            if active is not None:
                held.variant, held.device = variant.variant, device
                self._loads.used(variant.variant, now)
                yield from self._send(held, active.instance, now)
            elif not any(i.state in ("Loading", "Warm") for i in instances):
                held.began = now
                yield from self._loads.order(variant, held.status.app, now)
            return
        yield from self._let_go(held, AGAIN_S)

    def _send(self, held: TakenChunk, instance: str, now: float) -> Iterator[Effect]:
        yield from self._told.beat(now, least=LOOK_S)  # the executor must know us before we ask it for something
        uid = held.uid.hex()
        route = held.depart(self.name, instance, self._subjects.offline_answer(self.worker, uid), now)
        reply = self._subjects.undelivered(self.name, f"{uid}-0")
        yield Publish(self._subjects.execute(self.worker, held.device), Execute(route, held.chunk.body), reply)

    def _let_go(self, held: TakenChunk, delay: float | None) -> Iterator[Effect]:
        """Somebody else may have it after so many seconds; None: nobody needs it any more."""
        self._held.pop(held.key, None)
        if delay is None:
            yield Do(("drop", held.key), DropChunk(held.key), 10.0)
        else:
            yield Do(("give", held.key), ReturnChunk(held.key, delay), 10.0)

    # -- what becomes of a chunk

    def _by_uid(self, uid: bytes) -> TakenChunk | None:
        return next((held for held in self._held.values() if held.uid == uid and held.state != "storing"), None)

    def _on_heard(self, envelope: Envelope) -> Iterator[Effect]:
        heard: ChunkAnswer = envelope.message
        now = envelope.now
        try:
            held = self._by_uid(bytes.fromhex(envelope.subject.rpartition(".")[2]))
        except ValueError:
            return
        if held is None:
            return
        code = heard.error.code if heard.error is not None else ""
        variant = self._view.catalog.variant(heard.variant or held.variant)
        if variant is not None and code not in ("deadline", "overloaded"):
            route = held.route or held.depart(self.name, "", envelope.subject, now)  # asked for in an earlier life
            event = answered(
                route,
                variant,
                worker=self.worker,
                finished=now,
                batch=heard.batch,
                cost_per_item=heard.cost / held.chunk.items,
                code=code,
            )
            yield self._told.history.record(event)
        if heard.error is not None:
            yield from self._refused(held, heard.error, now)
            return
        yield from self._store(held, heard.outputs, heard.outputs_ref, heard.variant, heard.cost)
        yield from self._take(now)

    def _refused(self, held: TakenChunk, error: Error, now: float) -> Iterator[Effect]:
        if error.code in ("deadline", "overloaded"):
            held.wait(now + AGAIN_S)
        elif held.refused() >= TRIES:
            yield from self._store(held, NO_OUTPUTS, None, held.variant, 0.0, f"{error.code}: {error.message}")
        else:
            held.wait(now + LOOK_S)

    def _store(
        self, held: TakenChunk, outputs: Raw, ref: ObjectRef | None, variant: str, cost: float, error: str = ""
    ) -> Iterator[Effect]:
        held.state = "storing"
        part = Part(
            job=held.chunk.job,
            number=held.chunk.number,
            items=held.chunk.items,
            outputs=Raw(bytes(outputs)),
            worker=self.worker,
            variant=variant,
            cost=cost,
            error=error,
        )
        # Its outcome first: a job that is done has all its rows, whoever is killed meanwhile.
        self._settling.append((self._told.history.recorded, Do(("store", held.key), StorePart(part, ref), 60.0)))
        yield from self._settled()

    def _settled(self) -> Iterator[Effect]:
        """StorePart the parts whose outcomes are on disk."""
        while self._settling and self._told.history.on_disk(self._settling[0][0]):
            _, effect = self._settling.popleft()
            self._doing[effect.id[1]] = effect
            yield effect

    def _on_batch(self, envelope: Envelope) -> Iterable[Effect]:
        """The answers themselves came before; this is what the executor wants confirmed."""
        self._told.history.covers(envelope.message)
        return NOTHING

    def _on_trying(self, envelope: Envelope) -> Iterable[Effect]:
        held = self._by_uid(envelope.message.uid)
        if held is not None:
            held.begun = True
        return NOTHING

    # -- what goes wrong

    def _on_undelivered(self, envelope: Envelope) -> Iterable[Effect]:
        token = envelope.message.reply_subject.rpartition(".")[2]
        held = next((h for h in self._held.values() if h.uid.hex() == token[:32]), None)
        if held is not None and held.state == "flying":
            held.wait(envelope.now + LOOK_S)
        return NOTHING

    def _on_hand_back(self, envelope: Envelope) -> Iterator[Effect]:
        back: HandBack = envelope.message
        held = self._by_uid(back.route.uid)
        if held is None or held.state != "flying":
            return
        if back.reason == "crashed":
            held.begun = True
            yield from self._lost(held, envelope.now)
        else:
            held.wait(envelope.now + LOOK_S / 2)

    def _on_exited(self, envelope: Envelope) -> Iterator[Effect]:
        gone: ExecutorExited = envelope.message
        for held in list(self._held.values()):
            if held.state == "flying" and held.device == gone.device:
                yield from self._lost(held, envelope.now)

    def _lost(self, held: TakenChunk, now: float) -> Iterator[Effect]:
        """The executor died with it; whether it was the cause only repetition can tell."""
        held.crashes += held.begun
        if held.crashes >= TRIES:
            why = "the model's process ended each time it was computed"
            yield from self._store(held, NO_OUTPUTS, None, held.variant, 0.0, f"model_error: {why}")
        else:
            held.wait(now)

    def _on_load_reply(self, envelope: Envelope) -> Iterable[Effect]:
        self._loads.replied(envelope.message, envelope.now)
        return NOTHING

    # -- time

    def _on_heartbeat(self, envelope: Envelope) -> Iterator[Effect]:
        now = envelope.now
        beat: WorkerHeartbeat = envelope.message
        self._view.heard(beat, now)
        present = {instance.instance for instance in beat.instances}
        self._loads.seen(beat)
        for held in list(self._held.values()):
            if held.state == "flying" and held.instance not in present:
                yield from self._lost(held, now)
        yield from self._go_on(now)

    def _go_on(self, now: float) -> Iterator[Effect]:
        for held in list(self._held.values()):
            if held.state == "flying" and now - held.sent > LOST_S:
                held.wait(now)
            if held.state == "waiting" and held.due <= now:
                yield from self._place(held, now)

    def _on_look(self, envelope: Envelope) -> Iterator[Effect]:
        now = envelope.now
        yield After("look", LOOK_S, envelope.message)
        if self._held:
            self._told.active(now)
            if now - self._extended >= EXTEND_S:
                self._extended = now
                yield Do("extend", ExtendChunks(list(self._held)), 10.0)
        yield from self._told.beat(now)
        yield from self._go_on(now)
        yield from self._take(now)
        running = self._view.running()
        wanted = {variant.variant for record in running for variant, _ in self._view.candidates(record)[:1]}
        yield from self._loads.release(wanted | {held.variant for held in self._held.values()}, now)

    def _on_recorded(self, envelope: Envelope) -> Iterator[Effect]:
        self._told.history.stored(envelope.message.through)
        yield from self._settled()

    def _on_stopping(self, envelope: Envelope) -> Iterator[Effect]:
        """What is not stored yet somebody else computes; the executor records what it still ends for us."""
        self._stopping = True
        yield Cancel("look")
        for held in list(self._held.values()):
            if held.state != "storing":
                yield from self._let_go(held, 0.0)
        yield from self._told.goodbye(envelope.now)

    # -- what the edge did

    def _on_done(self, envelope: Envelope) -> Iterator[Effect]:
        done: Done = envelope.message
        if done.id == "take":
            self._taking = False
            if done.result is not None:
                yield from self._took(done.result, envelope.now)
        elif done.id[0] == "store":
            self._doing.pop(done.id[1], None)
            self._held.pop(done.id[1], None)
            yield from self._take(envelope.now)

    def _on_not_done(self, envelope: Envelope) -> Iterator[Effect]:
        """The bus was away: a chunk that is not stored now is stored later; the rest comes again by itself."""
        message: Failed | TimedOut = envelope.message
        if message.id == "take":
            self._taking = False
        elif message.id[0] == "store":
            effect = self._doing.get(message.id[1])
            held = self._held.get(message.id[1])
            if held is None or effect is None:
                return
            if effect.command.ref is not None and isinstance(message, Failed):
                held.wait(envelope.now + AGAIN_S)  # the outputs may have expired: compute them once more
            else:
                yield After(message.id, AGAIN_S, Again(effect))


# -- metrics


def families(actor: Runner) -> Iterable[MetricFamily]:
    chunks = MetricFamily(
        "infaas_offline_chunks_held", "gauge", "Chunks of offline jobs that a worker has taken, by their state."
    )
    for state, count in Counter(held.state for held in actor._held.values()).items():
        chunks.add(count, worker=actor.worker, state=state)
    return (chunks,)


def missing(actor: Runner, now: float) -> str:
    del actor, now
    return ""
