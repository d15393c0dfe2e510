"""The report of a run: counts, quantiles and time series. Its memory does not grow with the queries.

Time is the scenario's, in seconds, and never decreases. Latency, accuracy and violations are the client's view. docs/simulation.md
defines all figures.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import ceil, inf
from typing import Any

import msgspec
from msgspec import Struct

from bus.messages.events import Event, JobEvent, PipelineEvent, ScalingEvent, SelectionEvent
from bus.messages.public import Answer
from services.core.catalog import target_of
from services.simulation.composites import EnsembleCounts, PipelineReports
from services.simulation.scenario.model import PolicySpec, Scenario
from services.simulation.statistics import (
    UNITS,
    WINDOW_S,
    AccuracyDrop,
    AccuracyUnits,
    AppCounts,
    Quantiles,
    Sample,
    Series,
    Totals,
    ratio,
)

__all__ = ["MEASURED", "RunReport", "Sample"]

MEASURED = ("decisions", "events_per_s", "solve_ms")  # keys of wall-clock figures, which may differ from run to run
KEPT = 1000  # scaling decisions that are listed; the rest are counted
_ENOUGH = 4096  # values that are counted at once: fast to count, and small until then
_SAME = 1e-9  # s that an answer may exceed its limit, because times are sums of floats
_MS, _US = 1e3, 1e6


class RunReport:
    """The report of one policy's run. Feed it during the run, then call `finished` once."""

    def __init__(
        self,
        policy: str,
        duration_s: float,
        every_s: float,
        *,
        base: str = "",
        hardware: dict[str, str] | None = None,
        targets: Mapping[str, float] | None = None,
        several: Iterable[str] = (),
        pipelines: PipelineReports | None = None,
    ) -> None:
        """hardware: the kind of device of each variant. targets: the share of each app's queries to be answered in time.

        several: the apps of which several models answer together.
        """
        self._policy, self._base = policy, base or policy
        self._duration, self._every = duration_s, every_s
        self._hardware = hardware or {}
        self._targets = targets or {}
        self._apps: defaultdict[str, AppCounts] = defaultdict(AppCounts)
        self._ensembles = {app: EnsembleCounts() for app in several}
        self.pipelines = pipelines or PipelineReports({})
        self._variants: defaultdict[str, int] = defaultdict(int)
        self._units = AccuracyUnits()
        self._drop = AccuracyDrop()
        self._series = Series(every_s, duration_s)
        self._after = 0  # answers that came after the duration
        self._windows = 0  # closed
        self._end = min(every_s, WINDOW_S)  # of the interval or window that ends next
        self._actions: defaultdict[str, int] = defaultdict(int)
        self._scalings: list[dict[str, Any]] = []
        self._more = 0
        self._solving = Quantiles()
        self._deciding = Quantiles()
        self._offline = JobCounts(every_s, duration_s)
        self.job, self.job_refused, self.offline = self._offline.job, self._offline.refused, self._offline.written

    @classmethod
    def of(cls, scenario: Scenario, policy: PolicySpec) -> "RunReport":
        """An empty report for this run."""
        hardware = {record.variant: record.hardware for record in scenario.variants}
        usual = policy.settings.autoscaler.slo_target
        return cls(
            policy.name,
            scenario.duration_s,
            scenario.metrics_every_s,
            base=policy.base,
            hardware=hardware,
            targets={app.app: target_of(app, usual) for app in scenario.apps},
            several=[app.app for app in scenario.apps if app.selection is not None],
            pipelines=PipelineReports.of(scenario, policy),
        )

    def offered(self, app: str, now: float) -> None:
        """A query was sent, at its intended time."""
        if now >= self._end:
            self._close(now)
        self._apps[app].offered += 1

    def answered(
        self, app: str, now: float, seconds: float, limit_s: float, accuracy: float | None, variant: str
    ) -> None:
        """A query was answered. seconds: since the intended time of sending. limit_s: inf without an objective."""
        if now >= self._end:
            self._close(now)
        tally = self._apps[app]
        tally.answered += 1
        if now > self._duration:
            self._after += 1
        tally.latency.fresh.append(seconds)
        if variant:  # of several models' answers it is empty
            self._variants[variant] += 1
        if seconds - limit_s > _SAME:
            tally.late += 1
        elif accuracy is not None:
            tally.rated += 1
            tally.accuracy += self._units[accuracy]

    def judged(self, app: str, answer: Answer, items: int, wrong: int) -> None:
        """An answer of several models, after `answered`: so many of its items are wrong."""
        self._ensembles[app].answered(answer, items, wrong)

    def refused(self, app: str, now: float, code: str) -> None:
        """A query was refused, with a code of the contract."""
        if now >= self._end:
            self._close(now)
        refusals = self._apps[app].refusals
        refusals[code] = refusals.get(code, 0) + 1

    def event(self, event: Event, now: float) -> None:
        """An actor recorded an event. Scaling decisions are counted and listed."""
        if isinstance(event, JobEvent):
            self._offline.event(event, now)
        elif isinstance(event, SelectionEvent):
            if now >= self._end:
                self._close(now)
            self._ensembles[event.app].taught(event)
        elif isinstance(event, PipelineEvent):
            self.pipelines.changed(event, now)
        if not isinstance(event, ScalingEvent):
            return
        if event.count:  # 0: wanted, but not possible
            self._actions[event.action] += 1
        if event.solve_ms is not None:
            self._solving.fresh.append(event.solve_ms)
        if len(self._scalings) >= KEPT:
            self._more += 1
            return
        row = msgspec.structs.asdict(event)
        del row["solve_ms"], row["objective"]
        self._scalings.append({**row, "time": round(now, 6)})

    def sample(self, sample: Sample) -> None:
        """Add a sample of the system's state; every metrics_every_s."""
        if sample.time >= self._end:
            self._close(sample.time)
        self._series.sample(sample)
        self.pipelines.sample(sample.instances)

    def decided(self, seconds: float) -> None:
        """A selection took so many seconds by the wall clock."""
        self._deciding.fresh.append(seconds)

    def finished(self, cost: float, events: int, wall_s: float, open_queries: int) -> dict[str, Any]:
        """The result. cost: US$ of the run. events, wall_s: the kernel's. open_queries: number still unanswered at the end."""
        self._close_all()
        whole = AppCounts(drop=self._drop)
        for tally in self._apps.values():
            whole.add(tally)
        used = self._series.variants() | set(self._variants)
        p50_decide, p99_decide = self._deciding.quantiles(0.5, 0.99)
        p50_solve, p99_solve = self._solving.quantiles(0.5, 0.99)
        return {
            "policy": self._policy,
            "base": self._base,
            "simulated": True,
            "duration_s": self._duration,
            **_counts(whole),
            "open": open_queries,
            "throughput_qps": (whole.answered - self._after) / self._duration,
            "cost": cost,
            "cost_per_1000": ratio(1000.0 * cost, whole.answered),
            "cost_per_1000_in_time": ratio(1000.0 * cost, whole.answered - whole.late),
            "mean_utilisation": self._series.mean_utilisation(),
            "scale_actions": dict(sorted(self._actions.items())),
            "apps": {app: self._app(app, tally) for app, tally in sorted(self._apps.items())},
            "variants": dict(sorted(self._variants.items())),
            "hardware": {name: kind for name, kind in sorted(self._hardware.items()) if name in used},
            "scaling": {"decisions": self._scalings, "more": self._more},
            "series": {**self._series.document(), **self._offline.series(self._series.length)},
            "jobs": self._offline.rows(),
            "events": events,
            "decisions": {
                "count": self._deciding.count,
                "p50_us": _times(p50_decide, _US),
                "p99_us": _times(p99_decide, _US),
            },
            "solve_ms": {"count": self._solving.count, "p50": p50_solve, "p99": p99_solve},
            "events_per_s": ratio(events, wall_s),
        }

    def _app(self, app: str, tally: AppCounts) -> dict[str, Any]:
        attained = ratio(tally.answered - tally.late, tally.offered - tally.cancelled)
        found = {**_counts(tally), "slo_target": self._targets.get(app), "attainment": attained}
        ensemble = self._ensembles.get(app)
        if ensemble is not None:
            found["ensemble"] = ensemble.document()
        pipeline = self.pipelines.document(app, self._duration)
        return found if pipeline is None else {**found, "pipeline": pipeline}

    def _sums(self) -> Totals:
        return Totals(*map(sum, zip(Totals(), *(tally.totals for tally in self._apps.values()), strict=True)))

    def _close(self, now: float) -> None:
        """Close all intervals and windows that end by now."""
        for histogram in (self._deciding, self._solving, *(tally.latency for tally in self._apps.values())):
            histogram.settle(least=_ENOUGH)
        while now >= self._end:
            if self._end >= (self._windows + 1) * WINDOW_S:
                self._close_window()
            if self._end >= (self._series.length + 1) * self._every:
                self._close_interval()
            self._end = min((self._series.length + 1) * self._every, (self._windows + 1) * WINDOW_S)

    def _close_interval(self) -> None:
        self._series.close(self._sums())
        for ensemble in self._ensembles.values():
            ensemble.close()

    def _close_window(self) -> None:
        self._windows += 1
        for tally in self._apps.values():
            tally.drop.close(tally.rated, tally.accuracy)
        sums = self._sums()
        self._drop.close(sums.rated, sums.accuracy)

    def _close_all(self) -> None:
        """Close all intervals of the duration, and a later one if anything happened in it."""
        length = ceil(self._duration / self._every - _SAME)
        self._close((length + 0.5) * self._every if self._series.length < length else 0.0)
        if self._series.unlike(self._sums()):
            self._close_interval()
        self._close_window()
        self._end = inf


