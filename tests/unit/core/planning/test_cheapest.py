"""The cheapest plan against the paper's tables, brute force, and an independent check of every constraint."""

from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.core.planning.plan import Plan, cheapest, greedy, objective
from services.core.planning.problem import PlanningProblem, RequirementClass, lacking, react
from tests.support.data.planning_problems import (
    TABLE_2,
    broken,
    carried,
    entangled_problem,
    random_problem,
    scarce,
    table_3,
)

solve = partial(cheapest, time_limit_s=None, gap=0.0)


@pytest.mark.parametrize(
    ("load", "latency_ms", "instances", "cost"),
    [
        (10, 300, {"A": 2, "B": 0, "C": 0}, 2),
        (10, 50, {"A": 0, "B": 1, "C": 0}, 3),
        (1000, 300, {"A": 0, "B": 2, "C": 1}, 22),
    ],
)
@pytest.mark.parametrize("form", ["multiplicative", "additive"])
def test_tables_2_and_3_of_the_paper(
    load: float, latency_ms: float, instances: dict[str, int], cost: float, form: str
) -> None:
    plan = solve(table_3(load, latency_ms, objective=form))
    assert (plan.instances, plan.cost_per_s) == (instances, cost)
    assert (plan.status, plan.solver, plan.gap) == ("optimal", "ilp", 0.0)
    assert {action.kind for action in plan.actions} == {"load"}


def test_loading_latency_changes_the_choice_and_the_two_forms_differ() -> None:
    """20 items/s: four A at 4 US$/s, or one B at 3 that takes four times as long to load."""
    assert solve(table_3(20, 300)).instances["B"] == 1
    assert solve(table_3(20, 300, loading_weight=0.3)).instances["A"] == 4  # 4 × 1.3 against 3 × 2.2
    assert solve(table_3(20, 300, loading_weight=0.3, objective="additive")).instances["B"] == 1  # 5.2 against 4.2


def test_slack_leaves_room_and_a_variant_serves_two_apps_with_what_one_leaves() -> None:
    assert solve(table_3(100, 50)).instances["B"] == 1
    assert solve(table_3(100, 50, slack=1.05)).instances["B"] == 2
    exactly = replace(TABLE_2[1], saturation_qps=105.0)
    assert solve(table_3(100, 50, slack=1.05, candidates=(exactly,))).instances["B"] == 1  # 1.05 × 100 > 105 in floats
    shared = replace(TABLE_2[2], apps=("classify", "detect"))
    problem = table_3(700, 300, candidates=(*TABLE_2[:2], shared))
    demands = (*problem.demands, RequirementClass(app="detect", load=100, latency_ms=50))
    assert solve(replace(problem, demands=demands)).instances == {"A": 0, "B": 0, "C": 1}
    fuller = (*problem.demands, RequirementClass(app="detect", load=150, latency_ms=50))
    assert solve(replace(problem, demands=fuller)).instances == {"A": 0, "B": 1, "C": 1}


def test_what_runs_is_kept_replaced_or_unloaded() -> None:
    running = (replace(TABLE_2[0], running=3), TABLE_2[1], replace(TABLE_2[2], running=1))
    plan = solve(table_3(10, 300, candidates=running))
    assert [(a.variant, a.delta, a.kind) for a in plan.actions] == [("A", -1, "unload"), ("C", -1, "unload")]
    assert plan.objective == -17.0
    upgrade = solve(table_3(90, 300, candidates=running[:2]))
    assert [(a.variant, a.delta, a.kind) for a in upgrade.actions] == [("A", -3, "unload"), ("B", 1, "upgrade")]
    more = solve(table_3(20, 300, candidates=running[:1]))
    assert [(a.variant, a.delta, a.kind) for a in more.actions] == [("A", 1, "replicate")]
    downgrade = solve(table_3(10, 300, candidates=(TABLE_2[0], running[2])))
    assert [(a.variant, a.delta, a.kind) for a in downgrade.actions] == [("A", 2, "downgrade"), ("C", -1, "unload")]


def test_classes_are_carried_by_what_they_accept_only() -> None:
    measured = (replace(TABLE_2[0], accuracy=0.9), replace(TABLE_2[1], accuracy=0.7), replace(TABLE_2[2], accuracy=0.9))
    demands = (
        RequirementClass(app="classify", load=10, accuracy=0.8),
        RequirementClass(app="classify", load=10, latency_ms=50),
        RequirementClass(app="classify", load=1, cost=1.0),  # A costs 200 US$ per 1,000, B 30, C 20
    )
    problem = table_3(0, 300, candidates=measured, demands=demands[:2])
    assert solve(problem).instances == {"A": 2, "B": 1, "C": 0}
    plan = solve(replace(problem, demands=demands))
    assert plan.status == "infeasible"
    assert "no variant costs at most US$ 1 per 1,000 queries: C costs 20" in plan.reason
    assert plan.instances == {"A": 2, "B": 1, "C": 0}


