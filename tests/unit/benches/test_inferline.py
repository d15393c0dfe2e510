"""The replay of a pipeline whose replicas come and go, of InferLine's benches."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benches" / "paper"))

from inferline_estimator import stage
from inferline_pipelines import GRAPHS, latencies, problem_of, sample
from inferline_replay import replay, served
from inferline_tuner import ramp

from services.core.pipelines.planners import plan_pipeline
from services.core.pipelines.problem import problem_errors
from services.core.pipelines.tuner import PipelineTuner


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
