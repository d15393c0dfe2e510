"""Feedback on `infaas.feedback.<app>`: checked, joined with the prediction that it is for, and recorded. Pure.

The prediction is looked for by the uid that the answer named, then by the inputs with their context, then by the client's id: the last two
may mean several queries, and the latest is taken. If another dispatcher made it, that one takes the feedback over. If nobody knows
it any more and the inputs are there, the members are asked again (Clipper, paper 002, section 4.2 and 5).
"""

from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct

from bus.messages.catalog import ModelSelection
from bus.messages.events import FeedbackEvent
from bus.messages.flow import FeedbackSought, FeedbackTaken
from bus.messages.public import Code, Error, Feedback, Refusal
from bus.subjects import DISPATCHERS, Subjects
from services.core.actor import (
    NOTHING,
    After,
    Cancel,
    Done,
    Effect,
    Envelope,
    Failed,
    Handler,
    Inlet,
    Publish,
    TimedOut,
)
from services.core.outcomes import OutcomeLog
from services.dispatcher.apps import Apps
from services.dispatcher.contexts import MARK, Contexts
from services.dispatcher.learning import Learning, Lesson, Sender
from services.dispatcher.predictions import Prediction, Predictions, digest_of

MOST_TEXT = 1000  # characters of a label as JSON, an id, a context
UNKNOWN = "_unknown"  # in metrics: apps that do not exist, whose names clients choose
MOST_OPEN = 10_000  # feedbacks that are not applied yet: at most 1 MB each, usually 1 kB
PATIENCE = 0.25  # s in which another dispatcher says that it has a prediction; a message takes less than a thousandth
_NO_INPUTS = (b"", b"\xc0")
_encode = msgspec.json.Encoder().encode


class SoughtDue(Struct, frozen=True):
    """Timer: no other dispatcher has taken this feedback."""

    number: int


class OpenFeedback:
    """A feedback to an app with a selection policy, until its prediction is found."""

    __slots__ = ("applied", "digest", "event", "feedback", "mark", "query", "selection", "sender")

    def __init__(
        self,
        mark: bytes,
        feedback: Feedback,
        event: FeedbackEvent,
        query: bytes | None,
        digest: bytes | None,
        sender: Sender,
    ) -> None:
        self.mark = mark
        self.feedback = feedback
        self.event = event
        self.query = query
        self.digest = digest
        self.sender = sender
        self.applied = False  # it has been, but not by this dispatcher


# Ask all members again: (uid of the new prediction, app, context, raw inputs, now). The prediction comes to `Feedbacks.evaluated`.
Evaluate = Callable[[bytes, str, str | None, bytes, float], Iterable[Effect]]


