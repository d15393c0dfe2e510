"""A process hears itself through the server, to know how old a message may be when it reads it. Pure.

While a process is stopped, or its connection is clogged, messages wait, and come all at once as if they were new. The server keeps the order of
a connection: what comes after an echo has reached the server after that was sent, and what comes before it, before.
"""

from collections import deque

from bus.messages.flow import Echo
from services.core.actor import Publish
from services.core.outcomes import ECHO_LOST

ECHO_S = 0.1  # s between two echoes
UNDER_WAY = 1024  # echoes that have not come back, at most


class Line:
    """One actor's connection, as its echoes on `subject` show it. stale: seconds since the last echo that came back was sent, from which on
    messages may be old. fresh_until: when that is, Unix seconds.
    """

    __slots__ = ("_heard", "_sent", "_since", "_stale", "_subject", "fresh_until")

    def __init__(self, subject: str, stale: float) -> None:
        self._subject = subject
        self._stale = stale
        self._heard = 0.0
        self._sent: deque[float] = deque(maxlen=UNDER_WAY)
        self._since = 0.0  # when this process found that it had not heard itself for too long
        self.fresh_until = float("inf")  # before the first echo nothing is known

    def rest(self) -> None:
        """No echo is sent for a while: nothing is known until the next one."""
        self.fresh_until = float("inf")

    def resume(self, now: float) -> Publish:
        """The first echo after a rest; the line counts as fresh for as long as an echo may take. Before the very first one nothing is known."""
        if self._heard:
            self.fresh_until = now + self._stale
        return self.echo(now)

    def echo(self, now: float) -> Publish:
        """An echo, for the actor to send."""
        self._sent.append(now)
        return Publish(self._subject, Echo(now))

    def came(self, echo: Echo, now: float) -> bool:
        """An echo came back. Returns whether the connection was broken before, perhaps, and what came on it lost: an earlier echo never came
        back, or the last ones came very late, as if the connection was new.
        """
        stale, lost = now > self.fresh_until, False
        while self._sent and self._sent[0] <= echo.at:
            lost |= self._sent.popleft() < echo.at
        self._since = 0.0
        self._heard = max(self._heard, echo.at)
        self.fresh_until = self._heard + self._stale
        return lost or (stale and now <= self.fresh_until)

    def waits(self, now: float) -> bool:
        """Whether what is due now waits for an echo, as what came meanwhile may be on its way and change it. It does not wait for ever."""
        if now <= self.fresh_until:
            return False
        self._since = self._since or now
        return now < self._since + ECHO_LOST

    def reached(self, now: float) -> float:
        """When a message that is read now reached the server, in Unix seconds: now, or if it may have waited for long, the earliest possible time."""
        return now if now <= self.fresh_until else self._heard
