"""What became of a run's offline jobs so far."""

from typing import Any

from msgspec import Struct

from bus.messages.events import JobEvent


class Job(Struct):
    """One: inputs and outputs written so far are counted in items, finished_s is the scenario's time. reason: why it failed."""

    app: str
    inputs: int
    done: int = 0
    finished_s: float | None = None
    reason: str | None = None


class OfflineTally:
    """All jobs of one run; what is written after its duration does not count."""

    def __init__(self, every_s: float, duration_s: float) -> None:
        self._every, self._duration = every_s, duration_s
        self._jobs: dict[str, Job] = {}
        self._items: dict[int, int] = {}  # by interval

    def job(self, job: str, app: str, inputs: int) -> None:
        """There will be one."""
        self._jobs[job] = Job(app, inputs)

    def refused(self, job: str, reason: str) -> None:
        """It was not taken in."""
        self._jobs[job].reason = reason

    def written(self, job: str, items: int, now: float) -> None:
        """So many more of its outputs are there."""
        if now < self._duration:
            self._jobs[job].done += items
            interval = int(now / self._every)
            self._items[interval] = self._items.get(interval, 0) + items

    def event(self, event: JobEvent, now: float) -> None:
        """What the coordinator recorded of it."""
        job = self._jobs[event.job]
        if event.state == "done" and now < self._duration:
            job.finished_s = now
        elif event.state == "failed":
            job.reason = event.reason

    def rows(self) -> list[dict[str, Any]]:
        """The jobs in the scenario's order: app, inputs, done, finished_s, and reason where there is one."""
        rows = []
        for job in self._jobs.values():
            row: dict[str, Any] = {"app": job.app, "inputs": job.inputs, "done": job.done, "finished_s": job.finished_s}
            rows.append(row if job.reason is None else {**row, "reason": job.reason})
        return rows

    def series(self, count: int) -> dict[str, list[float]]:
        """offline_done: outputs/s in each of so many intervals; only where there are jobs."""
        if not self._jobs:
            return {}
        spans = (min(self._every, self._duration - i * self._every) for i in range(count))
        return {"offline_done": [self._items.get(i, 0) / span if span > 0 else 0.0 for i, span in enumerate(spans)]}
