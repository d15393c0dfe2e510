"""Which part of the past a page shows, in buckets of which width. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

MOST_POINTS = 200  # buckets of a line: at most 500 by rule; more than a screen shows are of no use
LAG = 3.0  # s that events take into the database at most, nearly always

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
LONG = 7 * 3600.0  # s of range from which minutes and hours that were added up before are read instead of single rows
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
_STEPS = (
    *(2.0, 5.0, 10.0, 20.0, 30.0),
    *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 7, 28)),
)


class Window(NamedTuple):
    """From `start` to before `end`, in steps of so many seconds. refresh: s until it is worth a new look; 0: it is past."""

    start: datetime
    end: datetime
    step: float
    refresh: float = 0.0

    @property
    def seconds(self) -> float:
        return (self.end - self.start).total_seconds()

    @property
    def long(self) -> bool:
        """Whether it is read from what was added up by the minute and the hour."""
        return self.seconds > LONG

    @property
    def previous(self) -> "Window":
        """As much time right before it, in the same steps."""
        length = self.end - self.start
        return Window(self.start - length, self.start, self.step)

    def at_least(self, step: float) -> "Window":
        """The same part of the past in steps that are no shorter."""
        if self.step >= step:
            return self
        step = next(each for each in _STEPS if each >= step)
        return Window(_floor(self.start, step), self.end, step, self.refresh)

    def whole(self, lag: float) -> "Window":
        """The same without a last bucket that is not over, or was not `lag` seconds ago; unless buckets are long."""
        if self.step > _MINUTE or not self.refresh:
            return self
        end = _floor(self.end - timedelta(seconds=lag), self.step)
        return self._replace(end=max(end, self.start + timedelta(seconds=self.step)))

    @property
    def parameters(self) -> dict[str, object]:
        """As the SQL files take it."""
        return {"start": self.start, "end": self.end, "step": timedelta(seconds=self.step)}

    @property
    def buckets(self) -> list[datetime]:
        """Where its buckets begin."""
        step, count = timedelta(seconds=self.step), int(-(-self.seconds // self.step))
        return [self.start + i * step for i in range(count)]

    def lasting(self, bucket: datetime) -> float:
        """Seconds of this bucket that lie within the window: the last one may be cut."""
        return min(self.step, (self.end - bucket).total_seconds())


def latest(choice: str, now: datetime) -> Window:
    """The window that ends now. The same for everybody who asks at about the same time, so that their queries are one."""
    seconds = RANGES.get(choice, RANGES[DEFAULT])
    step = _step(seconds)
    refresh = min(max(2.0, seconds / 450), 60.0)
    # A short bucket that has just begun would look like a dip: it is left out until it is complete.
    end = _floor(now - timedelta(seconds=LAG), step if step <= _MINUTE else refresh)
    return Window(_floor(end - timedelta(seconds=seconds), step), end, step, refresh)


def between(start: datetime, end: datetime) -> Window:
    """The window between two moments, whichever is the earlier; at least a minute long."""
    start, end = sorted((start, end))
    end = max(end, start + timedelta(minutes=1))
    step = _step((end - start).total_seconds())
    return Window(_floor(start, step), end, step)


def _step(seconds: float) -> float:
    return next((step for step in _STEPS if seconds / step <= MOST_POINTS), _STEPS[-1])


def _floor(moment: datetime, step: float) -> datetime:
    return datetime.fromtimestamp(moment.timestamp() // step * step, UTC)
