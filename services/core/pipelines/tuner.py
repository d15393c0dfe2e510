"""InferLine's tuner: the replicas of a deployed pipeline follow its traffic (paper 004, section 5). Pure.

Dispatchers tell how many queries came in each bin of 10 ms. If the queries in the last Δ, for any window Δ of the plan's envelope, are more than
what is provided for, all stages at once get replicas for the rate max A(Δ) / Δ. When nothing was too much for a while, they keep what the
largest rate of the last half minute needs.

What is provided for is the envelope of the plan, scaled to the rate that the present replicas serve. So after a cut the return of the planned
traffic is a change too. A cut is made only if no count of the last half minute would be too much after it, and counts nothing older from
then on: else bursts would go with a cut after each of them, and the longest windows would see a past burst as a new one.

Where a forecaster is named, the queries that it foresees until a replica that is ordered now serves count as those that came, with what an
operator has said to expect: a rate that rises, or comes again each day, is provided for before it is there.

A vertex that is asked for items of answers is told by itself how many come. Where a query of the last half minute surely asks it for more than planned,
it gets as many more replicas.

What the plan's `budget_per_hour` does not pay for is not added: all stages get replicas for as much of the rate as it pays.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil, sqrt
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bus.messages.catalog import PipelinePlan
from services.core.forecast.forecasters import make_forecaster
from services.core.pipelines.envelope import BIN_S, limits

CALM_S = 10.0
MEMORY_S = 30.0  # of the rates that a cut is decided by
SMOOTHED_S = 5.0
LATE_S = 0.5  # reports of other dispatchers may come so much later; windows that end within it are looked at again
LOOK_S = 1.0  # between two looks at what could be cut
STEP = 1.1  # by which a rate is raised until it provides for what was counted
ROUNDING = 1e-9
MANY = 60  # counts that tell how much counts vary
FEWEST = 5.0  # queries in a window, mean, for the same
SPREAD_Z = 5.0  # standard errors by which they vary more than planned
EXCEEDS = 10.0  # as that of apps: a forecast may be exceeded in so many times the share of queries that may miss
ITEMS_Z = 3.0  # standard errors by which a query asks for more items than planned

Counts = NDArray[np.int64]
Said = Callable[[float, float], float]
Asked = Mapping[str, tuple[int, int]]  # by vertex: items, and the sum of the squares of each query's


class TunerDecision(Struct, frozen=True, kw_only=True):
    """replicas: of every vertex, from now on. before: until now. lambda_max: the rate that they are for, queries/s; window_s: where it was seen."""

    action: str  # "up" or "down"
    replicas: dict[str, int]
    before: dict[str, int]
    lambda_max: float
    window_s: float
    reason: str


class ReplicaTuner(Protocol):
    """What decides the replicas of a deployed pipeline. replicas: of each vertex now, as it wants them. lead_s: from an order until one serves."""

    replicas: dict[str, int]
    lead_s: float

    def told(self, start: float, counts: Sequence[int], now: float, asked: Asked | None = None) -> TunerDecision | None:
        """A dispatcher's report: queries in the bins from `start`, Unix seconds. None: the replicas stay as they are."""


def replicas_for(planned: int, rate: float, planned_rate: float) -> int:
    """⌈k · λ / λ_planned⌉, at least 1. Rounding adds none: 3 · 250 / 150 is 5."""
    return max(1, ceil(planned * rate / planned_rate - ROUNDING * planned))


def pays(plan: PipelinePlan, replicas: Mapping[str, int]) -> bool:
    """Whether the plan's budget pays for so many."""
    cost = sum(k * plan.vertices[name].price_per_hour for name, k in replicas.items())
    return plan.budget_per_hour is None or cost <= plan.budget_per_hour * (1.0 + ROUNDING)


