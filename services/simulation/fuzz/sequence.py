"""What was said about one query, as a sequence diagram: as text, and for Mermaid."""

from typing import Any

import msgspec
from msgspec import Struct

from bus.codec import encode
from bus.messages.public import Answer, Refusal
from services.core.actor import Actor, Effect, Envelope, Publish, Record
from services.simulation.clients import INBOX
from services.simulation.fuzz.trial import FaultTrial, Wrap, Wrapped
from services.simulation.kernel import as_read
from services.simulation.scenario.model import BEGINS, Scenario

CLIENT = "client"
_MOST = 80  # steps


class TraceStep(Struct, frozen=True):
    """At this time (the scenario's, s) `to` got what `source` had said. to: "" if nobody did; the same as source: it recorded this."""

    time: float
    source: str
    to: str
    words: str


class QueryTrace:
    """The steps of one query of a run. query: its number."""

    def __init__(self, query: str) -> None:
        self.steps: list[TraceStep] = []
        self._inbox = f"{INBOX}{query}"
        self._uids: set[bytes] = set()
        self._said: dict[str, list[str]] = {}  # by subject: who has said something there that has not come

    def wrap(self, name: str, actor: Actor) -> Actor:
        """The actor, whose messages are traced."""

        def traced(envelope: Envelope) -> list[Effect]:
            self.came(name, envelope)
            effects = list(actor.handle(envelope))
            for effect in effects:
                self.went(name, effect, envelope.now)
            return effects

        return Wrapped(actor, traced)

    def came(self, name: str, envelope: Envelope) -> None:
        message = envelope.message
        if not envelope.subject or not self._about(message, envelope.subject, envelope.reply):
            return
        senders = self._said.get(envelope.subject)
        source = senders.pop(0) if senders else CLIENT if envelope.reply == self._inbox else "?"
        self._step(envelope.now, source, name, _words(message))

    def went(self, name: str, effect: Effect, now: float) -> None:
        if type(effect) is Record:
            event = effect.event
            uid = getattr(event, "uid", None) or getattr(event, "query", None)
            if uid in self._uids and uid is not None:
                self._step(now, name, name, _words(event))
        elif type(effect) is Publish and self._about(effect.message, effect.subject, effect.reply):
            if effect.subject == self._inbox:
                self._step(now, name, CLIENT, _words(as_read(effect).message))
            else:
                self._said.setdefault(effect.subject, []).append(name)

    def _step(self, now: float, source: str, to: str, words: str) -> None:
        if len(self.steps) < _MOST:
            self.steps.append(TraceStep(round(now - BEGINS, 4), source, to, words))

    def _about(self, message: Any, subject: str, reply: str) -> bool:
        """Whether this is about the query, or one of its parts, whose ids are learnt here."""
        if self._inbox in (subject, reply):
            self._learn(message if type(message) is not bytes else as_read(Publish(subject, message)).message)
            return True
        if not isinstance(message, Struct | bytes):
            return False
        body = message if isinstance(message, bytes) else _encoded(message)
        known = any(uid in body or uid.hex() in subject or uid.hex().encode() in body for uid in self._uids)
        if known or encode(self._inbox) in body:
            self._learn(message)
            return True
        return False

    def _learn(self, message: Any) -> None:
        route = getattr(message, "route", None)
        if route is not None:
            self._uids.add(route.uid)
        query = getattr(message, "query", None)
        if isinstance(query, str) and len(query) == 32:
            self._uids.add(bytes.fromhex(query))


def trace_of(scenario: Scenario, query: str, invariant: str, wrap: Wrap | None = None) -> list[TraceStep]:
    """What was said about this query, until the invariant broke. wrap: as of Trial."""
    trace = QueryTrace(query)
    FaultTrial(scenario, lambda name, actor: trace.wrap(name, actor if wrap is None else wrap(name, actor))).verdict(
        until=lambda found: any(one.invariant == invariant for one in found)
    )
    return trace.steps


def _encoded(message: Struct) -> bytes:
    try:
        return encode(message)
    except (TypeError, msgspec.MsgspecError):
        return b""


def _words(message: Any) -> str:
    if isinstance(message, Refusal):
        return f"Refusal {message.error.code}"
    if isinstance(message, Answer):
        return f"Answer {message.variant}".rstrip()
    name = type(message).__name__
    if outcome := getattr(message, "outcome", None):
        return f"row: {outcome}{f' ({code})' if (code := message.code) else ''}"
    reason = getattr(message, "reason", None)
    return f"{name} ({reason})" if isinstance(reason, str) and reason else name


# -- diagrams


def as_text(steps: list[TraceStep]) -> str:
    """A column for each participant, an arrow for each message."""
    names = _names(steps)
    width = max([14, *(len(name) + 3 for name in names)])
    lines = [" " * 12 + "".join(name.ljust(width) for name in names)]
    for step in steps:
        at, to = names.index(step.source), names.index(step.to)
        left, right = min(at, to), max(at, to)
        if at == to:
            lane = " " * (width * at) + f"* {step.words}"
        else:
            line = "-" * (width * (right - left) - 1)
            lane = " " * (width * left) + (f"{line}>" if at < to else f"<{line}") + f"  {step.words}"
        lines.append(f"{step.time:10.4f}  {lane}")
    return "\n".join(lines)


def as_mermaid(steps: list[TraceStep]) -> str:
    """The same for Mermaid."""
    names = _names(steps)
    lines = ["sequenceDiagram", *(f"    participant p{i} as {name}" for i, name in enumerate(names))]
    for step in steps:
        source, to, words = names.index(step.source), names.index(step.to), step.words.replace(";", ",")
        if source == to:
            lines.append(f"    Note over p{source}: {step.time:.4f} s {words}")
        else:
            lines.append(f"    p{source}->>p{to}: {step.time:.4f} s {words}")
    return "\n".join(lines) + "\n"


def _names(steps: list[TraceStep]) -> list[str]:
    found = dict.fromkeys(name for step in steps for name in (step.source, step.to))
    return sorted(found, key=lambda name: (name != CLIENT, not name.startswith("d-"), name))
