"""Errors of the client library and the system reach the gateway's clients without names of subjects."""

import json
import tracemalloc

import pytest

from bus.codec import encode
from bus.messages.events import ClientError
from bus.messages.fleet import DispatcherHeartbeat
from bus.port import PayloadTooLarge
from bus.subjects import Subjects
from infaas.errors import BadInput, InfaasError, NotConnected, Refused, Timeout, denied
from services.core.actor import After, Changed, Do, Done, Envelope, Failed, Record, Started, Stopping, Synced
from services.core.catalog import key_of
from services.gateway.actor import SILENT, TURN, AwaitClientErrors, Close, Gateway, Serve, TurnDue
from services.gateway.clipper.rest import clipper_error
from services.gateway.edge import MOST_NAMES, ClientErrorLog, failure_from
from services.gateway.errors import RequestFailed
from services.gateway.http.app import plain
from services.gateway.oip.models import ModelTarget, find, index, metadata, parse_target
from tests.support.simulated.fleet import catalogue, variant


def beat(at: float, *, leaving: bool = False, dispatcher: str = "d", missing: str = "") -> Envelope:
    heartbeat = DispatcherHeartbeat(dispatcher=dispatcher, incarnation=1, at=at, leaving=leaving, missing=missing)
    return Envelope(at, heartbeat)


def made() -> Gateway:
    gateway = Gateway(Subjects())
    for record in catalogue(variant(), variant("m-v2", version="2"), variant("n-v1", model="n")):
        gateway.handle(Envelope(0.0, Changed("b", key_of(record), encode(record))))
    gateway.handle(Envelope(0.0, Synced("b")))
    return gateway


def test_it_serves_from_its_start_to_its_end() -> None:
    gateway = Gateway(Subjects())
    wait = Do("client errors", AwaitClientErrors())
    assert gateway.handle(Envelope(0.0, Started())) == (Do("serve", Serve()), wait, After("turn", TURN, TurnDue()))
    assert gateway.handle(Envelope(0.0, Stopping(4.0))) == (Do("close", Close(4.0)),)
    (effect,) = gateway.handle(Envelope(0.0, Failed("serve", "the port is busy")))
    assert "the port is busy" in effect.reason


def test_with_a_successor_it_answers_to_the_end_although_it_hears_no_dispatcher_any_more() -> None:
    gateway = made()
    gateway.handle(beat(0.0))
    assert gateway.handle(Envelope(0.0, Stopping(4.0, succeeded=True))) == (Do("close", Close(4.0, succeeded=True)),)
    assert gateway.missing(2 * SILENT) == ""
    assert gateway.not_ready(2 * SILENT) == ""


def test_what_clients_did_wrong_is_recorded() -> None:
    gateway = Gateway(Subjects())
    wait = Do("client errors", AwaitClientErrors())
    some = [
        ClientError(time=1.0, app="a", code="bad_request", count=2),
        ClientError(time=1.0, app=None, code="unknown_app", count=1),
    ]
    assert gateway.handle(Envelope(0.0, Done(wait.id, some))) == (*map(Record, some), wait)
    assert gateway.handle(Envelope(0.0, Done(wait.id, []))) == ()  # it is closed
    assert gateway.handle(Envelope(0.0, Done("serve", None))) == ()


def test_it_is_ready_with_the_catalogue_and_a_dispatcher() -> None:
    gateway = Gateway(Subjects())
    assert gateway.missing(0.0) == "the catalogue"
    gateway.handle(Envelope(0.0, Synced("b")))
    assert gateway.missing(0.0) == "a running dispatcher"
    gateway.handle(beat(1.0))
    assert gateway.missing(1.0 + SILENT / 2) == ""
    assert gateway.missing(1.0 + SILENT) != ""
    gateway.handle(beat(10.0))
    gateway.handle(beat(10.1, leaving=True))
    assert gateway.missing(10.1) != ""


@pytest.mark.parametrize("still", [SILENT, 100.0])
def test_a_silence_of_its_own_is_no_dispatchers(still: float) -> None:
    gateway = made()
    gateway.handle(Envelope(0.0, Started()))
    gateway.handle(beat(0.0, missing="a living executor"))
    assert gateway.missing(still) == "", "it has stood still, and not looked at the clock yet"
    assert gateway.not_ready(still) == "a living executor"
    gateway.handle(Envelope(still, TurnDue()))
    assert gateway.missing(still) == "", "what came meanwhile may not have been read yet"
    for turn in range(1, 7):
        gateway.handle(Envelope(still + turn * TURN, TurnDue()))
    assert gateway.missing(still + SILENT) == "a running dispatcher"


def test_its_doors_say_what_dispatchers_lack_and_queries_are_passed_on() -> None:
    gateway = made()
    assert gateway.not_ready(0.0) == "a running dispatcher"
    gateway.handle(beat(1.0, missing="a living executor"))
    assert (gateway.missing(1.0), gateway.not_ready(1.0)) == ("", "a living executor")
    gateway.handle(beat(1.0, dispatcher="another"))
    assert gateway.not_ready(1.0) == "", "one that has all takes queries"
    gateway.handle(beat(1.0 + SILENT, missing="a living executor"))
    assert gateway.not_ready(1.0 + SILENT) == "a living executor"


