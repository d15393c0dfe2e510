"""The client against a peer that answers by the contract, on the in-process bus."""

import asyncio
import inspect
import re
import time
from contextlib import asynccontextmanager

import msgpack
import numpy as np
import pytest
from msgspec import convert

from bus.memory import Broker
from bus.messages.catalog import METRICS, TensorSpec
from infaas.blocking import Infaas
from infaas.client import Client
from infaas.connecting import connect
from infaas.errors import BadInput, InfaasError, NotConnected, Refused, Timeout
from infaas.queries import Needs, check_seconds
from infaas.tables import as_inputs
from tests.support.clients.responders import Responder, answer, item_sums, refusal, until


async def nothing_left(store):
    return not await store.keys()


@asynccontextmanager
async def with_client(behave, subject="infaas.query.*", prefix="infaas"):
    """A client, a peer on `subject`, and their broker."""
    broker = Broker()
    peer = await Responder(broker.connect(), behave).listen(subject)
    async with await Client(broker.connect(), prefix=prefix).open() as client:
        yield client, peer, broker


async def test_a_query_sends_what_it_was_given_and_returns_the_answer():
    async with with_client(lambda body, n: answer(body)) as (client, peer, _):
        got = await client.query(
            "digits",
            np.ones((2, 3), np.float32),
            latency_ms=20,
            accuracy=np.float64(0.5),
            context="me",
            priority=2,
            id="q7",
        )
        assert got.output.tolist() == [3.0, 3.0]
        assert got.id == "q7"
        (body,) = peer.heard
        assert body.pop("inputs") == {"datatype": "FP32", "shape": [2, 3], "data": np.ones(6, "<f4").tobytes()}
        assert len(body.pop("retry_key")) == 16
        assert body == {"latency_ms": 20, "accuracy": 0.5, "context": "me", "priority": 2, "id": "q7"}


TWO = [{"name": "age", "datatype": "FP32", "shape": [1]}, {"name": "town", "datatype": "BYTES", "shape": [1]}]
TEXT = [{"name": "text", "datatype": "BYTES", "shape": [1]}]
TABLE = [{"name": "x", "datatype": "FP32", "shape": [2], "columns": ["a", "b"]}]
PICTURE = [{"name": "x", "datatype": "FP32", "shape": [3, 2, 2]}]


def given(kind):
    if kind in ("frame", "row", "series"):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"town": ["here"], "age": [3], "other": [1]})
        return {"frame": frame, "row": frame.iloc[0], "series": frame["town"]}[kind]
    if kind == "picture":
        return pytest.importorskip("PIL.Image").new("RGB", (4, 4), (255, 255, 255))
    return kind


@pytest.mark.parametrize(
    ("specs", "x", "sent"),
    [
        (TWO, "frame", {"age": [3.0], "town": "here"}),
        (TWO, "row", {"age": [3.0], "town": "here"}),
        (TWO, [{"age": 3, "town": "here"}], {"age": [3.0], "town": "here"}),
        (TWO, {"age": [3], "town": ["here"]}, {"age": [3.0], "town": "here"}),
        (TEXT, "series", {"text": "here"}),
        (TEXT, ["here"], {"text": "here"}),
        (TABLE, [{"b": 2, "a": 1}], {"x": [1.0, 2.0]}),
        (TWO, [[3, "here"]], {"age": [3.0], "town": "here"}),
        (TABLE, np.array([1, 2]), {"x": [1.0, 2.0]}),
        (PICTURE, "picture", {"x": [1.0] * 12}),
    ],
)
async def test_a_query_takes_what_register_took(specs, x, sent):
    async with with_client(lambda body, n: answer({}, labels=["yes"])) as (client, peer, broker):
        await Responder(broker.connect(), lambda body, n: {"items": [{"app": "a", "inputs": specs}]}).listen(
            "infaas.list.apps"
        )
        said = await client.query("a", given(x) if isinstance(x, str) else x)
        heard = {name: one["data"] for name, one in peer.heard[0]["inputs"].items()}
        assert {name: data[4:].decode() if isinstance(sent[name], str) else np.frombuffer(data, "<f4").tolist() for name, data in heard.items()} == sent  # fmt: skip
        assert repr(said) == "Answer: yes\nby adder-v1: 1.5 ms; accuracy 0.9; US$ 1 per 1,000"


