"""The load of each requirement class, by the worker that serves it, from the dispatchers' reports. Pure.

A rate is the mean over the last seconds. If the newest part of them differs from the rest by more than chance explains (arrivals
are Poisson), it is the mean of that part. So noise is averaged out and a step is seen at once.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from bus.messages.scaling import ClassDemand, DemandReport
from services.core.demand import ANY, Band, band, merged, rate_of

KEPT = 5.0  # s of reports
SILENT = 1.2  # s without a report after which a dispatcher is ignored
LINGER = 30.0  # s for which a class without queries keeps an instance for its next query
FORGET = 300.0  # s after which a class is forgotten
REMEMBERED = 4096  # sets of needs whose class is cached

Needs = tuple[str, float | None, float, float | None, str | None, str | None, str | None]
Counts = dict[Band, dict[str, int]]  # items by class and worker


class ClassLoad(Struct, frozen=True):
    """The load of one class. last: when its last query came.

    by_worker: items/s; "": refused by all; "*": of all other workers, in the reports that one worker gets. counted: items of the
    last seconds. turned_away: those of them that were refused.
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
        """The share that is refused, 0..1."""
        return self.by_worker.get("", 0.0) / self.rate if self.rate > 0 else 0.0


class LoadEstimator:
    """Estimates loads from the reports of all dispatchers. everything: loads of other workers are needed even if nothing is refused."""

    def __init__(self, *, everything: bool = False) -> None:
        self._everything = everything
        self._reports: dict[str, deque[tuple[float, float, Counts]]] = {}
        self._needs: dict[Band, tuple[float, ClassDemand]] = {}  # the last time, and what was asked for
        self._bands: dict[Needs, Band] = {}
        self._known: tuple[float, list[ClassLoad]] | None = None  # at that time

    def take(self, report: DemandReport, now: float) -> None:
        """Add a report. The needs of a class are the strictest of its last reports."""
        self._known = None
        counts: Counts = {}
        for row in report.rows:
            of = self._band(row)
            ours = counts.get(of)
            if ours is None:
                ours = counts[of] = {}
            for worker, items in ((row.worker, row.items), ("", row.refused), (ANY, row.others)):
                if items:
                    ours[worker] = ours.get(worker, 0) + items
            known = self._needs.get(of)
            if known is None or now - known[0] > KEPT:
                self._needs[of] = (now, row)
            elif _same(known[1], row):
                self._needs[of] = (now, known[1])
            else:
                self._needs[of] = (now, merged(known[1], row))
        kept = self._reports.setdefault(report.dispatcher, deque())
        if report.seconds > 0:
            kept.append((now, min(report.seconds, KEPT), counts))
        while kept and now - kept[0][0] > KEPT:
            kept.popleft()

    def _band(self, row: ClassDemand) -> Band:
        key = (row.app, row.latency_ms, row.accuracy, row.cost, row.model, row.version, row.variant)
        of = self._bands.get(key)
        if of is None:
            if len(self._bands) >= REMEMBERED:
                self._bands.clear()
            of = self._bands[key] = band(row)
        return of

    @property
    def apps(self) -> set[str]:
        """The apps that have had load, as long as their classes are remembered."""
        return {of[0] for of in self._needs}

    def newest(self, names: Collection[str]) -> float:
        """Items/s to these workers by the newest report of each dispatcher alone."""
        found = 0.0
        for kept in self._reports.values():
            if kept:
                _, seconds, counts = kept[-1]
                found += sum(ours.get(name, 0) for ours in counts.values() for name in names) / seconds
        return found

    def classes(self, now: float) -> list[ClassLoad]:
        """All classes that are remembered, in a fixed order."""
        if self._known is None or self._known[0] != now:
            self._known = (now, self._classes(now))
        return self._known[1]

    def _classes(self, now: float) -> list[ClassLoad]:
        for name in [name for name, kept in self._reports.items() if not kept or now - kept[-1][0] > SILENT]:
            del self._reports[name]
        for of in [of for of, (at, _) in self._needs.items() if now - at > FORGET]:
            del self._needs[of]
        seconds, series = self._series()
        refused = {of[0] for of, ours in series.items() if any(ours.get("", ()))}
        found = []
        for of, (at, needs) in self._needs.items():
            ours = series.get(of, {})
            # Loads of other workers matter only if something is refused.
            shared = self._everything or of[0] in refused
            rates = {name: rate_of(seconds, items) for name, items in ours.items() if name and (shared or name != ANY)}
            if "" in ours:
                rates[""] = _turned_away(seconds, ours, sum(rates.values()))
            counts = {worker: sum(items) for worker, items in ours.items()}
            by_worker = {w: r for w, r in sorted(rates.items()) if r > 0}
            found.append(ClassLoad(needs, by_worker, at, sum(counts.values()), counts.get("", 0)))
        found.sort(key=lambda load: repr(self._band(load.needs)))
        return found

    def _series(self) -> tuple[list[float], dict[Band, dict[str, list[int]]]]:
        """Periods in seconds, the newest first, and the items of each by class and worker, of all dispatchers together."""
        length = max((len(kept) for kept in self._reports.values()), default=0)
        seconds = [0.0] * length
        series: dict[Band, dict[str, list[int]]] = {}
        for kept in self._reports.values():
            for i, (_, period, counts) in enumerate(reversed(kept)):
                seconds[i] = max(seconds[i], period)
                for of, ours in counts.items():
                    known = series.get(of)
                    if known is None:
                        known = series[of] = {}
                    for worker, items in ours.items():
                        steps = known.get(worker)
                        if steps is None:
                            steps = known[worker] = [0] * length
                        steps[i] += items
        return seconds, series


def _same(one: ClassDemand, other: ClassDemand) -> bool:
    return one.latency_ms == other.latency_ms and one.accuracy == other.accuracy and one.cost == other.cost


def _turned_away(seconds: Sequence[float], series: Mapping[str, Sequence[int]], taken: float) -> float:
    """Items/s that are refused (series ""). taken: items/s that workers serve.

    Refusals come in bursts, whenever a queue is full, so they show steps by chance. All items together show real steps: what workers
    do not serve of their rate counts as refused, if that is more than the mean of the refusals.
    """
    refused, period = series[""], sum(seconds)
    mean = sum(refused) / period if period > 0 else 0.0
    came = [sum(items) for items in zip(*series.values(), strict=True)]
    return max(min(mean, rate_of(seconds, refused)), rate_of(seconds, came) - taken)


def share_of(worker: str, load: ClassLoad, app_loads: Iterable[ClassLoad], holders: Sequence[str]) -> float:
    """The items/s of a class that this worker plans for: what it serves, and its part of what is refused.

    The part is in proportion to what each worker serves of the app. If none serves any, the first holder plans all of it.
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
