"""A process that hears itself through the server knows how old a message may be that it reads, and what must wait."""

from collections.abc import Iterable

from bus.messages.flow import Echo, PartsEnded, Trying
from services.core.actor import NOTHING, Effect, Envelope, Handler
from services.core.line import Hold, Line
from services.core.outcomes import ECHO_LOST

NOW, STALE = 1000.0, 0.4


def test_what_a_process_reads_before_its_first_echo_is_back_may_be_as_old_as_that() -> None:
    """It may have started behind a clogged link."""
    line = Line("me", STALE)
    assert not line.waits(NOW), "it has not begun"
    first = line.echo(NOW).message
    line.echo(NOW + 0.1)
    assert not line.waits(NOW + STALE)
    assert line.waits(NOW + 5.0)
    assert (line.reached(NOW + 5.0), line.came_once) == (NOW, False)
    line.came(first, NOW + 5.0)
    assert (line.reached(NOW + 5.0), line.came_once) == (NOW, True)


class Held:
    """An actor that counts what it handles, and guards two kinds of message. One of them does not always wait."""

    def __init__(self) -> None:
        self.line = Line("me", STALE)
        self.handled: list[Envelope] = []
        self.table: dict[type, Handler] = {PartsEnded: self._count, Trying: self._count}
        hold = self.hold = Hold(self.line, self.handle, lambda message: message == PartsEnded([]))
        hold.guard(self.table, (PartsEnded,))

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        return self.table[type(envelope.message)](envelope)

    def _count(self, envelope: Envelope) -> Iterable[Effect]:
        self.handled.append(envelope)
        return NOTHING


def test_what_a_process_would_say_waits_until_it_hears_itself() -> None:
    held = Held()
    echo = held.line.echo(NOW)
    held.line.came(echo.message, NOW)
    late, ended = NOW + 3.0, PartsEnded([b"q"])
    for message in (ended, PartsEnded([]), Trying(b"q", 0)):
        held.handle(Envelope(late, message))
    assert [one.message for one in held.handled] == [PartsEnded([]), Trying(b"q", 0)]
    assert held.hold.release(late) == []
    assert len(held.hold.held) == 1, "its echo is not back"
    held.line.came(Echo(late), late + 0.001)
    held.hold.release(late + 0.001)
    assert (held.handled[-1], held.hold.held) == (Envelope(late + 0.001, ended), [])


def test_it_does_not_wait_for_ever() -> None:
    held = Held()
    held.line.echo(NOW)
    held.handle(Envelope(NOW + 1.0, PartsEnded([b"q"])))
    held.hold.release(NOW + 1.0 + ECHO_LOST - 0.1)
    assert held.handled == []
    held.hold.release(NOW + 1.0 + ECHO_LOST)
    assert len(held.handled) == 1
