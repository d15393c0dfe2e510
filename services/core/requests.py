"""Requests to actors: answered, refused, or held until the actor has read what it needs to know; and the commands that they begin, which
outlive failures: they are repeated until they succeed, and what a dead process had begun is taken over.

The runtime drops a request whose reply subject is not the caller's own before an actor sees it (bus/rights.py). An actor therefore
answers wherever it is asked to.
"""

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from bus.messages.public import Error, Refusal
from services.core.actor import NOTHING, After, Do, Effect, Envelope, Failed, Handler, Publish, TimedOut


def answer(reply: str, message: Any) -> tuple[Effect, ...]:
    """The answer to a request; nothing where the caller waits for none."""
    return (Publish(reply, message),) if reply else NOTHING


def refuse(reply: str, error: Error) -> tuple[Effect, ...]:
    """The answer that says why a request is not carried out."""
    return answer(reply, Refusal(error=error))


def not_now(what: str, failure: Failed | TimedOut, retry_s: float) -> Error:
    """The error for a request whose command failed. what: a sentence's beginning. retry_s: when to ask again."""
    why = failure.error if isinstance(failure, Failed) else "it took too long"
    return Error(code="overloaded", message=f"{what} now, try again: {why}", retry_after_ms=retry_s * 1000.0)


class SyncGate:
    """Holds requests back until the actor has read all its buckets.

    unsynced: the buckets that it has not read yet. synced_at: Unix seconds at which it had read the last one.
    """

    def __init__(self, buckets: Iterable[str]) -> None:
        self.unsynced = set(buckets)
        self.synced_at = 0.0
        self._held: list[tuple[Handler, Envelope]] = []

    def after(self, handler: Handler) -> Handler:
        """The same handler, which gets no message before all buckets are read."""

        def gated(envelope: Envelope) -> Iterable[Effect]:
            if not self.unsynced:
                return handler(envelope)
            self._held.append((handler, envelope))
            return NOTHING

        return gated

    def synced(self, envelope: Envelope) -> Iterable[Effect]:
        """The handler of `Synced`: after the last bucket it hands over what was held, in order."""
        self.unsynced.discard(envelope.message.bucket)
        if self.unsynced:
            return NOTHING
        self.synced_at = envelope.now
        held, self._held = self._held, []
        return [effect for handler, request in held for effect in handler(request)]


class Retry(Struct, frozen=True):
    """A timer's message: this command failed, or was put off, and is due now."""

    command: Do


class Commands(Struct, eq=False):
    """The commands that an actor has under way, so that one that failed can be given once more, as it was.

    pause_s: before a command that failed is repeated.
    """

    pause_s: float
    _under_way: dict[Any, Do] = {}

    def start(self, command: Do) -> Do:
        """Give this command; a former one with the same id is forgotten."""
        self._under_way[command.id] = command
        return command

    def get(self, id: Any) -> Do | None:
        return self._under_way.get(id)

    def ended(self, id: Any) -> None:
        """It succeeded, or nobody needs it any more."""
        self._under_way.pop(id, None)

    def failed(self, id: Any) -> tuple[Effect, ...]:
        """Repeat it after the pause."""
        command = self._under_way.get(id)
        return NOTHING if command is None else (After(id, self.pause_s, Retry(command)),)

    def retry(self, envelope: Envelope) -> tuple[Effect, ...]:
        """The handler of `Retry`."""
        return (self.start(envelope.message.command),)


class TakeOver(Struct, frozen=True):
    """Make `owner` the owner of work whose owner `previous` is gone. Result: its record; None where another was faster, or it has ended."""

    work: str
    owner: str
    previous: str


class TakeOvers(Struct, eq=False):
    """Which unfinished work an actor takes over: its own from an earlier life, and that of peers that are gone.

    name: the actor's own. timeout_s: a peer without a heartbeat for so long is gone. command_s: timeout of `TakeOver`, whose edge lets
    one of several win.
    """

    name: str
    timeout_s: float
    command_s: float
    _heard: dict[str, float] = {}
    _under_way: set[str] = set()

    def heard(self, peer: str, now: float, *, leaving: bool) -> None:
        """A peer's heartbeat. leaving: its last one, with which it leaves its work to others."""
        self._heard[peer] = float("-inf") if leaving else now

    def start(self, unfinished: Iterable[tuple[str, str]], now: float, since: float) -> list[Do]:
        """Take over what nobody does. unfinished: id and owner of work that this actor does not do. since: when it began to listen."""
        if now - since > self.timeout_s:  # who is gone counts as never heard of
            self._heard = {peer: at for peer, at in self._heard.items() if now - at <= self.timeout_s}
        found = [
            (work, owner)
            for work, owner in unfinished
            if work not in self._under_way
            and (owner == self.name or now - self._heard.get(owner, since) > self.timeout_s)
        ]
        self._under_way.update(work for work, _ in found)
        return [Do(("takeover", work), TakeOver(work, self.name, owner), self.command_s) for work, owner in found]

    def ended(self, work: str) -> None:
        """The command succeeded or failed."""
        self._under_way.discard(work)