class PipelineTuner:
    """replicas: of each vertex now, as the tuner wants them."""

    def __init__(
        self,
        plan: PipelinePlan,
        now: float,
        *,
        replicas: Mapping[str, int] | None = None,
        calm_s: float = CALM_S,
        forecaster: str = "",
        said: Said = lambda _now, _ahead_s: 0.0,
    ) -> None:
        """now: Unix seconds. replicas: those that a tuner before this one had; None: the plan's. forecaster: its name; empty: nothing is foreseen.
        said: queries/s that an operator expects from now until so many seconds later. Raises ValueError for a plan without rate.
        """
        if not plan.rate > 0 or not plan.envelope:
            raise ValueError(
                f"the plan of {plan.pipeline} has no rate or no envelope: plan it from a sample trace of several queries"
            )
        self._plan = plan
        self._planned = {name: stage.replicas for name, stage in plan.vertices.items()}
        self._items: deque[tuple[float, Asked]] = deque()  # of the last half minute
        self._more = dict.fromkeys(self._planned, 1.0)  # of each vertex, the items of a query over those planned
        self.replicas = {name: max(1, (replicas or {}).get(name, k)) for name, k in self._planned.items()}
        self._calm_s = calm_s
        self._spans: Counts = np.array([max(1, round(window / BIN_S)) for window, _ in plan.envelope])
        self._at_plan = self._allowed(self._planned)
        self._limits = self._allowed(self.replicas)
        self._room = max(int(self._spans[-1]), round(MEMORY_S / BIN_S)) + round(LATE_S / BIN_S) + 1
        self._first = self._bin(now) - self._room + 1  # of the bins that are kept
        self._begun = self._bin(now)
        self._counts = np.zeros(self._room, np.int64)
        self._newest = self._begun - 1  # the last bin that was told
        self._since = self._first  # the first bin that windows count
        self._changed = self._violated = self._looked = self._tested = now
        self._forecast = make_forecaster(forecaster, LOOK_S) if forecaster else None
        self._said = said
        # The bin in which the first query came: how traffic begins is no error of a forecast.
        self._asked: int | None = None
        self.lead_s = 0.0
        self._close = int(np.abs(self._spans - round(SMOOTHED_S / BIN_S)).argmin())  # the window of forecasts
        self._coming = deque([0.0], maxlen=round(CALM_S / LOOK_S))  # queries in it that were foreseen, at each look

    def told(self, start: float, counts: Sequence[int], now: float, asked: Asked | None = None) -> TunerDecision | None:
        """A dispatcher's report: queries in the bins from `start`, Unix seconds. None: the replicas stay as they are.

        Reports of several dispatchers add up. What is too old, or in the future, counts for nothing.
        """
        if asked:
            self._items.append((now, asked))
        self._move(self._bin(now))
        begin = self._bin(start)
        for i, count in enumerate(counts):
            place = begin + i - self._first
            if 0 <= place < self._room:
                self._counts[place] += count
                self._newest = max(self._newest, begin + i)
        return self._decide(now)

    def _decide(self, now: float) -> TunerDecision | None:
        sums = np.zeros(self._room + 1, np.int64)
        np.cumsum(self._counts, out=sums[1:])
        last = max(1, self._newest - self._first + 1)
        looks = now - self._tested >= LOOK_S
        if looks:
            self._tested = now
            self._foresee(sums, last, now)
        came = self._most(sums, max(1, last - round(LATE_S / BIN_S)), last)
        most = self._with(came if (came > self._limits).any() else 0 * came, self._coming[-1])
        if (most > self._limits).any():
            self._violated = now
            return self._up(most, now)
        if looks:
            decision = self._larger(sums, last, now)
            if decision is not None:
                self._violated = now
                return decision
            found = self._bursts(sums, last, now)
            if found is not None:
                self._violated = now
                return self._provided(sums, last, found, now)
        if self._calm(now) and now - self._looked >= LOOK_S:
            self._looked = now
            return self._down(sums, now)
        return None

    def _foresee(self, sums: Counts, last: int, now: float) -> None:
        """The most queries in a window until a replica that is ordered now serves."""
        span = int(self._spans[self._close])
        if self._forecast is None:
            return
        if self._asked is None and sums[last]:
            self._asked = self._bin(now)
        last = max(last, self._bin(now) - self._first - round(LATE_S / BIN_S))  # what is calm sends no report
        coming = self._said(now, self.lead_s) * span * BIN_S
        heard = 0.0 if self._asked is None else (self._bin(now) - self._asked) * BIN_S
        if heard >= MEMORY_S:
            self._forecast.observe(now, float(sums[last] - sums[last - span]))
        if heard >= 2 * MEMORY_S:  # less tells too little
            share, spread = 1.0 - min(0.5, EXCEEDS * (1.0 - self._plan.percentile)), self._plan.dispersion[self._close]
            point, most = self._forecast.point(self.lead_s), self._forecast.peak(self.lead_s, share)
            coming = max(coming, point + max(0.0, most - point) * min(1.0, sqrt(spread)))
        self._coming.append(float(coming))

    def _with(self, most: Counts, coming: float) -> NDArray[np.float64]:
        """These counts of each window, where in one of them so many are foreseen."""
        found = most.astype(np.float64)
        found[self._close] = max(found[self._close], coming)
        return found

    def _most(self, sums: Counts, first: int, last: int) -> Counts:
        """Of each window, the most queries in one that ends with one of these bins, without those that a cut was decided by."""
        ends = np.arange(first, last + 1)
        begins = np.maximum(ends - self._spans[:, None], max(0, self._since - self._first))
        found: Counts = (sums[ends] - sums[begins]).max(axis=1)
        return found

    def _allowed(self, replicas: Mapping[str, int]) -> NDArray[np.float64]:
        """Of each window, the most queries that these replicas are provided for.

        Fewer queries vary more for their number. So with fewer replicas than planned it is not more than these serve within the window and
        the objective, or than their share of what the planned ones are provided for.
        """
        plan, share = self._plan, self._share(replicas)
        found = np.array(limits(plan.envelope, plan.dispersion, plan.rate, plan.rate * share))
        if share >= 1.0:
            return found
        served = plan.rate * min(
            (
                replicas[name] / stage.replicas / stage.rho / self._more[name]
                for name, stage in plan.vertices.items()
                if stage.rho > 0
            ),
            default=0.0,
        )
        within = served * (self._spans * BIN_S + plan.latency_ms / 1000.0)
        capped: NDArray[np.float64] = np.minimum(found, np.maximum(within, share * self._at_plan))
        return capped

    def _wanted(self, rate: float) -> dict[str, int]:
        return {name: replicas_for(k, rate * self._more[name], self._plan.rate) for name, k in self._planned.items()}

    def _grow(self, rate: float, window: float, reason: str, now: float) -> TunerDecision | None:
        """Replicas for this rate, or for as much of it as the plan's budget pays. Those that are there stay."""
        paid = rate
        while True:
            wanted = {name: max(self.replicas[name], k) for name, k in self._wanted(paid).items()}
            if wanted == self.replicas or pays(self._plan, wanted):
                break
            paid /= STEP
        if paid < rate:
            reason += f"; budget_per_hour ({self._plan.budget_per_hour:g}) pays for {paid:.4g}/s"
        return self._changed_to("up", wanted, rate, window, reason, now)

    def _share(self, replicas: Mapping[str, int]) -> float:
        """Of the planned rate, what these replicas serve."""
        return min(replicas[name] / k / self._more[name] for name, k in self._planned.items())

    def _larger(self, sums: Counts, last: int, now: float) -> TunerDecision | None:
        """Learn how many items a query asks each vertex for now, and provide for them at the rate that is served."""
        while self._items and self._items[0][0] < now - MEMORY_S:
            self._items.popleft()
        rate, told = self._plan.rate * self._share(self.replicas), ""
        for name, stage in self._plan.vertices.items():
            seen = [self._items_in(window, name, sums, last, now) for window in (SMOOTHED_S, MEMORY_S)]
            mean = max((mean for mean, surely in seen if surely > stage.scale > 0), default=0.0)
            more = max(1.0, mean / stage.scale) if stage.scale else 1.0
            if more > STEP * self._more[name]:
                told = f"a query asks {name} for {mean:.3g} items, planned {stage.scale:.3g}"
                self._more[name] = more
            elif self._calm(now):
                self._more[name] = min(self._more[name], more)
        if not told:
            return None
        return self._grow(rate, SMOOTHED_S, told, now)

    def _items_in(self, window: float, name: str, sums: Counts, last: int, now: float) -> tuple[float, float]:
        """Items for which a query of so many last seconds asks a vertex: mean, and what it surely is at least."""
        asked = [found[name] for at, found in self._items if at >= now - window and name in found]
        queries = int(sums[last] - sums[max(0, last - round(window / BIN_S))])
        if not asked or queries < MANY:
            return 0.0, 0.0
        mean = sum(items for items, _ in asked) / queries
        variance = max(mean, sum(squares for _, squares in asked) / queries - mean * mean)
        return mean, mean - ITEMS_Z * sqrt(variance / queries)

    def _calm(self, now: float) -> bool:
        return now - max(self._violated, self._changed) >= self._calm_s

    def _up(self, most: NDArray[np.float64], now: float) -> TunerDecision | None:
        windows = self._spans * BIN_S
        fastest, worst = int((most / windows).argmax()), int((most / self._limits).argmax())
        rate, window = float(most[fastest] / windows[fastest]), float(windows[fastest])
        foreseen = " foreseen" if worst == self._close and most[worst] <= self._coming[-1] else ""
        reason = (
            f"{most[worst]:.0f} queries{foreseen} in {windows[worst]:g} s, more than the {int(self._limits[worst])} provided for;"
            f" largest rate {rate:.4g}/s in {window:g} s"
        )
        return self._grow(rate, window, reason, now)

    def _bursts(self, sums: Counts, last: int, now: float) -> str | None:
        """How much more than planned the counts in the shortest windows of the last half minute vary; None: not surely more.

        Counts come in bursts long before one of them is too much. Differences of neighbours tell it: a rate that changes adds little to them.
        """
        memory, last = round(MEMORY_S / BIN_S), last - round(LATE_S / BIN_S)
        if self._bin(now) - self._begun < memory or last < memory:
            return None
        span = int(self._spans[0])
        number = memory // span
        counts = np.diff(sums[last - number * span : last + 1 : span])
        mean = float(counts.mean())
        if number < MANY or mean < FEWEST:
            return None
        spread = max(1.0, self._plan.dispersion[0])
        seen = float((np.diff(counts) ** 2.0).mean()) / (2.0 * mean)
        error = sqrt((3.0 + (6.0 * (spread - 1.0) + 1.0) / mean) / number)
        if seen <= spread * (1.0 + SPREAD_Z * error):
            return None
        return f"counts in {span * BIN_S:g} s vary {seen / spread:.2g} times as much as planned"

    def _provided(self, sums: Counts, last: int, reason: str, now: float) -> TunerDecision | None:
        """Replicas for the most queries within the objective in the last half minute."""
        windows = self._spans * BIN_S
        i = int(np.abs(windows - self._plan.latency_ms / 1000.0).argmin())
        most = self._most(sums, max(1, last - round(MEMORY_S / BIN_S)), last)
        rate, window = float(most[i] / windows[i]), float(windows[i])
        return self._grow(rate, window, f"{reason}; largest rate {rate:.4g}/s in {window:g} s", now)

    def _down(self, sums: Counts, now: float) -> TunerDecision | None:
        """Keep what the last half minute needs: its largest rate, and no count in it would have been too much."""
        span, memory = round(SMOOTHED_S / BIN_S), round(MEMORY_S / BIN_S)
        last = self._bin(now) - self._first
        if self._bin(now) - self._begun < memory:
            return None  # too little was heard to know what is needed
        ends = np.arange(last - memory + span, last + 1)
        coming = max(self._coming)
        seen = float((sums[ends] - sums[ends - span]).max()) / SMOOTHED_S
        rate = max(seen, coming / float(self._spans[self._close] * BIN_S))
        before, self._since = self._since, max(self._since, self._first + last - memory)
        most = self._with(self._most(sums, last - memory, last), coming)
        # the plan provides for such counts
        served = min(rate, self._plan.rate) if (most <= self._at_plan).all() else rate
        wanted = self._wanted(served)
        while wanted != self.replicas and (most > self._allowed(wanted)).any():
            served *= STEP
            wanted = {name: min(self.replicas[name], k) for name, k in self._wanted(served).items()}
        wanted = {name: min(self.replicas[name], k) for name, k in wanted.items()}
        reason = f"no change for {self._calm_s:g} s; largest rate {rate:.4g}/s in {SMOOTHED_S:g} s of the last {MEMORY_S:g} s"
        decision = self._changed_to("down", wanted, rate, SMOOTHED_S, reason, now)
        if decision is None:
            self._since = before
        return decision

    def _changed_to(
        self, action: str, wanted: dict[str, int], rate: float, window: float, reason: str, now: float
    ) -> TunerDecision | None:
        if wanted == self.replicas:
            return None
        before, self.replicas = self.replicas, wanted
        self._limits, self._changed = self._allowed(wanted), now
        return TunerDecision(
            action=action, replicas=dict(wanted), before=before, lambda_max=rate, window_s=window, reason=reason
        )

    def _bin(self, at: float) -> int:
        return int(at / BIN_S + 1e-6)

    def _move(self, newest: int) -> None:
        """Keep the bins until this one."""
        ahead = newest - (self._first + self._room - 1)
        if ahead > 0:
            kept = max(0, self._room - ahead)
            self._counts[:kept] = self._counts[self._room - kept :].copy()
            self._counts[kept:] = 0
            self._first += ahead
