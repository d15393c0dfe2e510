"""What a variant reaches in production, by its labels: a mean that may change, with an interval that holds at every moment. Pure.

Labels lie in bins, whose sizes grow with their age. Each bin begins a window that reaches to now, with a confidence sequence of its own
(services/core/confidence.py); their levels add up to LEVEL, so that all windows that ever begin hold together, and so does what they have in
common. Where they have nothing in common, the mean has changed: what is older than the most likely moment of the change is dropped (Shin,
Ramdas and Rinaldo, "E-detectors", 2022).
"""

from math import inf, log, log2

from msgspec import Struct

from services.core.confidence import Observed

LEVEL = 0.05
BIN = 16  # labels of a new bin: windows begin at multiples of it
AGED = 0.25  # two bins become one that is at most this share of all labels after it


def level_of(place: int) -> float:
    """Of the window that is the so-manieth multiple of BIN to begin: half of LEVEL for the first, and all levels add up to less than LEVEL."""
    return LEVEL / 2 if not place else LEVEL / (2.8 * (place + 1) * log2(place + 1) ** 2)


class Score(Struct, array_like=True):
    """The labels of one variant. bins: (sum of scores, labels), oldest first. place: multiples of BIN before the first of them. since: Unix
    seconds of the first label that still counts. last: how many labels its app had with its own last one.
    """

    bins: list[tuple[float, int]] = []
    place: int = 0
    since: float = 0.0
    last: int = 0

    @property
    def observed(self) -> Observed:
        return Observed(sum(total for total, _ in self.bins), sum(count for _, count in self.bins))

    def add(self, score: float, now: float) -> None:
        """One label more. score: 0..1."""
        bins = self.bins
        if not bins:
            self.since = now
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
        """What all windows have in common. Where that is nothing, the labels before the change are dropped. now: when a change is found."""
        while True:
            low, high = self._common()
            if low <= high:
                return low, high
            self._restart(now)

    def _common(self) -> tuple[float, float]:
        low, high, place, bound = 0.0, 1.0, self.place, self.observed
        for total, count in self.bins:
            level = level_of(place)
            if bound.excludes(low, level) or bound.excludes(high, level):
                lower, upper = bound.interval(level)
                low, high = max(low, lower), min(high, upper)
            place += count // BIN
            bound = Observed(max(0.0, bound.total - total), bound.count - count)
        return low, high

    def _restart(self, now: float) -> None:
        """Keep what came after the most likely moment of one change."""
        whole = self.observed
        best, at, before = -inf, 1, Observed()
        for i, (total, count) in enumerate(self.bins[:-1], 1):
            before += Observed(total, count)
            after = Observed(whole.total - before.total, whole.count - before.count)
            if (found := _likelihood(before) + _likelihood(after)) > best:
                best, at = found, i
        self.place += sum(count for _, count in self.bins[:at]) // BIN
        del self.bins[:at]
        self.since = now


def _likelihood(one: Observed) -> float:
    """Of the observations by their own mean, its logarithm."""
    wrong = one.count - one.total
    return sum(part * log(part / one.count) for part in (one.total, wrong) if part > 1e-9)
