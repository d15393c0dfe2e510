"""The exact solver: the integer programme as it is, by HiGHS.

INFaaS (Romero et al., section 4.2.1) gave it to Gurobi, which took 50 s for 100 architectures. Here a variable exists only for
supplies that can be of use, and flows only for variants that several groups share.
"""

from typing import Any, NamedTuple

from services.core.planning.conclude import conclude
from services.core.planning.deadline import Clock, Deadline
from services.core.planning.model import Model
from services.core.planning.plan import Plan
from services.core.planning.problem import Problem
from services.core.planning.program import Group, Program, compile_program
from services.core.planning.tableau import Unsolved

Short = dict[int, tuple[float, int]]  # group: the items/s and the instances that it lacks
OPTIMAL = 1e-4  # relative gap below which a plan counts as optimal, although the search was ended before its own gap


class Found(NamedTuple):
    """Counts of all candidates, how far from optimal they may be (relative), and whether the gap was closed."""

    counts: list[int]
    gap: float
    proven: bool


class ExactSolver:
    """time_limit_s: for all runs of HiGHS together, by this clock; without one, for each (an infeasible problem takes up to three).

    gap: relative, at which to stop. node_limit bounds the search without a clock, so that the same problem always has the same plan.
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
        self.gap = gap
        self._time_limit, self._node_limit, self._clock = time_limit_s, node_limit, clock

    def deadline(self) -> Deadline:
        """The end of a solve that begins now."""
        return Deadline(self._time_limit, self._clock)

    def solve(self, problem: Problem) -> Plan:
        """The cheapest plan; raises Unsolved when the limits end the search before any is found."""
        deadline = self.deadline()
        return self.solve_program(compile_program(problem), deadline)

    def solve_program(self, program: Program, deadline: Deadline | None = None, share: float = 1.0) -> Plan:
        """The same, of a compiled problem; each run of HiGHS takes no more than a share of what is left."""
        deadline = deadline or self.deadline()
        found = self.search(program, deadline, share)
        groups, hopeless = apart(program)
        if found is not None:
            return self.concluded(program, found, short=hopeless)
        left, short = carried(program, groups, deadline.bounding(self.options(share), share))
        answer = Model(program, left).run(deadline.bounding(self.options(share)))
        if answer is None:
            raise Unsolved("the solver contradicts itself about what can be carried")
        return self.concluded(program, Found(*answer), short=hopeless | short)

    def search(self, program: Program, deadline: Deadline | None = None, share: float = 1.0) -> Found | None:
        """What carries every group that anybody can carry; None when there is no such plan. Raises Unsolved."""
        options = (deadline or self.deadline()).bounding(self.options(share), share)
        answer = Model(program, apart(program)[0]).run(options)
        if answer is None:
            return None
        counts, gap, closed = answer
        return Found(counts, gap, closed or gap <= max(self.gap, OPTIMAL))

    def concluded(self, program: Program, found: Found, short: Short) -> Plan:
        """The plan that these counts are."""
        return conclude(
            program,
            found.counts,
            solver=self.name,
            status="optimal" if found.proven else "feasible",
            short=short,
            reason="" if found.proven else f"stopped at its limit, {found.gap:.2%} from optimal at most",
            gap=found.gap,
        )

    def options(self, share: float = 1.0) -> dict[str, Any]:
        """Limits of one run of HiGHS, as scipy names them, but for its time."""
        options: dict[str, Any] = {"mip_rel_gap": self.gap}
        if self._node_limit is not None:
            options["node_limit"] = max(1, int(self._node_limit * share))
        return options


def apart(program: Program) -> tuple[dict[int, Group], Short]:
    """The groups that somebody can carry, and what the others lack, which is all."""
    groups = dict(enumerate(program.groups))
    hopeless = {g: (group.need, group.least) for g, group in groups.items() if not group.candidates}
    return {g: group for g, group in groups.items() if group.candidates}, hopeless


def carried(program: Program, groups: dict[int, Group], options: dict[str, Any]) -> tuple[dict[int, Group], Short]:
    """What is left of these groups where they go short of as little as can be, and of what they do. Raises Unsolved."""
    short = Model(program, groups, elastic=True).shortage(options)
    told = {g: lack for g, lack in short.items() if lack[1] or lack[0] > 1e-6 * groups[g].need}
    return {g: _less(group, *short.get(g, (0.0, 0))) for g, group in groups.items()}, told


def _less(group: Group, missing: float, instances: int) -> Group:
    """What is left to carry; nothing, where that is only the solver's tolerance."""
    left = group.need - missing
    return group._replace(need=left * (1 - 1e-7) if left > 1e-6 * group.need else 0.0, least=group.least - instances)
