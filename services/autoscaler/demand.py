"""Demand: a rate for each requirement class and its burstiness; and, as the leader forecasts it, the headroom that targets need.
Pure.

The leader hears all demand. The model-autoscaler of a worker hears what its worker takes, and forecasts nothing. Dispatchers report
each half second what came of each class, and how many queries of each app ended in time. Once a second the rates go to the
forecasters. The headroom of an app is a factor on its forecasts. It follows from what was reached: while more queries miss their
objective than the target allows, it grows; while fewer do, it shrinks.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import sqrt

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.catalog import AppRecord
from bus.messages.scaling import ClassDemand, DemandHistory, DemandReport
from bus.subjects import WITHOUT_APP
from services.core.catalog import Catalog
from services.core.demand import ANY, Band, band, expected_qps, merged, rate_of
from services.core.forecast.conformal import Forecaster
from services.core.forecast.forecasters import make_forecaster, rates

TICK_S = 1.0  # s between two observations of a forecaster
SILENT_S = 1.2  # s without a report after which a dispatcher is ignored
KEPT = 10  # reports of a dispatcher from which a rate follows: 5 s; of arrivals in bursts more, up to KEPT_MOST
KEPT_MOST = 60
PATIENT_S = 30.0  # s that queries without an objective may wait
REPORT_S = 0.5  # s between two reports
WARM_S = 5.0  # s of a class before its forecasts begin
MERGED_S = 5.0  # s for which a class keeps its strictest needs
FORGET_S = 300.0  # s after which a class without queries is forgotten
BURST_S = 30.0  # s over which the burstiness of arrivals is averaged
STEEP = 6.0  # standard deviations to which one difference counts for burstiness: a step is no burst
REACHED_S = 120.0  # s over which the reached share is counted
LONGEST_LOAD_S = 600.0  # of a variant
ASK_S = 300.0  # s after which the history of an app is asked for again, if no answer has come
RISE_S = 5  # ticks over which a rise is told
PAST = 180  # ticks whose rates are remembered: bursts that come again
CALM = 1.25  # peakedness up to which, and down to one by which, arrivals count as Poisson: estimates scatter
EVEN = 0.2  # the least peakedness


class ForecastLoad(Struct, frozen=True):
    """One class. rate: items/s now. peakedness: variance over mean of arrivals. last: when its last query came.

    latency_s: that its queries may take. forecast: of the items in `window` seconds. So many items scatter as counts do, which forecasters take for granted.
    past: rates of the last minutes, items/s. said: what an operator has said of its app, and this class's part of that.
    """

    needs: ClassDemand
    rate: float
    peakedness: float
    last: float
    latency_s: float
    forecast: Forecaster
    window: float
    past: Sequence[float] = ()
    said: Callable[[float], float] = lambda _: 0.0

    @property
    def rise(self) -> float:
        """Items/s that came to it in the last seconds beyond chance. As many may come again: no error of a forecast has told of that yet."""
        if len(self.past) <= RISE_S:
            return 0.0
        return max(0.0, self.rate - self.past[-1 - RISE_S] - 3.0 * sqrt(self.peakedness * self.rate / self.window))

    def point(self, ahead_s: float) -> float:
        """Items/s that are expected then, at least what an operator has said, and at least the present rate while it rises."""
        least = self.rate if self.rise > 0 else 0.0
        return max(self.forecast.point(ahead_s) / self.window or self.rate, least, self.said(ahead_s))

    def peak(self, ahead_s: float, share: float) -> float:
        """Items/s that are exceeded at no moment until then, with this probability."""
        return max(self.rate + self.rise, self.forecast.peak(ahead_s, share) / self.window, self.said(ahead_s))


@dataclass(slots=True, eq=False)
class _Class:
    """What is known of one class. counts: by dispatcher, seconds and items of its last reports, the newest first."""

    needs: ClassDemand
    forecast: Forecaster
    needs_at: float
    counts: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)
    rate: float = 0.0
    past: deque[float] = field(default_factory=lambda: deque(maxlen=PAST))
    # By dispatcher: items and seconds of its last report.
    newest: dict[str, tuple[float, float]] = field(default_factory=dict)
    mean: float = 0.0  # items of a report, averaged
    difference: float = 0.0  # half the squared difference of two successive ones, averaged
    unseeded: bool = False  # earlier days are known, and the forecaster has not seen them
    first: float = field(init=False)
    last: float = field(init=False)

    def __post_init__(self) -> None:
        self.first = self.needs_at
        self.last = self.needs_at

    @property
    def latency_s(self) -> float:
        """Seconds that its queries may take."""
        return PATIENT_S if self.needs.latency_ms is None else self.needs.latency_ms / 1000.0

    @property
    def window(self) -> float:
        """Seconds over which its rate is averaged: for as long as a queue may hold what scatters."""
        return min(PATIENT_S, max(KEPT * REPORT_S, self.latency_s))

    @property
    def peakedness(self) -> float:
        if self.mean <= 0.5:
            return 1.0
        found = self.difference / self.mean
        return 1.0 if 1 / CALM < found < CALM else max(EVEN, found)

    def rate_now(self) -> float:
        """Items/s. It is averaged for longer the more arrivals scatter."""
        peak = self.peakedness
        number = min(KEPT_MOST, round(max(KEPT * peak, self.window / REPORT_S)))
        found = 0.0
        for kept in self.counts.values():
            recent = list(kept)[:number]
            found += rate_of([seconds for seconds, _ in recent], [items for _, items in recent], peak)
        return found

    def scatter(self, before: float, items: float, weight: float) -> None:
        """Two successive reports of one dispatcher: their difference shows the burstiness, whatever the trend."""
        self.mean += weight * (items - self.mean)
        most = STEEP * STEEP * max(self.mean, 1.0) * self.peakedness
        self.difference += weight * (min((items - before) ** 2 / 2, most) - self.difference)


@dataclass(slots=True, eq=False)
class Reached:
    """How many of an app's queries ended, and how many of them missed their objective, over the last minutes."""

    _ticks: deque[tuple[float, int, int]] = field(default_factory=deque)
    ended: int = 0
    missed: int = 0

    def add(self, now: float, ended: int, missed: int) -> None:
        self._ticks.append((now, ended, missed))
        self.ended += ended
        self.missed += missed
        while self._ticks and now - self._ticks[0][0] > REACHED_S:
            _, old_ended, old_missed = self._ticks.popleft()
            self.ended -= old_ended
            self.missed -= old_missed

    @property
    def share(self) -> float | None:
        """The share in time, 0..1; None while nothing has ended."""
        return 1.0 - self.missed / self.ended if self.ended > 0 else None


