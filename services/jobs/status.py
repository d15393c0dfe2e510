"""What the coordinator tells of jobs: statuses on the bus, rows for history, and what keeps workers from going on. Pure."""

from collections.abc import Iterator

from msgspec.structs import replace

from bus.messages.events import JobEvent
from bus.messages.jobs import OVER, JobStatus, RunnerNote
from bus.subjects import Subjects
from services.core.actor import Effect, Publish, Record

QUIET_S = 5.0  # without progress, after which the bucket of parts is looked through; notes older than this say nothing
TELL_S = 0.3  # at least between two statuses of one state
RECORD_S = 2.0  # the same for history


class JobStatuses:
    """What was told of each job last, and what its workers say."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._notes: dict[str, tuple[float, str]] = {}
        self._told: dict[str, tuple[float, JobStatus]] = {}
        self._recorded: dict[str, tuple[float, JobStatus]] = {}

    def note(self, note: RunnerNote, now: float) -> None:
        """A worker takes nothing now, or takes something again."""
        self._notes[note.worker] = (now, note.why)

    def with_notes(self, status: JobStatus, now: float) -> JobStatus:
        """The status; where all workers that were heard of lately are kept from going on, its step says by what."""
        notes = {worker: why for worker, (at, why) in self._notes.items() if now - at < QUIET_S}
        if status.state != "running" or not notes or not all(notes.values()):
            return status
        return replace(status, step="; ".join(f"{worker}: {why}" for worker, why in sorted(notes.items())))

    def tell(self, status: JobStatus, now: float) -> Iterator[Effect]:
        """Publish and record a status: each change of state, and what lies between at a bounded rate."""
        kept, status = status, self.with_notes(status, now)
        if _is_due(self._told.get(status.job), status, now, TELL_S):
            self._told[status.job] = (now, status)
            yield Publish(self._subjects.job_status(status.job), status)
        if _is_due(self._recorded.get(status.job), status, now, RECORD_S):
            self._recorded[status.job] = (now, status)
            event = event_of(status, now)
            yield Record(event if status is kept else replace(event, reason=status.step))
        if status.state in OVER:
            del self._told[status.job], self._recorded[status.job]


def _is_due(last: tuple[float, JobStatus] | None, status: JobStatus, now: float, pause: float) -> bool:
    if last is None:
        return True
    at, told = last
    return told.state != status.state or (told != status and now - at >= pause)


def event_of(status: JobStatus, now: float) -> JobEvent:
    """The status as a row of history."""
    return JobEvent(
        time=now,
        job=status.job,
        app=status.app,
        model=status.model,
        variant=status.variant,
        accuracy=status.accuracy,
        input=status.input,
        output=status.output,
        state=status.state,
        total=status.total,
        done=status.done,
        failed=status.failed,
        reason=status.reason,
        cost=status.cost,
        created=status.created,
        started=status.started,
        finished=status.finished,
    )