def _counts(tally: AppCounts) -> dict[str, Any]:
    """What became of the queries of one app, or of all."""
    p50, p99 = tally.latency.quantiles(0.5, 0.99)
    counted = tally.offered - tally.cancelled
    failed = counted - tally.answered - tally.refused
    return {
        "queries": tally.offered,
        "answered": tally.answered,
        "refused": tally.refused,
        "late": tally.late,
        "failed": failed,
        "refusals": dict(sorted(tally.refusals.items())),
        "slo_violation_ratio": ratio(tally.late + tally.refused + failed, counted) or 0.0,
        "effective_accuracy": ratio(tally.accuracy, UNITS * tally.rated),
        "max_accuracy_drop": tally.drop.most,
        "p50_ms": _times(p50, _MS),
        "p99_ms": _times(p99, _MS),
    }


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


# -- offline jobs


class SimulatedJob(Struct):
    """One offline job. inputs, done: items. finished_s: the scenario's time. reason: why it failed."""

    app: str
    inputs: int
    done: int = 0
    finished_s: float | None = None
    reason: str | None = None


class JobCounts:
    """All offline jobs of one run. Outputs after its duration do not count."""

    def __init__(self, every_s: float, duration_s: float) -> None:
        self._every, self._duration = every_s, duration_s
        self._jobs: dict[str, SimulatedJob] = {}
        self._items: dict[int, int] = {}  # by interval

    def job(self, job: str, app: str, inputs: int) -> None:
        """Add a job."""
        self._jobs[job] = SimulatedJob(app, inputs)

    def refused(self, job: str, reason: str) -> None:
        """A job was refused."""
        self._jobs[job].reason = reason

    def written(self, job: str, items: int, now: float) -> None:
        """Some outputs of a job were written."""
        if now < self._duration:
            self._jobs[job].done += items
            interval = int(now / self._every)
            self._items[interval] = self._items.get(interval, 0) + items

    def event(self, event: JobEvent, now: float) -> None:
        """The coordinator recorded an event of a job."""
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
        """offline_done: outputs/s in each of `count` intervals; empty without jobs."""
        if not self._jobs:
            return {}
        spans = (min(self._every, self._duration - i * self._every) for i in range(count))
        return {"offline_done": [self._items.get(i, 0) / span if span > 0 else 0.0 for i, span in enumerate(spans)]}
