"""The time range that a page shows, and the width of its buckets. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

MAX_BUCKETS = 200  # of a line; a screen cannot show more
LAG = 3.0  # s within which nearly all events reach the database

RANGES: Mapping[str, float] = {
    "5m": 300.0,
    "15m": 900.0,
    "1h": 3600.0,
    "6h": 6 * 3600.0,
    "1d": 86400.0,
    "7d": 7 * 86400.0,
    "30d": 30 * 86400.0,
}
DEFAULT = "15m"
LONG = 7 * 3600.0  # s. Longer ranges are read from aggregates by the minute and the hour instead of single rows.
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
_STEPS = (
    *(2.0, 5.0, 10.0, 20.0, 30.0),
    *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 7, 28)),
)


class Window(NamedTuple):
    """From `start` to before `end`, in buckets of `step` seconds. refresh: seconds until new data; 0: the range is past."""

    start: datetime
    end: datetime
    step: float
    refresh: float = 0.0

    @property
    def seconds(self) -> float:
        return (self.end - self.start).total_seconds()

    @property
    def long(self) -> bool:
        """Whether it is read from aggregates by the minute and the hour."""
        return self.seconds > LONG

    @property
    def previous(self) -> "Window":
        """The range of the same length right before it, with the same buckets."""
        length = self.end - self.start
        return Window(self.start - length, self.start, self.step)

    def at_least(self, step: float) -> "Window":
        """The same range in buckets of at least `step` seconds."""
        if self.step >= step:
            return self
        step = next(each for each in _STEPS if each >= step)
        return Window(_floor(self.start, step), self.end, step, self.refresh)

    def whole(self, lag: float) -> "Window":
        """The same without the last bucket if it ended less than `lag` seconds ago. Ranges with long buckets stay as they are."""
        if self.step > _MINUTE or not self.refresh:
            return self
        end = _floor(self.end - timedelta(seconds=lag), self.step)
        return self._replace(end=max(end, self.start + timedelta(seconds=self.step)))

    @property
    def parameters(self) -> dict[str, object]:
        """The parameters of the SQL files."""
        return {"start": self.start, "end": self.end, "step": timedelta(seconds=self.step)}

    @property
    def buckets(self) -> list[datetime]:
        """The start of each bucket."""
        step, count = timedelta(seconds=self.step), int(-(-self.seconds // self.step))
        return [self.start + i * step for i in range(count)]

    def lasting(self, bucket: datetime) -> float:
        """Seconds of this bucket within the window. The last one may be cut."""
        return min(self.step, (self.end - bucket).total_seconds())


def latest(choice: str, now: datetime) -> Window:
    """The window that ends now. It is the same for all visitors at about the same time, so that they share cached results."""
    seconds = RANGES.get(choice, RANGES[DEFAULT])
    step = _step(seconds)
    refresh = min(max(2.0, seconds / 450), 60.0)
    # A short bucket that has just begun would look like a drop. It is left out until it is complete.
    end = _floor(now - timedelta(seconds=LAG), step if step <= _MINUTE else refresh)
    return Window(_floor(end - timedelta(seconds=seconds), step), end, step, refresh)


def between(start: datetime, end: datetime) -> Window:
    """The window between two times, in either order; at least a minute long."""
    start, end = sorted((start, end))
    end = max(end, start + timedelta(minutes=1))
    step = _step((end - start).total_seconds())
    return Window(_floor(start, step), end, step)


def _step(seconds: float) -> float:
    return next((step for step in _STEPS if seconds / step <= MAX_BUCKETS), _STEPS[-1])


def _floor(moment: datetime, step: float) -> datetime:
    return datetime.fromtimestamp(moment.timestamp() // step * step, UTC)
