"""The chunks that a worker has taken from the queue, the runner's commands for them, and what it reads of their answers; and its control
messages: heartbeats to executors, notes to coordinators, load and release requests to its worker's monitor.
"""

from hashlib import blake2b
from typing import Any

from msgspec import Raw, Struct

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import EnsureLoaded, LoadReply, Release, WorkerHeartbeat
from bus.messages.flow import Route
from bus.messages.jobs import OFFLINE, Chunk, JobStatus, Part, RunnerNote
from bus.messages.public import Error, ObjectRef
from bus.subjects import Subjects
from services.core.actor import NOTHING, Effect, Publish
from services.core.outcomes import OutcomeLog

ChunkKey = tuple[str, int]  # job and number
NO_OUTPUTS = Raw(b"\x80")
DEADLINE_S = 3600.0  # far behind every online query's, so that those go first
ALONE = True  # in a batch of its own, so that no online query waits for offline work, or fails with it


class TakeChunk(Struct, frozen=True):
    """Fetch one chunk from the queue. Result: the Chunk, or None when there is none."""


class ExtendChunks(Struct, frozen=True):
    """Tell the queue that these chunks are still being worked on."""

    keys: list[ChunkKey]


class ReturnChunk(Struct, frozen=True):
    """Give a chunk back to the queue, which hands it out again after `delay` seconds."""

    key: ChunkKey
    delay: float


class DropChunk(Struct, frozen=True):
    """Remove a chunk that nobody needs from the queue."""

    key: ChunkKey


class StorePart(Struct, frozen=True):
    """Put the part into its bucket, then remove its chunk from the queue. ref: where the outputs are, if the answer has none."""

    part: Part
    ref: ObjectRef | None = None


class ChunkAnswer(Struct, frozen=True):
    """What a runner reads of an Answer or a Refusal."""

    outputs: Raw = NO_OUTPUTS
    outputs_ref: ObjectRef | None = None
    labels: list[str] | None = None
    variant: str = ""
    batch: int = 1
    cost: float = 0.0
    error: Error | None = None


class TakenChunk:
    """A chunk from when it is taken until its part is in the bucket.

    state: "waiting" (for an instance, or to be sent again), "flying" (with the executor) or "storing"; a metric shows it. refusals: how
    often the model has refused it. crashes: how many executors ended while they computed it. computing: an executor computes it now.
    """

    __slots__ = (
        "chunk", "computing", "crashes", "device", "due", "instance", "key", "refusals", "route", "sent", "state", "status", "uid",
        "variant", "waits_since",
    )  # fmt: skip

    def __init__(self, chunk: Chunk, status: JobStatus, now: float) -> None:
        self.chunk = chunk
        self.status = status
        self.key = (chunk.job, chunk.number)
        self.state = "waiting"
        self.refusals = 0
        self.crashes = 0
        self.computing = False
        self.waits_since = now
        self.due = now
        self.sent = 0.0
        self.variant = self.device = self.instance = ""
        self.route: Route | None = None
        self.uid = uid_of(chunk.job, chunk.number, 0)

    def send(
        self, runner: str, instance: str, reply_to: str, now: float, live: tuple[float, str] | None = None
    ) -> Route:
        """It goes to the executor now. live: as in `Route`."""
        self.state, self.instance, self.sent, self.computing = "flying", instance, now, False
        self.route = Route(
            self.uid, 0, 0, reply_to, now + DEADLINE_S, now, runner, instance, self.status.app, self.chunk.items,
            f"{self.chunk.job}/{self.chunk.number}", None, self.status.accuracy, None, 9, None, None, OFFLINE, None,
            self.status.model, None, self.status.variant, False, ALONE, live=live,
        )  # fmt: skip
        return self.route

    def wait(self, until: float) -> None:
        """It is to be sent (again), not before then."""
        self.state, self.due, self.instance, self.computing = "waiting", until, "", False

    def refused(self) -> int:
        """The model refused it, and that is recorded, so that the next attempt is another query. Returns how often by now."""
        self.refusals += 1
        self.uid = uid_of(self.chunk.job, self.chunk.number, self.refusals)
        return self.refusals


def uid_of(job: str, number: int, refusals: int) -> bytes:
    """The same for the same chunk on every worker, so that it is charged once."""
    return blake2b(f"{job}/{number}/{refusals}".encode(), digest_size=16, person=b"infaas offline").digest()


HEARTBEAT_S = 0.4
LINGER_S = 5.0  # of heartbeats after there is nothing left to do
NOTE_S = 2.0
AGAIN_S = 5.0  # before a load is requested again that did not come
REFUSED_S = 10.0  # before a variant that found no room is requested again
IDLE_S = 10.0  # that a variant stays which was loaded for jobs and which no job needs