def test_budgets_are_never_exceeded_and_what_does_not_fit_is_named() -> None:
    assert solve(table_3(1000, 300, budget_per_s=22.0)).status == "optimal"
    poor = solve(table_3(1000, 300, budget_per_s=21.0))
    assert poor.status == "infeasible"
    assert poor.cost_per_s <= 21
    assert "the budget of 75,600 US$/h" in poor.reason
    gpu = replace(TABLE_2[2], uses={"gpus": 1.0})
    plan = solve(table_3(1000, 16, candidates=(gpu,), resources={"gpus": 1.0}))
    assert (plan.status, plan.instances) == ("infeasible", {"C": 1})
    assert plan.unmet[0].missing == pytest.approx(200)
    assert "200 items/s more than fits in gpus (1)" in plan.reason
    nothing = solve(table_3(1000, 10))
    assert (nothing.status, nothing.actions) == ("infeasible", ())
    assert nothing.reason == "app classify: no variant answers within 10 ms: C takes 15 ms"


def test_what_is_excluded_and_that_there_is_nothing_to_do() -> None:
    bounded = (TABLE_2[0], replace(TABLE_2[1], most=3), replace(TABLE_2[2], most=0))
    assert solve(table_3(500, 300, candidates=bounded)).instances == {"A": 40, "B": 3, "C": 0}
    assert solve(table_3(0, 300)).actions == ()
    assert solve(PlanningProblem(candidates=(), demands=())).status == "optimal"
    assert (
        solve(PlanningProblem(candidates=(), demands=(RequirementClass(app="a", load=1),))).reason
        == "app a: has no variant"
    )


def small(seed: int) -> PlanningProblem:
    """At most four of each of three candidates, so that every plan can be looked at."""
    problem = random_problem(seed, apps=1, variants=3)
    candidates = tuple(replace(one, most=4, running=(seed + i) % 3) for i, one in enumerate(problem.candidates))
    load = (seed * 97) % 2500
    demands = (
        RequirementClass(app="a0", load=load, latency_ms=300),
        RequirementClass(app="a0", load=(seed * 31) % 150, latency_ms=50),
    )
    return replace(problem, candidates=candidates, demands=demands, resources={"inferentia_memory": 3.0})


def cheapest_of_all(problem: PlanningProblem) -> float | None:
    """By looking at every plan."""
    found = []
    for counts in product(range(5), repeat=3):
        fits = (
            sum(one.uses.get("inferentia_memory", 0) * n for one, n in zip(problem.candidates, counts, strict=True))
            <= 3
        )
        names = {one.name: n for one, n in zip(problem.candidates, counts, strict=True)}
        if fits and carried(problem, names):
            found.append(objective(problem, counts))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_cheaper(seed: int) -> None:
    problem = small(seed)
    plan, best = solve(problem), cheapest_of_all(problem)
    assert (plan.status == "infeasible") == (best is None)
    if best is not None:
        assert plan.objective == pytest.approx(best)


@pytest.mark.parametrize("seed", range(40))
def test_constraints_hold(seed: int) -> None:
    problem = entangled_problem(seed)
    plan = cheapest(problem, time_limit_s=60.0, gap=1e-3)
    assert broken(problem, plan) == []
    assert (plan.status == "infeasible") == bool(plan.unmet)


def tight(seed: int) -> PlanningProblem:
    loose = random_problem(seed, apps=12)
    return scarce(loose, solve(loose), seed, 0.8, 1.0)


def test_without_time_the_plan_is_the_greedy_one_and_with_few_nodes_always_the_same() -> None:
    problem = tight(1)
    plan = cheapest(problem, time_limit_s=1e-9)
    assert (plan.solver, plan.instances) == ("greedy", greedy(problem).instances)
    assert plan.reason.startswith("exact solver: no plan within the limits")
    problem = tight(2)
    first = cheapest(problem, node_limit=1)
    assert first == cheapest(problem, node_limit=1)
    assert broken(problem, first) == []


@pytest.mark.parametrize("seed", range(15))
def test_never_dearer_than_greedy(seed: int) -> None:
    loose = random_problem(seed)
    problem = scarce(loose, solve(loose), seed, 0.8, 1.5)
    ours, theirs = cheapest(problem, time_limit_s=60.0), greedy(problem)
    assert broken(problem, ours) == []
    if theirs.status != "infeasible":
        assert ours.status != "infeasible"
        assert ours.objective <= theirs.objective * (1 + 1e-6)


# -- The paper's greedy reaction (section 4.2.2): replicate what runs, or upgrade to one other variant, within what there is
# room for.


