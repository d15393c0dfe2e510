"""Benches of papers, short: the table of decision overhead has every row, and its bars hold; Rafiqi's shape on virtual time, by the services' own
actors; the replay of a pipeline whose replicas come and go, of InferLine's.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benches" / "paper"))

import compare
import rafiqi
import table7
from inferline_estimator import stage
from inferline_pipelines import GRAPHS, latencies, problem_of, sample
from inferline_replay import replay, served
from inferline_tuner import ramp

from services.core.pipelines.planners import plan_pipeline
from services.core.pipelines.problem import problem_errors
from services.core.pipelines.tuner import PipelineTuner
from services.simulation.scenario.read import read_scenario


def test_the_table_has_all_rows_and_decisions_are_as_quick_as_they_must_be() -> None:
    """INFaaS, Table 7: by name within 1 ms, by needs within 3.5 ms, ten times as fast as brute force. Ours take microseconds."""
    figure = table7.measured(100, 1, most=1000)
    ours = {row.what: row.mean for row in figure.rows}
    assert len(compare.table(figure).splitlines()[2:]) == len(ours) == 18, "no row stands twice"
    assert all(0.0 < value < float("inf") for value in ours.values())
    states = ("(a) not Active", "(b) Active")
    seen = ("needs asked before", "needs never seen")
    for state in states:
        for needs in seen:
            assert ours[f"a variant by name, {state}, {needs}: median"] <= 1000.0
            assert ours[f"app, > 72 %, 20 ms, {state}, {needs}: median"] <= 3500.0
            assert ours[f"app, > 72 %, 20 ms, {state}, {needs}: times as fast as brute force"] >= 10.0
        assert f"app, > 72 %, 20 ms, {state}, by brute force: median" in ours
    for needs in (*seen, "after a change"):
        assert ours[f"1,000 variants: app, > 72 %, 20 ms, (b) Active, {needs}: median"] <= 5000.0


SCENARIO = rafiqi.copies(read_scenario(compare.HERE / "rafiqi.toml"), 5)
QUERIES = 200


def measured(pattern: str, models: int) -> rafiqi.Measured:
    found = rafiqi.measure(SCENARIO, pattern, models, QUERIES)
    assert len(found.latencies) == QUERIES
    return found


def test_a_power_law_swaps_seldom_and_even_requests_of_five_models_each_time() -> None:
    found = measured("sequential", 5)
    assert found.swaps == QUERIES and found.demoted == QUERIES - rafiqi.CAP
    assert max(found.latencies) < 1000.0, "a model that is made again takes 30 s"
    assert measured("zipf", 5).swaps < 0.2 * QUERIES


@pytest.mark.parametrize("pattern", rafiqi.PATTERNS)
def test_four_models_come_to_the_device_once(pattern: str) -> None:
    found = measured(pattern, 4)
    assert (found.swaps, found.demoted) == (4, 0)


def test_many_queries_at_a_time_for_five_models_are_all_answered() -> None:
    found = rafiqi.measure(SCENARIO, "uniform", 5, QUERIES, clients=16)
    assert len(found.latencies) == QUERIES
    assert found.demoted > 0


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", GRAPHS)
def test_without_a_tuner_it_is_the_estimator(pipeline: str) -> None:
    problem = problem_of(pipeline, sample(100.0, 4.0, 60.0, 1), 0.35)
    assert not problem_errors(problem)
    plan = plan_pipeline(problem, effort=0)
    arrivals = sample(100.0, 4.0, 60.0, 2)
    found = replay(problem, plan, arrivals, 60.0)
    same = np.isclose(found.latencies, latencies(problem, plan, arrivals), rtol=0.0, atol=1e-9)
    assert same.mean() > 0.999  # where two things happen at the same moment, either may come first
    assert found.cost == pytest.approx(3600 * plan.cost_per_s)


def test_replicas_serve_from_their_activation_on_and_one_always_stays() -> None:
    """One query each 10 ms, and replicas that take 20 ms: with a second one from 1 s to 2 s."""
    ends = served(np.arange(1, 400) * 0.01, stage(0.0, 20.0, 1, 1), [(1.0, 1), (2.0, -1)])
    assert np.searchsorted(ends, [1.0, 2.0, 4.0], "right") == pytest.approx([50, 150, 250], abs=2)
    assert np.isfinite(served(np.array([1.0, 5.0, 6.0]), stage(0.0, 20.0, 1, 2), [(2.0, -5)])).all()


@pytest.mark.slow
def test_cost_is_paid_from_the_order_to_the_end() -> None:
    """Row 103: what a replay costs is the sum over replicas of price and time."""
    trace = ramp(300.0, 10.0, 1, 120.0)
    problem = problem_of("Image Processing", trace.sample, 0.35)
    plan = plan_pipeline(problem, effort=0, rounds=1)
    found = replay(problem, plan, trace.arrivals, 120.0, PipelineTuner(plan, 0.0))
    prices = {(one.vertex, one.hardware): one.price_per_hour for one in problem.options}
    total = 0.0
    for name, planned in plan.vertices.items():
        replicas, since = planned.replicas, 0.0
        for at, decision in found.decisions:
            total += prices[name, planned.hardware] * replicas * (at - since)
            replicas, since = decision.replicas[name], at
        total += prices[name, planned.hardware] * replicas * (120.0 - since)
    assert found.decisions
    assert found.cost == pytest.approx(total / 120.0)
