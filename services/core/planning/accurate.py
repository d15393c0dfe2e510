"""Exact plans where accuracy is the goal: as much load as can be, then the most accuracy, then the least cost, by HiGHS.

Each is a run of its own, which bounds the next: weights that keep such an order apart are too far from each other for a solver.
"""

from msgspec.structs import replace

from services.core.planning.deadline import Deadline
from services.core.planning.delivered import SAME
from services.core.planning.exact import ExactSolver, Found, apart, carried
from services.core.planning.flows import FlowModel, Reached
from services.core.planning.plan import Plan
from services.core.planning.problem import Problem
from services.core.planning.program import Program, compile_program
from services.core.planning.tableau import Unsolved
from services.core.planning.upgrading import Upgrading, better

_FIRST = 0.5  # of the time that is left, for the run before the last


class ExactAccuracy:
    """Backed by the greedy plan, which is taken where the limits end the search before it has found a better one.

    exact: whose limits hold; its gap is at least SAME.
    """

    name = "ilp"

    def __init__(self, exact: ExactSolver) -> None:
        self._exact = exact
        self._greedy = Upgrading()

    def solve(self, problem: Problem) -> Plan:
        """Never raises Unsolved; `solver` in the plan says whose it is."""
        deadline = self._exact.deadline()
        program = compile_program(problem)
        rough = self._greedy.solve_program(program)
        try:
            plan = self._solved(program, deadline)
        except Unsolved as unsolved:
            return replace(rough, reason="; ".join(filter(None, (f"exact solver: {unsolved}", rough.reason))))
        if plan.status == "optimal" or not better(program, rough, plan):
            return plan
        return replace(rough, reason="the exact solver stopped at its limit with no better plan")

    def _solved(self, program: Program, deadline: Deadline) -> Plan:
        groups, short = apart(program)
        model = FlowModel(program, groups)
        best = model.most_accurate(deadline.bounding(self._exact.options(), _FIRST))
        if best is None:
            groups, lacking = carried(program, groups, deadline.bounding(self._exact.options(), _FIRST))
            short |= lacking
            model = FlowModel(program, groups)
            best = model.most_accurate(deadline.bounding(self._exact.options(), _FIRST))
        if best is None:
            raise Unsolved("the solver contradicts itself about what can be carried")
        found = self._cheapest(model, best, deadline)
        return self._exact.concluded(program, Found(found.counts, found.gap, found.proven), short)

    def _cheapest(self, model: FlowModel, best: Reached, deadline: Deadline) -> Reached:
        """The same accuracy for less, if there is time to find out."""
        try:
            found = model.cheapest(best.worth - SAME, deadline.bounding(self._exact.options()))
        except Unsolved:
            found = None
        if found is None:
            return best._replace(proven=False)
        return found._replace(gap=max(best.gap, found.gap), proven=best.proven and found.proven)
