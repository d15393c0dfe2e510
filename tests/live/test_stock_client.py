"""A foreign program's view: only stock nats-py and msgpack, and the contract's names. Nothing of ours but the running system."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import nats
import numpy as np
import pytest
from nats.aio.client import Client

from tests.responders import until
from tests.servers import run
from tests.system import APP, MODELS, Whole

pytestmark = pytest.mark.timeout(300)  # the first test waits for the system and its registrations

CODES = {
    "bad_request", "unknown_app", "unknown_model", "unsatisfiable", "deadline", "overloaded", "model_error", "too_large", "forbidden",
}  # fmt: skip
ANSWER = {
    "id": (str, type(None)), "outputs": dict, "model": str, "version": str, "variant": str, "hardware": str, "worker": str,
    "accuracy": float, "latency_ms": float, "queue_ms": float, "compute_ms": float, "batch": int, "cached": bool,
    "simulated": bool, "cost": float, "missed": list,
}  # fmt: skip


def tensor(array: np.ndarray) -> dict[str, Any]:
    names = {"float32": "FP32", "float64": "FP64", "int64": "INT64", "uint8": "UINT8"}
    return {"datatype": names[str(array.dtype)], "shape": list(array.shape), "data": array.tobytes()}


def array(tensor: dict[str, Any]) -> np.ndarray:
    dtype = {"FP32": "<f4", "FP64": "<f8", "INT64": "<i8"}[tensor["datatype"]]
    return np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])


async def ask(nc: Client, subject: str, body: Any, *, raw: bool = False, timeout: float = 35) -> dict[str, Any]:
    message = await nc.request(subject, body if raw else msgpack.packb(body), timeout=timeout)
    reply = msgpack.unpackb(message.data)
    assert isinstance(reply, dict)
    return reply


async def answered(nc: Client, body: dict[str, Any], subject: str = f"infaas.query.{APP}") -> dict[str, Any]:
    """Ask until it is answered: a variant that is not loaded yet may be refused with a time to try again."""
    give_up = time.monotonic() + 60
    while True:
        reply = await ask(nc, subject, body)
        if "error" not in reply:
            return reply
        error = reply["error"]
        assert error["code"] in ("deadline", "overloaded"), error
        assert time.monotonic() < give_up, error
        await asyncio.sleep(max(error.get("retry_after_ms", 0) / 1000, 0.05))


def talk(system: Whole, work: Callable[[Client], Awaitable[None]]) -> None:
    """Connect as any NATS client would, do it, and see that the system still answers rightly afterwards."""

    async def main() -> None:
        nc = await nats.connect(system.nats)
        try:
            await work(nc)
            reply = await answered(nc, {"inputs": tensor(system.x[:1])})
            assert reply["outputs"]
        finally:
            await nc.close()

    run(main())


def test_right_answers(system):
    async def work(nc):
        right = 0
        for start in range(0, 400, 8):
            reply = await answered(nc, {"inputs": tensor(system.x[start : start + 8]), "id": f"q{start}"})
            assert {name for name, kind in ANSWER.items() if not isinstance(reply[name], kind)} == set()
            assert (reply["id"], reply["missed"], reply["simulated"]) == (f"q{start}", [], False)
            (scores,) = map(array, reply["outputs"].values())
            assert scores.shape == (8, 10)
            right += (scores.argmax(1) == system.y[start : start + 8]).sum()
            assert reply["model"] in MODELS
            assert 0 < reply["compute_ms"] <= reply["latency_ms"]
            assert reply["batch"] >= 8
            assert reply["cost"] > 0
        assert right / 400 > 0.85

    talk(system, work)


def test_items_keep_their_order_whatever_they_are_batched_with(system):
    async def work(nc):
        whole = await answered(nc, {"inputs": tensor(system.x[:64]), "variant": await some_variant(nc)})
        (expected,) = map(array, whole["outputs"].values())
        parts = await asyncio.gather(
            *(
                answered(nc, {"inputs": tensor(system.x[i : i + 2]), "variant": whole["variant"], "id": str(i)})
                for i in range(0, 64, 2)
            )
        )
        for i, part in zip(range(0, 64, 2), parts, strict=True):
            assert part["id"] == str(i)
            (scores,) = map(array, part["outputs"].values())
            np.testing.assert_allclose(scores, expected[i : i + 2], atol=1e-4)

    talk(system, work)


async def some_variant(nc: Client) -> str:
    items = (await ask(nc, "infaas.list.variants", {"app": APP}))["items"]
    return next(item["variant"] for item in items if "fp32" in item["variant"])


@pytest.mark.parametrize("form", ["list", "named", "fp64", "uint8-list", "named-list"])
def test_inputs_may_be_spelt_in_several_ways(system, form):
    x = system.x[:2]

    async def work(nc):
        name = (await ask(nc, "infaas.list.apps", {"app": APP}))["items"][0]["inputs"][0]["name"]
        forms = {
            "list": x.tolist(),
            "named": {name: tensor(x)},
            "fp64": tensor(x.astype(np.float64)),
            "uint8-list": np.rint(x).astype(int).tolist(),
            "named-list": {name: x.tolist()},
        }
        reply = await answered(nc, {"inputs": forms[form], "a_field_of_a_later_version": 1})
        (scores,) = map(array, reply["outputs"].values())
        assert scores.shape == (2, 10)

    talk(system, work)


def test_needs_pick_the_variant(system):
    async def work(nc):
        items = (await ask(nc, "infaas.list.variants", {"app": APP}))["items"]
        wanted = max(item["accuracy"] for item in items)
        reply = await answered(nc, {"inputs": tensor(system.x[:1]), "accuracy": wanted})
        assert reply["accuracy"] >= wanted
        for model in MODELS:
            reply = await answered(nc, {"inputs": tensor(system.x[:1]), "model": model})
            assert reply["model"] == model
            reply = await answered(nc, {"inputs": tensor(system.x[:1]), "model": model}, "infaas.query._")
            assert reply["model"] == model
        one = items[-1]
        reply = await answered(nc, {"inputs": tensor(system.x[:1]), "variant": one["variant"]})
        assert (reply["variant"], reply["accuracy"]) == (one["variant"], one["accuracy"])
        reply = await answered(nc, {"inputs": tensor(system.x[:1]), "latency_ms": 5000, "cost": 1000, "priority": 1})
        assert reply["missed"] == []

    talk(system, work)


def test_what_no_variant_can_do_is_unsatisfiable_with_the_closest(system):
    async def work(nc):
        for needs in ({"accuracy": 0.9999}, {"cost": 1e-12}, {"latency_ms": 1e-6}):
            reply = await ask(nc, f"infaas.query.{APP}", {"inputs": tensor(system.x[:1]), "id": "hard", **needs})
            error = reply["error"]
            assert (reply["id"], error["code"]) == ("hard", "unsatisfiable"), needs
            assert {"variant", "accuracy", "latency_ms", "cost"} <= error["closest"].keys()

    talk(system, work)


def test_a_query_sent_again_under_its_key_is_the_same_query(system):
    async def work(nc):
        body = {"inputs": tensor(system.x[:1]), "retry_key": bytes(range(16)), "id": "again"}
        inbox = nc.new_inbox()
        replies = []

        async def hear(message):
            replies.append(msgpack.unpackb(message.data))

        await nc.subscribe(inbox, cb=hear)
        for _ in range(5):
            await nc.publish(f"infaas.query.{APP}", msgpack.packb(body), reply=inbox)
        await until(lambda: replies)
        assert all(reply["id"] == "again" and "error" not in reply for reply in replies)
        await asyncio.sleep(0.2)
        assert len({reply["outputs"][name]["data"] for reply in replies for name in reply["outputs"]}) == 1

    talk(system, work)


def test_lists(system):
    numbers = (
        "accuracy", "load_ms", "latency_ms", "memory_mb", "saturation_qps", "price_per_hour", "cost_per_1000",
    )  # fmt: skip
    texts = ("app", "model", "version", "variant", "hardware", "framework", "precision", "state")

    async def work(nc):
        variants = (await ask(nc, "infaas.list.variants", {}))["items"]
        assert {item["model"] for item in variants} == set(MODELS)
        for item in variants:
            assert [name for name in texts if not isinstance(item[name], str)] == []
            assert [name for name in numbers if not (isinstance(item[name], float) and item[name] >= 0)] == []
            assert isinstance(item["threads"], int)
            assert isinstance(item["max_batch"], int)
            assert item["simulated"] is False
        one = (await ask(nc, "infaas.list.variants", {"app": APP, "model": MODELS[0]}))["items"]
        assert {item["model"] for item in one} == {MODELS[0]}
        assert [item["app"] for item in (await ask(nc, "infaas.list.apps", {}))["items"]] == [APP]
        assert {item["model"] for item in (await ask(nc, "infaas.list.models", {}))["items"]} == set(MODELS)
        assert (await ask(nc, "infaas.list.variants", {"app": "nobody"}))["items"] == []
        assert len((await ask(nc, "infaas.list.workers", {}))["items"]) == 1
        empty = await nc.request("infaas.list.apps", b"", timeout=10)
        assert "items" in msgpack.unpackb(empty.data)
        assert (await ask(nc, "infaas.list.secrets", {}))["error"]["code"] == "bad_request"

    talk(system, work)


def test_explain(system):
    async def work(nc):
        told = await ask(nc, f"infaas.explain.{APP}", {"accuracy": 0.5, "latency_ms": 5000})
        assert told["chosen"]["variant"] in {one["variant"] for one in told["candidates"]}
        assert all(one["why_not"] or one["variant"] == told["chosen"]["variant"] for one in told["candidates"])
        told = await ask(nc, f"infaas.explain.{APP}", {"accuracy": 0.9999})
        assert told["chosen"] is None
        assert all("accuracy" in one["why_not"] for one in told["candidates"])
        assert (await ask(nc, "infaas.explain.nobody", {}))["error"]["code"] == "unknown_app"
        assert (await ask(nc, f"infaas.explain.{APP}", {"accuracy": 2}))["error"]["code"] == "bad_request"

    talk(system, work)


X = np.zeros((1, 784), np.float32)
GOOD = tensor(X)
# What is sent, the code of the refusal, and what its message must name.
BAD: dict[str, tuple[Any, str, str]] = {
    "no inputs": ({}, "bad_request", "inputs"),
    "inputs null": ({"inputs": None}, "bad_request", "inputs"),
    "inputs a text": ({"inputs": "digits"}, "bad_request", "inputs"),
    "inputs a number": ({"inputs": 7}, "bad_request", "inputs"),
    "inputs empty": ({"inputs": []}, "bad_request", "inputs"),
    "inputs ragged": ({"inputs": [[1.0], [1.0, 2.0]]}, "bad_request", "inputs"),
    "inputs of texts": ({"inputs": [["a"] * 784]}, "bad_request", "inputs"),
    "wrong name": ({"inputs": {"nobody": GOOD}}, "bad_request", "inputs lacks"),
    "extra input": ({"inputs": {"x": GOOD, "more": GOOD}}, "bad_request", "more"),
    "datatype unknown": ({"inputs": {**GOOD, "datatype": "FP31"}}, "bad_request", "datatype"),
    "datatype a number": ({"inputs": {**GOOD, "datatype": 32}}, "bad_request", "datatype"),
    "shape a text": ({"inputs": {**GOOD, "shape": "1,784"}}, "bad_request", "shape"),
    "shape too short": ({"inputs": {**GOOD, "shape": []}}, "bad_request", "shape"),
    "shape of another model": ({"inputs": tensor(np.zeros((1, 64), np.float32))}, "bad_request", "shape"),
    "shape zero": ({"inputs": {**GOOD, "shape": [0, 784], "data": b""}}, "bad_request", "shape"),
    "shape negative": ({"inputs": {**GOOD, "shape": [-1, 784]}}, "bad_request", "shape"),
    "shape 2^31": ({"inputs": {**GOOD, "shape": [2**31, 784]}}, "bad_request", "shape"),
    "shape of 2^62 bytes": ({"inputs": {**GOOD, "shape": [2**30, 784, 2**30]}}, "bad_request", "inputs"),
    "data too short": ({"inputs": {**GOOD, "data": b"1234"}}, "bad_request", "data"),
    "data too long": ({"inputs": {**GOOD, "data": bytes(4 * 784 + 1)}}, "bad_request", "data"),
    "data a text": ({"inputs": {**GOOD, "data": "zeros"}}, "bad_request", "data"),
    "data missing": ({"inputs": {"datatype": "FP32", "shape": [1, 784]}}, "bad_request", "data"),
    "latency a text": ({"inputs": GOOD, "latency_ms": "soon"}, "bad_request", "latency_ms"),
    "latency negative": ({"inputs": GOOD, "latency_ms": -1}, "bad_request", "latency_ms"),
    "latency zero": ({"inputs": GOOD, "latency_ms": 0}, "bad_request", "latency_ms"),
    "latency NaN": ({"inputs": GOOD, "latency_ms": float("nan")}, "bad_request", "latency_ms"),
    "accuracy above 1": ({"inputs": GOOD, "accuracy": 1.1}, "bad_request", "accuracy"),
    "accuracy negative": ({"inputs": GOOD, "accuracy": -0.1}, "bad_request", "accuracy"),
    "accuracy NaN": ({"inputs": GOOD, "accuracy": float("nan")}, "bad_request", "accuracy"),
    "cost negative": ({"inputs": GOOD, "cost": -1}, "bad_request", "cost"),
    "cost NaN": ({"inputs": GOOD, "cost": float("nan")}, "bad_request", "cost"),
    "priority out of range": ({"inputs": GOOD, "priority": 10}, "bad_request", "priority"),
    "priority a float": ({"inputs": GOOD, "priority": 1.5}, "bad_request", "priority"),
    "deadline a text": ({"inputs": GOOD, "deadline": "tomorrow"}, "bad_request", "deadline"),
    "deadline NaN": ({"inputs": GOOD, "deadline": float("nan")}, "bad_request", "deadline"),
    "deadline past": ({"inputs": GOOD, "deadline": 1.0}, "deadline", ""),
    "id a number": ({"inputs": GOOD, "id": 7}, "bad_request", "id"),
    "retry key too short": ({"inputs": GOOD, "retry_key": b"short"}, "bad_request", "retry_key"),
    "retry key a text": ({"inputs": GOOD, "retry_key": "0123456789abcdef"}, "bad_request", "retry_key"),
    "model unknown": ({"inputs": GOOD, "model": "nobody"}, "unknown_model", "nobody"),
    "model a path": ({"inputs": GOOD, "model": "../etc/passwd"}, "bad_request", "model"),
    "model with a space": ({"inputs": GOOD, "model": "a b"}, "bad_request", "model"),
    "model a wildcard": ({"inputs": GOOD, "model": ">"}, "bad_request", "model"),
    "variant a wildcard": ({"inputs": GOOD, "variant": "*"}, "bad_request", "variant"),
    "version with a NUL": ({"inputs": GOOD, "version": "1\0"}, "bad_request", "version"),
    "model a number": ({"inputs": GOOD, "model": 3}, "bad_request", "model"),
    "reference to nowhere": ({"inputs_ref": {"bucket": "infaas-inputs", "key": "nobody"}}, "bad_request", "inputs_ref"),
    "reference to another bucket": ({"inputs_ref": {"bucket": "infaas-artifacts", "key": "x"}}, "bad_request", "inputs_ref"),
    "reference a text": ({"inputs_ref": "here"}, "bad_request", "inputs_ref"),
    "body a list": ([1, 2, 3], "bad_request", ""),
    "body a text": ("hello", "bad_request", ""),
    "2 MB inline": ({"inputs": tensor(np.zeros((700, 784), np.float32))}, "too_large", "inputs_ref"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_a_typed_refusal_that_names_the_field(system, case):
    body, code, names = BAD[case]

    async def work(nc):
        reply = await ask(nc, f"infaas.query.{APP}", body)
        assert "error" in reply, reply
        assert reply["error"]["code"] == code
        assert names in reply["error"]["message"]

    talk(system, work)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x81\xa6inputs", b"\x93\x01", b"\xdf\xff\xff\xff\xff", b"\x91" * 5000, b"{}", bytes(1000)]
)
def test_bytes_that_are_no_query_are_refused(system, body):
    async def work(nc):
        for subject in (f"infaas.query.{APP}", f"infaas.explain.{APP}", "infaas.register"):
            reply = await ask(nc, subject, body, raw=True)
            if body or not subject.startswith("infaas.explain"):
                assert reply["error"]["code"] == "bad_request", subject

    talk(system, work)


@pytest.mark.parametrize("app", ["nobody", "UPPER", "a" * 64])
def test_an_app_that_is_not_there(system, app):
    async def work(nc):
        reply = await ask(nc, f"infaas.query.{app}", {"inputs": GOOD, "id": "q"})
        assert (reply["id"], reply["error"]["code"]) == ("q", "unknown_app")

    talk(system, work)


@pytest.mark.parametrize("app", ["-a", "a" * 65, "é", "a%20b"])
def test_an_apps_name_that_is_none(system, app):
    async def work(nc):
        reply = await ask(nc, f"infaas.query.{app}", {"inputs": GOOD})
        assert reply["error"]["code"] == "bad_request"

    talk(system, work)


@pytest.mark.parametrize("field", ["app", "model", "version", "object", "validation"])
@pytest.mark.parametrize("value", ["../x", "a b", ">", "*", "a\0", "", 7])
def test_a_registration_with_a_bad_name_is_refused(system, field, value):
    good = {"app": "other", "model": "m", "format": "onnx", "object": "nothing", "validation": "nothing"}

    async def work(nc):
        reply = await ask(nc, "infaas.register", {**good, field: value})
        assert reply["error"]["code"] == "bad_request"
        assert field in reply["error"]["message"]

    talk(system, work)


def test_large_inputs_by_reference(system):
    x = np.tile(system.x, (1, 1))[:700]
    assert x.nbytes > 2_000_000

    async def work(nc):
        store = (
            await nc.jetstream().create_object_store("infaas-inputs")
            if not await has_bucket(nc)
            else await nc.jetstream().object_store("infaas-inputs")
        )
        await store.put("from-a-stranger", msgpack.packb(tensor(x)))
        reply = await answered(nc, {"inputs_ref": {"bucket": "infaas-inputs", "key": "from-a-stranger"}})
        (scores,) = map(array, reply["outputs"].values())
        assert (scores.argmax(1) == system.y[:700]).mean() > 0.85

    talk(system, work)


async def has_bucket(nc: Client) -> bool:
    try:
        await nc.jetstream().object_store("infaas-inputs")
    except nats.js.errors.NotFoundError:
        return False
    return True


def test_refusals_and_answers_are_in_the_record(system):
    """Every query of this file is one row: counted by what became of it, at most 5 s later."""
    import psycopg

    marks = {
        "recorded-ok": {"inputs": GOOD},
        "recorded-hard": {"inputs": GOOD, "accuracy": 0.9999},
        "recorded-bad": {"inputs": GOOD, "latency_ms": -1},
    }

    async def work(nc):
        for mark, body in marks.items():
            await ask(nc, f"infaas.query.{APP}", {**body, "id": mark})

    talk(system, work)
    give_up = time.monotonic() + 20
    while True:
        with psycopg.connect(system.sql) as connection:
            found = connection.execute(
                "SELECT id, outcome, code FROM infaas.query_outcomes WHERE id LIKE 'recorded-%'"
            ).fetchall()
        if len(found) >= len(marks) or time.monotonic() > give_up:
            break
        time.sleep(0.1)
    assert sorted(found) == [
        ("recorded-bad", "refused", "bad_request"),
        ("recorded-hard", "refused", "unsatisfiable"),
        ("recorded-ok", "ok", None),
    ]
