"""Actors that say what they are told to, on either stage."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec import Struct

from services.core.actor import Effect, Envelope, Inlet, Watch
from services.simulation.hosts import SimulatedEdge

START = 1000.0
DELAY = 0.01


class Word(Struct, frozen=True):
    """What puppets send each other."""

    text: str


class Ring(Struct, frozen=True):
    """A puppet's timer."""

    text: str


class Puppet:
    """seen: (seconds since the start, message) of all that it got. says: effects by message."""

    def __init__(
        self,
        *inlets: str,
        queue: str = "",
        watches: Iterable[str] = (),
        says: Callable[[Any], Iterable[Effect] | None] = lambda _: None,
        message: type = Word,
    ) -> None:
        self.inlets = tuple(Inlet(subject=subject, message=message, queue=queue) for subject in inlets)
        self.watches = tuple(Watch(bucket=bucket) for bucket in watches)
        self.seen: list[tuple[float, Any]] = []
        self._says = says

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        self.seen.append((round(envelope.now - START, 6), envelope.message))
        return self._says(envelope.message) or ()

    def got(self, kind: type) -> list[tuple[float, Any]]:
        """What came of one type."""
        return [each for each in self.seen if type(each[1]) is kind]

    @property
    def words(self) -> list[str]:
        return [message.text for _, message in self.got(Word)]


class Play:
    """A stage, what its actors recorded, and words from outside."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.told: list[tuple[str, Any]] = []
        self.stage = make(START, lambda name, event: self.told.append((name, event)), delay=DELAY)

    def enter(self, name: str, puppet: Puppet, hands: SimulatedEdge | None = None, seconds: float = 0.0) -> Puppet:
        self.stage.enter(name, puppet, hands)
        if seconds:
            self.run(seconds)
        return puppet

    def say(self, subject: str, *texts: str, seconds: float = 0.0) -> None:
        for text in texts:
            self.stage.publish(subject, Word(text))
        if seconds:
            self.run(seconds)

    def run(self, seconds: float) -> None:
        self.stage.run(self.stage.now + seconds)


def played(make: Callable[..., Any]) -> Iterator[Play]:
    """For a fixture: a play on a stage of this kind, cleared away afterwards."""
    play = Play(make)
    yield play
    close = getattr(play.stage, "close", None)
    if close is not None:
        close()
