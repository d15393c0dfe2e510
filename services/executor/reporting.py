"""What an executor tells its monitor twice a second: what each instance did since the last time. Pure."""

from collections.abc import Iterable

from msgspec import Struct

from bus.messages.fleet import ExecutorReport
from bus.subjects import Subjects
from services.core.actor import After, Do, Effect, Publish
from services.executor.instances import Loaded
from services.executor.work import MeasureMemory

REPORT = 0.5  # s


class Report(Struct, frozen=True):
    """Timer: tell the monitor what was measured."""


class Reporter:
    """memory_mb: of this process, as last measured."""

    def __init__(self, worker: str, device: str, incarnation: int, subjects: Subjects) -> None:
        self.memory_mb = 0.0
        self._worker = worker
        self._device = device
        self._incarnation = incarnation
        self._subject = subjects.monitor(worker, "report")
        self._reported = 0.0

    def start(self, now: float) -> tuple[Effect, ...]:
        """The first report is due at once."""
        self._reported = now
        return (After("report", 0.0, Report()),)

    def gap(self, now: float) -> float:
        """Seconds since the last report; a new one is under way."""
        gap = now - self._reported if self._reported else REPORT
        self._reported = now
        return gap

    def report(self, now: float, seconds: float, instances: Iterable[Loaded]) -> tuple[Effect, ...]:
        """Tell it, measure memory for the next one, and set the timer."""
        report = ExecutorReport(
            worker=self._worker,
            device=self._device,
            incarnation=self._incarnation,
            at=now,
            seconds=seconds,
            samples=[loaded.sample(now) for loaded in instances],
            memory_mb=self.memory_mb,
        )
        return (Publish(self._subject, report), Do(("memory", ""), MeasureMemory()), After("report", REPORT, Report()))
