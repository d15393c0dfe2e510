"""How an instance forms its batches, if a rule says so (Clipper, paper 002, section 4.3; Rafiqi, paper 001, section 3.3). Pure.

A policy says how many items a batch may have, and how long it waits for more. Its state belongs to one instance, since equal variants are
not equally fast everywhere. Sizes are learnt from measured times. The profile says nothing about them. The queue's deadlines always win: a
batch is never so large, and never waits so long, that its first query is late.
"""

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bus.codec import BadMessage, decode
from bus.messages.catalog import BatchingRule, VariantRecord
from services.core.batching import POLICIES, QUANTUM_MS, SCOPES, batching_at

Numbers = NDArray[np.float64]


class BatchingPolicy(Protocol):
    """The batches of one instance. Times are Unix seconds. An instance runs one batch at a time.

    learns: from measured times; then the queue's live factor follows fast, too. counts: arrivals. slo_s: seconds that a batch may take.
    """

    learns: bool
    counts: bool
    slo_s: float

    def limit(self, now: float) -> int:
        """The most items of the next batch, at least 1."""
        ...

    def arrived(self, items: int, now: float) -> None:
        """So many items came. Only a policy that counts them is told."""
        ...

    def hold_until(self, now: float, queued: int) -> float:
        """The time until which a batch that could begin now waits for more queries; in the past: it begins. queued: items that wait."""
        ...

    def measured(self, items: int, seconds: float) -> None:
        """A batch of `items` took `seconds`."""
        ...


@dataclass(eq=False)
class FixedSize:
    """`edf` and `fixed`: at most `most` items, and no waiting."""

    learns = False
    counts = False
    most: int
    slo_s: float = field(default=0.0, init=False)

    def limit(self, _now: float) -> int:
        return self.most

    def arrived(self, items: int, now: float) -> None:
        pass

    def hold_until(self, _now: float, _queued: int) -> float:
        return 0.0

    def measured(self, items: int, seconds: float) -> None:
        pass


@dataclass(eq=False)
class Delayed(FixedSize):
    """`delayed`: a batch that could begin waits up to `wait_s` for more queries (section 4.3.2, after Nagle's algorithm)."""

    wait_s: float
    _since: float | None = field(default=None, init=False)

    def hold_until(self, now: float, _queued: int) -> float:
        if self._since is None:
            self._since = now
        return self._since + self.wait_s

    def measured(self, _items: int, _seconds: float) -> None:
        self._since = None


@dataclass(eq=False)
class Threshold(FixedSize):
    """`threshold`: a batch begins when more items wait than the threshold t, which follows the items c that came in the last quantum.

    t <- ALPHA t + (1 - ALPHA) c if c > t; t <- t / 2 if c < t (Rafiqi, section 3.3). It is at most HIGHEST, or `batch` where that is less, so
    it is zero seven quanta after the load stops. A threshold of up to one counts as zero: else a lone query would wait for a second one.
    """

    counts = True
    ALPHA = 0.5
    HIGHEST = 128

    quantum_s: float
    _ends: float = field(default=0.0, init=False)  # of this quantum
    _came: int = field(default=0, init=False)  # items, in this quantum
    _threshold: float = field(default=0.0, init=False)

    def threshold(self, now: float) -> float:
        """Items; a batch begins when more wait."""
        self._advance(now)
        return self._threshold if self._threshold > 1.0 else 0.0

    def arrived(self, items: int, now: float) -> None:
        self._advance(now)
        self._came += items

    def hold_until(self, now: float, queued: int) -> float:
        return 0.0 if queued > self.threshold(now) else self._ends

    def _advance(self, now: float) -> None:
        """Account for the quanta that have ended. Nothing came in those after the first of them."""
        if now < self._ends:
            return
        more, before = self._came, self._threshold
        if more > before:
            self._threshold = min(self.HIGHEST, self.most, self.ALPHA * before + (1.0 - self.ALPHA) * more)
        elif more < before:
            self._threshold = before / 2.0
        idle = int((now - self._ends) / self.quantum_s)
        self._threshold *= 0.5**idle
        self._came = 0
        self._ends += (idle + 1) * self.quantum_s
        if self._ends <= now:  # rounded
            self._ends = now + self.quantum_s


@dataclass(eq=False)
class Aimd(FixedSize):
    """`aimd`: two items more while batches end within the objective, a tenth fewer when one does not (section 4.3.1).

    A batch that the limit did not cut short says little about it. So the limit grows only while it is used to more than half, and while a
    full batch, which takes at most proportionally longer, would be within the objective, too.
    """

    learns = True
    STEP = 2
    BACKOFF = 0.9

    _limit: int = field(default=1, init=False)

    def limit(self, _now: float) -> int:
        return self._limit

    def measured(self, items: int, seconds: float) -> None:
        if seconds > self.slo_s:
            self._limit = max(1, int(self._limit * self.BACKOFF))
        elif 2 * items > self._limit and seconds * self._limit < self.slo_s * items:
            self._limit = min(self.most, self._limit + self.STEP)


