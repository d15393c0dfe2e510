"""What this gateway has answered in Clipper's dialect, as Clipper's /metrics tells it. Pure."""

from typing import Any


class Counts:
    """By application: predictions, how many of them were defaults, and their latency."""

    def __init__(self) -> None:
        self._apps: dict[str, list[float]] = {}

    def add(self, app: str, items: int, micros: float, *, default: bool) -> None:
        """One request was answered."""
        found = self._apps.setdefault(app, [0.0, 0.0, 0.0, 0.0, 0.0])
        found[0] += items
        found[1] += items if default else 0
        found[2] += 1
        found[3] += micros
        found[4] = max(found[4], micros)

    def report(self) -> dict[str, list[dict[str, Any]]]:
        """Counters, ratios and histograms with Clipper's names."""
        apps = sorted(self._apps.items())
        return {
            "counters": [{f"app:{app}:num_predictions": {"count": int(found[0])}} for app, found in apps],
            "ratio_counters": [
                {f"app:{app}:default_prediction_ratio": {"ratio": found[1] / found[0]}} for app, found in apps
            ],
            "histograms": [
                {
                    f"app:{app}:prediction_latency": {
                        "unit": "microseconds",
                        "size": int(found[2]),
                        "mean": found[3] / found[2],
                        "max": found[4],
                    }
                }
                for app, found in apps
            ],
        }