class RunnerReports:
    """A runner's heartbeats and notes. To executors it is a dispatcher: its heartbeat says what of its history is on disk."""

    def __init__(self, name: str, worker: str, subjects: Subjects) -> None:
        self._name = name
        self._worker = worker
        self._subject = subjects.dispatcher_heartbeat(name)
        self._notes = subjects.offline("note")
        self.history = OutcomeLog((worker,))
        self._sent = self._active = float("-inf")
        self._noted = float("-inf")
        self._kept_off: tuple[Any, ...] = ()

    def active(self, now: float) -> None:
        """There is something under way."""
        self._active = now

    def heartbeat(self, now: float) -> tuple[Effect, ...]:
        """A heartbeat, if one is due."""
        if now - self._active > LINGER_S or now - self._sent < HEARTBEAT_S:
            return NOTHING
        self._sent = now
        return (self._heartbeat(now, leaving=False),)

    def goodbye(self, now: float) -> tuple[Effect, ...]:
        """The last heartbeat, if there were others."""
        return (self._heartbeat(now, leaving=True),) if self._active > float("-inf") else NOTHING

    def _heartbeat(self, now: float, *, leaving: bool) -> Publish:
        return Publish(self._subject, self.history.heartbeat(self._name, now, leaving=leaving))

    def note(self, why: str, jobs: dict[str, str], now: float) -> tuple[Effect, ...]:
        """Why nothing is taken now, empty when something is, or nothing of some jobs; published when that changes, and regularly."""
        kept_off = (bool(why), jobs.keys())
        if kept_off == self._kept_off and now - self._noted < NOTE_S:
            return NOTHING
        self._noted, self._kept_off = now, kept_off
        return (Publish(self._notes, RunnerNote(worker=self._worker, why=why, jobs=jobs)),)


class LoadRequests:
    """Variants that were loaded for offline jobs: requested once, not requested for a while after a refusal, released when idle.

    An instance that online queries use belongs to them from then on, and stays.
    """

    def __init__(self, name: str, worker: str, subjects: Subjects) -> None:
        self._name = name
        self._load = subjects.worker(worker, "load")
        self._release = subjects.worker(worker, "release")
        self._replies = subjects.loads(name)
        self._requested: dict[str, float] = {}
        self._refused: dict[str, tuple[float, str]] = {}  # until when, and why
        self._used: dict[str, float] = {}  # variants loaded for jobs, and when one was used last

    def is_refused(self, variant: str, now: float) -> bool:
        return self._refused.get(variant, (float("-inf"),))[0] > now

    def missing(self, variants: list[str], now: float) -> str:
        """Why none of these variants, of which none is loaded, computes yet; empty: nobody has wanted them yet."""
        if any(now - self._requested.get(variant, float("-inf")) < AGAIN_S for variant in variants):
            return "a model is being loaded for it"
        refused = [why for variant in variants for until, why in [self._refused.get(variant, (now, ""))] if until > now]
        return refused[0] if variants and len(refused) == len(variants) else ""

    def used(self, variant: str, now: float) -> None:
        if variant in self._used:
            self._used[variant] = now

    def request(self, record: VariantRecord, app: str, now: float) -> tuple[Effect, ...]:
        """Have one instance loaded, unless that was requested a moment ago."""
        if now - self._requested.get(record.variant, float("-inf")) < AGAIN_S:
            return NOTHING
        self._requested = {one: at for one, at in self._requested.items() if now - at < AGAIN_S}
        self._requested[record.variant] = self._used[record.variant] = now
        order = EnsureLoaded(variant=record, at_least=1, app=app, orderer=self._name, reason="an offline job needs it")
        return (Publish(self._load, order, self._replies),)

    def replied(self, reply: LoadReply, now: float) -> None:
        if reply.reason:
            self._refused = {one: kept for one, kept in self._refused.items() if kept[0] > now}
            self._refused[reply.variant] = (now + REFUSED_S, reply.reason)
            self._used.pop(reply.variant, None)
            self._requested.pop(reply.variant, None)

    def seen(self, heartbeat: WorkerHeartbeat) -> None:
        """Keep the variants that serve online queries (offline work does not count as load)."""
        for instance in heartbeat.instances:
            if instance.load > 0:
                self._used.pop(instance.variant, None)

    def release(self, wanted: set[str], now: float) -> list[Effect]:
        """Release variants that no job has needed for a while."""
        effects: list[Effect] = []
        for variant, used in list(self._used.items()):
            if variant in wanted:
                self._used[variant] = now
            elif now - used >= IDLE_S:
                del self._used[variant]
                self._requested.pop(variant, None)
                reason = "no offline job needs it any more"
                order = Release(variant=variant, keep=0, orderer=self._name, reason=reason)
                effects.append(Publish(self._release, order))
        return effects
