"""Workers whose clocks are off: what is sent to them says their own time, and what they say is read as ours. Pure.

A query's deadline is a time, and executors keep it. Heartbeats show how far a clock is behind. What delays them only adds to that, so the least
of the last seconds counts.
"""

from msgspec.structs import replace

from bus.messages.fleet import WorkerHeartbeat
from bus.messages.flow import DoneBatch, HandBack, Route
from services.core.line import Line

MUCH_S = 0.25  # of a clock that is off, from which on times are corrected
WINDOW_S = 5.0  # of heartbeats; a clock that falls behind while its worker goes on is noticed after two


class Clocks:
    """line: of the dispatcher. off: by worker, seconds that its clock is behind, if that is much; negative: it is ahead."""

    def __init__(self, line: Line) -> None:
        self.off: dict[str, float] = {}
        self._line = line
        self._least: dict[str, tuple[int, float, float, float]] = {}  # incarnation, since when; least before, and since

    def heard(self, heartbeat: WorkerHeartbeat, now: float) -> None:
        """A heartbeat has come."""
        if now > self._line.fresh_until:
            return  # it may have waited here
        worker, late = heartbeat.worker, now - heartbeat.at
        incarnation, since, before, least = self._least.get(worker, (0, 0.0, late, late))
        if incarnation != heartbeat.incarnation:  # its clock may have been set meanwhile
            since, before, least = now, late, late
        elif now > since + WINDOW_S:
            since, before, least = now, least, late
        self._least[worker] = heartbeat.incarnation, since, before, min(least, late)
        behind = min(before, least, late)
        if abs(behind) >= MUCH_S:
            self.off[worker] = behind
        else:
            self.off.pop(worker, None)

    def sent(self, route: Route, worker: str) -> Route:
        """The route as this worker must read it."""
        off = self.off.get(worker)
        return route if off is None else _moved(route, -off)

    def done(self, batch: DoneBatch) -> DoneBatch:
        """What a worker says."""
        off = self.off.get(batch.worker)
        return batch if off is None else replace(batch, started=batch.started + off, finished=batch.finished + off)

    def back(self, back: HandBack) -> HandBack:
        """What a worker hands back. A query as a whole was never sent to it, and nor were those that come without an instance."""
        if not self.off or back.reason == "orphaned":
            return back
        behind = (off for worker, off in self.off.items() if f".{worker}-" in back.route.instance)
        return replace(back, route=_moved(back.route, next(behind, 0.0)))


def _moved(route: Route, by: float) -> Route:
    return replace(route, deadline=route.deadline + by, arrived=route.arrived + by) if by else route