def test_names_are_kept_only_where_they_are_names() -> None:
    assert parse_target("a") == ModelTarget("a")
    assert parse_target("a.m.v", "2") == ModelTarget("a", "m", "v", "2")
    assert parse_target("a.m").requirements() == {"model": "m"}
    for wrong in ("", ".", "a.", ".a", "a.b.c.d", "a/b", "a..b", "a" * 65, "-a", "a b", "ä"):
        assert parse_target(wrong) is None, wrong
    assert parse_target("a", "../1") is None
    tracemalloc.start()
    try:
        for number in range(50):
            assert parse_target("a" * 100_000 + str(number)) is None
            assert parse_target("a", "1" * 100_000 + str(number)) is None
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_what_is_told_of_them() -> None:
    catalog = made().catalog
    whole = find(catalog, ModelTarget("app"))
    assert whole.versions == ["1", "2"]
    assert metadata(whole)["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
    served = catalog.app("app").links["m"]
    assert {one.version for one in whole.variants if one.model == "m"} == {served}
    older = find(catalog, ModelTarget("app", "m", None, "1"))
    assert [one.variant for one in older.variants] == ["m-v1-ort-fp32-t1-b8"]
    pinned = find(catalog, ModelTarget("app", "m", "m-v2"))
    assert (pinned.versions, pinned.platform) == (["2"], "onnxruntime_onnx")
    for wrong in (
        ModelTarget("nix"), ModelTarget("app", "nix"), ModelTarget("app", "n", "m-v2"), ModelTarget("app", "m", "m-v2", "1"), ModelTarget("app", "m", None, "3"),
    ):  # fmt: skip
        assert find(catalog, wrong) is None


def test_the_index_names_what_may_be_asked_for() -> None:
    catalog = made().catalog
    entries = list(index(catalog, ready=True))
    for entry in entries:
        target = parse_target(entry["name"], entry["version"] or None)
        assert target is not None
        assert find(catalog, target) is not None, entry
    assert {"app", "app.m", "app.n", "app.n.n-v1"} <= {entry["name"] for entry in entries}
    assert {entry["state"] for entry in index(catalog, ready=False)} == {"UNAVAILABLE"}


# -- Errors of the client library and the system reach the gateway's clients without names of subjects.


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "no app 'a': see infaas.list.apps, or register a model for it",
            "no app 'a': see /v2/models, or register a model for it",
        ),
        ("no model 'm': see infaas.list.models; did you mean n?", "no model 'm': see /v2/models; did you mean n?"),
        (
            denied("mine.admin.add-app").message,
            "the gateway's credentials on the bus do not allow this: ask an operator (infaas auth)",
        ),
        ("accuracy must be between 0 and 1, not 2", "accuracy must be between 0 and 1, not 2"),
    ],
)
def test_subjects_stay_inside(message: str, expected: str) -> None:
    refused = Refused("unknown_app", message, closest={"variant": "v"}, retry_after_ms=3.0, id="i")
    found = failure_from(refused)
    more = {"code": "unknown_app", "closest": {"variant": "v"}, "retry_after_ms": 3.0}
    assert json.loads(plain(found).pieces[0]) == {"error": expected, **more}
    assert json.loads(clipper_error(found).pieces[0]) == {"error": "Request error", "cause": expected}
    assert found.headers == {"Retry-After": "1"}


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("bad_request", 400, "Request error"),
        ("unknown_app", 404, "Request error"),
        ("unknown_model", 400, "Request error"),
        ("unsatisfiable", 400, "Request error"),
        ("deadline", 504, "Query processing error"),
        ("overloaded", 503, "Query processing error"),
        ("forbidden", 403, "Not allowed"),
        ("a later one", 500, "Request error"),
    ],
)
def test_clippers_clients_get_its_statuses_and_kinds(code: str, status: int, kind: str) -> None:
    reply = clipper_error(failure_from(Refused(code, "why")))
    assert (reply.status, json.loads(reply.pieces[0])) == (status, {"error": kind, "cause": "why"})


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadInput("inputs.x has no axis"), 400, "bad_request"),
        (Timeout("no reply on infaas.query.a in time"), 504, "deadline"),
        (NotConnected("nats://user:secret@host:4222 is away"), 503, "unavailable"),
        (InfaasError("the reply on infaas.query.a is no Answer"), 500, "internal"),
    ],
)
def test_what_the_client_library_cannot_do(error: InfaasError, status: int, code: str) -> None:
    failure = failure_from(error)
    assert (failure.status, failure.code) == (status, code)
    assert "infaas." not in failure.message
    assert "secret" not in failure.message


async def test_what_clients_did_wrong_is_put_together_and_what_dispatchers_saw_is_left_to_them() -> None:
    log = ClientErrorLog()
    refused = failure_from(Refused("unknown_app", "no app"))
    wrong, unknown = RequestFailed(None, "data is missing"), RequestFailed(None, "no app", code="unknown_app")
    for failure in (
        refused,
        failure_from(Refused("bad_request", "no")),
        RequestFailed(None, "full", code="overloaded"),
    ):
        log.add("a", failure, 5.0)
    for _ in range(3):
        log.add("a", wrong, 5.5)
    log.add("x" * 100, unknown, 6.0)
    log.add(None, wrong, 6.0)
    first = await log.take()
    for number in range(3 * MOST_NAMES):
        log.add(f"n{number}", unknown, 7.0)
    log.close()
    last = await log.take()
    assert first == [
        ClientError(time=5, app="a", code="bad_request", count=3),
        ClientError(time=6, app="x" * 64, code="unknown_app", count=1),
        ClientError(time=6, app=None, code="bad_request", count=1),
    ]
    assert sum(one.count for one in last) == 3 * MOST_NAMES
    assert len(last) == MOST_NAMES + 1


def test_a_body_that_the_bus_does_not_take() -> None:
    error = BadInput("9 bytes for infaas.query.a")
    error.__cause__ = PayloadTooLarge("9 bytes for infaas.query.a; the server takes 8")
    failure = failure_from(error)
    assert (failure.status, failure.code) == (413, "too_large")
    assert "infaas." not in failure.message
