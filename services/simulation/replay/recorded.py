"""What really happened, counted by the same report as a simulation: a run whose policy is "recorded".

Its latency is the system's own, from arrival to answer. A simulated latency includes the way there and back, half a millisecond.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

from services.simulation.replay.machines import kinds_of
from services.simulation.replay.recording import Bin, RecordedQuery, RecordingHead, with_stages
from services.simulation.report import RunReport, Sample

RECORDED = "recorded"
DEFAULT = "(default answer)"


class RecordedRun:
    """Add the queries in the order of their arrival, then call `finished` once. only: these apps; None: all."""

    def __init__(self, head: RecordingHead, only: frozenset[str] | None, every_s: float) -> None:
        self._head, self._only = head, only
        wanted = None if only is None else with_stages(only, head.apps)
        links = {link for app in head.apps if wanted is None or app.app in wanted for link in app.links.items()}
        hardware = {one.variant: one.hardware for one in head.variants if (one.model, one.version) in links}
        self._shown = None if only is None else frozenset(hardware)
        usual = head.slo_target
        targets = {app.app: usual if app.slo_target is None else app.slo_target for app in head.apps}
        known = {app: target for app, target in targets.items() if target is not None}
        self._report = RunReport(RECORDED, head.duration_s, every_s, base=RECORDED, hardware=hardware, targets=known)
        self._open: list[tuple[float, int, RecordedQuery]] = []  # by when they ended
        self._count = 0

    def add(self, query: RecordedQuery) -> None:
        """Add a query."""
        at = query.time - self._head.begins
        self._end_until(at)
        self._report.offered(query.app, at)
        self._count += 1
        heappush(self._open, (at + (query.latency_ms or 0.0) / 1000.0, self._count, query))

    def finished(self) -> dict[str, Any]:
        """The result, as of a simulation. Unmeasured values are None."""
        self._end_until(inf)
        head, every = self._head, self._head.every_s
        cost = 0.0
        kind_of = {one.worker: kind for kind, workers in kinds_of(head).items() for one in workers}
        for i, one in enumerate(head.bins):
            spent = self._spent(one)
            cost += spent
            workers: dict[str, int] = {}
            for name in one.workers:
                kind = kind_of.get(name)
                if kind is not None:
                    workers[kind] = workers.get(kind, 0) + 1
            span = min(every, head.duration_s - i * every)
            self._report.sample(
                Sample(
                    time=i * every,
                    instances={
                        name: round(count)
                        for name, count in one.instances.items()
                        if round(count) and (self._shown is None or name in self._shown)
                    },
                    workers=workers,
                    cost_rate=spent / span if span > 0 else 0.0,
                    utilisation=one.utilisation or 0.0,
                )
            )
        result = self._report.finished(cost, 0, 0.0, 0)
        used = [one.utilisation for one in head.bins if one.utilisation is not None]
        result |= {
            "simulated": False,
            "mean_utilisation": sum(used) / len(used) if used else None,
            "scale_actions": dict(head.actions),
        }
        if not head.billed:
            result |= {"cost": None, "cost_per_1000": None, "cost_per_1000_in_time": None}
        del result["scaling"], result["jobs"], result["decisions"], result["solve_ms"]
        del result["events"], result["events_per_s"], result["open"]
        return result

    def _spent(self, one: Bin) -> float:
        return sum(cost for app, cost in one.cost.items() if self._only is None or app in self._only)

    def _end_until(self, now: float) -> None:
        while self._open and self._open[0][0] <= now:
            at, _, query = heappop(self._open)
            self._end(query, at)

    def _end(self, query: RecordedQuery, at: float) -> None:
        answered: Callable[..., None] = self._report.answered
        seconds = (query.latency_ms or 0.0) / 1000.0
        match query.outcome:
            case "ok":
                answered(query.app, at, seconds, inf, query.accuracy, query.variant or "")
            case "late":
                answered(query.app, at, seconds, -1.0, query.accuracy, query.variant or "")
            case "default":
                answered(query.app, at, seconds, inf, None, DEFAULT)
            case "refused":
                self._report.refused(query.app, at, query.code or "refused")
            case _:  # an error: neither answered nor refused
                return
