"""One limit on time for everything that a solve does. Deciding code has no clock of its own: it is handed in."""

from collections.abc import Callable
from math import inf
from typing import Any

_MARGIN = 0.9  # of what is left, for one run of HiGHS: it looks at its clock only now and then
_LEAST = 1e-6  # s: HiGHS takes no limit of 0

Clock = Callable[[], float]  # s, from any beginning


class Deadline:
    """From now, so many seconds by this clock; without a clock nobody knows what is left, and each run of HiGHS gets them all."""

    def __init__(self, limit_s: float | None = None, clock: Clock | None = None) -> None:
        self._limit = inf if limit_s is None else limit_s
        self._clock = clock if limit_s is not None else None
        self._end = self._limit + self._clock() if self._clock else inf

    @property
    def limited(self) -> bool:
        """Whether there is a limit, and a clock to tell when it is reached."""
        return self._clock is not None

    def left(self) -> float:
        """Seconds, 0 when there are none; infinite without a limit."""
        return max(0.0, self._end - self._clock()) if self._clock else self._limit

    def passed(self) -> bool:
        return self.left() <= 0

    def bounding(self, options: dict[str, Any], share: float = 1.0) -> dict[str, Any]:
        """Options of HiGHS for a run that may take this share of what is left."""
        left = self.left()
        if left == inf:
            return options
        if self._clock:
            share *= _MARGIN
        return options | {"time_limit": max(_LEAST, left * share)}

    def sooner(self, limit_s: float) -> "Deadline":
        """One that ends this many seconds from now, if that is before this one does."""
        return Deadline(min(limit_s, self.left()), self._clock) if self._clock else self

    def since(self, limit_s: float) -> "Deadline":
        """One that ends this many seconds after this one's beginning, if that is before this one does."""
        return self.sooner(max(0.0, limit_s - (self._limit - self.left())))
