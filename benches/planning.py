"""How long planning takes, and how near greedy comes to exact: `python benches/planning.py [--problems N] [--repeats N]`.

Problems vary the paper's three variants (Table 2) by ±40 % in throughput, price and memory: 2 to 12 apps × 6 variants, nothing running.
"free": nothing is scarce. "scarce": totals are 0.8 to 1.5 times what the plan without limits takes, each resource by itself;
"tight": 0.6 to 1.2 times; problems without a plan are left out. Speed: 22, 50 and 100 architectures × 8 variants, as decided by
the default (exact, unless greedy's plan is proven optimal), by HiGHS alone, and by greedy.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf

import rig  # noqa: F401  (makes the packages importable)
import scipy.optimize  # noqa: F401  (reading it from disk is not solving)

from services.core.planning.exact import ExactSolver
from services.core.planning.greedy import GreedySolver
from services.core.planning.highs import Unsolved
from services.core.planning.plan import Plan
from services.core.planning.problem import PlanningProblem
from services.core.planning.solvers import make_solver
from tests.support.data.planning_problems import broken, random_problem, scarce

GREEDY = GreedySolver()
TIGHTNESS = {"free": None, "scarce": (0.8, 1.5), "tight": (0.6, 1.2)}


def problem_of(seed: int, kind: str, apps: int | None = None, variants: int = 6) -> PlanningProblem:
    loose = random_problem(seed, apps=apps, variants=variants)
    limits = TIGHTNESS[kind]
    return loose if limits is None else scarce(loose, GREEDY.solve(loose), seed, *limits)


def feasible(kind: str, count: int) -> Iterator[tuple[PlanningProblem, Plan]]:
    exact = ExactSolver(time_limit_s=5.0, gap=1e-3)
    seed = 0
    while count:
        problem = problem_of(seed, kind)
        seed += 1
        plan = exact.solve(problem)
        if plan.status != "infeasible":
            count -= 1
            yield problem, plan


def quality(kind: str, count: int) -> None:
    ratios, faults = [], 0
    for problem, exact in feasible(kind, count):
        plan = GREEDY.solve(problem)
        faults += bool(broken(problem, plan))
        ratios.append(plan.objective / exact.objective if plan.status == "feasible" else inf)
    near = sum(ratio <= 1.3 for ratio in ratios) / len(ratios)
    print(
        f"{kind:7} {len(ratios):8} {near:12.1%} {at(ratios, 0.5):8.3f} {at(ratios, 0.95):8.3f} {at(ratios, 0.99):8.3f} "
        f"{sum(ratio == inf for ratio in ratios):8} {faults:8}",
        flush=True,
    )


def speed(architectures: int, kind: str, repeats: int) -> None:
    problems = [problem_of(seed, kind, apps=architectures, variants=8) for seed in range(repeats)]
    for name, solve in (
        ("default", make_solver("ilp", clock=time.perf_counter).solve),
        ("HiGHS alone", ExactSolver(clock=time.perf_counter).solve),
        ("greedy", GREEDY.solve),
    ):
        taken, told = [], {"optimal": 0, "feasible": 0, "infeasible": 0, "unsolved": 0}
        for problem in problems:
            ms, status = timed(solve, problem)
            taken.append(ms)
            told[status] += 1
        counts = ", ".join(f"{n} {status}" for status, n in told.items() if n)
        size = f"{architectures} x 8"
        print(f"{size:8} {kind:7} {name:12} {at(taken, 0.5):9.2f} {at(taken, 0.99):9.2f}  {counts}", flush=True)


def timed(solve: Callable[[PlanningProblem], Plan], problem: PlanningProblem) -> tuple[float, str]:
    began = time.perf_counter()
    try:
        status: str = solve(problem).status
    except Unsolved:
        status = "unsolved"
    return 1000.0 * (time.perf_counter() - began), status


def at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", type=int, default=1000, help="for each line of greedy against exact")
    parser.add_argument(
        "--repeats", type=int, default=100, help="problems for each line of speed (half as many of 100)"
    )
    options = parser.parse_args()
    print(f"{'':7} {'problems':>8} {'within 1.3 x':>12} {'p50':>8} {'p95':>8} {'p99':>8} {'no plan':>8} {'broken':>8}")
    for kind in TIGHTNESS:
        quality(kind, options.problems)
    gc.collect()
    gc.freeze()  # as services do once they are up: what was imported is not looked through again and again
    print(f"\n{'size':8} {'':7} {'solver':12} {'p50 ms':>9} {'p99 ms':>9}")
    for architectures in (22, 50, 100):
        for kind in ("free", "scarce"):
            speed(architectures, kind, options.repeats if architectures < 50 else max(1, options.repeats // 2))


if __name__ == "__main__":
    main()
