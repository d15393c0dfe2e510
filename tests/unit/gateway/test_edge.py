"""Errors of the client library and the system reach the gateway's clients without names of subjects."""

import asyncio

import pytest

from bus.messages.events import ClientError
from bus.port import PayloadTooLarge
from infaas.errors import BadInput, InfaasError, NotConnected, Refused, Timeout, denied
from services.gateway.clipper.bodies import clipper_refusal
from services.gateway.edge import MOST_NAMES, ClientErrorLog
from services.gateway.errors import RequestFailed, failure_of, failure_of_refusal, without_subjects


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
    found = without_subjects(refused)
    assert found.message == expected
    assert clipper_refusal(refused).message == expected
    assert (found.code, found.closest, found.retry_after_ms, found.id) == ("unknown_app", {"variant": "v"}, 3.0, "i")


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
    failure = failure_of(error)
    assert (failure.status, failure.code) == (status, code)
    assert "infaas." not in failure.message
    assert "secret" not in failure.message


def test_what_clients_did_wrong_is_put_together_and_what_dispatchers_saw_is_left_to_them() -> None:
    async def taken() -> tuple[list[ClientError], list[ClientError]]:
        log = ClientErrorLog()
        refused = failure_of_refusal(Refused("unknown_app", "no app"))
        wrong, unknown = RequestFailed(None, "data is missing"), RequestFailed(None, "no app", code="unknown_app")
        for failure in (
            refused,
            clipper_refusal(Refused("bad_request", "no")),
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
    failure = failure_of(error)
    assert (failure.status, failure.code) == (413, "too_large")
    assert "infaas." not in failure.message
