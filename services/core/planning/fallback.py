"""The default: exact within its limits, with what the greedy solver knows; greedy where that is not enough."""

from math import inf

from msgspec.structs import replace

from services.core.planning.exact import ExactSolver, Found
from services.core.planning.greedy import GreedySolver, Packed
from services.core.planning.model import Unsolved
from services.core.planning.patterns import PatternSearch
from services.core.planning.plan import Plan
from services.core.planning.problem import Problem
from services.core.planning.program import Program, compile_program, cost
from services.core.planning.trim import trimmed

_NARROW = 0.25  # of what a group costs on average: optimal plans are mostly nearer to the bound than that
_FIRST = 0.3  # share of the limits for looking there
_LAST = 0.5  # share for each of up to three runs, where patterns led to no plan


class ExactOrGreedy:
    """Greedy first, since that takes milliseconds.

    Where its own bound proves that its plan is optimal, within the exact solver's gap, nothing needs to be searched: that
    plan counts as the exact solver's. Otherwise HiGHS searches among the instances that a plan near the bound can have,
    and, unless that proves enough, among those that a plan no dearer than the best known can have. The greedy plan is
    taken when that ends without a plan, or with a dearer one.
    """

    name = "ilp"

    def __init__(self, exact: ExactSolver, greedy: GreedySolver) -> None:
        self._exact, self._greedy = exact, greedy

    def solve(self, problem: Problem) -> Plan:
        """Never raises Unsolved; `solver` in the plan says whose it is."""
        program = compile_program(problem)
        packed = self._greedy.pack(program)
        rough = self._greedy.concluded(program, packed)
        if rough.gap is not None and rough.gap <= self._exact.gap:
            return replace(rough, status="optimal", solver=self.name)
        try:
            plan = self._by_patterns(program, packed, rough) or self._by_instances(program, packed, rough)
        except Unsolved as unsolved:
            return replace(rough, reason="; ".join(filter(None, (f"exact solver: {unsolved}", rough.reason))))
        if rough.status == "infeasible" or rough.objective > plan.objective:
            return plan
        if plan.status == "optimal":  # within the gap: the plan that keeps more of what runs goes first
            return replace(rough, status="optimal", solver=self.name, gap=plan.gap)
        return replace(rough, reason="the exact solver stopped at its limit with no cheaper plan")

    def _by_patterns(self, program: Program, packed: Packed, rough: Plan) -> Plan | None:
        """The cheapest plan; None where it cannot be found like this."""
        best = inf if rough.status == "infeasible" else packed.packing.cost()
        if any(not group.candidates for group in program.groups):
            return None
        try:
            cheapest = PatternSearch(program, packed.prices, best, self._exact.gap).run(self._exact.options())
        except Unsolved:
            return None
        counts = list(packed.packing.counts) if cheapest.counts is None else cheapest.counts
        return self._exact.concluded(program, Found(counts, cheapest.gap, cheapest.proven), short={})

    def _by_instances(self, program: Program, packed: Packed, rough: Plan) -> Plan:
        if rough.status == "infeasible" or packed.bound is None:
            return self._exact.solve_program(program, 1.0 if packed.bound is None else _LAST)
        return self._near(program, packed, packed.bound)

    def _near(self, program: Program, packed: Packed, bound: float) -> Plan:
        """Of a programme with a plan, whose cost `bound` says to be at least so much."""
        best = packed.packing.cost()
        narrow = min(best, bound * (1 + _NARROW / len(program.groups)))
        try:
            found = self._exact.search(trimmed(program, packed.prices, narrow - bound), _FIRST)
        except Unsolved:
            found = None
        if found is not None:
            reached = cost(program, found.counts)
            if found.proven and reached <= narrow * (1 + max(found.gap, self._exact.gap)):
                return self._exact.concluded(program, found, short={})
            best = min(best, reached)
        return self._exact.solve_program(trimmed(program, packed.prices, best - bound), 1 - _FIRST)
