"""What a feedback names, and by which marks it is known again. Pure.

A feedback is the same one if it has the same `retry_key`, or, without one, the same query, item and label. Whatever the key, one counts for
each item of a query.
"""

from hashlib import blake2b

import msgspec
from msgspec import Struct

from bus.messages.events import FeedbackEvent
from bus.messages.public import Feedback
from services.dispatcher.counted import MARK
from services.dispatcher.learning import Sender


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


def mark_of_bytes(app: str, what: bytes) -> bytes:
    """By which a feedback is known again."""
    return blake2b(what, digest_size=MARK, key=app.encode()[:64]).digest()


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
