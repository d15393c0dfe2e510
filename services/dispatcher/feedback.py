"""Feedback on `infaas.feedback.<app>`: checked, joined with the prediction that it is for, and recorded. Pure.

The prediction is the one of the query that is named: by the uid that the answer named, or by the client's id, of which all dispatchers say their
latest query; without a name, it is the latest for the inputs with their context. If another dispatcher made it, that one takes the feedback
over. If nobody knows it any more, has not counted the feedback and has the inputs, the members are asked again (Clipper, paper 002, section 4.2
and 5).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct

from bus.fields import filled
from bus.messages.catalog import Ensemble
from bus.messages.events import FeedbackEvent
from bus.messages.flow import FeedbackSought, FeedbackTaken, Payload
from bus.messages.public import MOST_TEXT, Error, Feedback, Refusal
from bus.subjects import DISPATCHERS, Subjects
from services.core.actor import (
    NOTHING,
    After,
    Cancel,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Handler,
    Inlet,
    Publish,
    TimedOut,
)
from services.core.ensemble.outputs import label_error
from services.core.outcomes import OutcomeLog
from services.dispatcher.answered import (
    Answered,
    AnsweredQueries,
    Publisher,
    Scored,
    kept_answer,
    score_answered,
    score_prediction,
    scored_event,
)
from services.dispatcher.apps import Apps
from services.dispatcher.commands import FindKept
from services.dispatcher.contexts import COUNTS, Contexts
from services.dispatcher.copies import Copies
from services.dispatcher.counted import mark_of_bytes
from services.dispatcher.feedback_names import (
    ANY_CONTEXT,
    FORGOTTEN,
    FeedbackLists,
    OpenFeedback,
    bad_request,
    json_of,
    mark_of,
    mark_of_item,
    named_uid,
    row_uid,
)
from services.dispatcher.learning import FeedbackUpdate, Learning, Sender
from services.dispatcher.predictions import Prediction, Predictions, digest_of, uid_of
from services.dispatcher.releases import Releases
from services.dispatcher.stages import learns

UNKNOWN = "_unknown"  # in metrics: apps that do not exist, whose names clients choose
MOST_OPEN = 10_000  # feedbacks that are not applied yet: at most 1 MB each, usually 1 kB
KEPT_S = 15.0  # s to find a query among those that are kept
PATIENCE = 0.25  # s in which another dispatcher says that it has a prediction; a message takes less than a thousandth
_NO_INPUTS = (b"", b"\xc0")

MARKS = ("counted", "move")  # commands of Learning about older marks


class SoughtDue(Struct, frozen=True):
    """Timer: no other dispatcher has taken this feedback."""

    number: int


# Ask all members again: (uid of the new prediction, app, context, raw inputs, now). The prediction comes to `Feedbacks.evaluated`.
Evaluate = Callable[[bytes, str, str | None, bytes, float], Iterable[Effect]]


@dataclass(eq=False)
class Feedbacks:
    """log: counts the dispatcher's events. new_uid: 16 fresh bytes. evaluate: asks the members of an app again; its owner sets it."""

    name: str
    subjects: Subjects
    apps: Apps
    contexts: Contexts
    predictions: Predictions
    log: OutcomeLog
    new_uid: Callable[[], bytes]
    answered: AnsweredQueries
    releases: Releases
    copies: Copies

    def __post_init__(self) -> None:
        self.publisher = Publisher(self.apps.catalog)
        self.learning = Learning(self.contexts, self.log, self.publisher, self.releases)
        self.evaluate: Evaluate = self._cannot_evaluate
        self._lists = FeedbackLists(self.name, self.subjects, self._feedback)
        self.inlets = (
            Inlet(subject=self.subjects.feedback(), message=Feedback, queue=DISPATCHERS),
            Inlet(subject=self.subjects.selection("sought"), message=FeedbackSought),
            Inlet(subject=self.subjects.selection(f"taken.{self.name}"), message=FeedbackTaken),
            self._lists.inlet,
        )
        self.handlers: dict[type, Handler] = {
            Feedback: self._feedback,
            FeedbackSought: self._asked_for,
            FeedbackTaken: self._taken,
            **self._lists.handlers,
            SoughtDue: self._sought_in_vain,
        }
        self._asked = 0
        self._sought: dict[int, OpenFeedback] = {}
        self._evaluated: dict[bytes, list[OpenFeedback]] = {}  # by the uid of the prediction that is being made again
        self._open_again = 0

    @property
    def open(self) -> int:
        """Feedbacks that have not been applied, refused or handed on."""
        return len(self._sought) + self._open_again + self.learning.open

    def _refuse(self, sender: Sender, error: Error) -> list[Effect]:
        return self.learning.tell(sender, Refusal(id=sender.id, error=error))

    # -- a feedback comes

    def _feedback(self, envelope: Envelope) -> Iterable[Effect]:
        """Refuse it, or see that it is applied."""
        feedback: Feedback = envelope.message
        if feedback.items is not None:
            return self._lists.begin(envelope, feedback.items)
        app = envelope.subject.rpartition(".")[2]
        known_app = app if self.apps.catalog.app(app) is not None else UNKNOWN
        sender = Sender(known_app, envelope.reply, feedback.id)
        event = self._event(app, feedback, envelope.now)
        if isinstance(event, Error):
            return self._refuse(sender, event)
        mark = self._mark(app, feedback, event)
        event = msgspec.structs.replace(event, uid=row_uid(mark))
        if self.open >= MOST_OPEN:
            text = "too much feedback waits to be stored: send it again"
            return self._refuse(sender, Error(code="overloaded", message=text, retry_after_ms=1000.0))
        known = self.learning.known((mark,), sender)
        if known is not None:
            return known
        inputs = bytes(feedback.inputs)
        digest = None if inputs in _NO_INPUTS else digest_of(inputs)
        one = OpenFeedback(mark, feedback, event, event.query, digest, sender)
        found, plain = self._find(app, one), self._is_plain(app)
        if one.by_id and not plain:
            if found is not None:
                one.latest, one.at = found.uid, found.at
            return self._seek(one)
        return self._apply(one, found) if found is not None or (plain and not one.named) else self._seek(one)

    def _mark(self, app: str, feedback: Feedback, event: FeedbackEvent) -> bytes:
        """By which this feedback is known again: its key, else the query that it names, its item and its label, else nothing."""
        if feedback.retry_key is None and event.query is None:
            return mark_of_bytes(app, self.new_uid())
        return mark_of(app, feedback, event.query, event.label)

    def _event(self, app: str, feedback: Feedback, now: float) -> FeedbackEvent | Error:
        if not self.apps.synced:
            text = "the dispatcher has only just started: ask again"
            return Error(code="overloaded", message=text, retry_after_ms=100.0)
        if self.apps.catalog.app(app) is None:
            return Error(code="unknown_app", message=self.apps.catalog.no_app(app))
        inputs = bytes(feedback.inputs)
        if feedback.id is None and feedback.query is None and inputs in _NO_INPUTS:
            return bad_request("give the `query` that an answer named, the `id` of a query, or its `inputs`")
        if feedback.label is None:
            return bad_request("field `label` is missing: what the answer should have been")
        label = json_of(feedback.label)
        if label is None:
            return bad_request(f"label must be a value of JSON, at most {MOST_TEXT} characters long")
        unfit = self._unfit(app, feedback.label)
        if unfit is not None:
            return bad_request(unfit)
        for name in ("id", "context"):
            if len(getattr(feedback, name) or "") > MOST_TEXT:
                return bad_request(f"{name} must be at most {MOST_TEXT} characters long")
        if feedback.item < 0:
            return bad_request(f"item must be the number of an item, from 0, not {feedback.item}")
        if feedback.retry_key is not None and len(feedback.retry_key) != 16:
            return bad_request(f"retry_key must be 16 random bytes, not {len(feedback.retry_key)}")
        query = None if feedback.query is None else uid_of(feedback.query)
        if query == b"":
            return bad_request("query must be the 32 hexadecimal digits that an answer named as its `query`")
        digest = None if inputs in _NO_INPUTS else blake2b(inputs, digest_size=16).hexdigest()
        return filled(FeedbackEvent, feedback, time=now, app=app, label=label, input_digest=digest, query=query)

    def _unfit(self, app: str, label: Any) -> str | None:
        """Why no model of an app could be right by this label; None: one could."""
        catalog = self.apps.catalog
        record = catalog.app(app)
        served = [] if record is None else [catalog.model(*link) for link in sorted(record.links.items())]
        return label_error(label, [model for model in served if model is not None])

    def _is_plain(self, app: str) -> bool:
        """Whether no policy learns from its labels: one variant answers each of its queries, or it is a pipeline of such apps."""
        record = self.apps.catalog.app(app)
        return record is not None and not learns(record, self.apps)

    def _ensemble(self, app: str) -> Ensemble | None:
        """None: no policy learns here."""
        record = self.apps.catalog.app(app)
        found = None if record is None else record.selection
        return None if found is None or found.policy is None else found

    # -- its prediction

    def _find(self, app: str, one: OpenFeedback) -> Prediction | Answered | None:
        """What this dispatcher has, by what the feedback names: a query is never taken for another one of equal inputs. Of an app with a policy, too, one
        variant answers what names a model; an id with inputs, or with another context, does not name such a query.
        """
        feedback = one.feedback
        contextual, found = self._contextual(app), None
        if one.query is not None:
            found = self.predictions.by_query(app, one.query)
        elif feedback.id is not None:
            found = self.predictions.by_id(app, feedback.id, one.digest, feedback.context if contextual else None)
        elif one.digest is not None:
            found = self.predictions.by_inputs(
                app, one.digest, feedback.context if contextual else False, feedback.item
            )
        alone = self.answered.find(app, one.query, feedback.id)
        if alone is None or (found is not None and found.at >= alone.at):
            return found
        other = contextual and feedback.context not in (None, alone.context)
        return found if one.by_id and (other or (one.digest is not None and not self._is_plain(app))) else alone

    def _contextual(self, app: str) -> bool:
        ensemble = self._ensemble(app)
        return ensemble is not None and ensemble.contextual

    def _count(self, one: OpenFeedback, of: Answered | None = None) -> list[Effect]:
        """It teaches no policy, and counts all the same. of: the query that it is about, if that is known."""
        item, scored, event = one.feedback.item, Scored(), one.event
        arm, right = None, None
        marks: tuple[bytes, ...] = (one.mark,)
        ensemble = self._ensemble(event.app) or COUNTS
        if of is not None:
            if (wrong := self._misplaced(one, ensemble, of.context, len(of.said))) is not None:
                return wrong
            marks = (one.mark, mark_of_item(of.app, of.uid, item))
            record = self.apps.catalog.variant(of.variant)
            scored = score_answered(one.feedback.label, item, of, self.apps.catalog.variant)
            event, arm, right = scored_event(event, scored, of), of.arm, scored.of(record)
            self.copies.labelled(of.uid, item, one.feedback.label)
        update = FeedbackUpdate(
            None, item, one.feedback.label, marks, event, one.sender, scored=scored, arm=arm, right=right
        )
        return self._after(self.learning.apply(update, ensemble))

    def _misplaced(self, one: OpenFeedback, ensemble: Ensemble, context: str | None, items: int) -> list[Effect] | None:
        """Refuse what names a context or an item that its query did not have."""
        told = one.feedback
        if ensemble.contextual and told.context not in (None, context):
            text = f"context is not that of the query: it was asked in {context!r}, and not in {told.context!r}"
        elif told.item >= items:
            text = f"item {told.item} is none of the query's: they are 0 to {items - 1}"
        else:
            return None
        return self._refuse(one.sender, bad_request(text))

    def _apply(
        self, one: OpenFeedback, prediction: Prediction | Answered | None, *, reevaluated: bool = False
    ) -> list[Effect]:
        if not isinstance(prediction, Prediction):
            return self._count(one, prediction)
        whole = None if prediction.of is None else self.answered.find(prediction.app, prediction.uid, None)
        if isinstance(prediction.of, str):
            return self._refuse(one.sender, bad_request(prediction.of)) if whole is None else self._count(one, whole)
        asked_in = prediction.context
        if prediction.of is not None:
            prediction.fed.add(one.feedback.item)
            prediction = prediction.of
            unfit = self._unfit(prediction.app, one.feedback.label)
            if unfit is not None:
                return self._refuse(one.sender, bad_request(unfit))
        ensemble = self._ensemble(prediction.app) or COUNTS  # it may have been switched off meanwhile
        if (wrong := self._misplaced(one, ensemble, asked_in, prediction.items)) is not None:
            return wrong
        item = one.feedback.item
        prediction.fed.add(item)
        query = one.meant() if reevaluated and one.named else prediction.uid
        marks = (one.mark, mark_of_item(prediction.app, query, item))
        more = (
            ()
            if prediction.id is None or prediction.digest is None
            else (mark_of_item(prediction.app, named_uid(prediction.id, prediction.digest), item),)
        )
        scored = score_prediction(one.feedback.label, item, prediction, self.apps.catalog.variant)
        released = None if prediction.arm is None else prediction.variants.get(prediction.arm.model)
        one.event = scored_event(one.event, scored, prediction)
        update = FeedbackUpdate(
            prediction, item, one.feedback.label, marks, one.event, one.sender, more=more, reevaluated=reevaluated, scored=scored,
            arm=prediction.arm, right=None if released is None else scored.of(self.apps.catalog.variant(released)),
        )  # fmt: skip
        effects = self.learning.apply(update, ensemble)
        if whole is not None and item < len(whole.said):
            found = score_answered(one.feedback.label, item, whole, self.apps.catalog.variant)
            effects += self.learning.counted(one.event.app, one.event, mark_of_item(whole.app, whole.uid, item), found)
        return self._after(effects)

    def read(self, key: str) -> list[Effect]:
        """A context has been read, as `Contexts.took` says."""
        return self._after(self.learning.read(key))

    def done(self, done: Done | Failed | TimedOut) -> list[Effect]:
        """The edge has read or written what has counted in a context, or run a user's own policy."""
        kind = done.id[0]
        if kind == "kept":
            return self._found_kept(done)
        ended = self.learning.wrote if kind == "write" else self.learning.moved if kind in MARKS else self.learning.ran
        return self._after(ended(done))

    def _after(self, effects: list[Effect]) -> list[Effect]:
        """Of the feedbacks that were found to be applied already, but not here, ask who did it. Those that were not are evaluated."""
        while self.learning.sought:
            update, complete = self.learning.sought.pop()
            effects.extend(self._evaluate(update.seeks, update.event.time, complete=complete))
        while self.learning.repeated:
            update = self.learning.repeated.pop()
            one = OpenFeedback(update.marks[0], Feedback(id=update.sender.id), update.event, None, None, update.sender)
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
            self.name, number, one.mark, one.event.app, feedback, one.query, one.digest, one.sender.reply, one.applied
        )
        due = After(("sought", number), PATIENCE, SoughtDue(number))
        return [Publish(self.subjects.selection("sought"), sought), due]

    def _asked_for(self, envelope: Envelope) -> Iterable[Effect]:
        """Another dispatcher asks for a prediction, or who has applied a feedback."""
        asked: FeedbackSought = envelope.message
        if asked.dispatcher == self.name or not self.apps.synced:
            return NOTHING
        taken = Publish(self.subjects.selection(f"taken.{asked.dispatcher}"), FeedbackTaken(asked.number))
        sender = Sender(asked.app, asked.reply, asked.feedback.id)
        known = self.learning.known((asked.mark,), sender)
        if known is not None:
            return (taken, *known)
        if asked.applied or self.apps.catalog.app(asked.app) is None:
            return NOTHING
        label = json_of(asked.feedback.label)
        digest = None if asked.digest is None else asked.digest.hex()
        event = filled(
            FeedbackEvent,
            asked.feedback,
            time=envelope.now,
            app=asked.app,
            label=label or "",
            input_digest=digest,
            query=asked.query,
            uid=row_uid(asked.mark),
        )
        one = OpenFeedback(asked.mark, asked.feedback, event, asked.query, asked.digest, sender)
        found = self._find(asked.app, one)
        if found is None:
            return NOTHING
        if one.by_id and not self._is_plain(asked.app):
            return (msgspec.structs.replace(taken, message=FeedbackTaken(asked.number, found.uid, found.at)),)
        return (taken, *self._apply(one, found))

    def _taken(self, envelope: Envelope) -> Iterable[Effect]:
        """Another dispatcher sees to a feedback, or says which query has its id."""
        taken: FeedbackTaken = envelope.message
        one = self._sought.get(taken.number)
        if one is None:
            return NOTHING
        if taken.query is None:
            del self._sought[taken.number]
            return (Cancel(("sought", taken.number)),)
        if one.latest is None or taken.at > one.at:
            one.latest, one.at = taken.query, taken.at
        return NOTHING

    def _sought_in_vain(self, envelope: Envelope) -> Iterable[Effect]:
        """No other dispatcher knows more."""
        one = self._sought.pop(envelope.message.number, None)
        if one is None:
            return NOTHING
        if one.applied:
            # Who applied it is gone, or has forgotten: its row may be lost with it. Rather twice than not at all.
            return self.learning.record(one.event, [one.mark], one.sender)
        app = one.event.app
        if self._is_plain(app):
            return self._find_kept(one, self._find(app, one))
        if one.by_id and one.latest is not None:
            one.is_about(one.latest)
            known = self.learning.known((one.mark,), one.sender)
            found = self._find(app, one)
            return known if known is not None else self._seek(one) if found is None else self._apply(one, found)
        ensemble = self._ensemble(app)
        if ensemble is None:
            return self._evaluate(one, envelope.now, complete=True)
        # It may have counted all the same: before a restart, or so long ago that its prediction is forgotten.
        item = one.feedback.item
        marks = (one.mark, mark_of_item(app, one.meant(), item)) if one.named else (one.mark,)
        update = FeedbackUpdate(None, item, one.feedback.label, marks, one.event, one.sender, seeks=one)
        return self._after(self.learning.apply(update, ensemble))

    def _find_kept(self, one: OpenFeedback, of: Prediction | Answered | None) -> list[Effect]:
        """Count it. Where no dispatcher knows what it is about, the app may have kept that."""
        app, query = self.apps.catalog.app(one.event.app), one.query
        if of is not None or not one.named or app is None or not app.payloads:
            return self._apply(one, of)
        self._asked += 1
        self._sought[self._asked] = one
        command = FindKept(app.app, None if query is None else query.hex(), one.feedback.id)
        return [Do(("kept", self._asked), command, KEPT_S)]

    def _found_kept(self, done: Done | Failed | TimedOut) -> list[Effect]:
        """The edge has looked for it among the queries that are kept."""
        one = self._sought.pop(done.id[1])
        if not isinstance(done, Done):
            text = "the queries that are kept cannot be read now: send the feedback again with the same retry_key"
            return self._refuse(one.sender, Error(code="overloaded", message=text, retry_after_ms=1000.0))
        kept: Payload | None = done.result
        of = None if kept is None else kept_answer(one.query, one.event.app, kept, self.apps.catalog.variant)
        return self._count(one, of)

    def _evaluate(self, one: OpenFeedback, now: float, *, complete: bool) -> Iterable[Effect]:
        """No dispatcher knows the prediction: ask the members again, if it is certain that the feedback has not counted. complete: whether all
        that have counted in its context are known.
        """
        app, feedback = one.event.app, one.feedback
        record = self.apps.catalog.app(app)
        pipeline = record is not None and record.pipeline is not None
        what = f"query {feedback.query}" if feedback.query is not None else f"the query with id {feedback.id!r}"
        if feedback.query is None and one.digest is not None:
            what = "the query with these inputs"
        if one.digest is None or pipeline:
            remedy = "sooner, or to the app of the stage that answered, with its" if pipeline else "with the query's"
            text = f"{what} is not known to this app, or not any more: send the feedback {remedy} `inputs`"
            return self._refuse(one.sender, bad_request(text))
        if one.named and not complete:
            return self._refuse(one.sender, bad_request(FORGOTTEN.format(what)))
        if one.named and feedback.context is None and self._contextual(app):
            return self._refuse(one.sender, bad_request(ANY_CONTEXT.format(what)))
        uid = blake2b(one.mark, digest_size=16, person=b"evaluate again").digest()
        waiting = self._evaluated.setdefault(uid, [])
        waiting.append(one)
        self._open_again += 1
        return NOTHING if len(waiting) > 1 else self.evaluate(uid, app, feedback.context, bytes(feedback.inputs), now)

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
                effects.extend(self._apply(one, made, reevaluated=True))
        return effects
