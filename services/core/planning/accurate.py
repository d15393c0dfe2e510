"""Exact plans where accuracy is the goal: as much load as can be, then the most accuracy, then the least cost, by HiGHS.

Each is a run of its own, which bounds the next: weights that keep such an order apart are too far from each other for a solver.
"""

from typing import Any

from msgspec.structs import replace

from services.core.planning.conclude import conclude
from services.core.planning.deadline import Clock, Deadline
from services.core.planning.delivered import SAME
from services.core.planning.flows import FlowModel, Reached
from services.core.planning.model import Model, Unsolved
from services.core.planning.plan import Plan
from services.core.planning.problem import Problem
from services.core.planning.program import Group, Program, compile_program
from services.core.planning.upgrading import Upgrading, better

_FIRST = 0.5  # of the time that is left, for the run before the last


class ExactAccuracy:
    """Backed by the greedy plan, which is taken where the limits end the search before it has found a better one.

    time_limit_s, gap, node_limit, clock: as `ExactSolver` has them.
    """

    name = "ilp"

    def __init__(
        self,
        *,
        time_limit_s: float | None = 0.4,
        gap: float = 1e-4,
        node_limit: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._gap = max(gap, SAME)
        self._time_limit, self._node_limit, self._clock = time_limit_s, node_limit, clock
        self._greedy = Upgrading()

    def solve(self, problem: Problem) -> Plan:
        """Never raises Unsolved; `solver` in the plan says whose it is."""
        deadline = Deadline(self._time_limit, self._clock)
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
        groups = {g: group for g, group in enumerate(program.groups) if group.candidates}
        short: dict[int, tuple[float, int]] = {
            g: (group.need, group.least) for g, group in enumerate(program.groups) if not group.candidates
        }
        model = FlowModel(program, groups)
        best = model.most_accurate(deadline.bounding(self._options(), _FIRST))
        if best is None:
            lacking = Model(program, groups, elastic=True).shortage(deadline.bounding(self._options(), _FIRST))
            told = {g: lack for g, lack in lacking.items() if lack[1] or lack[0] > 1e-6 * groups[g].need}
            short |= told
            model = FlowModel(program, {g: _less(group, *lacking.get(g, (0.0, 0))) for g, group in groups.items()})
            best = model.most_accurate(deadline.bounding(self._options(), _FIRST))
        if best is None:
            raise Unsolved("the solver contradicts itself about what can be carried")
        found = self._cheapest(model, best, deadline)
        return conclude(
            program,
            found.counts,
            solver=self.name,
            status="optimal" if found.proven else "feasible",
            short=short,
            reason="" if found.proven else f"stopped at its limit, {found.gap:.2%} from optimal at most",
            gap=found.gap,
        )

    def _cheapest(self, model: FlowModel, best: Reached, deadline: Deadline) -> Reached:
        """The same accuracy for less, if there is time to find out."""
        try:
            found = model.cheapest(best.worth - SAME, deadline.bounding(self._options()))
        except Unsolved:
            found = None
        if found is None:
            return best._replace(proven=False)
        return found._replace(gap=max(best.gap, found.gap), proven=best.proven and found.proven)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"mip_rel_gap": self._gap}
        if self._node_limit is not None:
            options["node_limit"] = max(1, self._node_limit)
        return options


def _less(group: Group, missing: float, instances: int) -> Group:
    """What is left to carry; nothing, where that is only the solver's tolerance."""
    left = group.need - missing
    return group._replace(need=left * (1 - 1e-7) if left > 1e-6 * group.need else 0.0, least=group.least - instances)
