"""Feedback on `infaas.feedback.<app>`: checked and recorded. Its sender gets a reply once it is on disk. Pure."""

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import msgspec

from bus.messages.events import FeedbackEvent
from bus.messages.public import Accepted, Code, Error, Feedback, Refusal
from bus.subjects import DISPATCHERS, Subjects
from services.core.actor import (
    NOTHING,
    Changed,
    Effect,
    Envelope,
    Handler,
    Inlet,
    Publish,
    Record,
    Recorded,
    Started,
    Stopping,
    Synced,
    Watch,
)
from services.core.catalog import Catalog

MOST_TEXT = 1000  # characters of a label as JSON, an id, a context
_NO_INPUTS = (b"", b"\xc0")
_encode = msgspec.json.Encoder().encode


class FeedbackActor:
    """One of the queue group takes each message. No policy learns from feedback yet; SQL has it (relation `feedback`)."""

    def __init__(self, subjects: Subjects) -> None:
        self._catalog = Catalog()
        self._synced = False
        self._recorded = 0
        self._open: deque[tuple[int, str]] = deque()  # number of the event, and who waits for it
        self.inlets = (Inlet(subject=subjects.feedback(), message=Feedback, queue=DISPATCHERS),)
        self.watches = (Watch(bucket=subjects.catalog_bucket),)
        self._on: dict[type, Handler] = {
            Feedback: self._feedback,
            Recorded: self._stored,
            Changed: self._changed,
            Synced: self._all_in,
            Started: lambda _: NOTHING,
            Stopping: lambda _: NOTHING,
        }

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        return self._on[type(envelope.message)](envelope)

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        self._catalog.apply(envelope.message.key, envelope.message.value)
        return NOTHING

    def _all_in(self, envelope: Envelope) -> Iterable[Effect]:
        del envelope
        self._synced = True
        return NOTHING

    def _feedback(self, envelope: Envelope) -> Iterable[Effect]:
        feedback: Feedback = envelope.message
        reply = envelope.reply
        app = envelope.subject.rpartition(".")[2]
        event = self._event(app, feedback, envelope.now)
        if isinstance(event, Error):
            return (Publish(reply, Refusal(id=feedback.id, error=event)),) if reply else NOTHING
        self._recorded += 1
        if reply:
            self._open.append((self._recorded, reply))
        return (Record(event),)

    def _event(self, app: str, feedback: Feedback, now: float) -> FeedbackEvent | Error:
        if not self._synced:
            text = "the dispatcher has only just started: ask again"
            return Error(code="overloaded", message=text, retry_after_ms=100.0)
        if self._catalog.app(app) is None:
            return _error("unknown_app", f"no app {app!r}: see infaas.list.apps")
        inputs = bytes(feedback.inputs)
        if feedback.id is None and inputs in _NO_INPUTS:
            return _error("bad_request", "give the `id` of a query, or its `inputs`")
        if feedback.label is None:
            return _error("bad_request", "field `label` is missing: what the answer should have been")
        label = _json(feedback.label)
        if label is None:
            return _error("bad_request", f"label must be a value of JSON, at most {MOST_TEXT} characters long")
        for name in ("id", "context"):
            if len(getattr(feedback, name) or "") > MOST_TEXT:
                return _error("bad_request", f"{name} must be at most {MOST_TEXT} characters long")
        digest = None if inputs in _NO_INPUTS else blake2b(inputs, digest_size=16).hexdigest()
        return FeedbackEvent(
            time=now, app=app, id=feedback.id, context=feedback.context, label=label, input_digest=digest
        )

    def _stored(self, envelope: Envelope) -> Iterable[Effect]:
        replies: list[Effect] = []
        while self._open and self._open[0][0] <= envelope.message.through:
            replies.append(Publish(self._open.popleft()[1], Accepted()))
        return replies


def _json(label: Any) -> str | None:
    try:
        text = _encode(label).decode()
    except (TypeError, ValueError, RecursionError):
        return None
    return text if len(text) <= MOST_TEXT else None


def _error(code: Code, text: str) -> Error:
    return Error(code=code, message=text)
