"""The status of a job that waits, on the bus and in history."""

from bus.messages.events import JobEvent
from bus.messages.jobs import JobStatus, RunnerNote
from bus.subjects import Subjects
from services.core.actor import Publish, Record
from services.jobs.job import RECORD_S, JobStatuses


def published(statuses: JobStatuses, status: JobStatus, now: float) -> tuple[JobStatus, JobEvent]:
    publish, record = statuses.publish(status, now)
    assert isinstance(publish, Publish)
    assert isinstance(record, Record)
    assert isinstance(publish.message, JobStatus)
    assert isinstance(record.event, JobEvent)
    return publish.message, record.event


def test_what_keeps_a_job_waiting_is_in_history_while_it_does() -> None:
    statuses = JobStatuses(Subjects("t"))
    status = JobStatus(job="j", app="a", input="i", output="o", state="running", total=8, created=1.0)
    statuses.note(RunnerNote(worker="w0", why="cpu is used 90 % by other work"), 10.0)
    shown, event = published(statuses, status, 10.0)
    assert shown.step == event.reason == "w0: cpu is used 90 % by other work"
    statuses.note(RunnerNote(worker="w0", why=""), 10.0 + RECORD_S)
    shown, event = published(statuses, status, 10.0 + RECORD_S)
    assert event.reason is None
    assert shown.step == status.step
