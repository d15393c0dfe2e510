"""What became of an app's queries so far."""

from services.simulation.histogram import Histogram

WINDOW_S = 10.0  # of the accuracy drop
UNITS = 10**12  # of accuracy: whole numbers add up without rounding, in any order


class Units(dict[float, int]):
    """An accuracy in units, kept once it was asked for."""

    def __missing__(self, accuracy: float) -> int:
        self[accuracy] = found = round(accuracy * UNITS)
        return found


class Tally:
    """Counts of one app's queries. rated, accuracy: how many answers in time have an accuracy, and the sum of these, in units."""

    __slots__ = ("accuracy", "answered", "drop", "late", "latency", "offered", "rated", "refusals")

    def __init__(self) -> None:
        self.offered = 0
        self.answered = 0
        self.late = 0
        self.rated = 0
        self.accuracy = 0
        self.refusals: dict[str, int] = {}
        self.latency = Histogram()
        self.drop = Drop()

    @property
    def refused(self) -> int:
        """With any code."""
        return sum(self.refusals.values())


class Drop:
    """The greatest fall of accuracy: of a window's mean (10 s, answers in time) below the best mean of a window before it.

    Windows without such answers do not count.
    """

    __slots__ = ("_accuracy", "_best", "_rated", "most")

    def __init__(self) -> None:
        self.most: float | None = None
        self._best = 0.0
        self._rated = 0
        self._accuracy = 0

    def close(self, rated: int, accuracy: int) -> None:
        """A window has ended, with these sums since the start; accuracy in units."""
        if rated == self._rated:
            return
        mean = (accuracy - self._accuracy) / (UNITS * (rated - self._rated))
        self._rated, self._accuracy = rated, accuracy
        if self.most is None:
            self._best, self.most = mean, 0.0
            return
        self.most = max(self.most, self._best - mean)
        self._best = max(self._best, mean)
