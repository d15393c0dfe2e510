"""Needs that meet other capabilities, in a whole system: a plan, several items. tests/unit/dispatcher/test_needs_everywhere.py has all."""

from typing import Any

import pytest

from infaas.errors import Refused
from tests.support.clients.responders import until
from tests.support.servers.pipelines import vertex
from tests.support.servers.system import APP, Whole


async def refused(client: Any, app: str, x: Any, word: str, **needs: Any) -> None:
    with pytest.raises(Refused, match=word) as caught:
        await client.query(app, x, timeout=60.0, **needs)
    assert caught.value.code == "unsatisfiable"


def kept_to(answer: Any, limit: float) -> bool:
    """Whether it is charged no more than the limit, or says so: how long a batch takes is the machine's affair."""
    return 1000.0 * answer.cost <= limit or "cost" in answer.missed


async def test_a_limit_of_cost_is_a_ceiling_for_many_items_too(system: Whole, client: Any) -> None:
    await client.query(APP, system.x[:1], timeout=60.0)
    least = min(one["cost"] for one in (await client.explain(APP))["candidates"])
    await refused(client, APP, system.x[:1], "costs at most US", cost=0.9 * least)
    await refused(client, APP, system.x[:512], "costs at most US", cost=1.01 * least)
    for items, times in ((1, 2.0), (1, 20.0), (64, 200.0)):
        answer = await client.query(APP, system.x[:items], timeout=60.0, cost=times * least)
        assert kept_to(answer, times * least), (answer.cost, answer.missed, least)


async def test_a_plan_and_a_named_variant_do_not_lower_a_querys_accuracy(system: Whole, client: Any) -> None:
    variants = sorted(await client.variants(app=APP), key=lambda one: one["accuracy"])
    low, best = variants[0], variants[-1]
    assert low["accuracy"] < best["accuracy"]
    await refused(client, APP, system.x[:1], "accuracy", variant=low["variant"], accuracy=best["accuracy"])

    [own] = [one for one in await client.apps() if one["app"] == APP]
    one = vertex("only", APP, {spec["name"]: f"$.{spec['name']}" for spec in own["inputs"]}, accuracy=low["accuracy"])
    output = {spec["name"]: f"only.{spec['name']}" for spec in own["outputs"]}
    head = {"name": "line", "latency_ms": 60_000.0}
    await client.admin("set-pipeline", pipeline=head, vertex=[one], edge=[], output=output)
    stage = {
        "hardware": low["hardware"], "batch": 1, "replicas": 1, "scale": 1.0, "rho": 0.5, "variant": low["variant"],
        "service_ms": max(low["batch_latency_ms"].values()) + 1.0,
    }  # fmt: skip
    plan = {
        "pipeline": "line", "policy": "inferline", "status": "feasible", "cost_per_s": 0.0, "p99_ms": 100.0, "vertices": {"only": stage},
        "envelope": [], "dispersion": [], "steps": [], "rate": 10.0, "latency_ms": 60_000.0,
    }  # fmt: skip
    await client.admin("deploy-pipeline", app="line", plan=plan)

    async def planned() -> bool:
        [row] = (await client.explain("line"))["stages"]
        return bool(row["planned"])

    await until(planned)

    async def by_plan() -> bool:  # the planned variant may have to be loaded
        return bool((await client.query("line", system.x[:1], timeout=60.0)).accuracy == low["accuracy"])

    await until(by_plan)
    answer = await client.query("line", system.x[:1], timeout=60.0, accuracy=best["accuracy"])
    assert (answer.accuracy, answer.missed) == (best["accuracy"], [])
    [row] = (await client.explain("line", accuracy=best["accuracy"]))["stages"]
    assert not row["planned"]
    await refused(client, "line", system.x[:1], "vertex only: .*accuracy", accuracy=0.99999)
    await client.admin("delete-app", app="line")
