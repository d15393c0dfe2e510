"""Plans for accuracy: every constraint, the order carried, accurate, cheap, and how near greedy comes to the exact solver."""

from itertools import product
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy.optimize import linprog

from services.core.cost import merit
from services.core.planning.flow import deliver, value_of
from services.core.planning.plan import Plan
from services.core.planning.problem import CandidateVariant, PlanningProblem, RequirementClass
from services.core.planning.program import compile_program
from services.core.planning.solvers import make_solver
from tests.support.data.planning_problems import (
    accuracy_problem,
    broken,
    carried,
    entangled_problem,
    random_problem,
    running_problem,
)

ILP = make_solver("ilp", time_limit_s=None, node_limit=300)
GREEDY = make_solver("greedy")


def variant(name: str, accuracy: float | None, rate: float, cost: float = 1.0, **more: object) -> CandidateVariant:
    fields: dict[str, object] = {"apps": ("app",), "model": name, "hardware": "cpu", "latency_ms": 10.0}
    return CandidateVariant(
        **(
            {"name": name, "accuracy": accuracy, "saturation_qps": rate, "cost_per_s": cost, "uses": {"cores": 1.0}}
            | fields
            | more
        )  # type: ignore[arg-type]
    )


GOOD, QUICK = variant("good", 0.78, 30.0), variant("quick", 0.69, 100.0)


def problem(load: float, cores: float = 2.0, *candidates: CandidateVariant, **more: object) -> PlanningProblem:
    demands = (RequirementClass(app="app", load=load),)
    fields: dict[str, object] = {"resources": {"cores": cores}, "slack": 1.0, "goal": "accuracy", "demands": demands}
    return PlanningProblem(candidates=candidates or (GOOD, QUICK), **(fields | more))  # type: ignore[arg-type]


def worth(of: PlanningProblem, plan: Plan) -> tuple[float, float]:
    found = value_of(compile_program(of), [plan.instances[one.name] for one in of.candidates])
    return found.carried, found.accuracy


@pytest.mark.parametrize("solver", [ILP, GREEDY])
@pytest.mark.parametrize(
    ("load", "instances", "accuracy"),
    [
        (20.0, {"good": 1, "quick": 0}, 0.78),
        (60.0, {"good": 2, "quick": 0}, 0.78),
        (61.0, {"good": 1, "quick": 1}, (30 * 0.78 + 31 * 0.69) / 61),
        (130.0, {"good": 1, "quick": 1}, (30 * 0.78 + 100 * 0.69) / 130),
        (131.0, {"good": 0, "quick": 2}, 0.69),
        (300.0, {"good": 0, "quick": 2}, 0.69),
    ],
)
def test_less_accurate_variants_take_over_as_the_load_grows_and_no_sooner(
    solver: object, load: float, instances: dict[str, int], accuracy: float
) -> None:
    found = solver.solve(problem(load))  # type: ignore[attr-defined]
    assert found.instances == instances
    assert found.accuracy == pytest.approx(accuracy)
    assert (found.status == "infeasible") == (load > 200)


@pytest.mark.parametrize("solver", [ILP, GREEDY])
def test_of_equally_accurate_plans_the_cheapest_is_taken_and_an_unknown_accuracy_counts_as_none(solver: object) -> None:
    dear, unknown = variant("dear", 0.78, 100.0, 9.0), variant("unknown", None, 100.0, 0.1)
    found = solver.solve(problem(60.0, 4.0, GOOD, dear, unknown))  # type: ignore[attr-defined]
    assert found.instances == {"good": 2, "dear": 0, "unknown": 0}
    alone = solver.solve(problem(60.0, 4.0, unknown))  # type: ignore[attr-defined]
    assert (alone.instances, alone.accuracy) == ({"unknown": 1}, 0.0)


@pytest.mark.parametrize("solver", [ILP, GREEDY])
def test_a_budget_bounds_accuracy(solver: object) -> None:
    better = variant("better", 0.9, 100.0, 5.0)
    assert solver.solve(problem(60.0, 4.0, QUICK, better)).instances["better"] == 1  # type: ignore[attr-defined]
    assert solver.solve(problem(60.0, 4.0, QUICK, better, budget_per_s=4.0)).instances == {"quick": 1, "better": 0}  # type: ignore[attr-defined]


@pytest.mark.parametrize("solver", [ILP, GREEDY])
def test_what_is_shared_in_time_need_not_hold_both_during_a_swap(solver: object) -> None:
    running = replace(GOOD, running=2)
    kept = problem(80.0, 2.0, running, QUICK, make_before_break=True)
    assert solver.solve(kept).status == "infeasible"  # type: ignore[attr-defined]
    swapped = solver.solve(replace(kept, time_shared=frozenset({"cores"})))  # type: ignore[attr-defined]
    assert {one.variant: (one.delta, one.kind) for one in swapped.actions} == {
        "good": (-1, "unload"),
        "quick": (1, "downgrade"),
    }


