"""The way of one job from its acceptance to its end: what comes next, and how far it is.

At a time at most one command is under way for its input (`reading`), and one for its output (`writing`). A checkpoint is kept before
anybody learns of it and before anything is deleted: whoever carries the job on after a crash finds all that was published.

Others see its statuses: published on the bus, recorded for history, with what keeps workers from going on.
"""

from msgspec.structs import replace

from bus.fields import filled
from bus.messages.events import JobEvent
from bus.messages.jobs import OVER, Checkpoint, JobRecord, JobState, JobStatus, Position, RunnerNote
from bus.subjects import Subjects
from services.core.actor import Do, Effect, Publish, Record
from services.jobs.commands import (
    Abandon,
    Assemble,
    Assembled,
    Broken,
    ChunkRange,
    Conclude,
    Feed,
    JobRoute,
    Keep,
    Read,
    Resume,
    Resumed,
    WasRead,
)

AT_ONCE = 16  # parts appended by one command


class ActiveJob:
    """A job that this coordinator carries on. Its methods return the commands to give next.

    record: as it was last kept, or is being kept. advanced_at: Unix seconds at which outputs were last appended. window: chunks that are
    queued or computed at a time.
    """

    def __init__(self, record: JobRecord, route: JobRoute, window: int) -> None:
        self.record = record
        self.route = route
        self.job = record.status.job
        self.advanced_at = 0.0
        self._window = window
        self._queued: dict[int, ChunkRange] = {}  # of chunks that are queued and not yet appended
        self._parts: set[int] = set()  # in the bucket and not yet appended
        self._next = (0, 0, Position())  # where the next chunk begins: number, item, position
        self._resumed = False
        self._reading = False
        self._writing = False
        self._drop: list[int] = []
        self._failure = ""  # why it cannot go on, while what it leaves behind is cleared away

    @property
    def status(self) -> JobStatus:
        return self.record.status

    @property
    def over(self) -> bool:
        return bool(self._failure) or self.status.state in OVER

    # -- what comes next

    def begin(self) -> list[Do]:
        """It was just accepted, or taken over from a coordinator that is gone."""
        state = self.status.state
        if state in ("accepted", "reading"):
            self._reading = True
            return [self._do("read", Read(self.route))]
        if state == "running":
            return [self._resume()]
        return [self._conclude()] if state == "writing" else []

    def go_on(self) -> list[Do]:
        """Queue the chunks that there is room for, and append the parts that are next in order."""
        if self.status.state != "running" or not self._resumed or self._failure:
            return []
        commands = []
        total = self.status.total or 0
        number, first, position = self._next
        room = self._window - len(self._queued)
        if not self._reading and first < total and room >= max(1, self._window // 4):
            self._reading = True
            skip = frozenset(self._parts)
            feed = Feed(
                self.route, self.record.stamp, self.record.chunk_items, number, first, total, position, room, skip,
                self.record.checkpoint.generation,
            )  # fmt: skip
            commands.append(self._do("feed", feed))
        if self._writing:
            return commands
        if self.record.checkpoint.items == total:
            return [*commands, self._keep("writing", step="giving the output its name")]
        following: list[ChunkRange] = []
        at = self.record.checkpoint.chunks
        while at in self._parts and at in self._queued and len(following) < AT_ONCE:
            following.append(self._queued[at])
            at += 1
        if following:
            self._writing = True
            commands.append(self._do("assemble", Assemble(self.route, total, self.record.checkpoint, following)))
        return commands

    def part_stored(self, number: int) -> list[Do]:
        """A part is in the bucket."""
        if number < self.record.checkpoint.chunks:
            return []
        self._parts.add(number)
        return self.go_on()

    def check(self) -> list[Do]:
        """Nothing was heard for a while: look into the bucket, because a message may be lost."""
        if self._resumed and not self._reading and self.status.state == "running" and not self._failure:
            return [self._resume()]
        return []

    # -- results of commands

    def was_read(self, result: WasRead | Broken, now: float) -> list[Do]:
        self._reading = False
        if self.over:
            return []
        if isinstance(result, Broken):
            return self.fail(result.reason)
        self._resumed = True
        self.record = replace(self.record, stamp=result.stamp)
        return [self._keep("running", total=result.items, started=now, step="its first items are queued")]

    def resumed(self, result: Resumed) -> list[Do]:
        self._reading = False
        if self.over:
            return []
        if not result.written:  # the output grows on another machine: begin anew
            generation = self.record.checkpoint.generation + 1
            self.record = replace(self.record, checkpoint=Checkpoint(generation=generation))
            self._parts, self._queued, self._next = set(result.parts), {}, (0, 0, Position())
            self._resumed = True
            return [self._keep("running", done=0, cost=0.0, variants=[], step="what was written is gone: once more")]
        checkpoint = self.record.checkpoint
        self._parts |= {number for number in result.parts if number >= checkpoint.chunks}
        if not self._resumed:
            self._resumed = True
            self._next = (checkpoint.chunks, checkpoint.items, checkpoint.position)
        return self.go_on()

    def fed(self, result: list[ChunkRange] | Broken) -> list[Do]:
        self._reading = False
        if isinstance(result, Broken):
            return self.fail(result.reason)
        for chunk in result:
            self._queued[chunk.number] = chunk
            self._next = (chunk.number + 1, chunk.first + chunk.items, chunk.end)
        return self.go_on()

    def assembled(self, result: Assembled | Broken, now: float) -> list[Do]:
        self._writing = False
        if self.over:
            return []
        if isinstance(result, Broken):
            return self.fail(result.reason)
        before, after = self.record.checkpoint, result.checkpoint
        self._drop = list(range(before.chunks, after.chunks))
        for number in self._drop:
            self._queued.pop(number, None)
            self._parts.discard(number)
        self.advanced_at = now
        self.record = replace(self.record, checkpoint=after)
        status = self.status
        variants = [*status.variants, *(v for v in result.variants if v not in status.variants)]
        cost = status.cost + result.cost
        if result.failure:
            return self.fail(result.failure, failed=result.failed, done=after.items, cost=cost, variants=variants)
        return [self._keep("running", step="computing", done=after.items, cost=cost, variants=variants)]

    def concluded(self, result: Broken | None, now: float) -> list[Do]:
        self._writing = False
        return self.fail(result.reason) if result is not None else [self._keep("done", step="", finished=now)]

    def kept(self) -> list[Do]:
        """The record is kept: go on from there."""
        self._writing = False
        return [self._conclude()] if self.status.state == "writing" else self.go_on()

    def fail(self, reason: str, **changes: object) -> list[Do]:
        """It cannot go on. Its status says so only after its partial output has a name, where clients will look for it."""
        if self.over:
            return []
        self._failure = reason[:1000]
        self.record = replace(self.record, status=replace(self.status, **changes))
        self._writing = True
        return [self._do("abandon", Abandon(self.route, self.record.checkpoint, keep=True))]

    def abandoned(self, partial: str, now: float) -> list[Do]:
        """What it leaves behind is cleared away. partial: where its outputs are; empty if there are none."""
        kept = f"; the first {self.status.done} outputs are in {partial}" if partial else ""
        return [self._keep("failed", reason=f"{self._failure}{kept}", finished=now, step="")]

    # -- commands

    def _resume(self) -> Do:
        self._reading = True
        return self._do("resume", Resume(self.route, self.record.checkpoint))

    def _conclude(self) -> Do:
        self._writing = True
        return self._do("conclude", Conclude(self.route, self.record.checkpoint))

    def _keep(self, state: JobState, **changes: object) -> Do:
        """Keep the job in this state; the parts that nobody needs after that go."""
        status = replace(self.status, state=state, **changes)
        done = 1.0 if state == "done" else (status.done / status.total if status.total else 0.0)
        self.record = replace(self.record, status=replace(status, progress=round(done, 4)))
        self._writing = True
        drop, self._drop = self._drop, []
        return self._do("keep", Keep(self.record, drop))

    def _do(self, what: str, command: object) -> Do:
        return Do((what, self.job), command)


NOTE_S = 5.0  # after which a runner's note says nothing any more
PUBLISH_S = 0.3  # at least between two statuses of one state
RECORD_S = 2.0  # the same for history


class JobStatuses:
    """The last status that was published and recorded of each job, and the last note of each worker's runner."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._notes: dict[str, tuple[float, RunnerNote]] = {}
        self._listening: float | None = None  # since when
        self._published: dict[str, tuple[float, JobStatus]] = {}
        self._recorded: dict[str, tuple[float, JobStatus]] = {}

    def note(self, note: RunnerNote, now: float) -> None:
        """A worker takes nothing now, or takes something again."""
        self._notes = {one: kept for one, kept in self._notes.items() if now - kept[0] < NOTE_S}
        self._notes[note.worker] = (now, note)

    def with_notes(self, status: JobStatus, now: float) -> JobStatus:
        """The status. If something keeps all workers that were heard of lately from going on, its step says what."""
        self._listening = now if self._listening is None else self._listening
        notes = [note for at, note in self._notes.values() if now - at < NOTE_S]
        reasons = {note.worker: note.why or note.jobs.get(status.job, "") for note in notes}
        if status.state != "running" or not all(reasons.values()):
            return status
        if reasons:
            return replace(status, step="; ".join(f"{worker}: {why}" for worker, why in sorted(reasons.items())))
        unheard = now - max(self._listening, status.started or 0.0) > NOTE_S
        return (
            replace(status, step=f"no worker has spoken for {NOTE_S:g} s: `infaas workers` lists them")
            if unheard
            else status
        )

    def publish(self, status: JobStatus, now: float) -> list[Effect]:
        """Publish and record a status: each change of state, and at a bounded rate what lies between."""
        effects: list[Effect] = []
        kept, status = status, self.with_notes(status, now)
        if _is_due(self._published.get(status.job), status, now, PUBLISH_S):
            self._published[status.job] = (now, status)
            effects.append(Publish(self._subjects.job_status(status.job), status))
        if _is_due(self._recorded.get(status.job), status, now, RECORD_S):
            self._recorded[status.job] = (now, status)
            event = filled(JobEvent, status, time=now)
            effects.append(Record(event if status is kept else replace(event, reason=status.step)))
        if status.state in OVER:
            self.forget(status.job)
        return effects

    def forget(self, job: str) -> None:
        """It has ended, or is another coordinator's."""
        for last in (self._published, self._recorded):
            last.pop(job, None)


def _is_due(last: tuple[float, JobStatus] | None, status: JobStatus, now: float, pause: float) -> bool:
    if last is None:
        return True
    at, former = last
    return former.state != status.state or (former != status and now - at >= pause)
