"""Whose query it is: the same retry key names the same query for its own sender only."""

from collections.abc import Iterable

import pytest
from msgspec import Raw
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.flow import DoneBatch, Execute, HandBack
from bus.messages.public import QueryHead, Refusal, Tensor
from bus.subjects import Subjects
from services.core.actor import Changed, Effect, Envelope, Publish, Record, Stopping, Synced
from services.core.catalog import key_of
from services.core.selection.cluster import ClusterView
from services.core.selection.policy import InfaasPolicy
from services.core.settings import Settings
from services.core.trace import Span, read, span_id
from services.dispatcher.actor import Dispatcher, make_dispatcher
from services.dispatcher.apps import Apps
from services.dispatcher.query import Admission, Query
from tests.support.data.events import beat, change_of, instance
from tests.support.simulated.fleet import PRICES, catalogue, variant


def admission() -> Admission:
    apps = Apps(ClusterView(PRICES, "cost"))
    for app in ("faces", "numbers"):
        for record in catalogue(variant(), app=app):
            apps.change(Changed("b", key_of(record), encode(record)))
    apps.complete()
    return Admission(apps, lambda: b"fresh" * 3 + b"!", 30.0, 2**20)


def uid(admitting: Admission, app: str, reply: str) -> bytes:
    body = encode({"inputs": Tensor("FP32", [1, 2], bytes(8)), "retry_key": b"k" * 16})
    found = admitting.admit(app, Envelope(1.0, decode(QueryHead, body), f"infaas.query.{app}", reply, body))
    assert isinstance(found, Query), found
    return found.uid


def test_a_retry_key_is_its_senders_own() -> None:
    admitting = admission()
    mine = uid(admitting, "faces", "_INBOX_.faces.phone.x.1")
    assert uid(admitting, "faces", "_INBOX_.faces.phone.y.2") == mine  # another connection of the same user
    others = [
        uid(admitting, "faces", "_INBOX_.faces.tablet.x.1"),
        uid(admitting, "numbers", "_INBOX_.faces.phone.x.1"),
        uid(admitting, "faces", "_INBOX_.@.gateway.x.1"),
        uid(admitting, "faces", "_INBOX.x.1"),
        uid(admitting, "faces", "mine.1"),
    ]
    assert len({mine, *others}) == 6


# -- A query's trace goes with it wherever it is sent: to an executor, to another dispatcher, to its client.

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
NOW = 1_000_000.0
UID = b"u" * 16
RECORD = variant()


def dispatcher(name: str, *, worker: bool = True) -> Dispatcher:
    actor = make_dispatcher(Settings(), Subjects(), name, InfaasPolicy(), PRICES, lambda: UID)
    for record in catalogue(RECORD):
        tell(actor, change_of(record))
    tell(actor, Synced("infaas-catalog"))
    if worker:
        tell(actor, beat(instance("i1", RECORD.variant), worker="w1", at=NOW))
    return actor


def tell(actor: Dispatcher, message: object, subject: str = "", **more: object) -> list[Effect]:
    return list(actor.handle(Envelope(NOW, message, subject, **more)))


def ask(actor: Dispatcher, headers: dict[str, str] | None, **needs: object) -> list[Effect]:
    inputs = {"datatype": "FP32", "shape": [1, 2], "data": bytes(8)}
    body = encode({"inputs": inputs, "id": "mine", **needs})
    return tell(actor, decode(QueryHead, body), "infaas.query.app", reply="_INBOX.x.1", body=body, headers=headers)


def sent(effects: Iterable[Effect], kind: type) -> Publish:
    (found,) = [e for e in effects if isinstance(e, Publish) and isinstance(e.message, kind)]
    return found


def spans(effects: Iterable[Effect]) -> list[Span]:
    return [effect for effect in effects if isinstance(effect, Span)]


OURS = span_id(UID, "dispatch")


def test_to_the_executor_and_back_again_and_to_the_next() -> None:
    actor = dispatcher("d1")
    execute = sent(ask(actor, HEADERS), Execute)
    trace = read(execute.headers)
    assert (trace.trace, trace.parent) == (TRACE, OURS)
    route = execute.message.route
    again = sent(tell(actor, HandBack(route, "deadline", Raw(b"")), headers=dict(execute.headers or {})), Execute)
    assert read(again.headers) == trace
    assert (again.message.route.instance, again.message.route.attempt) == (route.instance, 1)  # there is no other
    again = tell(actor, HandBack(again.message.route, "deadline", Raw(b"")), headers=dict(again.headers or {}))
    assert read(sent(again, Refusal).headers) == trace
    (span,) = spans(again)
    assert (span.span, span.trace.parent, span.error) == (OURS, PARENT, "deadline")
    assert span.attributes["infaas.query.id"] == "mine"


def test_a_dispatcher_that_takes_over_passes_on_the_trace_and_who_pays() -> None:
    first, second = dispatcher("d1"), dispatcher("d2")
    execute = sent(ask(first, HEADERS), Execute)
    back = HandBack(execute.message.route, "crashed", execute.message.body)
    retried = sent(tell(second, back, headers=execute.headers), Execute)
    assert retried.headers == execute.headers  # below the first one's span, which is the query's
    execute = sent(ask(dispatcher("d1"), None), Execute).message
    back = HandBack(replace(execute.route, payer="social"), "crashed", execute.body)
    assert sent(tell(dispatcher("d2"), back), Execute).message.route.payer == "social"


def test_one_that_stops_hands_it_on_with_what_waits() -> None:
    actor = dispatcher("d1", worker=False)
    waiting = ask(actor, HEADERS)
    if not actor.in_flight.waiting:
        pytest.fail(f"it should wait: {waiting}")
    back = sent(tell(actor, Stopping(1.0)), HandBack)
    assert back.headers == HEADERS | {"traceparent": f"00-{TRACE}-{OURS}-01"}


@pytest.mark.parametrize(
    ("headers", "count"), [(HEADERS, 1), ({"traceparent": HEADERS["traceparent"][:-1] + "0"}, 0), (None, 0)]
)
def test_a_span_is_made_where_the_trace_is_recorded(headers: dict[str, str] | None, count: int) -> None:
    actor = dispatcher("d1")
    assert (sent(ask(actor, headers), Execute).headers is None) == (headers is None)
    done = DoneBatch("w1/cpu/1", "w1", 1, "i1", RECORD.variant, 1, NOW + 1, NOW + 2, 0.0, 0, [UID])
    ended = tell(actor, done)
    assert len(spans(ended)) == count
    for span in spans(ended):
        assert (span.start, span.end, span.error) == (NOW, NOW + 2, "")


def test_the_row_has_the_items_that_only_the_executor_could_count() -> None:
    actor = dispatcher("d1")
    ask(actor, None)
    done = DoneBatch("w1/cpu/1", "w1", 1, "i1", RECORD.variant, 3, NOW + 1, NOW + 2, 0.5, 0, [UID], items=[3])
    [row] = [effect.event for effect in tell(actor, done) if isinstance(effect, Record)]
    assert (row.items, row.cost) == (3, 1.5)