@pytest.mark.parametrize(
    ("specs", "x", "said"),
    [
        (TWO, [{"agee": 3, "town": "x"}], "column 'age' is missing: the app takes age, town; is it 'agee'?"),
        (
            TWO,
            {"age": ["old"], "town": ["x"]},
            "column 'age' holds 'old' in row 0, and the app takes numbers: give a number",
        ),
        (
            TWO,
            {"age": np.array(["2026-01-01"], "M8[D]"), "town": ["a"]},
            "column 'age' holds datetime64[D], and the app takes numbers: make",
        ),
        (TWO, {"age": [1], "town": [3]}, "column 'town' holds numbers, and the app takes texts: give it as texts"),
        (TWO, {"age": [1, 2], "town": ["x"]}, "the columns differ in length: age 2, town 1"),
        (TWO, [{"age": 1, "town": "x"}, {"age": 1}], "row 1 has no 'town'"),
        (TWO, [1, 2], "the app takes 2 columns, age, town: give rows that name them, or a DataFrame"),
        (TABLE, [1, 2, 3], "x has shape [3]: the model takes [n, 2]"),
    ],
)
def test_what_does_not_fit_is_named_with_the_remedy(specs, x, said):
    with pytest.raises(BadInput, match=re.escape(said)):
        as_inputs(x, convert(specs, list[TensorSpec]))


@pytest.mark.parametrize("x", [{"age": [1.0, None], "town": ["here", None]}, ["here"], [["here", 1]]])
async def test_a_table_for_an_app_that_is_not_there_is_refused_by_the_apps_name(x):
    async with with_client(lambda body, n: answer({})) as (client, peer, broker):
        known = [{"app": "wine", "inputs": TWO}]
        await Responder(
            broker.connect(), lambda body, n: {"items": [one for one in known if body.get("app") in (None, one["app"])]}
        ).listen("infaas.list.apps")
        with pytest.raises(Refused, match=r"no app .wien.: .*; did you mean wine"):
            await client.query("wien", x)
        assert peer.heard == []


async def test_many_at_once_each_get_their_own():
    async with with_client(lambda body, n: answer(body)) as (client, peer, _):
        answers = await asyncio.gather(*(client.query("a", [[float(i)]], id=str(i)) for i in range(200)))
        assert [a.output[0] for a in answers] == list(range(200))
        assert [a.id for a in answers] == [str(i) for i in range(200)]
        assert len({body["retry_key"] for body in peer.heard}) == 200


async def test_queries_need_no_app_and_prefixes_are_systems() -> None:
    async with with_client(lambda body, n: answer(body), subject="infaas.query._") as (client, peer, _):
        await client.query(None, [1.0], model="resnet")
        assert peer.heard[0]["model"] == "resnet"
    async with with_client(lambda body, n: answer(body), subject="other.query.*", prefix="other") as (client, _, _):
        assert (await client.query("a", [1.0])).variant == "adder-v1"


async def test_refusals_are_raised_or_returned():
    closest = {"model": "m", "variant": "v", "accuracy": 0.8, "latency_ms": 5.0, "cost": 0.1}

    async with with_client(
        lambda body, n: refusal("unsatisfiable", "too good", closest=closest, retry_after_ms=12.5)
    ) as (client, _, _):
        with pytest.raises(Refused) as caught:
            await client.query("a", [1.0], accuracy=0.99)
        assert (caught.value.code, caught.value.closest, caught.value.retry_after_ms) == (
            "unsatisfiable",
            closest,
            12.5,
        )
        returned = await client.query("a", [1.0], raise_refused=False)
        assert isinstance(returned, Refused)
        assert returned.code == "unsatisfiable"


async def test_wrong_names_needs_and_inputs_send_nothing() -> None:
    async with with_client(lambda body, n: answer(body)) as (client, peer, _):
        for app in ("../x", "a b", ">", "*", "a\0", ""):
            refused = await client.query(app, [1.0], raise_refused=False)
            assert (refused.code, "`app`" in refused.message) == ("bad_request", True)
        assert not peer.heard
    async with with_client(lambda body, n: answer(body)) as (client, peer, _):
        with pytest.raises(TypeError, match="latencyms"):
            await client.query("a", [1.0], latencyms=3)
        with pytest.raises(BadInput):
            await client.query("a", np.zeros(2, complex))
        assert not peer.heard


def test_a_client_that_is_not_connected_yet_says_what_to_write() -> None:
    with pytest.raises(TypeError, match="async with"), connect():
        pass
    with pytest.raises(AttributeError, match="not connected yet"):
        connect().query("a", [1.0])
    with pytest.raises(BadInput, match="above 0, not nan"):
        check_seconds(float("nan"))


async def test_timeouts_come_after_the_deadline_and_answers_admit_to_be_late() -> None:
    async with with_client(lambda body, n: answer(body)) as (client, peer, _):
        await peer.subscription.drain()
        with pytest.raises(Timeout, match="is a dispatcher running"):
            await client.query("a", [1.0], timeout=0.1)
        with pytest.raises(TimeoutError):
            await client.query("a", [1.0], deadline=time.time() - 60)
    # The peer hears the second sending only, and counts from there; the caller has waited for longer.
    async with with_client(lambda body, n: answer(body) if n == 2 else None) as (client, peer, _):
        assert (await client.query("a", [1.0], latency_ms=50)).missed == ["latency"]
        assert len({body["retry_key"] for body in peer.heard}) == 1
        assert client.resent == 1


