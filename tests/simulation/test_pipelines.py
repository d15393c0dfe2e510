"""Pipelines on virtual time: the real dispatchers, queues and executors do what the estimator said before, with another seed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bus.messages.catalog import PipelineEdge, PipelineRecord, PipelineVertex
from services.core.pipelines.estimator import LatencyEstimator, at_percentile
from services.core.pipelines.graph import PipelineGraph
from services.core.pipelines.problem import PipelineProblem, StageOption, batch_seconds
from services.core.pipelines.queueing import Floats, StageConfiguration
from services.simulation.run import simulate_all
from services.simulation.scenario.model import Scenario
from services.simulation.scenario.planning import HOP
from services.simulation.scenario.read import read_scenario
from services.simulation.workload import at_once
from tests.support.data.pipeline_scenarios import write_scenario

Edges = tuple[tuple[str, str, float | None], ...]
CHAIN: Edges = (("a", "b", None), ("b", "c", None))
DIAMOND: Edges = (("a", "b", None), ("a", "c", None), ("b", "d", None), ("c", "d", None))
CASCADE: Edges = (("a", "b", 0.3),)
TREE: Edges = (("a", "b", 0.6), ("a", "c", 0.4), ("b", "d", 0.5))
SOCIAL: Edges = (("a", "b", 0.4), ("a", "c", None), ("b", "d", None), ("a", "d", None))
MS = {"a": (2, 4), "b": (10, 6), "c": (8, 12), "d": (4, 3)}  # of a batch of n on a core: first + second · n
HARDWARE = (("cpu", 0.1, 1.0), ("gpu", 0.5, 0.3))  # US$ per hour, and its time over a core's
WORKERS = {"cpu": 12, "gpu": 6}


def problem(edges: Edges, latency_ms: float = 200.0, **more: Any) -> PipelineProblem:
    names = dict.fromkeys(name for source, target, _ in edges for name in (source, target))
    return PipelineProblem(
        name="p",
        pipeline=PipelineRecord(
            vertices=[PipelineVertex(name=name, app=name, **more) for name in names],
            edges=[PipelineEdge(source=a, target=b, probability=share) for a, b, share in edges],
        ),
        latency_ms=latency_ms,
        options=tuple(
            StageOption(
                vertex=name,
                hardware=hardware,
                price_per_hour=price,
                batch_latency_ms={n: (MS[name][0] + MS[name][1] * n) * slower for n in (1, 2, 4, 8)},
            )
            for name in names
            for hardware, price, slower in HARDWARE
        ),
        arrivals=np.zeros(0),
    )


def handing_on(mean: float, dispersion: float) -> PipelineProblem:
    """A chain whose second stage is asked for so many items of each answer of the first."""
    inputs = {"a": "$.x", "b": "a.boxes", "c": "b.y"}
    record = PipelineRecord(
        vertices=[PipelineVertex(name=name, app=name, inputs={"x": text}) for name, text in inputs.items()],
        edges=[
            PipelineEdge(source="a", target="b", items="boxes", items_mean=mean, items_dispersion=dispersion),
            PipelineEdge(source="b", target="c"),
        ],
    )
    return replace(problem(CHAIN, latency_ms=400.0), pipeline=record)


def posed(
    folder: Path, edges: Edges, policy: str = "inferline", *, load: dict[str, Any], seconds: float, patient: bool
) -> Scenario:
    file = write_scenario(folder, problem(edges), load, WORKERS, duration_s=seconds, patient=patient)
    return read_scenario(file, policies=[policy], seed=2)


def run(scenario: Scenario) -> dict[str, Any]:
    [result] = simulate_all(scenario)["policies"]
    found: dict[str, Any] = result["apps"]["p"]
    assert found["answered"] + found["refused"] == found["queries"]
    return found


SLOW = [pytest.param(edges, marks=pytest.mark.slow) for edges in (CHAIN, CASCADE, TREE, SOCIAL)]


@pytest.mark.parametrize("edges", [DIAMOND, *SLOW], ids=["diamond", "chain", "cascade", "tree", "social"])
def test_the_plan_predicts_the_slowest_hundredth_within_a_tenth(tmp_path: Path, edges: Edges) -> None:
    scenario = posed(tmp_path, edges, load={"arrivals": "gamma", "cv": 0.5, "rate": 60}, seconds=40.0, patient=True)
    predicted = scenario.policies[0].plans["p"].p99_ms
    found = run(scenario)
    assert found["p99_ms"] == pytest.approx(predicted, rel=0.1)
    assert found["pipeline"]["plan"]["p99_ms"] == predicted
    assert all(len(set(one["instances"])) == 1 for one in found["pipeline"]["vertices"].values()), (
        "no replica more or less"
    )


def test_for_the_same_arrivals_estimator_and_dispatchers_agree(tmp_path: Path) -> None:
    """In bursts, in which batches fill. Quantiles of reports are exact to 0.8 %. Of queries whose answers come together, a dispatcher sends
    the first on before it knows of the others.
    """
    scenario = posed(tmp_path, CHAIN, load={"arrivals": "gamma", "cv": 2.0, "rate": 60}, seconds=20.0, patient=True)
    found = run(scenario)
    latencies = estimated(scenario, problem(CHAIN))
    assert len(latencies) == found["queries"]
    for share, key in ((0.5, "p50_ms"), (0.99, "p99_ms")):
        assert found[key] == pytest.approx(1000.0 * at_percentile(latencies, share), rel=0.03), key


def estimated(scenario: Scenario, asked: PipelineProblem) -> Floats:
    """What the estimator says of the scenario's own arrivals."""
    [load], plan = scenario.loads, scenario.policies[0].plans["p"]
    arrivals, _ = at_once(load, scenario.duration_s, np.random.default_rng(np.random.SeedSequence(2).spawn(1)[0]))
    tables = {(one.vertex, one.hardware): batch_seconds(one) for one in asked.options}
    stages = {
        name: StageConfiguration(tables[name, one.hardware][: one.batch + 1], one.batch, one.replicas)
        for name, one in plan.vertices.items()
    }
    return LatencyEstimator(PipelineGraph(asked.pipeline), arrivals, hop=HOP).latencies(stages)


