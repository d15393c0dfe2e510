"""An executor that stood still, or whose connection did: what it was about to say waits until it has heard what came meanwhile. Pure."""

from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.flow import Echo
from bus.subjects import Subjects
from services.core.actor import NOTHING, After, Effect, Envelope, Handler, Inlet
from services.core.line import ECHO_S, Line

STALE = 0.2  # s since the last echo that came back was sent, from which on it waits; its dispatchers are more patient
RESTS = 10  # echoes after which an executor without queries sends none


class EchoDue(Struct, frozen=True):
    """Timer: send an echo."""


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
        self._handle = handle
        self._busy = busy
        self._gap = gap
        self._held: list[Envelope] = []
        self._idle = 0
        self._heard = 0.0

    def guard(self, table: dict[type, Handler], kinds: Iterable[type]) -> None:
        """Messages of these types wait for an echo after it was still: something may be on its way that changes what is said about them."""
        for kind in kinds:
            table[kind] = self._guarded(table[kind])

    def _guarded(self, handler: Handler) -> Handler:
        line = self.line

        def guarded(envelope: Envelope) -> Iterable[Effect]:
            if envelope.now > line.fresh_until and line.waits(envelope.now):
                self._held.append(envelope)
                return NOTHING
            return handler(envelope)

        return guarded

    def wake(self, now: float) -> tuple[Effect, ...]:
        """It has queries again: send echoes."""
        self.rests, self._idle, self._heard = False, 0, now
        return (self.line.resume(now), After("echo", ECHO_S, EchoDue()))

    def _due(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        self._idle = 0 if self._held or self._busy() or self.line.waits(now) else self._idle + 1
        if self._idle > RESTS:
            self.rests = True
            self.line.rest()
            return NOTHING
        released = NOTHING if self.line.waits(now) else self._release(now)
        return (*released, self.line.echo(now), After("echo", ECHO_S, envelope.message))

    def _echoed(self, envelope: Envelope) -> Iterable[Effect]:
        now, echo = envelope.now, envelope.message
        if self.rests:
            return NOTHING
        self.line.came(echo, now)
        if self.line.waits(now):
            return NOTHING  # it waited itself
        still, self._heard = echo.at - self._heard, echo.at
        return (*self._gap(still, now), *self._release(now))

    def _release(self, now: float) -> list[Effect]:
        held, self._held = self._held, []
        return [effect for each in held for effect in self._handle(replace(each, now=now))]
