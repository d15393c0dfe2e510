"""Actors on virtual time with scripted edges: the simulator's kernel, and what a test hears and sends.

An edge script answers each command by (seconds that it takes, result or exception), as the simulator's edges do.
"""

from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from bus.codec import encode
from services.core.actor import Actor, Effect, Envelope, Inlet, Publish, Watch
from services.simulation.hosts import RunningActor, SimulatedEdge
from services.simulation.kernel import Kernel


class _Listener:
    """An actor that keeps what is published on a subject, encoded."""

    watches: tuple[Watch, ...] = ()

    def __init__(self, pattern: str, heard: list[tuple[float, str, Any]]) -> None:
        self.inlets = (Inlet(subject=pattern, message=bytes),)
        self._heard = heard

    def handle(self, envelope: Envelope) -> tuple[()]:
        if envelope.subject:  # else it is Started or Stopping
            self._heard.append((envelope.now, envelope.subject, envelope.message))
        return ()


class Stage:
    """The kernel, as tests use it. delay: seconds that a message is under way.

    heard: what was published on the subjects of `listen`, and to inboxes: (time, subject, body). records: recorded events by kind.
    """

    def __init__(self, *, start: float = 1_000_000.0, delay: float = 0.0001) -> None:
        self.heard: list[tuple[float, str, Any]] = []
        self.records: list[tuple[str, Any]] = []
        self._held: dict[str, list[Envelope]] = {}
        self.kernel = Kernel(start, lambda _, event: self.records.append((type(event).kind, event)), delay=delay)
        self.kernel.received = self._received

    @property
    def now(self) -> float:
        return self.kernel.now

    @property
    def members(self) -> dict[str, RunningActor]:
        return self.kernel.members

    @property
    def delay(self) -> float:
        return self.kernel.delay

    @delay.setter
    def delay(self, delay: float) -> None:
        self.kernel.delay = delay

    def enter(self, name: str, actor: Actor, edge: SimulatedEdge | None = None) -> RunningActor:
        self.kernel.enter(name, actor, edge)
        return self.kernel.members[name]

    def kill(self, name: str, seconds: float = 0.0) -> None:
        """As kill -9: the actor gets nothing more, and nothing that it has begun is finished."""
        assert name in self.members, name
        self.kernel.leave(name, goodbye=False)
        self._pass(seconds)

    def stop(self, name: str, seconds: float = 0.0) -> None:
        """The actor gets Stopping; work under way may end within the kernel's time for that."""
        assert name in self.members, name
        self.kernel.leave(name, goodbye=True)
        self._pass(seconds)

    def clog(self, name: str, subject: str = "", seconds: float = 0.0) -> None:
        """Messages to this actor, or those on this subject, wait, in their order, until `go_on`. Its timers ring."""
        self._hold(name, subject, stopped=False)
        self._pass(seconds)

    def pause(self, name: str, seconds: float = 0.0) -> None:
        """As SIGSTOP: whatever comes to this actor waits until `go_on`, its timers too."""
        self._hold(name, stopped=True)
        self._pass(seconds)

    def lag(self, name: str, seconds: float) -> None:
        """Messages to this actor come so much later, in their order, as where it has more to read than it can. Its timers ring."""
        member = self.members[name]

        def read(envelope: Envelope) -> None:
            member.handle = member.actor.handle
            self.kernel._deliver(member, replace(envelope, now=self.now))
            member.handle = late

        def late(envelope: Envelope) -> Iterable[Effect]:
            if not envelope.subject:
                return member.actor.handle(envelope)
            self.at(seconds, lambda: read(envelope))
            return ()

        member.handle = late

    def _hold(self, name: str, subject: str = "", *, stopped: bool) -> None:
        member = self.members[name]
        waiting = self._held[name] = list[Envelope]()

        def handle(envelope: Envelope) -> Iterable[Effect]:
            if stopped or (envelope.subject and subject in ("", envelope.subject)):
                waiting.append(envelope)
                return ()
            return member.actor.handle(envelope)

        member.handle = handle

    def go_on(self, name: str, seconds: float = 0.0) -> None:
        """All that waited comes now."""
        member = self.members[name]
        member.handle = member.actor.handle
        for envelope in self._held.pop(name):
            self.kernel._deliver(member, replace(envelope, now=self.now))
        self._pass(seconds)

    def listen(self, pattern: str) -> None:
        """Keep what is published on these subjects in `heard`."""
        self.kernel.enter(f"listener {pattern}", _Listener(pattern, self.heard))

    def publish(self, subject: str, message: Any, reply: str = "", seconds: float = 0.0) -> None:
        self.kernel.publish(subject, message, reply)
        self._pass(seconds)

    def send(self, name: str, message: Any, seconds: float = 0.0) -> None:
        """Hand one actor a message that does not travel on the bus (Changed, Synced, ...)."""
        self.kernel._deliver(self.members[name], Envelope(self.now, message))
        self._pass(seconds)

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Call it after so many seconds."""
        self.kernel.at(delay, lambda _: action())

    def run(self, seconds: float) -> None:
        self.kernel.run(self.now + seconds)

    def _pass(self, seconds: float) -> None:
        """After what was done to an actor; without seconds not even what is due now comes."""
        if seconds:
            self.run(seconds)

    def _received(self, reply: Publish) -> None:
        body = reply.message if isinstance(reply.message, bytes) else encode(reply.message)
        self.heard.append((self.now, reply.subject, body))
