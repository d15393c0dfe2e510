"""What settings of the model-autoscaler do: to a worker that plans for itself, because no leader does."""

from typing import Any

import pytest

from bus.memory import MemoryBus
from bus.subjects import Subjects
from services.autoscaler.models.__main__ import wire
from services.autoscaler.models.actor import ModelAutoscaler, Solve
from services.core.actor import After, Envelope, Started, Tick
from services.core.planning.greedy import GreedySolver
from services.core.planning.plan import Plan
from services.core.planning.problem import PlanningProblem
from services.core.settings import AutoscalerSettings, Settings, WorkerSettings
from tests.support.data.planning_problems import random_problem, scarce, table_3
from tests.support.servers.nats import run
from tests.support.simulated.autoscaled_fleet import ScalingFleet
from tests.support.simulated.fleet import PRICES, variant


@pytest.mark.parametrize("period_s", [0.5, 3.0])
def test_it_looks_again_after_each_period(period_s: float) -> None:
    actor = ModelAutoscaler("w0", Subjects(), PRICES, AutoscalerSettings(period_s=period_s))
    for message in (Started(), Tick("check")):
        [again] = [one for one in actor.handle(Envelope(0.0, message)) if isinstance(one, After)]
        assert again.delay == period_s


@pytest.mark.parametrize(("loading_weight", "objective"), [(0.3, "multiplicative"), (0.0, "additive")])
@pytest.mark.parametrize("led", [False, True])
def test_loading_latency_counts_as_the_settings_say_where_no_leader_plans(
    loading_weight: float, objective: str, led: bool
) -> None:
    """What they do to a plan: tests/unit/core/planning/test_exact.py."""
    tuned = {"loading_weight": loading_weight, "objective": objective}
    fleet = ScalingFleet(variant(base_ms=10.0, per_item_ms=10.0), tuned=tuned, controlled=led)
    fleet.load(20, 12, latency_ms=200)  # a leader has planned by then
    fleet.problems.clear()
    fleet.load(150, 4, latency_ms=200)
    told = {(problem.loading_weight, problem.objective) for problem in fleet.problems}
    assert told == (set() if led else {(loading_weight, objective)})


def plan(problem: PlanningProblem, **settings: Any) -> Plan:
    """As the edge of a worker with these settings makes it."""

    async def main() -> Plan:
        bus = MemoryBus()
        own = Settings(worker=WorkerSettings(name="w0"), autoscaler=AutoscalerSettings(**settings))
        try:
            [runtime] = await wire(own, bus)
            found: Plan = (await runtime._edge.perform(Solve(problem))).plan
            return found
        finally:
            await bus.close()

    return run(main())


def test_the_solver_is_the_one_of_the_settings() -> None:
    assert plan(table_3(20, 300), solver="ilp", time_limit_s=60.0).solver == "ilp"
    assert plan(table_3(20, 300), solver="greedy").solver == "greedy"


def test_without_time_the_exact_solver_gives_what_the_greedy_one_has() -> None:
    loose = random_problem(1, apps=12)
    problem = scarce(loose, GreedySolver().solve(loose), 1, 0.8, 1.0)
    assert plan(problem, solver="ilp", time_limit_s=60.0).solver == "ilp"
    assert plan(problem, solver="ilp", time_limit_s=1e-9).solver == "greedy"
