"""The greedy solver: never breaks a constraint, and stays near the exact one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.core.planning.exact import ExactSolver
from services.core.planning.greedy import GreedySolver
from services.core.planning.plan import Plan
from tests.support.data.planning_problems import TABLE_2, broken, entangled_problem, random_problem, scarce, table_3

GREEDY = GreedySolver()
EXACT = ExactSolver(time_limit_s=60.0, gap=1e-3)


@pytest.mark.parametrize(
    ("load", "latency_ms", "instances"),
    [(10, 300, {"A": 2, "B": 0, "C": 0}), (10, 50, {"A": 0, "B": 1, "C": 0}), (1000, 300, {"A": 0, "B": 2, "C": 1})],
)
def test_tables_2_and_3_of_the_paper(load: float, latency_ms: float, instances: dict[str, int]) -> None:
    plan = GREEDY.solve(table_3(load, latency_ms))
    assert plan.instances == instances
    assert (plan.status, plan.solver, plan.gap) == ("feasible", "greedy", 0.0)


def test_replicate_or_upgrade_whichever_costs_less() -> None:
    """The paper's two options for a running variant that no longer suffices."""
    running = (replace(TABLE_2[0], running=2), *TABLE_2[1:])
    a_little = GREEDY.solve(table_3(12, 300, candidates=running))
    assert [(a.variant, a.delta, a.kind) for a in a_little.actions] == [("A", 1, "replicate")]
    much = GREEDY.solve(table_3(60, 300, candidates=running))
    assert [(a.variant, a.delta, a.kind) for a in much.actions] == [("A", -2, "unload"), ("B", 1, "upgrade")]


def test_what_does_not_fit_is_named_and_the_rest_planned() -> None:
    sized = (replace(TABLE_2[2], uses={"gpus": 1.0}),)
    plan = GREEDY.solve(table_3(1000, 16, candidates=sized, resources={"gpus": 1.0}))
    assert plan.status == "infeasible"
    assert plan.instances == {"C": 1}
    assert "200 items/s more than fits in gpus (1)" in plan.reason
    assert GREEDY.solve(table_3(1000, 10)).reason == "app classify: no variant answers within 10 ms: C takes 15 ms"


@given(st.integers(0, 10**9))
def test_constraints_hold_where_variants_are_shared(seed: int) -> None:
    problem = entangled_problem(seed)
    plan = GREEDY.solve(problem)
    assert broken(problem, plan) == []
    assert (plan.status == "infeasible") == bool(plan.unmet)


@given(st.integers(0, 10**9), st.sampled_from([0.5, 0.8, 1.0, 1.5]))
def test_constraints_hold_where_resources_are_scarce(seed: int, tightness: float) -> None:
    loose = random_problem(seed)
    problem = scarce(loose, GREEDY.solve(loose), seed, tightness, tightness + 0.5)
    assert broken(problem, GREEDY.solve(problem)) == []


def ratios(least: float, most: float, seeds: range) -> list[float]:
    """Cost of greedy over exact, where there is a plan; infinite where greedy finds none."""
    found = []
    for seed in seeds:
        loose = random_problem(seed)
        problem = scarce(loose, GREEDY.solve(loose), seed, least, most)
        exact, greedy = EXACT.solve(problem), GREEDY.solve(problem)
        if exact.status == "infeasible":
            assert greedy.status == "infeasible"
        else:
            found.append(greedy.objective / exact.objective if greedy.status == "feasible" else float("inf"))
    return found


def test_near_the_exact_one_where_nothing_is_scarce() -> None:
    """benches/planning.py does this for 1,000 problems."""
    assert max(ratios(10.0, 10.0, range(40))) <= 1.0 + 1e-3


def test_near_the_exact_one_where_resources_are_scarce() -> None:
    found = ratios(0.8, 1.5, range(40))
    assert sum(ratio <= 1.3 for ratio in found) >= 0.95 * len(found)


def test_its_bound_is_one() -> None:
    """A plan that says how far it may be from optimal is no farther."""
    said = 0
    for seed in range(40):
        loose = random_problem(seed)
        problem = scarce(loose, GREEDY.solve(loose), seed, 0.7, 1.5)
        greedy = GREEDY.solve(problem)
        if greedy.status == "feasible" and greedy.gap is not None:
            exact = EXACT.solve(problem)
            said += 1
            assert greedy.objective * (1 - greedy.gap) <= exact.objective * (1 + 1e-9)
    assert said > 20


def test_the_check_of_constraints_sees() -> None:
    """What would make the tests above pass for nothing."""
    loose = random_problem(5)
    plan = GREEDY.solve(loose)
    problem = scarce(loose, plan, 5, 1.0, 1.2)
    name = max(plan.instances, key=lambda name: plan.instances[name])

    def changed(n: int) -> Plan:
        return replace(plan, instances=plan.instances | {name: n})

    assert broken(loose, plan) == []
    assert any("not carried" in text for text in broken(loose, changed(0)))
    assert any("memory" in text for text in broken(problem, changed(1000)))
    assert any("-1 instances" in text for text in broken(loose, changed(-1)))
    assert any("actions" in text for text in broken(loose, changed(plan.instances[name] + 1)))
