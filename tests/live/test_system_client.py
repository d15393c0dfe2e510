"""The client and the commands against the whole system, real models and digits."""

import asyncio
import json
import re
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import infaas
from tests.support.clients.responders import until
from tests.support.servers.processes import eventually
from tests.support.servers.processes import infaas as command
from tests.support.servers.system import APP, MODELS, Whole


async def awake(client: infaas.Client, x: np.ndarray) -> None:
    """Until a first answer came: what serves may have to be loaded."""

    async def answers() -> bool:
        return isinstance(await client.query(APP, x[:1], raise_refused=False), infaas.Answer)

    await until(answers)


async def test_right_answers_to_many_at_once(system):
    async with infaas.connect(data_dir=system.directory) as client:
        await awake(client, system.x)
        answers = await asyncio.gather(*(client.query(APP, system.x[i : i + 1], id=str(i)) for i in range(700)))
    assert [answer.id for answer in answers] == [str(i) for i in range(700)]
    right = [answer.output.argmax() == system.y[i] for i, answer in enumerate(answers)]
    assert np.mean(right) > 0.85
    assert {answer.model for answer in answers} <= set(MODELS)


@pytest.mark.parametrize("repeat", [1, 40])  # 2.2 MB in; 94 MB in and more than 1 MB out
async def test_large_inputs_and_outputs(system, repeat):
    x, y = np.tile(system.x[:700], (repeat, 1)), np.tile(system.y[:700], repeat)

    async with infaas.connect(data_dir=system.directory) as client:
        await awake(client, system.x)
        buckets = (client.subjects.inputs_bucket, client.subjects.outputs_bucket)
        stores = [await client.bus.object_store(bucket) for bucket in buckets]
        before = [set(await store.keys()) for store in stores]  # other tests' may stay there
        answer = await client.query(APP, x, deadline=time.time() + 300)
        assert answer.output.shape == (len(x), 10)
        assert (answer.output.argmax(1) == y).mean() > 0.85
        assert answer.batch >= len(x)
        for store, kept in zip(stores, before, strict=True):
            await until(lambda store=store, kept=kept: _nothing_new(store, kept))


async def _nothing_new(store, kept: set[str]) -> bool:
    return set(await store.keys()) <= kept


def test_the_blocking_client(system):
    with infaas.connect_blocking(system.nats) as whole:
        assert {item["model"] for item in whole.variants(app=APP)} == set(MODELS)
        assert whole.explain(APP, accuracy=0.5)["chosen"] is not None
        with pytest.raises(infaas.Refused) as caught:
            whole.query(APP, system.x[:1], accuracy=0.9999)
        assert caught.value.code == "unsatisfiable"
        assert caught.value.closest["variant"]
        with pytest.raises(infaas.Refused, match="`inputs` has shape"):
            whole.query(APP, np.zeros((1, 3), np.float32))


def test_commands(system, tmp_path):
    np.save(tmp_path / "x.npy", system.x[:20])
    (scores,) = system.told("query", "--app", APP, "--input", str(tmp_path / "x.npy"))["outputs"].values()
    assert (np.argmax(scores, 1) == system.y[:20]).mean() > 0.7
    report = system.told("bench", "--app", APP, "--rate", "100", "--seconds", "1")
    assert report["answered"] + report["refused"] + report["failed"] == report["offered"] > 0
    assert report["answered"] > 0
    told = partial(system.command, "status")
    ready = r"(?m)^1 of 1 workers ready, [1-9]\d* apps"  # other tests have apps there, too, of which it may tell first
    assert eventually(lambda: re.search(ready, told().stdout) is not None), told()


def test_load_is_expected_listed_and_taken_back(system: Whole) -> None:
    there = {"INFAAS_DATA_DIR": str(system.directory)}
    expected = ("expect", "digits", "--at", "09:00", "--weekly")
    assert command(*expected, "--qps", "5", **there).returncode == 0
    [said] = json.loads(command("expect", "--json", "--data-dir", str(system.directory)).stdout)["expected"]
    assert (said["app"], said["qps"], said["weekly"], said["at"][11:16]) == ("digits", 5.0, True, "09:00")
    assert command(*expected, "--qps", "0", **there).returncode == 0
    assert json.loads(command("expect", "digits", "--json", **there).stdout) == {"expected": []}
    for wrong in (("--at", "noon", "--qps", "1"), ("--at", "09:00"), ("--qps", "1")):
        assert command("expect", "digits", *wrong, **there).returncode == 2


def test_machines_are_recommended_by_profiles_and_prices(system: Whole) -> None:
    def told(qps: str) -> dict[str, Any]:
        [cheapest, *_] = json.loads(
            command("recommend", "--app", "digits", "--qps", qps, "--json", "--data-dir", str(system.directory)).stdout
        )["choices"]
        return cheapest

    few, many = told("10"), told("100000000")
    assert few["machines"] == {"cpu": 1} and few["per_hour"] > 0
    assert many["machines"]["cpu"] > 1
    assert many["per_hour"] == pytest.approx(few["per_hour"] * many["machines"]["cpu"])
    assert all(name.split("-v1-")[0] in MODELS for name in few["instances"])
