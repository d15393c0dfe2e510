"""The exact solver against the paper's tables, brute force, and an independent check of every constraint."""

from itertools import product
from math import inf

import pytest
from msgspec.structs import replace

from services.core.planning.exact import Deadline, ExactSolver
from services.core.planning.greedy import GreedySolver
from services.core.planning.highs import Unsolved
from services.core.planning.plan import objective
from services.core.planning.problem import PlanningProblem, RequirementClass
from services.core.planning.solvers import make_solver
from tests.support.data.planning_problems import (
    TABLE_2,
    broken,
    carried,
    entangled_problem,
    random_problem,
    scarce,
    table_3,
)

SOLVER = ExactSolver(time_limit_s=None, gap=0.0)


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
    plan = SOLVER.solve(table_3(load, latency_ms, objective=form))
    assert plan.instances == instances
    assert plan.cost_per_s == cost
    assert (plan.status, plan.solver, plan.gap) == ("optimal", "ilp", 0.0)
    assert {action.kind for action in plan.actions} == {"load"}


def test_loading_latency_changes_the_choice_and_the_two_forms_differ() -> None:
    """20 items/s: four A at 4 US$/s, or one B at 3 that takes four times as long to load."""
    assert SOLVER.solve(table_3(20, 300)).instances["B"] == 1
    assert SOLVER.solve(table_3(20, 300, loading_weight=0.3)).instances["A"] == 4  # 4 × 1.3 against 3 × 2.2
    assert (
        SOLVER.solve(table_3(20, 300, loading_weight=0.3, objective="additive")).instances["B"] == 1
    )  # 5.2 against 4.2


def test_slack_asks_for_room_to_spare() -> None:
    assert SOLVER.solve(table_3(100, 50)).instances["B"] == 1
    assert SOLVER.solve(table_3(100, 50, slack=1.05)).instances["B"] == 2
    exactly = replace(TABLE_2[1], saturation_qps=105.0)
    assert (
        SOLVER.solve(table_3(100, 50, slack=1.05, candidates=(exactly,))).instances["B"] == 1
    )  # 1.05 × 100 > 105 in floats


def test_what_runs_is_kept_replaced_or_unloaded() -> None:
    running = (replace(TABLE_2[0], running=3), TABLE_2[1], replace(TABLE_2[2], running=1))
    plan = SOLVER.solve(table_3(10, 300, candidates=running))
    assert [(a.variant, a.delta, a.kind) for a in plan.actions] == [("A", -1, "unload"), ("C", -1, "unload")]
    assert plan.objective == -17.0
    upgrade = SOLVER.solve(table_3(90, 300, candidates=running[:2]))
    assert [(a.variant, a.delta, a.kind) for a in upgrade.actions] == [("A", -3, "unload"), ("B", 1, "upgrade")]
    more = SOLVER.solve(table_3(20, 300, candidates=running[:1]))
    assert [(a.variant, a.delta, a.kind) for a in more.actions] == [("A", 1, "replicate")]
    downgrade = SOLVER.solve(table_3(10, 300, candidates=(TABLE_2[0], running[2])))
    assert [(a.variant, a.delta, a.kind) for a in downgrade.actions] == [("A", 2, "downgrade"), ("C", -1, "unload")]


def test_room_for_both_while_one_replaces_the_other() -> None:
    sized = tuple(replace(one, uses={"memory": 1.0}, running=one.name == "C") for one in TABLE_2)
    problem = table_3(10, 300, candidates=sized, resources={"memory": 2.0})
    assert SOLVER.solve(problem).instances == {"A": 2, "B": 0, "C": 0}
    both = SOLVER.solve(replace(problem, make_before_break=True))
    assert both.instances == {"A": 0, "B": 1, "C": 0}, "one B fits beside C, two A do not"


