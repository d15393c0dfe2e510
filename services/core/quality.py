"""What a variant reaches in production, by its labels: a mean that may change, with an interval that holds at every moment. Pure.

Labels lie in bins, whose sizes grow with their age. Each bin begins a window that reaches to now, with a confidence sequence of its own
(services/core/confidence.py). Their levels add up to less than LEVEL, so that all windows that ever begin hold together, and whichever is
looked at does. It is the longest one, until a later one contradicts it, or has left the registered figure where it has not: then what is older
than the likeliest moment of the change is dropped (Shin, Ramdas and Rinaldo, "E-detectors", 2022).
"""

from collections.abc import Iterator
from math import inf, log, log2

from msgspec import Struct

from bus.messages.catalog import TARGETS, VariantRecord, accuracy_of, value_of
from services.core.confidence import Sampled
from services.core.ensemble.outputs import aim_of, reached

LEVEL = 0.05
BIN = 16  # labels of a new bin: windows begin at multiples of it
COMPARED = ("top1", "mae", "rmse")  # metrics whose error is a distance of answers
CLOSER, AGREED, SPARE = 10, 3, 50  # of `Pace`
AGED = 0.25  # two bins become one that is at most this share of all labels after it


def level_of(place: int) -> float:
    """Of the window that is the so-manieth multiple of BIN to begin: half of LEVEL for the first, and all levels add up to less than LEVEL."""
    return LEVEL / 2 if not place else LEVEL / (2.8 * (place + 1) * log2(place + 1) ** 2)


class Score(Struct, array_like=True):
    """The labels of one variant. bins: (sum of scores, labels), oldest first. place: multiples of BIN before the first of them. since: Unix
    seconds of the first label that still counts. aim: the registered figure. last: how many labels its app had with its own last one; at: when.
    """

    bins: list[tuple[float, int]] = []
    place: int = 0
    since: float = 0.0
    aim: float = 0.0
    last: int = 0
    at: float = 0.0

    @property
    def observed(self) -> Sampled:
        return Sampled(sum(total for total, _ in self.bins), sum(count for _, count in self.bins))

    def add(self, score: float, now: float) -> None:
        """One label more. score: 0..1."""
        bins = self.bins
        if not bins:
            self.since = now
        self.at = now
        if bins and bins[-1][1] < BIN:
            bins[-1] = bins[-1][0] + score, bins[-1][1] + 1
            return
        bins.append((score, 1))
        after, i = 1, len(bins) - 2
        while i > 0:
            (older, many), (newer, few) = bins[i - 1], bins[i]
            if many + few <= AGED * after:
                bins[i - 1 : i + 1] = [(older + newer, many + few)]
            else:
                after += few
            i -= 1

    def interval(self, now: float) -> tuple[float, float]:
        """Of the mean of all labels that count. Where the mean has changed, those before it are dropped. now: when a change is found."""
        while True:
            low, high = self.observed.interval(level_of(self.place))
            at = self._changed(low, high)
            if not at:
                return low, high
            self.place += sum(count for _, count in self.bins[:at]) // BIN
            del self.bins[:at]
            self.since = now

    def _windows(self) -> Iterator[tuple[int, Sampled, float]]:
        """All but the longest: at which bin each begins, what it has, and its level."""
        seen, place = self.observed, self.place
        for i, (total, count) in enumerate(self.bins[:-1], 1):
            place += count // BIN
            seen = Sampled(max(0.0, seen.total - total), seen.count - count)
            yield i, seen, level_of(place)

    def _changed(self, low: float, high: float) -> int:
        """The bin from which on the mean is another one; 0: it is the same."""
        inside = low <= self.aim <= high
        for i, seen, level in self._windows():
            if (seen.mean < low and seen.excludes(low, level)) or (seen.mean > high and seen.excludes(high, level)):
                return self._likeliest()
            if inside and seen.excludes(self.aim, level):
                return i
        return 0

    def _likeliest(self) -> int:
        whole = self.observed
        best, at = -inf, 1
        for i, seen, _ in self._windows():
            before = Sampled(max(0.0, whole.total - seen.total), whole.count - seen.count)
            if (found := _likelihood(before) + _likelihood(seen)) > best:
                best, at = found, i
        return at


def _likelihood(one: Sampled) -> float:
    """Of the observations by their own mean, its logarithm."""
    wrong = one.count - one.total
    return sum(part * log(part / one.count) for part in (one.total, wrong) if part > 1e-9)


# -- A variant beside a more accurate one, its reference, without labels. Errors that are distances (COMPARED) keep the triangle inequality: where both
# answer the same queries at a mean distance d, and the reference has the error r, the variant's own lies between |d - r| and d + r, whatever the
# queries. More is not known: two variants may be wrong together or apart.


class Pace(Struct):
    """Which queries of an app have references: a share, and CLOSER times as many after one that disagrees, until AGREED in a row agree. That depends on
    what came before alone, so intervals hold as they do. spare: how many more there may be beyond the share: as many as by the share in the long run.
    """

    close: int = 0
    spare: int = SPARE

    def asks(self, place: float) -> bool:
        """place: of a query, at random; below 1 for the share."""
        if place < 1.0:
            self.spare = min(SPARE, self.spare + 1)
            return True
        more = place < CLOSER and self.close > 0 and self.spare > 0
        self.spare -= more
        return more

    def said(self, alike: float) -> None:
        """A reference has come. alike: its score."""
        self.close = AGREED if alike < 0.5 else max(0, self.close - 1)


def compared(of: VariantRecord, by: VariantRecord) -> str:
    """The name of the scores of one variant by another one's answers."""
    return f"{of.twins} by {by.twins}"


def least_agreement(of: VariantRecord, by: VariantRecord) -> float:
    """Their aim: below this mean one of the two is worse than registered. They are scored by `of`'s own error, as by labels."""
    own, both = _error(of.accuracy, of.metric), _error(of.accuracy, of.metric) + _error(by.accuracy, by.metric)
    if of.metric in TARGETS:
        both = (1.0 - aim_of(of.metric, of.accuracy)) * (both / own) ** (2 if of.metric == "rmse" else 1)
    return max(0.0, 1.0 - both)


def by_reference(one: Score, of: VariantRecord, sure: float, now: float) -> tuple[float, float, float]:
    """The variant's accuracy, and its interval. sure: the reference's accuracy. In that interval, the accuracy is what it would be if the reference were
    always right.
    """
    low, high = one.interval(now)
    most, found, least = (
        _error(reached(share, of.metric, of.accuracy or 0.0), of.metric) for share in (low, one.observed.mean, high)
    )
    other = _error(sure, of.metric)
    least, most = max(0.0, least - other, other - most), most + other
    found, low, high = (
        accuracy_of(error, of.metric) if of.metric in TARGETS else max(0.0, 1.0 - error)
        for error in (min(max(found, least), most), most, least)
    )
    return found, low, high


def _error(accuracy: float | None, metric: str) -> float:
    return value_of(accuracy or 0.0, metric) if metric in TARGETS else 1.0 - (accuracy or 0.0)
