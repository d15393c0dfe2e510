"""Bad input from a foreign program: each gets the typed refusal that names the field, is counted, and harms nobody else."""

import asyncio
import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.clients.stock import GOOD, answered, ask, tensor
from tests.support.servers.processes import eventually
from tests.support.servers.system import APP, Whole

# What is sent, the code of the refusal, and what its message must name: one of each kind, and what takes a whole system. All wrong values of
# all fields are in tests/unit/core/test_validation.py and tests/unit/bus/test_tensors.py.
BAD: dict[str, tuple[Any, str, str]] = {
    "no inputs": ({}, "bad_request", "inputs"),
    "inputs a text": ({"inputs": "digits"}, "bad_request", "inputs"),
    "inputs a number": ({"inputs": 7}, "bad_request", "inputs"),
    "datatype a number": ({"inputs": {**GOOD, "datatype": 32}}, "bad_request", "datatype"),
    "shape a text": ({"inputs": {**GOOD, "shape": "1,784"}}, "bad_request", "shape"),
    "datatype that loses range": ({"inputs": tensor(np.full((1, 784), 1e300))}, "bad_request", "scale them down"),
    "shape negative": ({"inputs": {**GOOD, "shape": [-1, 784]}}, "bad_request", "shape"),
    "shape of 2^62 bytes": ({"inputs": {**GOOD, "shape": [2**30, 784, 2**30]}}, "bad_request", "inputs"),
    "data too long": ({"inputs": {**GOOD, "data": bytes(4 * 784 + 1)}}, "bad_request", "data"),
    "data missing": ({"inputs": {"datatype": "FP32", "shape": [1, 784]}}, "bad_request", "data"),
    "latency a text": ({"inputs": GOOD, "latency_ms": "soon"}, "bad_request", "latency_ms"),
    "accuracy above 1": ({"inputs": GOOD, "accuracy": 1.1}, "bad_request", "accuracy"),
    "priority out of range": ({"inputs": GOOD, "priority": 10}, "bad_request", "priority"),
    "priority a float": ({"inputs": GOOD, "priority": 1.5}, "bad_request", "priority"),
    "deadline a text": ({"inputs": GOOD, "deadline": "tomorrow"}, "bad_request", "deadline"),
    "deadline past": ({"inputs": GOOD, "deadline": 1.0}, "deadline", ""),
    "id a number": ({"inputs": GOOD, "id": 7}, "bad_request", "id"),
    "retry key too short": ({"inputs": GOOD, "retry_key": b"short"}, "bad_request", "retry_key"),
    "retry key a text": ({"inputs": GOOD, "retry_key": "0123456789abcdef"}, "bad_request", "retry_key"),
    "model unknown": ({"inputs": GOOD, "model": "nobody"}, "unknown_model", "nobody"),
    "model a wildcard": ({"inputs": GOOD, "model": ">"}, "bad_request", "model"),
    "reference to nowhere": ({"inputs_ref": {"bucket": "infaas-inputs", "key": "nobody"}}, "bad_request", "inputs_ref"),
    "reference without a key": ({"inputs_ref": {"bucket": "infaas-inputs"}}, "bad_request", "key"),
    "reference that writes protocol": ({"inputs_ref": {"bucket": "x 0\r\n\r\nPUB evil 0\r\n\r\nPUB y", "key": "x"}}, "bad_request", "inputs_ref.bucket"),
    "reference to another bucket": ({"inputs_ref": {"bucket": "infaas-artifacts", "key": "x"}}, "bad_request", "inputs_ref"),
    "reference a text": ({"inputs_ref": "here"}, "bad_request", "inputs_ref"),
    "body a list": ([1, 2, 3], "bad_request", ""),
    "body a text": ("hello", "bad_request", ""),
    "2 MB inline": ({"inputs": tensor(np.zeros((700, 784), np.float32))}, "too_large", "inputs_ref"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_gets_a_typed_refusal_that_names_the_field(nc, case):
    body, code, names = BAD[case]

    body_ = {"id": "bad", **body} if isinstance(body, dict) else body
    reply = await ask(nc, f"infaas.query.{APP}", body_)
    assert "error" in reply, reply
    assert reply["error"]["code"] == code
    assert names in reply["error"]["message"]
    if isinstance(body, dict):
        assert reply["id"] == (None if "id" in body else "bad")


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x81\xa6inputs", b"\x93\x01", b"\xdf\xff\xff\xff\xff", b"\x91" * 5000, b"{}", bytes(1000)]
)
async def test_bytes_that_are_no_query_are_refused(nc, body):
    for subject in (f"infaas.query.{APP}", f"infaas.explain.{APP}", "infaas.register"):
        reply = await ask(nc, subject, body, raw=True)
        if body or not subject.startswith("infaas.explain"):
            assert reply["error"]["code"] == "bad_request", subject


@pytest.mark.parametrize("app", ["nobody", "UPPER", "a" * 64])
async def test_an_app_that_is_not_there(nc, app):
    reply = await ask(nc, f"infaas.query.{app}", {"inputs": GOOD, "id": "q"})
    assert (reply["id"], reply["error"]["code"]) == ("q", "unknown_app")


@pytest.mark.parametrize("app", ["-a", "a" * 65, "é", "a%20b", "a\0b", "a" * 3000])
async def test_an_apps_name_that_is_none(nc, app):
    reply = await ask(nc, f"infaas.query.{app}", {"inputs": GOOD})
    assert reply["error"]["code"] == "bad_request"


@pytest.mark.parametrize("name", ["../x", "a b", ">", "*", "a\0", ""])
async def test_lists_and_explanations_take_only_names(nc, name):
    for subject, body in (
        ("infaas.list.variants", {"app": name}),
        ("infaas.list.models", {"model": name}),
        (f"infaas.explain.{APP}", {"model": name}),
    ):
        reply = await ask(nc, subject, body)
        assert reply["error"]["code"] == "bad_request", subject
        assert next(iter(body)) in reply["error"]["message"]
    assert (await ask(nc, "infaas.explain.-x", {}))["error"]["code"] == "bad_request"


@pytest.mark.parametrize(("field", "value"), [("app", ">"), ("model", 7), ("version", "a\0"), ("object", "../x")])
async def test_a_registration_with_a_bad_name_is_refused(nc, field, value):
    good = {"app": "other", "model": "m", "format": "onnx", "object": "nothing", "validation": "nothing"}

    reply = await ask(nc, "infaas.register", {**good, field: value})
    assert reply["error"]["code"] == "bad_request"
    assert field in reply["error"]["message"]


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


UPLOADS: dict[str, tuple[Callable[[Whole], tuple[bytes, bytes]], str]] = {
    "a pickle called onnx": (lambda s: (b"\x80\x04cos\nsystem\n(S'true'\ntR.", npz(x=s.x, y=s.y)), "not an ONNX model"),
    "labels that are objects": (lambda s: (model(), npz(x=s.x, y=s.y.astype(object))), "Python objects"),
    "labels of no class": (lambda s: (model(), npz(x=s.x, y=s.y + 100)), "label"),
    "no validation set at all": (lambda s: (model(), b"junk"), "validation"),
}


def model() -> bytes:
    from infaas.demo import digits

    return digits.models()["logreg"].read_bytes()


@pytest.mark.parametrize("case", UPLOADS)
async def test_an_upload_that_is_not_what_it_says_fails_with_the_reason(nc, system, case):
    files, says = UPLOADS[case]

    name = f"upload-{list(UPLOADS).index(case)}"
    store = await nc.jetstream().object_store("infaas-uploads")
    for key, digits in zip((f"{name}.model", f"{name}.validation"), files(system), strict=True):
        await store.put(key, digits)
    body = {
        "app": "hostile",
        "model": name,
        "format": "onnx",
        "object": f"{name}.model",
        "validation": f"{name}.validation",
    }
    accepted = await ask(nc, "infaas.register", {**body, "registration": name})
    assert accepted == {"registration": name}
    give_up = time.monotonic() + 400
    while (status := await ask(nc, f"infaas.registration.{name}", {}))["state"] not in ("done", "failed"):
        assert time.monotonic() < give_up, status
        await asyncio.sleep(0.1)
    assert status["state"] == "failed"
    assert says in status["reason"]
    assert (await ask(nc, "infaas.list.apps", {"app": "hostile"}))["items"] == []


async def test_refused_registrations_are_counted(nc, system):
    refused = "SELECT count(*) FROM infaas.registrations WHERE state = 'refused'"
    before = system.rows(refused)[0][0]
    for body in (
        {"app": "../counted"},
        {"app": "../counted", "model": "m", "format": "onnx", "object": "o", "validation": "v"},
    ):
        reply = await ask(nc, "infaas.register", body)
        assert reply["error"]["code"] == "bad_request"
    assert eventually(lambda: system.rows(refused)[0][0] >= before + 2)
    named = "SELECT reason FROM infaas.registrations WHERE app = '../counted'"
    assert eventually(lambda: bool(system.rows(named)))
    assert "app" in system.rows(named)[0][0]


async def test_refusals_and_answers_are_in_the_record(nc, system):
    """Every query of this file is one row: counted by what became of it, at most 5 s later."""
    marks = {
        "recorded-ok": {"inputs": GOOD},
        "recorded-hard": {"inputs": GOOD, "accuracy": 0.9999},
        "recorded-bad": {"inputs": GOOD, "latency_ms": -1},
        "recorded-type": {"inputs": GOOD, "latency_ms": "soon"},
        "recorded-nul": {"inputs": GOOD, "context": "a\0b"},
    }

    await answered(nc, {"inputs": GOOD})  # what serves is loaded
    for mark, body in marks.items():
        await ask(nc, f"infaas.query.{APP}", {**body, "id": mark})
    # Those that were wrong themselves are no outcomes: client_errors counts them.
    expected = [
        ("recorded-nul", "ok", None),
        ("recorded-ok", "ok", None),
    ]
    query = "SELECT id, outcome, code FROM infaas.query_outcomes WHERE id LIKE 'recorded-%%' ORDER BY id"
    assert eventually(lambda: system.rows(query) == expected), system.rows(query)


async def test_bytes_that_are_no_query_are_in_the_record(nc, system):
    for body in (b"\xc1", b"\x93\x01", b"\x80\x04pickle"):
        await ask(nc, "infaas.query.nobody-at-all", body, raw=True)
    errors = "SELECT code, sum(count) FROM infaas.client_errors WHERE app = 'nobody-at-all' GROUP BY code"
    assert eventually(lambda: system.rows(errors) == [("bad_request", 3)]), system.rows(errors)
    assert system.rows("SELECT count(*) FROM infaas.query_outcomes WHERE app = 'nobody-at-all'") == [(0,)]
