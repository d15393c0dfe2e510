"""Requests to actors: answered, refused, or held until the actor has read what it needs to know.

The runtime drops a request whose reply subject is not the caller's own before an actor sees it (bus/rights.py). An actor therefore
answers wherever it is asked to.
"""

from collections.abc import Iterable
from typing import Any

from bus.messages.public import Error, Refusal
from services.core.actor import NOTHING, Effect, Envelope, Failed, Handler, Publish, TimedOut


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
