"""Traces of drivers, against peers that answer by the contract: they show the graph, and say what they cannot know."""

import asyncio
import tomllib
from typing import Any

import numpy as np
import pytest

from bus.messages.catalog import AppRecord, Signature, TensorSpec
from infaas.errors import BadInput, Refused
from infaas.pipelines import Rpc
from infaas.tracing import trace
from services.core.pipelines.checks import pipeline_errors
from services.simulation.scenario.pipelines import read_pipeline
from tests.support.clients.peers import APPS, Peers, cascade, peers, samples, with_peers

__all__ = ["peers"]  # a fixture


async def test_a_cascade_that_asks_again_in_three_of_ten_cases_has_that_scale_factor(peers: Peers) -> None:
    given = samples(2000, 0.3)
    unsure = float((given["image"].sum(1) < 0).mean())
    found = await trace(peers.client, cascade, given)
    assert found.queries == 2000
    assert found.scale == {"quick": 1.0, "exact": unsure}
    assert unsure == pytest.approx(0.3, abs=0.03)
    assert set(found.edges) == {("quick", "exact")}
    assert found.probability("quick", "exact") == unsure


def written(text: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("traced") / "traced.toml"
    path.write_text(text)
    return read_pipeline(path)


async def test_the_file_of_a_traced_cascade_is_a_pipeline(
    peers: Peers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = (await trace(peers.client, cascade, samples(100, 0.3))).to_toml("cascade")
    file = written(text, tmp_path_factory)
    assert file.pipeline.output == {"sum": "exact.sum | quick.sum"}
    assert [vertex.inputs for vertex in file.pipeline.vertices] == [{"x": "$.image"}] * 2
    spec = TensorSpec(name="x", datatype="FP32", shape=[-1])
    signature = Signature(inputs=[spec], outputs=[TensorSpec(name="sum", datatype="FP32", shape=[])])
    apps = {name: AppRecord(app=name, links={}, signature=signature) for name in APPS}
    assert pipeline_errors("cascade", file.latency_ms, file.pipeline, apps) == []
    assert "TODO: the driver's code decides it" in text


async def fan(rpc: Rpc, x: Any) -> Any:
    """First -> (left, right side by side) -> last, which gets what the left one gave."""
    await rpc("quick", x["image"], stage="first")
    left, _ = await asyncio.gather(
        rpc("quick", x["image"], stage="left"), rpc("exact", x["image"], stage="right", accuracy=0.9)
    )
    return {"y": (await rpc("check", {"x": left.outputs["sum"]}, stage="last")).outputs["sum"], "raw": x["image"]}


async def fan_of_tasks(rpc: Rpc, x: Any) -> Any:
    """The same, the branches as coroutines of their own."""

    async def ask(app: str, stage: str, **needs: Any) -> Any:
        return await rpc(app, x["image"], stage=stage, **needs)

    await ask("quick", "first")
    left, _ = await asyncio.gather(ask("quick", "left"), ask("exact", "right", accuracy=0.9))
    return {"y": (await rpc("check", {"x": left.outputs["sum"]}, stage="last")).outputs["sum"], "raw": x["image"]}


@pytest.mark.parametrize("driver", [fan, fan_of_tasks])
async def test_a_trace_shows_what_depends_on_what(
    peers: Peers, driver: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = await trace(peers.client, driver, samples(20, 0.0))
    assert dict(found.edges) == {
        ("first", "left"): 20,
        ("first", "right"): 20,
        ("left", "last"): 20,
        ("right", "last"): 20,
    }
    text = found.to_toml("fan")
    assert text.count("TODO") == 1, "only the objective"
    file = written(text, tmp_path_factory)
    by_name = {vertex.name: vertex for vertex in file.pipeline.vertices}
    assert by_name["last"].inputs == {"x": "left.sum"}
    assert (by_name["right"].app, by_name["right"].accuracy, by_name["left"].accuracy) == ("exact", 0.9, None)
    assert file.pipeline.output == {"y": "last.sum", "raw": "$.image"}
    assert all(edge.probability is None for edge in file.pipeline.edges)


async def odd(rpc: Rpc, x: Any) -> Any:
    first = await rpc("quick", x["image"])
    for _ in range(3):
        await rpc("check", first.outputs["sum"] + 1)
    return first.output * 2


async def test_what_a_trace_cannot_know_is_said(peers: Peers) -> None:
    found = await trace(peers.client, odd, samples(2, 0.0))
    assert found.scale == {"quick": 1.0, "check": 3.0}
    text = found.to_toml("odd")
    assert tomllib.loads(text)["vertex"][1] == {"name": "check", "app": "check", "inputs": {}}
    assert "# TODO: up to 3 visits in a run; a pipeline visits each stage once: make a stage of each" in text
    assert "# TODO: x is computed by the driver's own code: put an app before this stage that computes it" in text
    assert "# TODO: output is computed by the driver's own code: name a tensor of a stage" in text


async def test_each_line_of_a_driver_that_asks_is_a_stage(peers: Peers) -> None:
    async def twice(rpc: Rpc, x: Any) -> None:
        await rpc("quick", x["image"])
        await rpc("quick", x["image"])

    found = await trace(peers.client, twice, samples(3, 0.0))
    assert found.scale == {"quick": 1.0, "quick-2": 1.0}
    assert set(found.edges) == {("quick", "quick-2")}
    assert "the driver returned no tensors" in found.to_toml("twice")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "samples: there must be at least one array"),
        ({"x": np.zeros((0, 3))}, "samples: there are none; give at least one"),
        ({"x": np.zeros((2, 3)), "y": np.zeros((3, 3))}, "the same number of samples, not x 2, y 3"),
        ({"x": np.array(1.0)}, "samples: each array must have a first axis"),
    ],
)
async def test_samples_that_are_none_are_refused(given: dict[str, Any], message: str) -> None:
    async with with_peers() as peers:
        with pytest.raises(BadInput, match=message):
            await trace(peers.client, cascade, given)


async def test_a_trace_of_a_driver_that_fails_fails_with_its_error(peers: Peers) -> None:
    async def fails(rpc: Rpc, x: Any) -> Any:
        return await rpc("broken", x["image"])

    with pytest.raises(Refused, match="it broke"):
        await trace(peers.client, fails, samples(20, 0.0))
    assert len(asyncio.all_tasks()) == 1
