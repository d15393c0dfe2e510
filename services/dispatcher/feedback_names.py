"""What a feedback names, by which marks it is known again, and lists of feedbacks. Pure.

A feedback is the same one if it has the same `retry_key`, or, without one, the same query, item and label. Whatever the key, one counts for
each item of a query.
"""

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from bus.messages.events import FeedbackEvent
from bus.messages.flow import FeedbackTold
from bus.messages.public import MOST_TEXT, Accepted, Error, Feedback, Refusal, RefusedItem
from bus.subjects import Subjects
from services.core.actor import NOTHING, After, Cancel, Effect, Envelope, Handler, Inlet, Publish
from services.dispatcher.counted import mark_of_bytes
from services.dispatcher.learning import Sender

LIST_S = 20.0  # s in which all of a list are to end
MOST_LISTED = 5_000  # feedbacks in a list

FORGOTTEN = (
    "{} is not known any more, and whether it has had its feedback is not, either: many others have counted since. If it has not, send the"
    " `inputs` without `query` and `id`"
)
ANY_CONTEXT = "{} is not known any more, and so its context is not: send the `context` that it had, or the `inputs` without `query` and `id`"
_encode = msgspec.json.Encoder().encode


class ListDue(Struct, frozen=True):
    """Timer: a list of feedbacks has waited long enough."""

    number: int


class OpenList(Struct, eq=False):
    """Feedbacks that came as one list. reply: who waits for all of them. left: places of those that have not ended."""

    reply: str
    left: set[int]
    refused: list[RefusedItem] = []


class FeedbackLists:
    """Lists of feedbacks. one: takes each, as if it had come alone; whichever dispatcher sees to it replies to this one."""

    def __init__(self, name: str, subjects: Subjects, one: Callable[[Envelope], Iterable[Effect]]) -> None:
        self._name, self._selection = name, subjects.selection
        self._one = one
        self._begun = 0
        self._open: dict[int, OpenList] = {}
        self.inlet = Inlet(subject=self._subject("*", "*"), message=FeedbackTold)
        self.handlers: dict[type, Handler] = {FeedbackTold: self._ended, ListDue: self._due}

    def _subject(self, number: object, item: object) -> str:
        return self._selection(f"told.{self._name}.{number}.{item}")

    def begin(self, envelope: Envelope, items: list[Feedback]) -> list[Effect]:
        """A list comes."""
        if not items or len(items) > MOST_LISTED or any(one.items is not None for one in items):
            text = f"items must be a list of 1 to {MOST_LISTED:,} feedbacks, without lists in them"
            refusal = Refusal(error=Error(code="bad_request", message=text))
            return [Publish(envelope.reply, refusal)] if envelope.reply else []
        self._begun += 1
        number = self._begun
        self._open[number] = OpenList(envelope.reply, set(range(len(items))))
        effects: list[Effect] = [After(("list", number), LIST_S, ListDue(number))]
        for i, one in enumerate(items):
            effects += self._one(Envelope(envelope.now, one, envelope.subject, self._subject(number, i)))
        return effects

    def _ended(self, envelope: Envelope) -> Iterable[Effect]:
        """One of a list has been accepted or refused."""
        number, item = map(int, envelope.subject.rsplit(".", 2)[1:])
        found = self._open.get(number)
        if found is None or item not in found.left:
            return NOTHING
        found.left.remove(item)
        if envelope.message.error is not None:
            found.refused.append(RefusedItem(item=item, error=envelope.message.error))
        return NOTHING if found.left else [Cancel(("list", number)), *self._tell(number)]

    def _due(self, envelope: Envelope) -> Iterable[Effect]:
        """Those that have not ended may be sent again."""
        number = envelope.message.number
        error = Error(
            code="overloaded", message=f"not stored within {LIST_S:g} s: send it again", retry_after_ms=1000.0
        )
        found = self._open[number]
        found.refused += [RefusedItem(item=item, error=error) for item in found.left]
        return self._tell(number)

    def _tell(self, number: int) -> list[Effect]:
        found = self._open.pop(number)
        refused = sorted(found.refused, key=lambda one: one.item)
        accepted = Accepted(accepted=not refused, refused=refused or UNSET)
        return [Publish(found.reply, accepted)] if found.reply else []


class OpenFeedback(Struct, eq=False):
    """A feedback to an app with a selection policy, until its prediction is found. mark: by which it is known again. query: that it is about."""

    mark: bytes
    feedback: Feedback
    event: FeedbackEvent
    query: bytes | None
    digest: bytes | None
    sender: Sender
    applied: bool = False  # it has been, but not by this dispatcher
    latest: bytes | None = None  # query with its id that is known so far
    at: float = 0.0  # when that was answered

    @property
    def named(self) -> bool:
        """Whether it names a query, rather than inputs alone."""
        return self.query is not None or self.feedback.id is not None

    @property
    def by_id(self) -> bool:
        """Whether which query it is about is not known yet."""
        return self.query is None and self.feedback.id is not None

    def is_about(self, query: bytes) -> None:
        """It is known now."""
        self.query = query
        if self.feedback.retry_key is None:
            self.mark = mark_of(self.event.app, self.feedback, query, self.event.label)
        self.event = msgspec.structs.replace(self.event, query=query, uid=row_uid(self.mark))

    def meant(self) -> bytes:
        """The uid of the query that it names, or what stands for it where no dispatcher knows which one has its id."""
        return self.query if self.query is not None else named_uid(self.feedback.id or "", self.digest)


def mark_of(app: str, feedback: Feedback, query: bytes | None, label: str) -> bytes:
    """Of a feedback with a key, or that names this query. label: JSON."""
    if feedback.retry_key is not None:
        return mark_of_bytes(app, feedback.retry_key)
    return mark_of_bytes(app, b"word" + (query or b"") + feedback.item.to_bytes(8, "little") + label.encode())


def mark_of_item(app: str, query: bytes, item: int) -> bytes:
    """By which an item of a query is known, for which a feedback has counted."""
    return mark_of_bytes(app, query + item.to_bytes(8, "little"))


def named_uid(id: str, digest: bytes | None) -> bytes:
    """In place of a query's uid, of which only the client's id and the inputs are known."""
    return blake2b(id.encode() + (digest or b""), digest_size=16, person=b"id and inputs").digest()


def row_uid(mark: bytes) -> bytes:
    """The uid of a feedback's row."""
    return blake2b(mark, digest_size=16, person=b"feedback").digest()


def json_of(label: Any) -> str | None:
    """None: it is no JSON, or too long."""
    try:
        text = _encode(label).decode()
    except (TypeError, ValueError, RecursionError):
        return None
    return text if len(text) <= MOST_TEXT else None


def bad_request(text: str) -> Error:
    """What a feedback is refused with."""
    return Error(code="bad_request", message=text)
