"""A process hears itself through the server: what stands still, and what is only slow."""

from collections.abc import Iterable

import pytest

from bus.messages.flow import Echo, PartsEnded, Trying
from services.core.actor import NOTHING, Effect, Envelope, Handler
from services.core.line import ECHO_S, WINDOW_S, Hold, Line
from services.core.outcomes import ECHO_LOST

STALE = 0.2
BEGINS = 1000.0


class Heard:
    """A line, and its echoes. broken: at which it found that its connection had been, perhaps."""

    def __init__(self) -> None:
        self.line = Line("echo", STALE)
        self.now = BEGINS
        self.still: list[float] = []
        self.broken: list[float] = []

    def send(self) -> float:
        self.line.echo(self.now)
        return self.now

    def comes(self, sent: float, now: float) -> None:
        """An echo comes back."""
        self.now = now
        if self.line.waits(now):
            self.still.append(now)
        if self.line.came(Echo(sent), now):
            self.broken.append(now)

    def turn(self, seconds: float, takes: float, every: float = ECHO_S) -> None:
        """Echoes are sent every so many seconds, and each takes so long; all have come back at the end."""
        first, count = self.now, round(seconds / every)
        events = [(first + n * every, "sent") for n in range(count)]
        events += [(first + n * every + takes, "came") for n in range(count)]
        under_way: list[float] = []
        for at, what in sorted(events):
            self.now = at
            if what == "sent":
                under_way.append(self.send())
            else:
                self.comes(under_way.pop(0), at)


@pytest.mark.parametrize("takes", [0.3, 1.0, 3.0])
def test_a_line_that_is_always_slow_stands_still_only_until_that_is_known(takes: float) -> None:
    heard = Heard()
    heard.turn(3.0, 0.001)
    began = heard.now
    heard.turn(takes + 10.0, takes)
    assert heard.still
    assert max(heard.still) < began + takes + 2.0 * WINDOW_S + 0.3
    assert not heard.line.waits(heard.now)


def test_rests_and_seldom_turns_are_no_broken_connection() -> None:
    """Each echo comes in time, and later than it would have come of the one before."""
    heard = Heard()
    heard.turn(10.0, 0.15, every=0.5)
    assert [at for at in heard.broken if at > BEGINS + 2.0 * WINDOW_S + 1.0] == []
    heard = Heard()
    heard.turn(3.0, 0.001)
    heard.line.rest()
    heard.now += 60.0
    heard.line.resume(heard.now)
    heard.comes(heard.now, heard.now + 0.001)
    assert heard.line.usual < 0.01


@pytest.mark.parametrize("seconds", [0.5, 2.0, 12.0])
def test_a_connection_that_was_held_up_stands_still_until_all_has_come(seconds: float) -> None:
    heard = Heard()
    heard.turn(3.0, 0.001)
    sent = []
    for _ in range(round(seconds / ECHO_S)):
        sent.append(heard.send())
        heard.now += ECHO_S
    heard.broken.clear()
    still = []
    for at in sent:  # all come at once
        heard.comes(at, heard.now)
        still.append(heard.line.still(heard.now))
    assert still == [heard.now - at > STALE + heard.line.usual for at in sent]
    assert still[0] is True
    assert still[-1] is False
    assert heard.line.usual < 0.01
    assert len(heard.broken) == 1


def test_where_each_echo_comes_later_than_the_one_before_nothing_waits_for_ever() -> None:
    heard = Heard()
    heard.turn(3.0, 0.001)
    began = heard.now
    sent = [began + n * ECHO_S for n in range(1000)]
    for at in sent:
        heard.now = at
        heard.send()
    for n, at in enumerate(sent[:100]):  # what comes is read at half of its speed
        heard.comes(at, began + 0.1 + 2.0 * n * ECHO_S)
    assert heard.still
    assert max(heard.still) < began + ECHO_LOST + 1.0


# -- A process that hears itself through the server knows how old a message may be that it reads, and what must wait.
NOW, HELD = 1000.0, 0.4


def test_what_a_process_reads_before_its_first_echo_is_back_may_be_as_old_as_that() -> None:
    """It may have started behind a clogged link."""
    line = Line("me", HELD)
    assert not line.waits(NOW), "it has not begun"
    first = line.echo(NOW).message
    line.echo(NOW + 0.1)
    assert not line.waits(NOW + HELD)
    assert line.waits(NOW + 5.0)
    assert (line.reached(NOW + 5.0), line.came_once) == (NOW, False)
    line.came(first, NOW + 5.0)
    assert (line.reached(NOW + 5.0), line.came_once) == (NOW, True)


class Held:
    """An actor that counts what it handles, and guards two kinds of message. One of them does not always wait."""

    def __init__(self) -> None:
        self.line = Line("me", HELD)
        self.handled: list[Envelope] = []
        self.table: dict[type, Handler] = {PartsEnded: self._count, Trying: self._count}
        hold = self.hold = Hold(self.line, self.handle, lambda message: message == PartsEnded([]))
        hold.guard(self.table, (PartsEnded,))

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        return self.table[type(envelope.message)](envelope)

    def _count(self, envelope: Envelope) -> Iterable[Effect]:
        self.handled.append(envelope)
        return NOTHING


def test_it_says_nothing_until_it_hears_itself_but_not_for_ever() -> None:
    held = Held()
    held.line.came(held.line.echo(NOW).message, NOW)
    late, ended = NOW + 3.0, PartsEnded([b"q"])
    for message in (ended, PartsEnded([]), Trying(b"q", 0)):
        held.handle(Envelope(late, message))
    assert [one.message for one in held.handled] == [PartsEnded([]), Trying(b"q", 0)]
    assert held.hold.release(late) == []
    assert len(held.hold.held) == 1, "its echo is not back"
    held.line.came(Echo(late), late + 0.001)
    held.hold.release(late + 0.001)
    assert (held.handled[-1], held.hold.held) == (Envelope(late + 0.001, ended), [])
    held = Held()
    held.line.echo(NOW)
    held.handle(Envelope(NOW + 1.0, PartsEnded([b"q"])))
    held.hold.release(NOW + 1.0 + ECHO_LOST - 0.1)
    assert held.handled == []
    held.hold.release(NOW + 1.0 + ECHO_LOST)
    assert len(held.handled) == 1
