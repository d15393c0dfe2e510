"""The default: exact within its limits, greedy where they are not enough."""

from msgspec.structs import replace

from services.core.planning.exact import ExactSolver, Unsolved
from services.core.planning.greedy import GreedySolver
from services.core.planning.plan import Plan
from services.core.planning.problem import Problem


class ExactOrGreedy:
    """Greedy first, since that takes milliseconds.

    Where its own bound proves that its plan is optimal, within the exact solver's gap, nothing needs to be searched: that
    plan counts as the exact solver's. Otherwise the exact solver's plan is taken, unless its limits left it without one,
    or with one that costs more than the greedy solver's.
    """

    name = "ilp"

    def __init__(self, exact: ExactSolver, greedy: GreedySolver) -> None:
        self._exact, self._greedy = exact, greedy

    def solve(self, problem: Problem) -> Plan:
        """Never raises Unsolved; `solver` in the plan says whose it is."""
        rough = self._greedy.solve(problem)
        if rough.gap is not None and rough.gap <= self._exact.gap:
            return replace(rough, status="optimal", solver=self.name)
        try:
            plan = self._exact.solve(problem)
        except Unsolved as unsolved:
            return replace(rough, reason="; ".join(filter(None, (f"exact solver: {unsolved}", rough.reason))))
        if plan.status == rough.status == "feasible" and rough.objective < plan.objective:
            return replace(rough, reason="the exact solver stopped at its limit with a dearer plan")
        return plan