def test_a_variant_serves_two_apps_with_what_one_leaves() -> None:
    shared = replace(TABLE_2[2], apps=("classify", "detect"))
    problem = table_3(700, 300, candidates=(*TABLE_2[:2], shared))
    demands = (*problem.demands, RequirementClass(app="detect", load=100, latency_ms=50))
    assert SOLVER.solve(replace(problem, demands=demands)).instances == {"A": 0, "B": 0, "C": 1}
    fuller = (*problem.demands, RequirementClass(app="detect", load=150, latency_ms=50))
    assert SOLVER.solve(replace(problem, demands=fuller)).instances == {"A": 0, "B": 1, "C": 1}


def test_classes_are_carried_by_what_they_accept_only() -> None:
    measured = (replace(TABLE_2[0], accuracy=0.9), replace(TABLE_2[1], accuracy=0.7), replace(TABLE_2[2], accuracy=0.9))
    demands = (
        RequirementClass(app="classify", load=10, accuracy=0.8),
        RequirementClass(app="classify", load=10, latency_ms=50),
        RequirementClass(app="classify", load=0, cost=1.0, least=1),  # A costs 200 US$ per 1,000, B 30, C 20
    )
    problem = table_3(0, 300, candidates=measured, demands=demands[:2])
    assert SOLVER.solve(problem).instances == {"A": 2, "B": 1, "C": 0}
    plan = SOLVER.solve(replace(problem, demands=demands))
    assert plan.status == "infeasible"
    assert "no variant costs at most US$ 1000 per million answers: C costs 2e+04" in plan.reason
    assert plan.instances == {"A": 2, "B": 1, "C": 0}


def test_what_does_not_fit_is_named_and_the_rest_planned() -> None:
    gpu = replace(TABLE_2[2], uses={"gpus": 1.0})
    plan = SOLVER.solve(table_3(1000, 16, candidates=(gpu,), resources={"gpus": 1.0}))
    assert plan.status == "infeasible"
    assert plan.instances == {"C": 1}
    assert plan.unmet[0].missing == pytest.approx(200)
    assert "200 items/s more than fits in gpus (1)" in plan.reason
    nothing = SOLVER.solve(table_3(1000, 10))
    assert (nothing.status, nothing.actions) == ("infeasible", ())
    assert nothing.reason == "app classify: no variant answers within 10 ms: C takes 15 ms"


def test_a_budget_is_never_exceeded() -> None:
    assert SOLVER.solve(table_3(1000, 300, budget_per_s=22.0)).status == "optimal"
    poor = SOLVER.solve(table_3(1000, 300, budget_per_s=21.0))
    assert poor.status == "infeasible"
    assert poor.cost_per_s <= 21
    assert "the budget of 75,600 US$/h" in poor.reason


def test_held_and_excluded_variants() -> None:
    held = (replace(TABLE_2[0], running=5, least=4), TABLE_2[1], replace(TABLE_2[2], most=0))
    assert SOLVER.solve(table_3(500, 300, candidates=held)).instances == {"A": 4, "B": 5, "C": 0}
    crowded = tuple(replace(one, uses={"memory": 1.0}) for one in held)
    plan = SOLVER.solve(table_3(10, 300, candidates=crowded, resources={"memory": 1.0}))
    assert plan.instances == {"A": 4, "B": 0, "C": 0}, "what is held is there, even where there is too much of it"


