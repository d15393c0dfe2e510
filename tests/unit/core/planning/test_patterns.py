"""Planning by patterns finds what the whole programme finds; the search over groups finds what there is to find."""

from itertools import product
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from services.core.planning.beam import choose
from services.core.planning.exact import ExactSolver
from services.core.planning.greedy import GreedySolver
from services.core.planning.highs import Unsolved
from services.core.planning.patterns import PatternSearch
from services.core.planning.problem import PlanningProblem
from services.core.planning.program import compile_program, cost
from services.core.planning.solvers import make_solver
from tests.support.data.planning_problems import broken, random_problem, running_problem, scarce

GREEDY, WHOLE = GreedySolver(), ExactSolver(time_limit_s=None, gap=1e-6)
OPTIONS = {"mip_rel_gap": 1e-6}


def crowded(seed: int) -> PlanningProblem:
    """Scarce, some running, some held, some barred, some needed whatever the load."""
    rng, loose = Random(seed), random_problem(seed, apps=6)
    problem = scarce(loose, GREEDY.solve(loose), seed, 0.7, 1.3)
    running = [rng.choice([0, 0, 1, 2]) for _ in problem.candidates]
    return replace(
        problem,
        make_before_break=rng.random() < 0.5,
        candidates=tuple(
            replace(one, running=n, least=min(n, rng.choice([0, 0, 1])), most=rng.choice([None, None, n + 1]))
            for one, n in zip(problem.candidates, running, strict=True)
        ),
        demands=tuple(replace(one, least=rng.choice([0, 1])) for one in problem.demands),
    )


def test_as_cheap_as_the_whole_programme() -> None:
    found = 0
    for seed in range(40):
        problem = crowded(seed)
        program, whole = compile_program(problem), WHOLE.solve(problem)
        packed = GREEDY.pack(program)
        best = packed.packing.cost() if GREEDY.solve(problem).status == "feasible" else float("inf")
        try:
            cheapest = PatternSearch(program, packed.prices, best, 1e-6).run(OPTIONS)
        except Unsolved:
            continue
        assert cheapest.proven
        counts = cheapest.counts or packed.packing.counts
        plan = replace(whole, instances={one.name: n for one, n in zip(problem.candidates, counts, strict=True)})
        assert not [text for text in broken(problem, plan) if not text.startswith("actions")]
        reached = sum(
            (n - one.running) * one.cost_per_s * (1 + problem.loading_weight * one.load_s * (n > one.running))
            for one, n in zip(problem.candidates, counts, strict=True)
        )
        assert whole.status != "infeasible"
        assert reached == pytest.approx(whole.objective, rel=1e-5)
        found += 1
    assert found > 15


def test_shared_variants_are_not_for_patterns() -> None:
    shared = next(
        program
        for program in (compile_program(running_problem(seed)) for seed in range(20))
        if any(map(program.shared, range(len(program.home))))
    )
    with pytest.raises(Unsolved, match="shared"):
        PatternSearch(shared, [0.0] * len(shared.rows), 1.0, 0.0)


def test_a_limit_ends_the_search_with_what_is_known_and_how_far_it_may_be() -> None:
    loose = random_problem(147, apps=22, variants=8)
    problem = scarce(loose, GREEDY.solve(loose), 147, 0.8, 1.5)
    program, whole = compile_program(problem), make_solver("ilp", time_limit_s=None).solve(problem)
    packed = GREEDY.pack(program)
    best = packed.packing.cost()
    stopped = PatternSearch(program, packed.prices, best, 1e-6).run({"mip_rel_gap": 1e-6, "node_limit": 1})
    assert not stopped.proven
    reached = best if stopped.counts is None else cost(program, stopped.counts)
    assert whole.objective * (1 - 1e-3) <= reached <= best
    assert reached * (1 - stopped.gap) <= whole.objective
    plan = make_solver("ilp", time_limit_s=None, node_limit=1).solve(problem)
    assert plan.status == "feasible"
    assert "stopped at its limit" in plan.reason
    assert broken(problem, plan) == []


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("width", [1, 3, 10_000])
def test_the_cheapest_choice(seed: int, width: int) -> None:
    """Against every choice; a narrow search may miss it, and says then that it was not complete."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(4), 3)
    patterns = np.column_stack([rng.uniform(1, 10, 12), rng.uniform(0, 0.5, (12, 2))])
    room = np.array([1.0, 0.9])
    choices = [list(rows) for rows in product(*(np.flatnonzero(group == g) for g in range(4)))]
    fitting = [patterns[rows, 0].sum() for rows in choices if (patterns[rows, 1:].sum(axis=0) <= room).all()]
    best = choose(patterns, group, room, np.array([5.0, 5.0]), 1000.0, width)
    if best.complete:
        assert (best.rows is None) == (not fitting)
        assert best.rows is None or best.cost == pytest.approx(min(fitting))
        assert choose(patterns, group, room, np.array([5.0, 5.0]), min(fitting, default=0) - 0.01, width).rows is None
    assert best.complete or width < 10_000
    if best.rows is not None:
        assert sorted(group[best.rows]) == [0, 1, 2, 3]
        assert (patterns[best.rows, 1:].sum(axis=0) <= room + 1e-6).all()
