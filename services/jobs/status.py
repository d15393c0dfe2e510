"""The statuses of jobs as others see them: published on the bus, recorded for history, with what keeps workers from going on."""

from msgspec.structs import replace

from bus.messages.events import JobEvent
from bus.messages.jobs import OVER, JobStatus, RunnerNote
from bus.subjects import Subjects
from services.core.actor import Effect, Publish, Record

NOTE_S = 5.0  # after which a runner's note says nothing any more
PUBLISH_S = 0.3  # at least between two statuses of one state
RECORD_S = 2.0  # the same for history


class JobStatuses:
    """The last status that was published and recorded of each job, and the last note of each worker's runner."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._notes: dict[str, tuple[float, str]] = {}
        self._published: dict[str, tuple[float, JobStatus]] = {}
        self._recorded: dict[str, tuple[float, JobStatus]] = {}

    def note(self, note: RunnerNote, now: float) -> None:
        """A worker takes nothing now, or takes something again."""
        self._notes[note.worker] = (now, note.why)

    def with_notes(self, status: JobStatus, now: float) -> JobStatus:
        """The status. If something keeps all workers that were heard of lately from going on, its step says what."""
        notes = {worker: why for worker, (at, why) in self._notes.items() if now - at < NOTE_S}
        if status.state != "running" or not notes or not all(notes.values()):
            return status
        return replace(status, step="; ".join(f"{worker}: {why}" for worker, why in sorted(notes.items())))

    def publish(self, status: JobStatus, now: float) -> list[Effect]:
        """Publish and record a status: each change of state, and at a bounded rate what lies between."""
        effects: list[Effect] = []
        kept, status = status, self.with_notes(status, now)
        if _is_due(self._published.get(status.job), status, now, PUBLISH_S):
            self._published[status.job] = (now, status)
            effects.append(Publish(self._subjects.job_status(status.job), status))
        if _is_due(self._recorded.get(status.job), status, now, RECORD_S):
            self._recorded[status.job] = (now, status)
            event = event_of(status, now)
            effects.append(Record(event if status is kept else replace(event, reason=status.step)))
        if status.state in OVER:
            del self._published[status.job], self._recorded[status.job]
        return effects


def _is_due(last: tuple[float, JobStatus] | None, status: JobStatus, now: float, pause: float) -> bool:
    if last is None:
        return True
    at, former = last
    return former.state != status.state or (former != status and now - at >= pause)


def event_of(status: JobStatus, now: float) -> JobEvent:
    """The status as an event."""
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
