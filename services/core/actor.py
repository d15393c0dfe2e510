"""The actor contract: private state, a mailbox of typed messages, one pure method that decides.

    handle(envelope) -> effects

Time comes in with the envelope; everything that must happen goes out as an effect. Two drivers run the same objects:
`services.shell.runtime.runtime` (asyncio, real time) and the simulator's kernel (an event heap, virtual time).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from bus.messages.events import Event
from services.core.trace import Span


class Inlet(Struct, frozen=True, kw_only=True):
    """What an actor listens to: messages of one type on one subject, all of them or a queue group's share.

    message `bytes`: whatever the body is, also an empty one, undecoded. malformed: the actor itself answers for bodies that
    are no such message, which reach it as `Malformed`; otherwise the runtime refuses them.
    """

    subject: str
    message: type
    queue: str = ""
    malformed: bool = False


class Watch(Struct, frozen=True, kw_only=True):
    """A key-value bucket an actor follows: its entries arrive as `Changed`, and `Synced` once when all are in."""

    bucket: str


class Envelope(Struct, frozen=True, gc=False):
    """One message as an actor gets it. now: Unix seconds of a clock that never goes back. body: the bytes as they came."""

    now: float
    message: Any
    subject: str = ""
    reply: str = ""
    body: bytes = b""
    headers: Mapping[str, str] | None = None


class Started(Struct, frozen=True):
    """The first message of every actor's life."""


class Stopping(Struct, frozen=True):
    """The last: say goodbye; what is returned is still carried out, and work under way may finish within the grace."""

    grace: float


class Tick(Struct, frozen=True):
    """A timer of the actor's own. of: which one, if it has several."""

    of: Any = None


class Changed(Struct, frozen=True):
    """A watched key has this value now; None: it was deleted."""

    bucket: str
    key: str
    value: bytes | None


class Synced(Struct, frozen=True):
    """Every present key of the watched bucket has arrived."""

    bucket: str


class Malformed(Struct, frozen=True):
    """The body is not what its inlet takes; error names the field, in words for the sender."""

    error: str


class Undelivered(Struct, frozen=True):
    """Nobody was listening where a message with this reply subject was published."""

    reply_subject: str


class Recorded(Struct, frozen=True):
    """All events that this actor has recorded, up to and including number `through` (counted from 1), are on disk."""

    through: int


class Done(Struct, frozen=True):
    """The edge carried out the command with this id."""

    id: Any
    result: Any


class Failed(Struct, frozen=True):
    """The edge could not; error is a sentence for people."""

    id: Any
    error: str


class TimedOut(Struct, frozen=True):
    """The edge took longer than the command's timeout; whatever it still does is ignored."""

    id: Any


class Publish(Struct, frozen=True, gc=False):
    """Tell the bus. message: a Struct, encoded by the runtime; or bytes, sent as they are."""

    subject: str
    message: Any
    reply: str = ""
    headers: Mapping[str, str] | None = None


class After(Struct, frozen=True, gc=False):
    """The only timer: hand `message` back after `delay` seconds; a later After with the same key replaces it."""

    key: Any
    delay: float
    message: Any


class Cancel(Struct, frozen=True, gc=False):
    """Forget the timer with this key, if it is still to come."""

    key: Any


class Do(Struct, frozen=True, gc=False):
    """Hand slow or outside work to the actor's edge; it comes back as Done, Failed or TimedOut with the same id."""

    id: Any
    command: Any
    timeout: float = 0.0


class Record(Struct, frozen=True, gc=False):
    """An event for history; the runtime batches it, holds it until the stream has it, and reports `Recorded`."""

    event: Event


class Halt(Struct, frozen=True, gc=False):
    """This actor cannot go on; the runtime stops it loudly and starts a new one."""

    reason: str


Effect = Publish | After | Cancel | Do | Record | Halt | Span
# What an actor's table holds for a type of message: `self._on: dict[type, Handler]`, called with the envelope.
Handler = Callable[[Envelope], Iterable[Effect]]
NOTHING: tuple[Effect, ...] = ()  # what a handler returns when nothing must happen


class Actor(Protocol):
    """Private state changed only by `handle`, which reads no clock, does no I/O and draws no randomness of its own."""

    @property
    def inlets(self) -> tuple[Inlet, ...]: ...
    @property
    def watches(self) -> tuple[Watch, ...]: ...
    def handle(self, envelope: Envelope) -> Iterable[Effect]: ...


class Edge(Protocol):
    """An actor's hands. `perform` carries out one command off the decision path.

    It may have a method `inline(command)`, too, which carries out short work (predicted under a millisecond) at once on the loop and
    returns its result, or `NotImplemented` to have `perform` do it.
    """

    async def perform(self, command: Any) -> Any:
        """Carry out one command; an exception's text becomes `Failed.error`."""
        ...
