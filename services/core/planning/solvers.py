"""Solvers by the names that settings and the command line use."""

from services.core.planning.accurate import ExactAccuracy
from services.core.planning.deadline import Clock
from services.core.planning.delivered import SAME
from services.core.planning.exact import ExactSolver
from services.core.planning.fallback import ExactOrGreedy
from services.core.planning.greedy import GreedySolver
from services.core.planning.plan import Plan, Solver
from services.core.planning.problem import Problem
from services.core.planning.upgrading import Upgrading

SOLVERS = ("ilp", "greedy")
PATIENCE_S = 0.0016


class ByGoal:
    """The solver for the goal that a problem states."""

    def __init__(self, cheapest: Solver, most_accurate: Solver) -> None:
        self.name = cheapest.name
        self._cheapest, self._most_accurate = cheapest, most_accurate

    def solve(self, problem: Problem) -> Plan:
        """See `Solver`."""
        return (self._cheapest if problem.goal == "cost" else self._most_accurate).solve(problem)


def make_solver(
    name: str = "ilp",
    *,
    time_limit_s: float | None = 0.4,
    gap: float = 1e-4,
    node_limit: int | None = None,
    clock: Clock | None = None,
    patience_s: float | None = PATIENCE_S,
) -> Solver:
    """By name: "ilp", exact within its limits and backed by greedy; "greedy". Raises ValueError for other names.

    time_limit_s: of a whole solve, by this clock (seconds, such as time.monotonic); without one, of each run of HiGHS.
    patience_s: for each group of demands (20 at least); after so long a plan within 1 % of the cheapest will do, and after
    a quarter more one within 7 %. None: only the limit counts. A node limit and no time limit give the same plan for the same problem
    on any machine. Where accuracy is the goal there is no patience, and the gap is at least 10⁻⁴.
    """
    if name == "ilp":
        exact = ExactSolver(time_limit_s=time_limit_s, gap=gap, node_limit=node_limit, clock=clock)
        coarse = ExactSolver(time_limit_s=time_limit_s, gap=max(gap, SAME), node_limit=node_limit, clock=clock)
        return ByGoal(ExactOrGreedy(exact, GreedySolver(), patience_s=patience_s), ExactAccuracy(coarse))
    if name == "greedy":
        return ByGoal(GreedySolver(), Upgrading())
    raise ValueError(f"there is no solver {name!r}; there are: {', '.join(SOLVERS)}")
