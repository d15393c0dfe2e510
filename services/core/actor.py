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

    message: `bytes` stands for any body, undecoded, even an empty one. malformed: a body that cannot be decoded reaches the actor as
    `Malformed`; otherwise the runtime refuses it.
    """

    subject: str
    message: type
    queue: str = ""
    malformed: bool = False


class Watch(Struct, frozen=True, kw_only=True):
    """A key-value bucket that an actor follows. Its entries arrive as `Changed`. `Synced` comes once, when all have arrived."""

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
    """The last message. Its effects are still carried out, and work under way may finish within `grace` seconds.

    succeeded: another process has the same work already, or begins at once.
    """

    grace: float
    succeeded: bool = False


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
    """The body cannot be decoded as its inlet's message. error: names the field, in words for the sender."""

    error: str


class Undelivered(Struct, frozen=True):
    """No process listened on the subject of a message with this reply subject."""

    reply_subject: str


class Recorded(Struct, frozen=True):
    """All events that this actor has recorded, up to and including number `through` (counted from 1), are on disk."""

    through: int


class Done(Struct, frozen=True):
    """The edge carried out the command with this id."""

    id: Any
    result: Any


class Failed(Struct, frozen=True):
    """The edge could not carry the command out. error: a sentence for people."""

    id: Any
    error: str


class TimedOut(Struct, frozen=True):
    """The edge took longer than the command's timeout. Its result is ignored."""

    id: Any


class Publish(Struct, frozen=True, gc=False):
    """Publish on the bus. message: a Struct, which the runtime encodes, or bytes, which it sends as they are."""

    subject: str
    message: Any
    reply: str = ""
    headers: Mapping[str, str] | None = None


class PublishBehind(Publish, frozen=True, gc=False):
    """Publish to this actor itself, so that it comes behind all that any server of the bus had got before (`bus.port.Bus.publish_behind`)."""


class After(Struct, frozen=True, gc=False):
    """The only timer: `message` comes back after `delay` seconds. A later After with the same key replaces it."""

    key: Any
    delay: float
    message: Any


class Cancel(Struct, frozen=True, gc=False):
    """Cancel the timer with this key, if there is one."""

    key: Any


class Do(Struct, frozen=True, gc=False):
    """Give slow or outside work to the actor's edge. It comes back as Done, Failed or TimedOut with the same id."""

    id: Any
    command: Any
    timeout: float = 0.0


class Record(Struct, frozen=True, gc=False):
    """Record an event. The runtime batches it, keeps it until the stream has it, and reports `Recorded`."""

    event: Event


class Will(Struct, frozen=True, gc=False):
    """If this actor's process is killed, its successor publishes this. A later Will with the same key replaces it; None takes it back."""

    key: Any
    publish: Publish | None


class Halt(Struct, frozen=True, gc=False):
    """This actor cannot go on. The runtime logs the reason, stops it, and starts a new one."""

    reason: str


Effect = Publish | After | Cancel | Do | Record | Will | Halt | Span
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


class TableActor:
    """An actor that is a table. inlets, watches: what it listens to and follows, all its life."""

    inlets: tuple[Inlet, ...] = ()
    watches: tuple[Watch, ...] = ()
    _on: dict[type, Handler]

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        """Take one message."""
        return self._on[type(envelope.message)](envelope)


class Edge(Protocol):
    """Carries out an actor's commands. `perform` carries out one, off the decision path.

    It may have a method `inline(command)`, too, which carries out short work (predicted under a millisecond) at once on the loop and
    returns its result, or `NotImplemented` to have `perform` do it.
    """

    async def perform(self, command: Any) -> Any:
        """Carry out one command. An exception's text becomes `Failed.error`."""
        ...