@pytest.mark.parametrize(
    ("mean", "dispersion", "rate", "seconds"),
    [(2.6, 1.0, 30.0, 60.0), pytest.param(18.9, 2.0, 8.0, 240.0, marks=pytest.mark.slow)],
)
def test_they_agree_where_stages_are_asked_for_the_items_of_answers(
    tmp_path: Path, mean: float, dispersion: float, rate: float, seconds: float
) -> None:
    """B is asked for each box that a finds, c for each answer of b. How many there are is drawn from one law, not of the same numbers."""
    asked = handing_on(mean, dispersion)
    load = {"arrivals": "gamma", "cv": 1.0, "rate": rate}
    file = write_scenario(tmp_path, asked, load, {"cpu": 24, "gpu": 24}, duration_s=seconds, patient=True)
    scenario = read_scenario(file, policies=["inferline"], seed=2)
    found = run(scenario)
    visits = found["pipeline"]["vertices"]
    assert scenario.policies[0].plans["p"].vertices["b"].scale == pytest.approx(mean, rel=0.05)
    assert visits["b"]["share"] == pytest.approx(mean, rel=0.1)
    assert visits["c"]["visits"] == visits["b"]["visits"]
    latencies = estimated(scenario, asked)
    for share, key in ((0.5, "p50_ms"), (0.99, "p99_ms")):
        assert found[key] == pytest.approx(1000.0 * at_percentile(latencies, share), rel=0.1), key


@pytest.mark.parametrize("policy", ["inferline", pytest.param("model-less", marks=pytest.mark.slow)])
@pytest.mark.parametrize("edges", [pytest.param(DIAMOND, marks=pytest.mark.slow), TREE], ids=["diamond", "tree"])
def test_plans_meet_the_objective_with_another_seed(tmp_path: Path, edges: Edges, policy: str) -> None:
    scenario = posed(
        tmp_path, edges, policy, load={"arrivals": "gamma", "cv": 1.5, "rate": 60}, seconds=30.0, patient=False
    )
    assert run(scenario)["attainment"] >= scenario.policies[0].plans["p"].percentile


@pytest.mark.slow
def test_when_the_load_triples_the_tuner_gives_all_vertices_replicas_at_once(tmp_path: Path) -> None:
    rate = [[0, 40], [15, 40], [15.1, 120], [30, 120]]
    file = write_scenario(tmp_path, problem(CHAIN), {"rate": rate}, WORKERS, duration_s=30.0, seconds=15.0)
    scenario = read_scenario(file, policies=["inferline"], seed=2)
    plan, found = scenario.policies[0].plans["p"], run(scenario)
    assert plan.rate == pytest.approx(40.0, rel=0.15), "it knows the first 15 s only"
    ups = [one for one in found["pipeline"]["changes"] if one["action"] == "up"]
    assert ups
    first = [one["vertex"] for one in ups if one["time"] == ups[0]["time"]]
    assert 15.0 < ups[0]["time"] < 20.0
    assert len(first) == len(set(first)) > 1
    vertices = found["pipeline"]["vertices"]
    assert sum(one["replicas"] for one in vertices.values()) > sum(one["plan"]["replicas"] for one in vertices.values())
    assert found["pipeline"]["cost"] > found["pipeline"]["plan"]["cost"]
    assert found["attainment"] > 0.85