@dataclass(eq=False)
class Quantile(FixedSize):
    """`quantile`: P99 seconds = slope x items + base, by quantile regression on the last batches; limit = (objective - base) / slope
    (section 4.3.1).

    The line is fitted anew after REFIT batches, and at most every PERIOD seconds. Until the first fit, the limit grows by two a batch.
    It is at most twice the largest batch that the fit has seen: beyond that the line says nothing.
    """

    learns = True
    KEPT = 128  # batches: at 20 ms a batch, what is older than 3 s is forgotten
    REFIT = 8
    PERIOD = 0.1
    SPREAD = 0.1  # smallest difference of sizes, as a share of the largest, that shows a slope

    _batches: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=Quantile.KEPT), init=False)
    _new: int = field(default=0, init=False)
    _fitted: float = field(default=0.0, init=False)
    _grown: int = field(default=1, init=False)
    _line: tuple[float, float] | None = field(default=None, init=False)  # seconds an item, seconds a batch
    _largest: int = field(default=1, init=False)

    def limit(self, now: float) -> int:
        if self._new >= self.REFIT and now - self._fitted >= self.PERIOD:
            self._fit()
            self._fitted = now
        if self._line is None:
            return self._grown
        slope, base = self._line
        spare = max(0.0, self.slo_s - base)
        highest = min(self.most, 2 * self._largest)
        return max(1, int(spare / slope)) if spare < slope * highest else highest if spare else 1

    def measured(self, items: int, seconds: float) -> None:
        self._batches.append((items, seconds))
        self._new += 1
        if self._line is None and seconds <= self.slo_s and 2 * items > self._grown:
            self._grown = min(self.most, self._grown + 2)

    def _fit(self) -> None:
        self._new = 0
        sizes, seconds = np.array(self._batches).T
        self._largest = int(sizes.max())
        if sizes.max() - sizes.min() >= self.SPREAD * sizes.max():
            self._line = quantile_line(sizes, seconds)
        elif self._line is not None:  # all of one size: the base stays as it was known
            high = float(np.partition(seconds, rank := _rank(len(seconds)))[rank])
            base = min(self._line[1], high)
            self._line = max(0.0, high - base) / self._largest, base


PROBABILITY = 0.99
SEARCHED = 40  # steps of the golden section: the slope is exact to 1e-8 of its range
GOLDEN = 0.6180339887498949


def quantile_line(sizes: Numbers, seconds: Numbers) -> tuple[float, float]:
    """Slope (at least 0) and base of the line below which PROBABILITY of the points lie: linear quantile regression.

    For one slope, the best base is that quantile of the residuals; the loss is convex in the slope (Koenker & Bassett 1978).
    """
    rank = _rank(len(sizes))

    def base_of(slope: float) -> float:
        return float(np.partition(seconds - slope * sizes, rank)[rank])

    def loss(slope: float) -> float:
        residuals = seconds - slope * sizes
        over = residuals - np.partition(residuals, rank)[rank]
        return float(PROBABILITY * over.sum() - over[over < 0].sum())

    low, high = 0.0, float((seconds / sizes).max())
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = loss(left), loss(right)
    for _ in range(SEARCHED):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = loss(right)
    slope = (low + high) / 2
    return slope, base_of(slope)


def _rank(count: int) -> int:
    """Index of the quantile among so many sorted values."""
    return ceil(PROBABILITY * count) - 1


def make_policy(rule: BatchingRule, record: VariantRecord) -> BatchingPolicy:
    """The policy of one instance, which has learnt nothing yet. Its batches are never larger than the variant's largest."""
    most = max(1, min(record.max_batch, rule.batch or record.max_batch))
    match rule.policy:
        case "aimd":
            return Aimd(most)
        case "quantile":
            return Quantile(most)
        case "delayed":
            return Delayed(most, (rule.wait_ms or 0.0) / 1000.0)
        case "threshold":
            return Threshold(most, (rule.quantum_ms or QUANTUM_MS) / 1000.0)
    return FixedSize(most)


class BatchingRules:
    """The rules of the control bucket. present: there is one."""

    def __init__(self) -> None:
        self.present = False
        self._by: dict[str, dict[str, BatchingRule]] = {scope: {} for scope in SCOPES}

    def apply(self, key: str, value: bytes | None) -> bool:
        """Take over one entry of the bucket (None: it was deleted). Returns whether it is a rule."""
        at = batching_at(key)
        if at is None:
            return False
        rules, name = self._by[at[0]], at[1]
        rules.pop(name, None)
        if value is not None:
            with suppress(BadMessage):
                rule = decode(BatchingRule, value)
                if rule.policy in POLICIES:  # else a later release wrote it
                    rules[name] = rule
        self.present = any(self._by.values())
        return True

    def rule_for(self, record: VariantRecord, app: str | None) -> BatchingRule | None:
        """The narrowest rule. app: of the first query that waits, since queries of several apps share a batch; None: none waits."""
        return (
            self._by["variant"].get(record.variant)
            or self._by["model"].get(record.model)
            or (self._by["app"].get(app) if app is not None else None)
        )

    def all(self) -> Iterable[BatchingRule]:
        return (rule for rules in self._by.values() for rule in rules.values())