class Feedbacks:
    """log: counts the dispatcher's events. new_uid: 16 fresh bytes. evaluate: asks the members of an app again; its owner sets it."""

    def __init__(
        self,
        name: str,
        subjects: Subjects,
        apps: Apps,
        contexts: Contexts,
        predictions: Predictions,
        log: OutcomeLog,
        new_uid: Callable[[], bytes],
    ) -> None:
        self._name = name
        self._subjects = subjects
        self._apps = apps
        self._predictions = predictions
        self._learning = Learning(contexts, log)
        self._new_uid = new_uid
        self.evaluate: Evaluate = self._cannot_evaluate
        self.inlets = (
            Inlet(subject=subjects.feedback(), message=Feedback, queue=DISPATCHERS),
            Inlet(subject=subjects.selection("sought"), message=FeedbackSought),
            Inlet(subject=subjects.selection(f"taken.{name}"), message=FeedbackTaken),
        )
        self.handlers: dict[type, Handler] = {
            Feedback: self._feedback,
            FeedbackSought: self._asked_for,
            FeedbackTaken: self._taken,
            SoughtDue: self._sought_in_vain,
        }
        self._asked = 0
        self._sought: dict[int, OpenFeedback] = {}
        self._evaluated: dict[bytes, list[OpenFeedback]] = {}  # by the uid of the prediction that is being made again
        self._open_again = 0

    @property
    def open(self) -> int:
        """Feedbacks that have not been applied, refused or handed on."""
        return len(self._sought) + self._open_again + self._learning.open

    @property
    def ended(self) -> Mapping[tuple[str, str], int]:
        """Feedbacks by app and how they ended: `accepted`, or the code of the refusal."""
        return self._learning.ended

    def _refuse(self, sender: Sender, error: Error) -> list[Effect]:
        return self._learning.tell(sender, Refusal(id=sender.id, error=error))

    # -- a feedback comes

    def _feedback(self, envelope: Envelope) -> Iterable[Effect]:
        """Refuse it, or see that it is applied."""
        feedback: Feedback = envelope.message
        app = envelope.subject.rpartition(".")[2]
        known_app = app if self._apps.catalog.app(app) is not None else UNKNOWN
        sender = Sender(known_app, envelope.reply, feedback.id)
        event = self._event(app, feedback, envelope.now)
        if isinstance(event, Error):
            return self._refuse(sender, event)
        selection = self._selection(app)
        mark = _mark(app, feedback.retry_key or self._new_uid())
        if selection is None:
            known = self._learning.known((mark,), sender)
            return self._learning.record(event, (mark,), sender) if known is None else known
        if self.open >= MOST_OPEN:
            text = "too much feedback waits to be stored: send it again"
            return self._refuse(sender, Error(code="overloaded", message=text, retry_after_ms=1000.0))
        inputs = bytes(feedback.inputs)
        digest = None if inputs in _NO_INPUTS else digest_of(inputs)
        one = OpenFeedback(mark, feedback, event, event.query, digest, sender)
        known = self._learning.known((mark,), sender)
        if known is not None:
            return known
        found = self._find(app, one)
        return self._seek(one) if found is None else self._teach(one, found)

    def _event(self, app: str, feedback: Feedback, now: float) -> FeedbackEvent | Error:
        if not self._apps.synced:
            text = "the dispatcher has only just started: ask again"
            return Error(code="overloaded", message=text, retry_after_ms=100.0)
        if self._apps.catalog.app(app) is None:
            return _error("unknown_app", f"no app {app!r}: see infaas.list.apps")
        inputs = bytes(feedback.inputs)
        if feedback.id is None and feedback.query is None and inputs in _NO_INPUTS:
            return _error("bad_request", "give the `query` that an answer named, the `id` of a query, or its `inputs`")
        if feedback.label is None:
            return _error("bad_request", "field `label` is missing: what the answer should have been")
        label = _json(feedback.label)
        if label is None:
            return _error("bad_request", f"label must be a value of JSON, at most {MOST_TEXT} characters long")
        for name in ("id", "context"):
            if len(getattr(feedback, name) or "") > MOST_TEXT:
                return _error("bad_request", f"{name} must be at most {MOST_TEXT} characters long")
        if feedback.item < 0:
            return _error("bad_request", f"item must be the number of an item, from 0, not {feedback.item}")
        if feedback.retry_key is not None and len(feedback.retry_key) != 16:
            return _error("bad_request", f"retry_key must be 16 random bytes, not {len(feedback.retry_key)}")
        query = None if feedback.query is None else _uid(feedback.query)
        if query == b"":
            return _error("bad_request", "query must be the 32 hexadecimal digits that an answer named as its `query`")
        digest = None if inputs in _NO_INPUTS else blake2b(inputs, digest_size=16).hexdigest()
        return FeedbackEvent(
            time=now, app=app, id=feedback.id, context=feedback.context, label=label, input_digest=digest, query=query
        )

    def _selection(self, app: str) -> ModelSelection | None:
        """None: no policy learns here."""
        record = self._apps.catalog.app(app)
        found = None if record is None else record.selection
        return None if found is None or found.policy is None else found

    # -- its prediction

    def _find(self, app: str, one: OpenFeedback) -> Prediction | None:
        feedback = one.feedback
        found = None
        if one.query is not None:
            found = self._predictions.by_query(app, one.query)
        if found is None and one.digest is not None:
            selection = self._selection(app)
            context = feedback.context if selection is not None and selection.contextual else False
            found = self._predictions.by_inputs(app, one.digest, context, feedback.item)
        if found is None and one.query is None and one.digest is None and feedback.id is not None:
            found = self._predictions.by_id(app, feedback.id)
        return found

    def _teach(self, one: OpenFeedback, prediction: Prediction, *, reevaluated: bool = False) -> list[Effect]:
        selection = self._selection(prediction.app)
        if selection is None:  # it has been switched off meanwhile
            return self._learning.record(one.event, (one.mark,), one.sender)
        item = one.feedback.item
        if item >= prediction.items:
            text = f"item {item} is none of the query's: they are 0 to {prediction.items - 1}"
            return self._refuse(one.sender, _error("bad_request", text))
        prediction.fed.add(item)
        marks = (one.mark, _mark(prediction.app, prediction.uid + item.to_bytes(8, "little")))
        lesson = Lesson(prediction, item, one.feedback.label, marks, one.event, one.sender, reevaluated=reevaluated)
        return self._after(self._learning.teach(lesson, selection))

    def stored(self) -> list[Effect]:
        """More of the log's events are on disk."""
        return self._learning.stored()

    def read(self, key: str) -> list[Effect]:
        """A context has been read, as `Contexts.took` says."""
        return self._after(self._learning.read(key))

    def done(self, done: Done | Failed | TimedOut) -> list[Effect]:
        """The edge has written a context, or run a user's own policy."""
        return self._after(self._learning.wrote(done) if done.id[0] == "write" else self._learning.ran(done))

    def _after(self, effects: list[Effect]) -> list[Effect]:
        """Of the feedbacks that were found to be applied already, but not here, ask who did it."""
        while self._learning.repeated:
            lesson = self._learning.repeated.pop()
            one = OpenFeedback(lesson.marks[0], Feedback(id=lesson.sender.id), lesson.event, None, None, lesson.sender)
            one.applied = True
            effects.extend(self._seek(one))
        return effects

    # -- other dispatchers

    def _seek(self, one: OpenFeedback) -> list[Effect]:
        """Ask the other dispatchers. Who has the prediction, or has applied the feedback, answers its sender."""
        self._asked += 1
        number = self._asked
        self._sought[number] = one
        feedback = msgspec.structs.replace(one.feedback, inputs=msgspec.Raw(b"\xc0"))
        sought = FeedbackSought(
            self._name, number, one.mark, one.event.app, feedback, one.query, one.digest, one.sender.reply, one.applied
        )
        return [
            Publish(self._subjects.selection("sought"), sought),
            After(("sought", number), PATIENCE, SoughtDue(number)),
        ]

    def _asked_for(self, envelope: Envelope) -> Iterable[Effect]:
        """Another dispatcher asks for a prediction, or who has applied a feedback."""
        asked: FeedbackSought = envelope.message
        if asked.dispatcher == self._name or not self._apps.synced:
            return NOTHING
        taken = Publish(self._subjects.selection(f"taken.{asked.dispatcher}"), FeedbackTaken(asked.number))
        sender = Sender(asked.app, asked.reply, asked.feedback.id)
        known = self._learning.known((asked.mark,), sender)
        if known is not None:
            return (taken, *known)
        if asked.applied or self._apps.catalog.app(asked.app) is None:
            return NOTHING
        label = _json(asked.feedback.label)
        digest = None if asked.digest is None else asked.digest.hex()
        event = FeedbackEvent(
            time=envelope.now,
            app=asked.app,
            id=asked.feedback.id,
            context=asked.feedback.context,
            label=label or "",
            input_digest=digest,
            query=asked.query,
        )
        one = OpenFeedback(asked.mark, asked.feedback, event, asked.query, asked.digest, sender)
        found = self._find(asked.app, one)
        return NOTHING if found is None else (taken, *self._teach(one, found))

    def _taken(self, envelope: Envelope) -> Iterable[Effect]:
        """Another dispatcher sees to a feedback."""
        number = envelope.message.number
        return NOTHING if self._sought.pop(number, None) is None else (Cancel(("sought", number)),)

    def _sought_in_vain(self, envelope: Envelope) -> Iterable[Effect]:
        """No other dispatcher knows more."""
        one = self._sought.pop(envelope.message.number, None)
        if one is None:
            return NOTHING
        if one.applied:
            # Who applied it is gone, or has forgotten: its row may be lost with it. Rather twice than not at all.
            return self._learning.record(one.event, [one.mark], one.sender)
        app, feedback = one.event.app, one.feedback
        if one.digest is None:
            what = f"query {feedback.query}" if feedback.query is not None else f"the query with id {feedback.id!r}"
            text = f"{what} is not known to this app, or not any more: send the feedback with the query's `inputs`"
            return self._refuse(one.sender, _error("bad_request", text))
        uid = blake2b(one.mark, digest_size=16, person=b"evaluate again").digest()
        waiting = self._evaluated.setdefault(uid, [])
        waiting.append(one)
        self._open_again += 1
        return (
            NOTHING
            if len(waiting) > 1
            else self.evaluate(uid, app, feedback.context, bytes(feedback.inputs), envelope.now)
        )

    def _cannot_evaluate(
        self, uid: bytes, app: str, context: str | None, inputs: bytes, now: float
    ) -> Iterable[Effect]:
        del app, context, inputs, now
        text = "the query is not known any more: send the feedback sooner, with the `query` that its answer named"
        return self.evaluated(uid, Error(code="bad_request", message=text))

    def evaluated(self, uid: bytes, made: Prediction | Error) -> list[Effect]:
        """The members have been asked again."""
        effects: list[Effect] = []
        for one in self._evaluated.pop(uid, ()):
            self._open_again -= 1
            if isinstance(made, Error):
                effects.extend(self._refuse(one.sender, made))
            else:
                effects.extend(self._teach(one, made, reevaluated=True))
        return effects


def _mark(app: str, what: bytes) -> bytes:
    """By which a feedback is known again."""
    return blake2b(what, digest_size=MARK, key=app.encode()[:64]).digest()


def _uid(text: str) -> bytes:
    """b"" if it is none."""
    try:
        uid = bytes.fromhex(text)
    except ValueError:
        return b""
    return uid if len(uid) == 16 and len(text) == 32 else b""


def _json(label: Any) -> str | None:
    try:
        text = _encode(label).decode()
    except (TypeError, ValueError, RecursionError):
        return None
    return text if len(text) <= MOST_TEXT else None


def _error(code: Code, text: str) -> Error:
    return Error(code=code, message=text)
