"""Exact within its limits, greedy where they are not enough."""

from math import inf

import pytest

from services.core.planning.exact import ExactSolver
from services.core.planning.greedy import GreedySolver
from services.core.planning.problem import PlanningProblem
from services.core.planning.solvers import SOLVERS, ExactOrGreedy, make_solver
from tests.support.data.planning_problems import broken, entangled_problem, random_problem, scarce, table_3


def tight(seed: int) -> PlanningProblem:
    loose = random_problem(seed, apps=12)
    return scarce(loose, GreedySolver().solve(loose), seed, 0.8, 1.0)


def test_without_time_the_plan_is_the_greedy_one_and_says_why() -> None:
    problem = tight(3)
    plan = ExactOrGreedy(ExactSolver(time_limit_s=1e-6, gap=0.0), GreedySolver()).solve(problem)
    assert plan.solver == "greedy"
    assert plan.status == "feasible"
    assert plan.instances == GreedySolver().solve(problem).instances
    assert plan.reason.startswith("exact solver: no plan within the limits")


@pytest.mark.parametrize("seed", range(15))
def test_never_dearer_than_greedy(seed: int) -> None:
    problem = entangled_problem(seed)
    greedy, both = GreedySolver().solve(problem), make_solver("ilp", time_limit_s=1.0).solve(problem)
    assert broken(problem, both) == []
    if greedy.status == "feasible":
        assert both.status != "infeasible"
        assert both.objective <= greedy.objective + 1e-3 * abs(greedy.objective)


@pytest.mark.parametrize("seed", [*range(6), 42, 83, 111, 123, 178])
def test_without_limits_the_plan_is_as_cheap_as_by_the_exact_solver(seed: int) -> None:
    loose = random_problem(seed)
    problem = scarce(loose, GreedySolver().solve(loose), seed, 0.7, 1.3)
    exact = ExactSolver(time_limit_s=None, gap=1e-6).solve(problem)
    plan = make_solver("ilp", time_limit_s=None, gap=1e-6).solve(problem)
    assert plan.status == exact.status
    if exact.status != "infeasible":
        assert plan.objective == pytest.approx(exact.objective, rel=1e-5)


def test_a_node_limit_that_is_too_small_leaves_a_plan_and_says_so() -> None:
    loose = random_problem(147, apps=22, variants=8)
    problem = scarce(loose, GreedySolver().solve(loose), 147, 0.8, 1.5)
    plan = make_solver("ilp", time_limit_s=None, node_limit=1).solve(problem)
    assert plan.status == "feasible"
    assert "stopped at its limit" in plan.reason
    assert broken(problem, plan) == []


@pytest.mark.parametrize("seed", range(10))
def test_a_plan_that_is_proven_needs_no_search(seed: int) -> None:
    problem = random_problem(seed)
    plan = make_solver("ilp", time_limit_s=1e-6, gap=1e-9).solve(problem)
    assert (plan.status, plan.solver, plan.reason) == ("optimal", "ilp", "")
    assert plan.objective == pytest.approx(ExactSolver(time_limit_s=None, gap=0.0).solve(problem).objective)


def test_infeasible_is_told_by_either() -> None:
    for name in SOLVERS:
        plan = make_solver(name).solve(table_3(10, 10))
        assert (plan.status, plan.reason) == (
            "infeasible",
            "app classify: no variant answers within 10 ms: C takes 15 ms",
        )
        assert plan.gap is None


def test_solvers_by_name() -> None:
    assert [make_solver(name).name for name in SOLVERS] == ["ilp", "greedy"]
    with pytest.raises(ValueError, match="no solver 'gurobi'; there are: ilp, greedy"):
        make_solver("gurobi")
    assert make_solver("ilp", time_limit_s=None, gap=inf).solve(table_3(10, 50)).cost_per_s == 3