def posed(seed: int) -> PlanningProblem:
    """One of the kinds of problems that tests know, served for accuracy."""
    make = (accuracy_problem, entangled_problem, running_problem)[seed % 3]
    shared = frozenset({"cpu/cores"}) if seed % 2 else frozenset()
    return replace(make(seed), goal="accuracy", time_shared=shared)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_plans_keep_every_constraint_and_the_exact_one_is_no_worse(seed: int) -> None:
    of = posed(seed)
    exact, greedy = ILP.solve(of), GREEDY.solve(of)
    assert broken(of, exact) == []
    assert broken(of, greedy) == []
    if exact.status != "infeasible":  # else who goes short is the exact solver's choice
        (most, ours), (some, theirs) = worth(of, exact), worth(of, greedy)
        assert most >= some * (1 - 1e-5)
        assert greedy.status == "infeasible" or ours >= theirs - 3e-4


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_what_is_carried_for_least_cost_is_carried_for_accuracy_too(seed: int) -> None:
    of = random_problem(seed, apps=3)
    of = replace(of, candidates=tuple(replace(one, accuracy=0.5 + i / 100) for i, one in enumerate(of.candidates)))
    for solver in (ILP, GREEDY):
        cheap, accurate = solver.solve(of), solver.solve(replace(of, goal="accuracy"))
        assert carried(of, accurate.instances)
        assert worth(of, accurate)[1] >= worth(of, cheap)[1] - 1e-4
        assert accurate.cost_per_s >= cheap.cost_per_s * (1 - 0.1)


@settings(max_examples=60)
@given(st.integers(0, 10_000))
def test_the_exact_plan_is_the_best_of_all_there_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = ("one", "other")
    candidates = tuple(
        variant(f"v{i}", round(float(rng.uniform(0.5, 0.9)), 2), float(rng.integers(5, 60)), float(rng.integers(1, 9)),
                apps=tuple(names[: rng.integers(1, 3)]), uses={"cores": float(rng.integers(1, 3))})
        for i in range(3)
    )  # fmt: skip
    demands = tuple(RequirementClass(app=name, load=float(rng.integers(1, 60))) for name in names)
    of = replace(problem(1.0, float(rng.integers(2, 6)), *candidates), demands=demands)
    program = compile_program(of)
    fitting = [
        counts
        for counts in product(range(7), repeat=3)
        if sum(n * one.uses["cores"] for n, one in zip(counts, candidates, strict=True)) <= of.resources["cores"]
    ]
    possible = [value_of(program, counts) for counts in fitting]
    whole = sum(group.need for group in program.groups if group.candidates)
    carrying = [found for found in possible if found.carried >= whole * (1 - 1e-6)]
    plan = ILP.solve(of)
    assert (plan.status == "infeasible") == (not carrying or not all(group.candidates for group in program.groups))
    if not carrying:
        return
    best = max(found.accuracy for found in carrying)
    cheapest = min(found.cost for found in carrying if found.accuracy >= best - 1e-9)
    found = value_of(program, [plan.instances[one.name] for one in candidates])
    assert found.accuracy >= best - 2e-4
    assert found.cost <= cheapest + 1e-6


@settings(max_examples=100)
@given(st.integers(0, 10_000))
def test_what_instances_deliver_is_the_most_that_any_sharing_of_the_load_could(seed: int) -> None:
    """Against the linear programme: first the most load, then the most accuracy."""
    of = posed(3 * seed + 1)
    program = compile_program(of)
    rng = np.random.default_rng(seed)
    counts = [int(rng.integers(0, 4)) for _ in of.candidates]
    found = deliver(program, counts)
    pairs = [(c, g) for g, group in enumerate(program.groups) for c in group.candidates]
    if not pairs:
        assert found.carried == 0
        return
    rows = np.zeros((len(counts) + len(program.groups), len(pairs)))
    for i, (c, g) in enumerate(pairs):
        rows[c, i] = rows[len(counts) + g, i] = 1.0
    limits = [n * one.saturation_qps for n, one in zip(counts, of.candidates, strict=True)]
    limits += [group.need for group in program.groups]
    value = np.array([1000.0 + merit(of.candidates[c].accuracy) for c, _ in pairs])
    best = linprog(-value, A_ub=rows, b_ub=limits)
    assert found.worth + 1000.0 * found.carried == pytest.approx(-best.fun, rel=1e-7, abs=1e-4)


@pytest.mark.slow
def test_greedy_comes_near_the_exact_plan() -> None:
    """500 such problems: docs/planning.md."""
    gaps = []
    for seed in range(12):
        of = accuracy_problem(seed)
        (most, exact), (some, greedy) = worth(of, ILP.solve(of)), worth(of, GREEDY.solve(of))
        assert some >= 0.9 * most
        if some >= most * (1 - 1e-5):
            gaps.append(1 - greedy / exact)
    assert mean(gaps) < 0.02
