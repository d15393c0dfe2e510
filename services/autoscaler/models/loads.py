"""The load of each requirement class, by the worker that takes it, from the dispatchers' reports. Pure.

A rate is the mean over the last seconds, unless the newest part of them differs from the rest by more than chance explains
(arrivals counted as Poisson): then it is the mean of that newest part. So noise is averaged out and a step is seen at once.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import sqrt

from msgspec import Struct

from bus.messages.scaling import ClassDemand, DemandReport
from services.core.demand import Band, band, merged

KEPT = 5.0  # s of reports
SILENT = 1.2  # s without a report after which a dispatcher has nothing to tell
LINGER = 30.0  # s for which a class without queries still counts as used: its next query should find an instance
FORGET = 300.0  # s after which a class is forgotten
SIGNIFICANT = 3.5  # standard deviations between chance and a change


class Load(Struct, frozen=True):
    """One class: its needs, items/s by worker (worker "": what nobody could take), and when its last query came.

    counted, turned_away: items of the last seconds, and of them those that nobody could take.
    """

    needs: ClassDemand
    by_worker: dict[str, float]
    last: float
    counted: int = 0
    turned_away: int = 0

    @property
    def rate(self) -> float:
        return sum(self.by_worker.values())

    @property
    def refused(self) -> float:
        """The share that nobody could take, 0..1."""
        return self.by_worker.get("", 0.0) / self.rate if self.rate > 0 else 0.0


class Loads:
    """Follows the reports of all dispatchers."""

    def __init__(self) -> None:
        self._reports: dict[str, deque[tuple[float, float, dict[tuple[Band, str], int]]]] = {}
        self._needs: dict[Band, tuple[float, ClassDemand]] = {}  # the last time, and what was asked for

    def take(self, report: DemandReport, now: float) -> None:
        """One report; the needs of a class are the strictest of its last reports."""
        counts: dict[tuple[Band, str], int] = {}
        for row in report.rows:
            of = band(row)
            counts[of, row.worker] = counts.get((of, row.worker), 0) + row.items
            known = self._needs.get(of)
            fresh = known is None or now - known[0] > KEPT
            self._needs[of] = (now, row if fresh or known is None else merged(known[1], row))
        kept = self._reports.setdefault(report.dispatcher, deque())
        if report.seconds > 0:
            kept.append((now, min(report.seconds, KEPT), counts))
        while kept and now - kept[0][0] > KEPT:
            kept.popleft()

    def classes(self, now: float) -> list[Load]:
        """Every class that is remembered, in a fixed order."""
        for name in [name for name, kept in self._reports.items() if not kept or now - kept[-1][0] > SILENT]:
            del self._reports[name]
        for of in [of for of, (at, _) in self._needs.items() if now - at > FORGET]:
            del self._needs[of]
        series = self._series()
        found = []
        for of, (at, needs) in self._needs.items():
            ours = {worker: steps for (which, worker), steps in series.items() if which == of}
            rates = {worker: rate(steps) for worker, steps in ours.items() if worker}
            if "" in ours:
                rates[""] = _turned_away(ours, sum(rates.values()))
            counts = {worker: sum(items for _, items in steps) for worker, steps in ours.items()}
            by_worker = {w: r for w, r in sorted(rates.items()) if r > 0}
            found.append(Load(needs, by_worker, at, sum(counts.values()), counts.get("", 0)))
        found.sort(key=lambda load: repr(band(load.needs)))
        return found

    def _series(self) -> dict[tuple[Band, str], list[tuple[float, int]]]:
        """(seconds, items) newest first, by class and worker, all dispatchers together."""
        length = max((len(kept) for kept in self._reports.values()), default=0)
        keys = {key for kept in self._reports.values() for _, _, counts in kept for key in counts}
        series: dict[tuple[Band, str], list[tuple[float, int]]] = {key: [(0.0, 0)] * length for key in keys}
        for kept in self._reports.values():
            for i, (_, seconds, counts) in enumerate(reversed(kept)):
                for key in keys:
                    known = series[key][i]
                    series[key][i] = (max(known[0], seconds), known[1] + counts.get(key, 0))
        return series


def rate(steps: Sequence[tuple[float, int]]) -> float:
    """Items/s now, from (seconds, items) of successive periods, the newest first."""
    seconds, items = (sum(column) for column in zip(*steps, strict=True)) if steps else (0.0, 0)
    if seconds <= 0:
        return 0.0
    best, found = SIGNIFICANT, items / seconds
    new_s, new_n = 0.0, 0
    for period, count in steps[:-1]:
        new_s, new_n = new_s + period, new_n + count
        old_s, old_n = seconds - new_s, items - new_n
        if new_s <= 0 or old_s <= 0:
            continue
        # Both counts are Poisson, and few: their roots (Anscombe's) are near normal, with a spread that no rate changes.
        spread = sqrt(1.0 / new_s + 1.0 / old_s) / 2.0
        distance = abs(sqrt((new_n + 0.375) / new_s) - sqrt((old_n + 0.375) / old_s)) / spread
        if distance > best:
            best, found = distance, new_n / new_s
    return found


def _turned_away(series: dict[str, list[tuple[float, int]]], taken: float) -> float:
    """Items/s that nobody could take (series ""). taken: by all workers.

    Refusals come in bursts, whenever a queue is full, so that chance alone makes steps of them. What tells a step is all that
    came: it counts as turned away as far as nobody takes it, and else the mean does.
    """
    refused = series[""]
    seconds, items = (sum(column) for column in zip(*refused, strict=True)) if refused else (0.0, 0)
    mean = items / seconds if seconds > 0 else 0.0
    came = [(max(s for s, _ in at), sum(n for _, n in at)) for at in zip(*series.values(), strict=True)]
    return max(min(mean, rate(refused)), rate(came) - taken)


def share_of(worker: str, load: Load, app_loads: Iterable[Load], holders: Sequence[str]) -> float:
    """The items/s of a class that this worker plans for: what it takes, and its part of what nobody could take.

    That part goes by what each worker takes of the app; while nobody takes anything, all of it is the first holder's.
    holders: workers that have, or could have, an instance for the app, in a fixed order.
    """
    own = load.by_worker.get(worker, 0.0)
    refused = load.by_worker.get("", 0.0)
    if refused <= 0:
        return own
    taken = dict.fromkeys(holders, 0.0)
    for other in app_loads:
        for name, value in other.by_worker.items():
            if name:
                taken[name] = taken.get(name, 0.0) + value
    total = sum(taken.values())
    if total > 0:
        return own + refused * taken.get(worker, 0.0) / total
    return own + (refused if holders and holders[0] == worker else 0.0)
