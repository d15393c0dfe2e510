"""A report that also follows each app: throughput and P99 of every thirty seconds, and when instances were found Interfered."""

from collections import defaultdict
from math import ceil
from typing import Any

import numpy as np

from bus.messages.events import Event, StateEvent
from services.simulation.report import RunReport

EVERY = 30.0  # s, as in figure 7


class AppReport(RunReport):
    """Adds "windows": {app: {"time", "mean_ms", "p99_ms", "qps"}} (by the time of the answer) and "interfered": {variant: seconds}."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._latencies: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._interfered: defaultdict[str, list[float]] = defaultdict(list)

    def answered(
        self, app: str, now: float, seconds: float, limit_s: float, accuracy: float | None, variant: str
    ) -> None:
        super().answered(app, now, seconds, limit_s, accuracy, variant)
        self._latencies[app][int(now // EVERY)].append(seconds)

    def event(self, event: Event, now: float) -> None:
        super().event(event, now)
        if isinstance(event, StateEvent) and event.to_state == "Interfered":
            self._interfered[event.variant].append(round(now, 3))

    def finished(self, cost: float, events: int, wall_s: float, open_queries: int) -> dict[str, Any]:
        count = ceil(self._duration / EVERY - 1e-9)
        windows = {}
        for app, known in sorted(self._latencies.items()):
            rows = [known.get(i, []) for i in range(count)]
            windows[app] = {
                "time": [i * EVERY for i in range(count)],
                "mean_ms": [1000.0 * float(np.mean(row)) if row else None for row in rows],
                "p99_ms": [1000.0 * float(np.quantile(row, 0.99)) if row else None for row in rows],
                "qps": [len(row) / min(EVERY, self._duration - i * EVERY) for i, row in enumerate(rows)],
            }
        found = super().finished(cost, events, wall_s, open_queries)
        return found | {"windows": windows, "interfered": dict(sorted(self._interfered.items()))}
