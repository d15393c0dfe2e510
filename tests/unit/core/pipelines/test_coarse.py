"""The baselines' tuner adds whole units when those that there are do not serve what comes, and keeps them for two minutes."""

import numpy as np
import pytest
from msgspec.structs import replace

from bus.messages.catalog import PipelinePlan
from services.core.pipelines.envelope import BIN_S
from services.core.pipelines.planners import IDLE_S, POLICIES, CoarseTuner, make_tuner, plan_pipeline
from services.core.pipelines.problem import PipelineProblem, StageOption
from services.core.pipelines.tuner import PipelineTuner, TunerDecision
from tests.support.data.pipelines import Floats, chain, gamma_arrivals

T0 = 1_700_000_000.0


def plan_for(rate: float, policy: str = "cg-mean") -> PipelinePlan:
    """Units of 50 queries/s: the second stage takes 20 ms."""
    options = tuple(
        StageOption(vertex=name, hardware="gpu", price_per_hour=1.0, batch_latency_ms={1: ms})
        for name, ms in (("v0", 5.0), ("v1", 20.0))
    )
    posed = PipelineProblem(
        name="p", pipeline=chain(2), latency_ms=300.0, options=options, arrivals=gamma_arrivals(rate, 1.0, 300.0, 1)
    )
    return plan_pipeline(posed, policy)


def run(
    tuner: CoarseTuner | PipelineTuner, arrivals: Floats, seconds: float, dispatchers: int = 1
) -> list[tuple[float, TunerDecision]]:
    found = []
    counts = [
        np.bincount(((arrivals[d::dispatchers]) / BIN_S).astype(int), minlength=round(seconds / BIN_S) + 20)
        for d in range(dispatchers)
    ]
    for i in range(round(seconds / 0.1)):
        for mine in counts:
            now = T0 + (i + 1) * 0.1
            decision = tuner.told(T0 + i * 0.1, mine[10 * i : 10 * i + 10].tolist(), now)
            if decision is not None:
                found.append((now - T0, decision))
    return found


def step(rate: float, until_s: float, end_s: float) -> Floats:
    """130/s, from 60 s to `until_s` this rate."""
    parts = [gamma_arrivals(130.0, 1.0, 60.0, 2), 60.0 + gamma_arrivals(rate, 1.0, until_s - 60.0, 3)]
    return np.concatenate([*parts, until_s + gamma_arrivals(130.0, 1.0, end_s - until_s, 4)])


@pytest.mark.parametrize("dispatchers", [1, 3])
def test_units_for_the_rate_are_enough_while_it_stays(dispatchers: int) -> None:
    plan = plan_for(130.0)
    assert {stage.replicas for stage in plan.vertices.values()} == {3}
    assert not run(CoarseTuner(plan, T0), gamma_arrivals(130.0, 1.0, 300.0, 5), 300.0, dispatchers)


def test_all_vertices_get_a_replica_for_each_unit_and_later_than_the_envelope_says() -> None:
    found = run(CoarseTuner(plan_for(130.0), T0), step(230.0, 120.0, 121.0), 120.0)
    assert found[0][1].action == "up"
    assert all(len(set(decision.replicas.values())) == 1 for _, decision in found)
    assert found[-1][1].replicas["v0"] >= 5
    sooner = run(PipelineTuner(plan_for(130.0, "inferline"), T0), step(230.0, 120.0, 121.0), 120.0)
    assert 60.0 < sooner[0][0] < found[0][0] < 75.0


def test_units_stay_for_two_minutes_without_need() -> None:
    found = run(CoarseTuner(plan_for(130.0), T0), step(230.0, 90.0, 360.0), 360.0)
    downs = [at for at, decision in found if decision.action == "down"]
    assert downs[0] >= 90.0 + IDLE_S - 10.0
    assert found[-1][1].replicas == {"v0": 3, "v1": 3}


def test_what_waits_counts() -> None:
    """A rate of twelve units for three seconds: the mean of ten seconds is less than what then waits asks for."""
    burst = np.concatenate([gamma_arrivals(130.0, 1.0, 60.0, 2), 60.0 + gamma_arrivals(600.0, 1.0, 3.0, 3)])
    found = run(CoarseTuner(plan_for(130.0), T0), burst, 66.0)
    (rate,) = {decision.lambda_max for at, decision in found if at == found[-1][0]}
    assert found[-1][1].replicas["v0"] * 50.0 > rate + 50.0


def test_one_unit_stays_without_traffic() -> None:
    found = run(CoarseTuner(plan_for(130.0), T0), np.array([0.5]), 200.0)
    assert found[-1][1].replicas == {"v0": 1, "v1": 1}


def test_it_goes_on_from_the_units_there_are() -> None:
    tuner = CoarseTuner(plan_for(130.0), T0, replicas={"v0": 6, "v1": 6})
    assert not run(tuner, gamma_arrivals(130.0, 1.0, 60.0, 6), 60.0)
    assert tuner.replicas == {"v0": 6, "v1": 6}


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_has_its_tuner(policy: str) -> None:
    tuner = make_tuner(plan_for(130.0, policy), T0, {"v0": 4, "v1": 4})
    assert type(tuner) is (CoarseTuner if policy.startswith("cg-") else PipelineTuner)
    assert tuner.replicas == {"v0": 4, "v1": 4}


def test_a_plan_that_names_no_traffic_has_no_tuner() -> None:
    assert make_tuner(replace(plan_for(130.0), rate=0.0), T0) is None