async def test_the_client_waits_longer_than_the_system_so_that_a_refusal_at_the_deadline_still_arrives():
    async with with_client(lambda body, n: answer(body)) as (client, _, _):
        whenever, soon = (
            await client.prepare("a", [1.0]),
            await client.prepare("a", [1.0], deadline=(by := time.time() + 200)),
        )
        assert whenever.timeout == pytest.approx(33.0)  # 30 s from when a dispatcher has it, and a tenth more
        assert by - time.time() < soon.timeout <= 220.0


async def test_large_inputs_go_by_reference_and_are_cleaned_up():
    big = np.arange(600_000, dtype=np.float32).reshape(2, -1)
    seen = {}

    async with with_client(lambda body, n: None) as (client, peer, broker):
        store = await broker.connect().object_store("infaas-inputs", create=True)

        async def fetch(key):
            seen["inputs"] = msgpack.unpackb(await store.get(key))

        query = asyncio.create_task(client.query("a", big))
        await until(lambda: peer.heard)
        (body,) = peer.heard
        assert "inputs" not in body
        assert (body["inputs_ref"]["bucket"], body["inputs_ref"]["items"]) == ("infaas-inputs", len(big))
        await fetch(body["inputs_ref"]["key"])
        assert item_sums(seen["inputs"]).tolist() == big.sum(1).tolist()
        (reply,) = peer.replies_to
        peer.bus.publish(reply, msgpack.packb(answer({})))
        await query
        await until(lambda: nothing_left(store))


async def test_large_outputs_are_fetched():
    outputs = {"y": {"datatype": "INT64", "shape": [2], "data": np.array([7, 8], "<i8").tobytes()}}

    async with with_client(
        lambda body, n: answer(body, outputs={}, outputs_ref={"bucket": "infaas-outputs", "key": "k1"})
    ) as (client, _, broker):
        store = await broker.connect().object_store("infaas-outputs")
        await store.put("k1", msgpack.packb(outputs))
        assert (await client.query("a", [1.0])).output.tolist() == [7, 8]
        await client.close()
        assert await store.keys() == []


async def test_lost_outputs_and_closed_clients_say_so() -> None:
    async with with_client(
        lambda body, n: answer(body, outputs={}, outputs_ref={"bucket": "infaas-outputs", "key": "k"})
    ) as (client, _, _):
        with pytest.raises(InfaasError, match="could not be fetched"):
            await client.query("a", [1.0])
    async with with_client(lambda body, n: answer(body)) as (client, _, _):
        await client.close()
        await client.close()
        with pytest.raises(NotConnected):
            await client.query("a", [1.0])


async def test_lists_and_explanations():
    async with with_client(lambda body, n: {"items": [{"asked": body}]}, subject="infaas.list.*") as (
        client,
        _,
        broker,
    ):
        await Responder(broker.connect(), lambda body, n: {"chosen": None, "candidates": [body]}).listen(
            "infaas.explain.a"
        )
        assert await client.variants(app="digits") == [{"asked": {"app": "digits"}}]
        assert await client.apps() == await client.models() == await client.workers() == [{"asked": {}}]
        told = await client.explain("a", latency_ms=3, accuracy=None)
        assert told == {"chosen": None, "candidates": [{"latency_ms": 3}]}
        with pytest.raises(Refused):
            await client.explain("a.b")


async def test_feedback():
    async with with_client(lambda body, n: {"accepted": True}, subject="infaas.feedback.a") as (client, peer, _):
        key = b"k" * 16
        await client.feedback("a", 3, id="q1")
        await client.feedback("a", 4, inputs=[[1.0]], context="me")
        await client.feedback("a", 5, query="ab", item=2, retry_key=key)
        keys = [body.pop("retry_key") for body in peer.heard]
        assert list(map(len, keys)) == [16] * 3
        assert len(set(keys)) == 3
        assert keys[2] == key
        assert peer.heard == [
            {"id": "q1", "label": 3},
            {"label": 4, "inputs": [[1.0]], "context": "me"},
            {"query": "ab", "label": 5, "item": 2},
        ]


def test_needs_and_methods_are_those_of_the_contract() -> None:
    assert set(Needs.__annotations__) - METRICS.keys() == {
        "latency_ms", "accuracy", "metric", "cost", "model", "version", "variant", "context", "priority", "deadline", "confidence", "id", "input_digest",
    }  # fmt: skip
    for name in (
        "query", "feedback", "apps", "models", "variants", "workers", "selection", "explain", "register",
    ):  # fmt: skip
        ours, theirs = inspect.signature(getattr(Infaas, name)), inspect.signature(getattr(Client, name))
        assert list(ours.parameters) == list(theirs.parameters), name
        assert getattr(Infaas, name).__doc__