@cache
def _untold() -> Forecaster:
    """The forecaster of all classes where nothing is forecast: each has room for 100 kB of errors."""
    return make_forecaster("last", TICK_S)


class DemandForecast(Struct, eq=False):
    """forecaster: its name, as `make_forecaster` takes it; "": the rates are all that is asked for. catalog: of the apps; what is deleted is forgotten."""

    forecaster: str
    catalog: Catalog | None = None
    reached: dict[str, Reached] = {}
    _classes: dict[Band, _Class] = {}
    _heard: dict[str, float] = {}  # dispatchers, and when they reported last
    _ticked: float = 0.0
    _histories: dict[str, DemandHistory] = {}  # by app
    _asked: dict[str, float] = {}

    def take(self, report: DemandReport, now: float) -> None:
        """Add the report of one dispatcher."""
        name, seconds = report.dispatcher, report.seconds
        self._heard[name] = now
        for app, (ended, missed) in report.served.items():
            self.reached.setdefault(app, Reached()).add(now, ended, missed)
        if seconds <= 0:
            return
        items: dict[Band, int] = {}
        for row in report.rows:
            of = band(row)
            items[of] = items.get(of, 0) + row.items + row.refused
            known = self._classes.get(of)
            if known is None:
                forecast = make_forecaster(self.forecaster, TICK_S) if self.forecaster else _untold()
                self._classes[of] = known = _Class(row, forecast, now)
                if row.app in self._histories:
                    known.unseeded = True
            known.needs = row if now - known.needs_at > MERGED_S else merged(known.needs, row)
            known.needs_at = known.last = now
        weight = min(1.0, seconds / BURST_S)
        for of, known in self._classes.items():
            came = items.get(of, 0)
            before = known.newest.get(name)
            if before is not None:
                known.scatter(before[0], came, weight)
            known.newest[name] = (came, seconds)
            known.counts.setdefault(name, deque(maxlen=KEPT_MOST)).appendleft((seconds, came))

    def unknown(self, now: float) -> list[str]:
        """Apps whose history is to be asked for now."""
        apps = {known.needs.app for known in self._classes.values()} - self._histories.keys()
        due = sorted(app for app in apps if now - self._asked.get(app, -ASK_S) >= ASK_S)
        self._asked.update(dict.fromkeys(due, now))
        return due

    def remember(self, history: DemandHistory) -> None:
        """What an app was asked for on earlier days."""
        if not history.error:
            self._histories[history.app] = history
            for known in self._classes.values():
                known.unseeded = known.unseeded or known.needs.app == history.app

    def surges(self) -> list[tuple[ForecastLoad, float]]:
        """Each class with the rate of the newest reports alone, less what chance may add to it. Items/s."""
        found = []
        for known in self._classes.values():
            items = sum(each[0] for each in known.newest.values())
            seconds = max((each[1] for each in known.newest.values()), default=0.0)
            if seconds > 0:
                found.append((_load_of(known), max(0.0, items - 3.0 * sqrt(items * known.peakedness)) / seconds))
        return found

    def tick(self, now: float) -> None:
        """Give the rates since the last tick to the forecasters, once a second."""
        if now - self._ticked < TICK_S - REPORT_S / 2:  # reports come a little early or late
            return
        self._ticked = now
        for name in [name for name, at in self._heard.items() if now - at > SILENT_S]:
            del self._heard[name]
            for known in self._classes.values():
                known.counts.pop(name, None)
                known.newest.pop(name, None)
        for of, known in list(self._classes.items()):
            if now - known.last > FORGET_S or self._gone(known.needs.app):
                del self._classes[of]
                continue
            known.rate = known.rate_now()
            known.past.append(known.rate)
            if known.unseeded:
                self._seed(known, now)
            if (
                self.forecaster and now - known.first >= WARM_S
            ):  # before, there is only a part of the window, and it begins with nothing
                known.forecast.observe(now, known.rate * known.window)
        apps = {known.needs.app for known in self._classes.values()}
        # Also of deleted apps. One that is back is asked for anew.
        for of_apps in (self._histories, self._asked, self.reached):
            for app in of_apps.keys() - apps:
                del of_apps[app]

    def _gone(self, app: str) -> bool:
        return self.catalog is not None and self.catalog.app(app) is None and not app.startswith(f"{WITHOUT_APP}.")

    def _seed(self, known: _Class, now: float) -> None:
        """Give a forecaster its part of the app's history: the share that the class has of the app now."""
        app = known.needs.app
        whole = sum(other.rate for other in self._classes.values() if other.needs.app == app)
        if whole > 0 and known.rate > 0:
            known.unseeded = False
            known.forecast.seed(rates(self._histories[app], known.window * known.rate / whole), now)

    def loads(self) -> list[ForecastLoad]:
        """All classes that are remembered, in a fixed order."""
        return [_load_of(known) for _, known in sorted(self._classes.items(), key=lambda each: repr(each[0]))]


