"""Solvers by the names that settings and the command line use."""

from services.core.planning.exact import ExactSolver
from services.core.planning.fallback import ExactOrGreedy
from services.core.planning.greedy import GreedySolver
from services.core.planning.plan import Solver

SOLVERS = ("ilp", "greedy")


def make_solver(
    name: str = "ilp", *, time_limit_s: float | None = 0.4, gap: float = 1e-4, node_limit: int | None = None
) -> Solver:
    """By name: "ilp", exact within its limits and backed by greedy; "greedy". Raises ValueError for other names.

    Limits are ExactSolver's. A node limit and no time limit give the same plan for the same problem on any machine.
    """
    if name == "ilp":
        return ExactOrGreedy(ExactSolver(time_limit_s=time_limit_s, gap=gap, node_limit=node_limit), GreedySolver())
    if name == "greedy":
        return GreedySolver()
    raise ValueError(f"there is no solver {name!r}; there are: {', '.join(SOLVERS)}")
