"""Feedback is accepted once it is on disk, and refused with the field named."""

from typing import Any

import msgspec
import pytest

from bus.codec import encode
from bus.messages.catalog import AppRecord
from bus.messages.events import FeedbackEvent
from bus.messages.public import Accepted, Feedback, Refusal
from bus.subjects import Subjects
from services.core.actor import Changed, Effect, Envelope, Publish, Record, Recorded, Synced
from services.dispatcher.feedback import FeedbackActor

SUBJECTS = Subjects()
NOW = 1000.0


def actor(*, synced: bool = True) -> FeedbackActor:
    found = FeedbackActor(SUBJECTS)
    found.handle(Envelope(NOW, Changed(SUBJECTS.catalog_bucket, "app.a", encode(AppRecord(app="a", links={})))))
    if synced:
        found.handle(Envelope(NOW, Synced(SUBJECTS.catalog_bucket)))
    return found


def tell(found: FeedbackActor, app: str = "a", reply: str = "_INBOX.1", **fields: Any) -> list[Effect]:
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Feedback)
    return list(found.handle(Envelope(NOW, message, SUBJECTS.feedback(app), reply)))


def test_it_is_accepted_once_it_is_on_disk() -> None:
    found = actor()
    [record] = tell(found, id="q1", label=7, context="user")
    assert isinstance(record, Record)
    assert record.event == FeedbackEvent(time=NOW, app="a", id="q1", context="user", label="7", input_digest=None)
    tell(found, id="q2", label=[1, 2], reply="_INBOX.2")
    assert found.handle(Envelope(NOW, Recorded(1))) == [Publish("_INBOX.1", Accepted())]
    assert found.handle(Envelope(NOW, Recorded(2))) == [Publish("_INBOX.2", Accepted())]


def test_inputs_are_kept_as_their_digest() -> None:
    events = []
    for inputs in ([[1.0]], [[1.0]], [[2.0]]):
        [record] = tell(actor(), inputs=inputs, label="x")
        assert isinstance(record, Record)
        events.append(record.event)
    digests = [event.input_digest for event in events if isinstance(event, FeedbackEvent)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0] or "") == 32


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [
        ({"label": 1}, "bad_request", "id"),
        ({"label": 1, "inputs": None}, "bad_request", "id"),
        ({"id": "q"}, "bad_request", "label"),
        ({"id": "q", "label": "x" * 1000}, "bad_request", "label"),
        ({"id": "q" * 1001, "label": 1}, "bad_request", "id"),
        ({"id": "q", "label": 1, "context": "c" * 1001}, "bad_request", "context"),
        ({"app": "other", "id": "q", "label": 1}, "unknown_app", "other"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], code: str, word: str) -> None:
    [effect] = tell(actor(), **fields)
    assert isinstance(effect, Publish)
    assert isinstance(effect.message, Refusal)
    assert effect.message.error.code == code
    assert word in effect.message.error.message


def test_before_the_catalogue_is_known_it_says_so() -> None:
    [effect] = tell(actor(synced=False), id="q", label=1)
    assert isinstance(effect, Publish)
    assert effect.message.error.code == "overloaded"
