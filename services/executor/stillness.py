"""An executor that stood still, or whose connection did: what it was about to say waits until it has heard what came meanwhile. Pure."""

from collections.abc import Callable, Iterable

from bus.messages.flow import Echo
from bus.subjects import Subjects
from services.core.actor import NOTHING, After, Effect, Envelope, Handler, Inlet
from services.core.line import ECHO_S, EchoDue, Hold, Line

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
