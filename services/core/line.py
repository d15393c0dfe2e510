"""A process hears itself through the server, to know how old a message may be when it reads it. Pure.

While a process is stopped, or its connection is clogged, messages wait, and come all at once as if they were new. The server keeps the order of
a connection: what comes after an echo has reached the server after that was sent, and what comes before it, before.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.flow import Echo
from bus.subjects import Subjects
from services.core.actor import NOTHING, After, Effect, Envelope, Handler, Inlet, Publish
from services.core.outcomes import CUT_OFF, ECHO_LOST

ECHO_S = 0.1  # s between two echoes
UNNOTICED_S = 0.02  # s that an echo may take; where it takes longer, what is read has waited
OFTEN_S = 0.02  # s between two echoes then
SILENT_S = 1.0  # s without an echo that comes back, after which the line is held up altogether
WINDOW_S = 1.0  # of echoes, whose least lateness counts as usual; one that has become slow is known to be after two
UNDER_WAY = 1024  # echoes that have not come back, at most


class EchoDue(Struct, frozen=True):
    """Timer: send an echo."""


@dataclass(slots=True, eq=False)
class Line:
    """One actor's connection, as its echoes on `subject` show it. stale: seconds since the last echo that came back was sent, from which on
    messages may be old. fresh_until: when that is, Unix seconds. came_once: an echo has come back, so what others say regularly has come as well.
    caught_up: an echo has come back that was sent after the last silence of SILENT_S. What is read until then others may have done in its stead.

    usual: seconds by which echoes are late on a line that is always slow, or whose process is: a busy machine gives them no better one. It
    stood still only where it takes longer than that. Else nothing would ever be said on such a line.
    """

    subject: str
    stale: float
    publish: type[Publish] = Publish
    usual: float = 0.0
    came_once: bool = False
    caught_up: bool = True
    fresh_until: float = inf  # before the first echo nothing is known
    _heard: float = 0.0
    _came: float = 0.0  # when that came back
    _from: float = 0.0  # the same, or when a rest ended: what was said before that was heard
    _way: float = 0.0  # s that the last echo took
    _sent: deque[float] = field(default_factory=lambda: deque(maxlen=UNDER_WAY))
    _left: deque[float] = field(
        default_factory=lambda: deque(maxlen=UNDER_WAY)
    )  # when each of them was due, if earlier
    _rings: float = inf  # when the next one is due
    _silent_until: float = 0.0  # when an echo came back after the last silence
    _since: float = 0.0  # when this process found that it had not heard itself for too long
    _least: tuple[float, float, float] = (0.0, 0.0, 0.0)  # since when; the least lateness before, and since then

    def rest(self) -> None:
        """No echo is sent for a while: nothing is known until the next one."""
        self.fresh_until = inf

    def resume(self, now: float) -> Publish:
        """The first echo after a rest; the line counts as fresh for as long as an echo may take. Before any has come back nothing is known."""
        self._since = 0.0
        echo = self.echo(now)
        self.fresh_until = inf
        if self.came_once:
            self.fresh_until, self._from = now + self.stale, now
        return echo

    def echo(self, now: float) -> Publish:
        """An echo, for the actor to send. Until the very first one is back, messages may be as old as that."""
        if not self._heard:
            self._heard, self.fresh_until = now, now + self.stale
        self._sent.append(now)
        self._left.append(min(now, self._rings))
        return self.publish(self.subject, Echo(now))

    def came(self, echo: Echo, now: float) -> bool:
        """An echo came back. Returns whether the connection was broken before, perhaps, and what came on it lost: an earlier echo never came
        back, or the last ones came very late, as if the connection was new.
        """
        still, lost = self.still(now), False
        while self._sent and self._sent[0] <= echo.at:
            lost |= self._sent.popleft() < echo.at
            self._left.popleft()
        if self.came_once and now - self._came > SILENT_S:
            self._silent_until = now
            self._since = self._since and now
        self.came_once, self.caught_up = True, echo.at >= self._silent_until
        self._came, self._way = now, now - echo.at
        if echo.at < self._from:
            return lost  # from before a rest
        if self._from:
            due = self._from + min(ECHO_S, echo.at - self._from)  # a process that seldom turns sends it late, too
            self._came_late(max(0.0, now - due), now)
        self._heard = self._from = echo.at
        self.fresh_until = self._heard + self.stale
        if self.still(now):
            return lost  # the next ones are on their way
        self._since = 0.0
        return lost or still

    def _came_late(self, late: float, now: float) -> None:
        """An echo shows by how much this process heard itself late. What stops it, or holds its connection up, adds to that for a while only."""
        since, before, least = self._least
        since, before, least = (now, least, late) if now > since + WINDOW_S else (since, before, min(least, late))
        self._least = since, before, least
        self.usual = min(before, least)

    def still(self, now: float) -> bool:
        """Whether this process, or its connection, stands still or did a moment ago: what was said meanwhile is on its way."""
        return now > self.fresh_until + self.usual

    def waits(self, now: float) -> bool:
        """Whether what is due now waits for an echo, as what came meanwhile may be on its way and change it. It does not wait for ever: also
        where each echo comes later than the one before. While none comes at all, what it says hardly gets out either.
        """
        if not self.still(now):
            return False
        self._since = self._since or now
        cut_off = self.came_once and self._came < now - SILENT_S
        return now < self._since + (CUT_OFF if cut_off else ECHO_LOST)

    def next_due(self, now: float) -> After:
        """The timer of the next echo. Where they take long, more of them say how long other messages wait."""
        pause = ECHO_S if self._way <= UNNOTICED_S else OFTEN_S
        self._rings = now + pause
        return After("echo", pause, EchoDue())

    def waited_since(self, now: float) -> float:
        """Since when a message that is read now has waited, in Unix seconds: now, or where more comes than this process can read, when the first echo left
        that is not back; where the process stood still, when that was due.
        """
        since = self._left[0] if self._left else self._rings
        return since if now - since > UNNOTICED_S and now <= self.fresh_until else self.reached(now)

    def reached(self, now: float) -> float:
        """When a message that is read now reached the server, in Unix seconds: now, or if it may have waited for long, the earliest possible time."""
        return now if now <= self.fresh_until else self._heard


class Hold(Struct, eq=False):
    """What a process would say that has not heard itself for too long waits until its echo is back, and with it all that may change what it says.
    handle: of the actor. never: whether a message does not wait, although others of its type do.
    """

    line: Line
    handle: Callable[[Envelope], Iterable[Effect]]
    never: Callable[[Any], bool] = lambda _: False
    held: list[Envelope] = []

    def guard(self, table: dict[type, Handler], kinds: Iterable[type]) -> None:
        """Messages of these types wait."""
        for kind in kinds:
            table[kind] = self._guarded(table[kind])

    def _guarded(self, handler: Handler) -> Handler:
        line = self.line

        def guarded(envelope: Envelope) -> Iterable[Effect]:
            if envelope.now > line.fresh_until and line.waits(envelope.now) and not self.never(envelope.message):
                self.held.append(envelope)
                return NOTHING
            return handler(envelope)

        return guarded

    def release(self, now: float) -> list[Effect]:
        """Handle what waited, unless it must wait on."""
        if not self.held or self.line.waits(now):
            return []
        held, self.held = self.held, []
        return [effect for each in held for effect in self.handle(replace(each, now=now))]


# -- an executor that stood still, or whose connection did: what it was about to say waits until it has heard what came meanwhile

STALE = 0.2  # s since the last echo that came back was sent, from which on it waits; its dispatchers are more patient
RESTS = 10  # echoes after which an executor without queries sends none


class Stillness:
    """handle: of the actor. busy: whether it has queries. gap: called with the seconds that it was still, before what it held comes to its turn."""

    def __init__(
        self,
        worker: str,
        device: str,
        subjects: Subjects,
        handle: Callable[[Envelope], Iterable[Effect]],
        busy: Callable[[], bool],
        gap: Callable[[float, float], Iterable[Effect]],
    ) -> None:
        subject = subjects.executor(worker, device, "echo")
        self.line = Line(subject, STALE)
        self.inlets = (Inlet(subject=subject, message=Echo),)
        self.handlers: dict[type, Handler] = {Echo: self._echoed, EchoDue: self._due}
        self.rests = True
        self._busy = busy
        self._gap = gap
        self._hold = Hold(self.line, handle)
        self._idle = 0
        self._heard = 0.0

    def guard(self, table: dict[type, Handler], kinds: Iterable[type]) -> None:
        """Messages of these types wait for an echo after it was still: something may be on its way that changes what is said about them."""
        self._hold.guard(table, kinds)

    def wake(self, now: float) -> tuple[Effect, ...]:
        """It has queries again: send echoes."""
        self.rests, self._idle, self._heard = False, 0, now
        return (self.line.resume(now), After("echo", ECHO_S, EchoDue()))

    def _due(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        self._idle = 0 if self._hold.held or self._busy() or self.line.waits(now) else self._idle + 1
        if self._idle > RESTS:
            self.rests = True
            self.line.rest()
            return NOTHING
        return (*self._hold.release(now), self.line.echo(now), After("echo", ECHO_S, envelope.message))

    def _echoed(self, envelope: Envelope) -> Iterable[Effect]:
        now, echo = envelope.now, envelope.message
        if self.rests:
            return NOTHING
        self.line.came(echo, now)
        if self.line.waits(now):
            return NOTHING  # it waited itself
        still, self._heard = echo.at - self._heard, echo.at
        return (*self._gap(still, now), *self._hold.release(now))
