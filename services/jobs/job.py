"""The course of one job, from its acceptance to its end: what comes next, and how far it is. Pure.

At most one command that changes the job is under way at a time for its input (`reading`), and one for its output (`writing`).
What is on disk is kept before anything is told or thrown away, so that whoever goes on after a crash finds all that was told.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from bus.messages.jobs import OVER, Checkpoint, JobRecord, JobState, JobStatus, Position
from services.core.actor import Do, Effect
from services.jobs.commands import (
    Abandon,
    Assemble,
    Assembled,
    Broken,
    Conclude,
    Feed,
    JobRoute,
    Keep,
    Read,
    Resume,
    Resumed,
    Spot,
    WasRead,
)

AT_ONCE = 16  # parts appended in one go


class ActiveJob:
    """One job. record: as it was last kept, or is being kept. window: chunks that are queued or computed at a time."""

    def __init__(self, record: JobRecord, route: JobRoute, window: int) -> None:
        self.record = record
        self.route = route
        self.job = record.status.job
        self.moved = 0.0  # when something was last appended
        self._window = window
        self._spots: dict[int, Spot] = {}  # cut and not yet appended
        self._parts: set[int] = set()  # in the bucket, not yet appended
        self._fed = (0, 0, Position())  # where the next chunk begins: number, item, position
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

    def begin(self) -> Iterator[Effect]:
        """It was just accepted, or taken over from somebody who has died."""
        match self.status.state:
            case "accepted" | "reading":
                self._reading = True
                yield self._do("read", Read(self.route))
            case "running":
                self._reading = True
                yield self._do("resume", Resume(self.route, self.record.checkpoint))
            case "writing":
                yield from self._conclude()

    def go_on(self) -> Iterator[Effect]:
        """Feed what may be fed, append what can be appended."""
        if self.status.state != "running" or not self._resumed or self._failure:
            return
        total = self.status.total or 0
        number, first, position = self._fed
        room = self._window - len(self._spots)
        if not self._reading and first < total and room >= max(1, self._window // 4):
            self._reading = True
            skip = frozenset(self._parts)
            feed = Feed(
                self.route, self.record.stamp, self.record.chunk_items, number, first, total, position, room, skip,
                self.record.checkpoint.generation,
            )  # fmt: skip
            yield self._do("feed", feed)
        if self._writing:
            return
        if self.record.checkpoint.items == total:
            yield from self._to("writing", step="giving the output its name")
            return
        following: list[Spot] = []
        at = self.record.checkpoint.chunks
        while at in self._parts and at in self._spots and len(following) < AT_ONCE:
            following.append(self._spots[at])
            at += 1
        if following:
            self._writing = True
            yield self._do("assemble", Assemble(self.route, total, self.record.checkpoint, following))

    def part(self, number: int) -> Iterator[Effect]:
        """A part is in the bucket."""
        if number >= self.record.checkpoint.chunks:
            self._parts.add(number)
            yield from self.go_on()

    def look(self) -> Iterator[Effect]:
        """Nothing was heard for a while: perhaps a word got lost."""
        if self._resumed and not self._reading and self.status.state == "running" and not self._failure:
            self._reading = True
            yield self._do("resume", Resume(self.route, self.record.checkpoint))

    # -- what was done

    def was_read(self, result: WasRead | Broken, now: float) -> Iterator[Effect]:
        self._reading = False
        if self.over:
            return
        if isinstance(result, Broken):
            yield from self.fail(result.reason)
            return
        self._resumed = True
        self.record = replace(self.record, stamp=result.stamp)
        yield from self._to("running", total=result.items, started=now, step="waiting for spare capacity")

    def resumed(self, result: Resumed) -> Iterator[Effect]:
        self._reading = False
        if self.over:
            return
        if not result.written:  # another machine had it: begin anew
            generation = self.record.checkpoint.generation + 1
            self.record = replace(self.record, checkpoint=Checkpoint(generation=generation))
            self._parts, self._spots, self._fed = set(result.parts), {}, (0, 0, Position())
            self._resumed = True
            yield from self._to("running", done=0, cost=0.0, variants=[], step="what was written is gone: once more")
            return
        checkpoint = self.record.checkpoint
        self._parts |= {number for number in result.parts if number >= checkpoint.chunks}
        if not self._resumed:
            self._resumed = True
            self._fed = (checkpoint.chunks, checkpoint.items, checkpoint.position)
        yield from self.go_on()

    def fed(self, result: list[Spot] | Broken) -> Iterator[Effect]:
        self._reading = False
        if isinstance(result, Broken):
            yield from self.fail(result.reason)
            return
        for spot in result:
            self._spots[spot.number] = spot
            self._fed = (spot.number + 1, spot.first + spot.items, spot.end)
        yield from self.go_on()

    def assembled(self, result: Assembled | Broken, now: float) -> Iterator[Effect]:
        self._writing = False
        if self.over:
            return
        if isinstance(result, Broken):
            yield from self.fail(result.reason)
            return
        before, after = self.record.checkpoint, result.checkpoint
        self._drop = list(range(before.chunks, after.chunks))
        for number in self._drop:
            self._spots.pop(number, None)
            self._parts.discard(number)
        self.moved = now
        self.record = replace(self.record, checkpoint=after)
        status = self.status
        variants = [*status.variants, *(v for v in result.variants if v not in status.variants)]
        cost = status.cost + result.cost
        if result.failure:
            yield from self.fail(result.failure, failed=result.failed, done=after.items, cost=cost, variants=variants)
        else:
            yield from self._to("running", step="computing", done=after.items, cost=cost, variants=variants)

    def concluded(self, result: Broken | None, now: float) -> Iterator[Effect]:
        self._writing = False
        if isinstance(result, Broken):
            yield from self.fail(result.reason)
        else:
            yield from self._to("done", step="", finished=now)

    def kept(self) -> Iterator[Effect]:
        """The record is on disk: go on from there."""
        self._writing = False
        if self.status.state == "writing":
            yield from self._conclude()
        else:
            yield from self.go_on()

    def fail(self, reason: str, **changes: object) -> Iterator[Effect]:
        """It cannot go on. It counts as failed only once what it leaves behind has its name: whoever waits for it looks there then."""
        if self.over:
            return
        self._failure = reason[:1000]
        self.record = replace(self.record, status=replace(self.status, **changes))
        self._writing = True
        yield self._do("abandon", Abandon(self.route, self.record.checkpoint, keep=True))

    def abandoned(self, partial: str, now: float) -> Iterator[Effect]:
        """What it left behind has been cleared away; partial: where the outputs so far are."""
        reason = self._failure
        kept = f"; the first {self.status.done} outputs are in {partial}" if partial else ""
        yield from self._to("failed", reason=f"{reason}{kept}", finished=now, step="")

    # -- inside

    def _conclude(self) -> Iterator[Effect]:
        self._writing = True
        yield self._do("conclude", Conclude(self.route, self.record.checkpoint))

    def _to(self, state: JobState, **changes: object) -> Iterator[Effect]:
        """Keep the job in this state; what it was told to drop goes along."""
        status = replace(self.status, state=state, **changes)
        done = 1.0 if state == "done" else (status.done / status.total if status.total else 0.0)
        self.record = replace(self.record, status=replace(status, progress=round(done, 4)))
        self._writing = True
        drop, self._drop = self._drop, []
        yield self._do("keep", Keep(self.record, drop))

    def _do(self, what: str, command: object) -> Do:
        return Do((what, self.job), command)