def test_nothing_to_do() -> None:
    assert SOLVER.solve(table_3(0, 300)).actions == ()
    assert SOLVER.solve(PlanningProblem(candidates=(), demands=())).status == "optimal"
    assert (
        SOLVER.solve(PlanningProblem(candidates=(), demands=(RequirementClass(app="a", load=1),))).reason
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


def cheapest(problem: PlanningProblem) -> float | None:
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
    plan, best = SOLVER.solve(problem), cheapest(problem)
    assert (plan.status == "infeasible") == (best is None)
    if best is not None:
        assert plan.objective == pytest.approx(best)


@pytest.mark.parametrize("seed", range(40))
def test_constraints_hold(seed: int) -> None:
    problem = entangled_problem(seed)
    plan = ExactSolver(time_limit_s=60.0, gap=1e-3).solve(problem)
    assert broken(problem, plan) == []
    assert (plan.status == "infeasible") == bool(plan.unmet)


def test_what_cannot_be_carried_at_all_leaves_nothing_to_scale() -> None:
    """Two apps go without; HiGHS says so up to its tolerance."""
    loose = random_problem(390)
    plan = ExactSolver(time_limit_s=60.0, gap=1e-3).solve(scarce(loose, GreedySolver().solve(loose), 390, 0.6, 1.2))
    assert plan.status == "infeasible"
    assert [(one.app, round(one.missing, 1)) for one in plan.unmet] == [("a3", 873.6), ("a7", 550.0)]


def test_limits_end_the_search() -> None:
    loose = random_problem(1, apps=12)
    problem = scarce(loose, SOLVER.solve(loose), 1, 0.8, 1.0)
    with pytest.raises(Unsolved):
        ExactSolver(time_limit_s=1e-6, gap=0.0).solve(problem)


def test_a_node_limit_gives_the_same_plan_every_time() -> None:
    loose = random_problem(2, apps=12)
    problem = scarce(loose, SOLVER.solve(loose), 2, 0.8, 1.0)
    limited = ExactSolver(time_limit_s=None, gap=0.0, node_limit=1)
    first = limited.solve(problem)
    assert first == limited.solve(problem)
    assert broken(problem, first) == []


# -- One limit on time for a whole solve: by a clock that the test turns.


class TurnedClock:
    """A clock that moves by so much each time that somebody looks."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 100.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def hard(seed: int) -> PlanningProblem:
    loose = random_problem(seed, apps=22, variants=8)
    return scarce(loose, GreedySolver().solve(loose), seed, 0.8, 1.5)


def test_what_is_left() -> None:
    clock = TurnedClock()
    deadline = Deadline(2.0, clock)
    clock.now += 0.4
    assert deadline.left() == pytest.approx(1.6)
    assert deadline.since(0.5).left() == pytest.approx(0.1)
    assert deadline.since(0.3).left() == 0.0
    assert deadline.since(5.0).left() == pytest.approx(1.6)
    assert deadline.bounding({"node_limit": 1}, 0.5) == {"node_limit": 1, "time_limit": pytest.approx(0.72)}
    clock.now += 2.0
    assert deadline.left() == 0.0
    assert 0 < deadline.bounding({})["time_limit"] < 1e-3


def test_without_a_clock_each_run_has_the_limit_and_without_a_limit_none() -> None:
    assert Deadline(2.0).bounding({}) == {"time_limit": 2.0}
    assert Deadline(2.0).since(0.5).left() == 2.0
    assert Deadline(None, TurnedClock()).left() == inf
    assert Deadline().bounding({"node_limit": 3}) == {"node_limit": 3}


@pytest.mark.parametrize("seed", [40, 83, 106, 147, 149, 182])
def test_a_plan_that_time_cut_short_says_how_far_from_optimal_it_may_be(seed: int) -> None:
    """Each look takes 1 ms here: whatever the machine, the search ends in the midst of something."""
    problem = hard(seed)
    cheapest = make_solver("ilp", time_limit_s=None).solve(problem)
    assert cheapest.status == "optimal"
    for step in (0.0003, 0.001, 0.003, 0.03):
        plan = make_solver("ilp", time_limit_s=0.4, clock=TurnedClock(step)).solve(problem)
        assert broken(problem, plan) == []
        if plan.status == "feasible" and plan.gap is not None:
            assert plan.objective * (1 - plan.gap) <= cheapest.objective * (1 + 1e-4)
            assert "limit" in plan.reason
        elif plan.status == "optimal":
            assert plan.objective == pytest.approx(cheapest.objective, rel=3e-4)


def test_impatience_leaves_things_unproven_that_patience_proves() -> None:
    problem = hard(182)
    impatient = make_solver("ilp", time_limit_s=60.0, clock=TurnedClock(0.001), patience_s=1e-6).solve(problem)
    patient = make_solver("ilp", time_limit_s=60.0, clock=TurnedClock(0.001), patience_s=None).solve(problem)
    assert (impatient.status, patient.status) == ("feasible", "optimal")
    assert impatient.gap is not None
    assert patient.objective <= impatient.objective <= patient.objective / (1 - impatient.gap) * (1 + 1e-6)