@pytest.mark.parametrize(
    ("load", "latency_ms", "instances"),
    [
        (10, 300, {"A": 2, "B": 0, "C": 0}),
        (10, 50, {"A": 0, "B": 1, "C": 0}),
        (1000, 300, {"A": 0, "B": 10, "C": 0}),  # of one variant; the cheapest mixture is 2 B + 1 C
    ],
)
def test_the_loads_of_table_3(load: float, latency_ms: float, instances: dict[str, int]) -> None:
    plan = greedy(table_3(load, latency_ms))
    assert (plan.instances, plan.status, plan.solver) == (instances, "feasible", "greedy")


def test_replicate_or_upgrade_whichever_costs_and_loads_less() -> None:
    """The paper's two options for a running variant that no longer suffices. What runs stays."""
    running = (replace(TABLE_2[0], running=2), *TABLE_2[1:])
    assert react(table_3(10, 300, candidates=running)).added == {}
    assert react(table_3(12, 300, candidates=running)).added == {"A": 1}
    assert react(table_3(60, 300, candidates=running)).added == {"B": 1}
    # Three more A at 3 US$/s, or one B at 2.9 that loads for four seconds.
    cheaper = (replace(TABLE_2[0], running=1), replace(TABLE_2[1], cost_per_s=2.9))
    assert react(table_3(20, 300, candidates=cheaper, loading_weight=0.0)).added == {"B": 1}
    assert react(table_3(20, 300, candidates=cheaper, loading_weight=0.1)).added == {"A": 3}


def test_what_does_not_fit_is_named_and_the_most_is_taken() -> None:
    sized = tuple(replace(one, uses={"cores": 1.0}, running=int(one.name == "A")) for one in TABLE_2[:2])
    problem = table_3(500, 300, candidates=sized, resources={"cores": 3.0})
    found = react(problem)
    assert (found.added, found.lacking) == ({"B": 2}, {0: pytest.approx(500 - 5 - 200)})
    assert lacking(problem) == {0: pytest.approx(495)}
    sized = (replace(TABLE_2[2], uses={"gpus": 1.0}),)
    plan = greedy(table_3(1000, 16, candidates=sized, resources={"gpus": 1.0}))
    assert (plan.status, plan.instances) == ("infeasible", {"C": 1})
    assert "200 items/s more than fits in gpus (1)" in plan.reason
    assert greedy(table_3(1000, 10)).reason == "app classify: no variant answers within 10 ms: C takes 15 ms"


def test_what_serves_one_class_serves_no_other() -> None:
    shared = replace(TABLE_2[1], running=1)
    demands = tuple(RequirementClass(app="classify", load=60, latency_ms=ms) for ms in (50, 300))
    assert react(table_3(0, 300, candidates=(shared,), demands=demands)).added == {"B": 1}


@given(st.integers(0, 10**9))
def test_constraints_hold_where_variants_are_shared(seed: int) -> None:
    problem = entangled_problem(seed)
    problem = replace(
        problem,
        candidates=tuple(
            replace(one, running=0 if one.most is None else min(one.running, one.most)) for one in problem.candidates
        ),
    )
    plan = greedy(problem)
    assert broken(problem, plan) == []
    assert (plan.status == "infeasible") == bool(plan.unmet)


@given(st.integers(0, 10**9), st.sampled_from([0.5, 0.8, 1.0, 1.5]))
def test_constraints_hold_where_resources_are_scarce(seed: int, tightness: float) -> None:
    loose = random_problem(seed)
    problem = scarce(loose, greedy(loose), seed, tightness, tightness + 0.5)
    assert broken(problem, greedy(problem)) == []


def test_one_variant_is_near_the_cheapest_mixture_where_nothing_is_scarce() -> None:
    ratios = [greedy(one).objective / cheapest(one, gap=1e-3).objective for one in map(random_problem, range(20))]
    assert max(ratios) < 1.6
    assert sum(ratios) / len(ratios) < 1.15


def test_the_check_of_constraints_sees() -> None:
    """What would make the tests above pass for nothing."""
    loose = random_problem(5)
    plan = greedy(loose)
    problem = scarce(loose, plan, 5, 1.0, 1.2)
    name = max(plan.instances, key=lambda name: plan.instances[name])

    def changed(n: int) -> Plan:
        return replace(plan, instances=plan.instances | {name: n})

    assert broken(loose, plan) == []
    assert any("not carried" in text for text in broken(loose, changed(0)))
    assert any("memory" in text for text in broken(problem, changed(1000)))
    assert any("-1 instances" in text for text in broken(loose, changed(-1)))
    assert any("actions" in text for text in broken(loose, changed(plan.instances[name] + 1)))