def with_expected(
    loads: list[ForecastLoad], apps: Iterable[AppRecord], now: float, boot_s: float
) -> list[ForecastLoad]:
    """These loads with what operators have said of their apps: classes share it as they share what comes. An app of which nobody asks gets the class
    of queries without needs of their own, in time for a machine to boot and a model to load.
    """
    for app in apps:
        if not app.expects:
            continue
        ours = [load for load in loads if load.needs.app == app.app]
        if not ours and expected_qps(app, now, boot_s + LONGEST_LOAD_S) > 0:
            ours = [_load_of(_Class(ClassDemand(app.app, ANY, 0, app.latency_ms), _untold(), now))]
        whole = sum(load.rate for load in ours)
        parts = [load.rate / whole if whole > 0 else 1.0 / len(ours) for load in ours]
        told = [replace(load, said=partial(_said, app, now, part)) for load, part in zip(ours, parts, strict=True)]
        loads = [load for load in loads if load.needs.app != app.app] + told
    return loads


def _said(app: AppRecord, now: float, part: float, ahead_s: float) -> float:
    return part * expected_qps(app, now, ahead_s)


def _load_of(known: _Class) -> ForecastLoad:
    return ForecastLoad(
        known.needs, known.rate, known.peakedness, known.last, known.latency_s, known.forecast, known.window, known.past
    )


# -- headroom

LEAST, MOST = 0.5, 3.0  # of the factor
GAIN = 0.3
AIM = 0.5  # the part of what may miss that is aimed at: bursts take the rest
PRIOR = 2.0  # misses that the target allows, in so many queries as have little to say yet


def margin_factor(target: float, ended: int, missed: int) -> float:
    """The factor on all margins that follows from what was reached: 1 while `AIM` of the queries that may miss do miss.

    It grows while more miss and shrinks while fewer do, so that the share reached stays at the target, neither below nor dearly above.
    """
    budget = AIM * (1.0 - target)
    prior = PRIOR / budget
    share = (missed + budget * prior) / (ended + prior)
    return float(min(MOST, max(LEAST, (share / budget) ** GAIN)))
