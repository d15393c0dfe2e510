"""A foreign program's view: only stock nats-py and msgpack, and the contract's names. Nothing of ours but the running system."""

import asyncio

import msgpack
import nats
import numpy as np
import pytest
from nats.aio.client import Client

from tests.support.clients.responders import until
from tests.support.clients.stock import answered, array, ask, tensor
from tests.support.servers.system import APP, MODELS

ANSWER = {
    "id": (str, type(None)), "outputs": dict, "model": str, "version": str, "variant": str, "hardware": str, "worker": str,
    "accuracy": float, "latency_ms": float, "queue_ms": float, "compute_ms": float, "batch": int, "cached": bool,
    "simulated": bool, "cost": float, "missed": list,
}  # fmt: skip


async def test_right_answers(nc, system):
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


async def test_items_keep_their_order_whatever_they_are_batched_with(nc, system):
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


async def some_variant(nc: Client) -> str:
    items = (await ask(nc, "infaas.list.variants", {"app": APP}))["items"]
    return next(item["variant"] for item in items if "fp32" in item["variant"])


@pytest.mark.parametrize("form", ["list", "named", "fp64", "uint8-list", "named-list"])
async def test_inputs_may_be_spelt_in_several_ways(nc, system, form):
    x = system.x[:2]

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


async def test_needs_pick_the_variant(nc, system):
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
    reply = await answered(nc, {"inputs": tensor(system.x[:1]), "latency_ms": 30_000, "cost": 1000, "priority": 1})
    assert reply["missed"] == []


async def test_what_no_variant_can_do_is_unsatisfiable_with_the_closest(nc, system):
    for needs in ({"accuracy": 0.9999}, {"cost": 1e-12}, {"latency_ms": 1e-6}):
        reply = await ask(nc, f"infaas.query.{APP}", {"inputs": tensor(system.x[:1]), "id": "hard", **needs})
        error = reply["error"]
        assert (reply["id"], error["code"]) == ("hard", "unsatisfiable"), needs
        assert {"variant", "accuracy", "latency_ms", "cost"} <= error["closest"].keys()


async def test_a_query_sent_again_under_its_key_is_the_same_query(nc, system):
    body = {"inputs": tensor(system.x[:1]), "retry_key": bytes(range(16)), "id": "again"}
    inbox = nc.new_inbox()
    replies = []

    async def hear(message):
        replies.append(msgpack.unpackb(message.data))

    await nc.subscribe(inbox, cb=hear)
    await answered(nc, {"inputs": body["inputs"]})  # what serves is loaded
    for _ in range(5):
        await nc.publish(f"infaas.query.{APP}", msgpack.packb(body), reply=inbox)
    await until(lambda: replies)
    assert all(reply["id"] == "again" and "error" not in reply for reply in replies)
    await asyncio.sleep(0.2)
    assert len({reply["outputs"][name]["data"] for reply in replies for name in reply["outputs"]}) == 1


async def test_lists(nc):
    numbers = (
        "accuracy", "load_ms", "latency_ms", "memory_mb", "saturation_qps", "price_per_hour", "cost_per_1000",
    )  # fmt: skip
    texts = ("app", "model", "version", "variant", "hardware", "framework", "precision", "state")

    variants = (await ask(nc, "infaas.list.variants", {}))["items"]
    assert {item["model"] for item in variants if item["app"] == APP} == set(MODELS)  # other tests have models, too
    for item in variants:
        if item["app"] != APP:
            continue
        assert [name for name in texts if not isinstance(item[name], str)] == []
        assert [name for name in numbers if not (isinstance(item[name], float) and item[name] >= 0)] == []
        assert isinstance(item["threads"], int)
        assert isinstance(item["max_batch"], int)
        assert item["simulated"] is False
    one = (await ask(nc, "infaas.list.variants", {"app": APP, "model": MODELS[0]}))["items"]
    assert {item["model"] for item in one} == {MODELS[0]}
    assert [item["app"] for item in (await ask(nc, "infaas.list.apps", {}))["items"]].count(APP) == 1
    assert {item["model"] for item in (await ask(nc, "infaas.list.models", {"app": APP}))["items"]} == set(MODELS)
    assert (await ask(nc, "infaas.list.variants", {"app": "nobody"}))["items"] == []
    workers = [item["worker"] for item in (await ask(nc, "infaas.list.workers", {}))["items"]]
    assert workers.count("w0") == 1  # a container of another test's is one, too, for a while
    empty = await nc.request("infaas.list.apps", b"", timeout=60)
    assert "items" in msgpack.unpackb(empty.data)
    assert (await ask(nc, "infaas.list.secrets", {}))["error"]["code"] == "bad_request"


async def test_explain(nc):
    told = await ask(nc, f"infaas.explain.{APP}", {"accuracy": 0.5, "latency_ms": 60_000})
    assert told["chosen"]["variant"] in {one["variant"] for one in told["candidates"]}
    assert all(one["why_not"] or one["variant"] == told["chosen"]["variant"] for one in told["candidates"])
    told = await ask(nc, f"infaas.explain.{APP}", {"accuracy": 0.9999})
    assert told["chosen"] is None
    assert all("accuracy" in one["why_not"] for one in told["candidates"])
    assert (await ask(nc, "infaas.explain.nobody", {}))["error"]["code"] == "unknown_app"
    assert (await ask(nc, f"infaas.explain.{APP}", {"accuracy": 2}))["error"]["code"] == "bad_request"


async def test_large_inputs_by_reference(nc, system):
    x = np.tile(system.x, (1, 1))[:700]
    assert x.nbytes > 2_000_000

    store = (
        await nc.jetstream().create_object_store("infaas-inputs")
        if not await has_bucket(nc)
        else await nc.jetstream().object_store("infaas-inputs")
    )
    await store.put("from-a-stranger", msgpack.packb(tensor(x)))
    reply = await answered(nc, {"inputs_ref": {"bucket": "infaas-inputs", "key": "from-a-stranger"}})
    (scores,) = map(array, reply["outputs"].values())
    assert (scores.argmax(1) == system.y[:700]).mean() > 0.85


async def has_bucket(nc: Client) -> bool:
    try:
        await nc.jetstream().object_store("infaas-inputs")
    except nats.js.errors.NotFoundError:
        return False
    return True
