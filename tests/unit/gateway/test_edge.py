"""Errors of the client library and the system reach the gateway's clients without names of subjects."""

import asyncio
import json

import pytest

from bus.messages.events import ClientError
from bus.port import PayloadTooLarge
from infaas.errors import BadInput, InfaasError, NotConnected, Refused, Timeout, denied
from services.gateway.clipper.rest import clipper_error
from services.gateway.edge import MOST_NAMES, ClientErrorLog, failure_from
from services.gateway.errors import RequestFailed
from services.gateway.http.app import plain


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("no app 'a': see infaas.list.apps, or register a model for it", "no app 'a': register a model for it"),
        ("no model 'm': see infaas.list.models", "no model 'm'"),
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
    assert json.loads(plain(found).body) == {"error": expected, **more}
    assert json.loads(clipper_error(found).body) == {"error": "Request error", "cause": expected}
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
    assert (reply.status, json.loads(reply.body)) == (status, {"error": kind, "cause": "why"})


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


def test_what_clients_did_wrong_is_put_together_and_what_dispatchers_saw_is_left_to_them() -> None:
    async def taken() -> tuple[list[ClientError], list[ClientError]]:
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
        return first, await log.take()

    first, last = asyncio.run(taken())
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
