"""The exact solvers, one for each goal: the integer programme of `program.py` as it is, by HiGHS, within limits of time or nodes.

INFaaS (Romero et al., section 4.2.1) gave it to Gurobi, which took 50 s for 100 architectures. Here a column exists only for supplies
that can be of use, and flows exist only for variants that several groups share.
"""

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from msgspec.structs import replace

from services.core.planning.flow import SAME
from services.core.planning.greedy_accuracy import GreedyAccuracySolver, better
from services.core.planning.highs import AccuracyModel, AccuracyResult, CostModel, Unsolved
from services.core.planning.plan import Plan, conclude
from services.core.planning.problem import PlanningProblem
from services.core.planning.program import DemandGroup, Program, compile_program

_MARGIN = 0.9  # of the time that is left, for one run of HiGHS, which looks at its clock only now and then
_LEAST = 1e-6  # s: HiGHS takes no limit of 0

Clock = Callable[[], float]  # s, from any beginning


class Deadline:
    """The end of a solve that begins now: `limit_s` seconds later by this clock.

    Planning is pure and has no clock of its own, so the caller hands one in. Without a clock, nobody knows how much time is left,
    and each run of HiGHS gets the whole limit.
    """

    def __init__(self, limit_s: float | None = None, clock: Clock | None = None) -> None:
        self._limit = inf if limit_s is None else limit_s
        self._clock = clock if limit_s is not None else None
        self._end = self._limit + self._clock() if self._clock else inf

    def left(self) -> float:
        """Seconds, 0 when there are none. Infinite without a limit."""
        return max(0.0, self._end - self._clock()) if self._clock else self._limit

    def bounding(self, options: dict[str, Any], share: float = 1.0) -> dict[str, Any]:
        """Options of HiGHS for a run that may take this share of what is left."""
        left = self.left()
        if left == inf:
            return options
        if self._clock:
            share *= _MARGIN
        return options | {"time_limit": max(_LEAST, left * share)}

    def since(self, limit_s: float) -> "Deadline":
        """A deadline this many seconds after this one's beginning, but not after this one. Itself without a clock."""
        if self._clock is None:
            return self
        left = self.left()
        return Deadline(min(left, max(0.0, limit_s - (self._limit - left))), self._clock)


Short = dict[int, tuple[float, int]]  # by group: the items/s and the instances that it lacks
OPTIMAL = 1e-4  # relative gap below which a plan counts as optimal, even if HiGHS stopped before its own gap


class SearchResult(NamedTuple):
    """counts: of all candidates. gap: how far from optimal they are at most, relative. proven: whether HiGHS closed the gap."""

    counts: list[int]
    gap: float
    proven: bool


class ExactSolver:
    """The cheapest plan.

    time_limit_s: for all runs of HiGHS together (up to three), by this clock; without a clock, for each run. gap: the relative gap at which
    HiGHS stops. node_limit: bounds the search without a clock, so that the same problem always has the same plan.
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

    def solve(self, problem: PlanningProblem) -> Plan:
        """The cheapest plan. Raises Unsolved when the limits end the search before HiGHS finds any."""
        deadline = self.deadline()  # compiling counts too
        return self.solve_program(compile_program(problem), deadline)

    def solve_program(self, program: Program, deadline: Deadline) -> Plan:
        """The cheapest plan of a compiled problem. Raises Unsolved.

        Where not every group can be carried, a second run of HiGHS finds the least that is missing, and a third the cheapest plan for the rest.
        """
        groups, short = possible_groups(program)
        answer = CostModel(program, groups).run(deadline.bounding(self.options()))
        if answer is None:
            groups, lacking = reduced(program, groups, deadline.bounding(self.options()))
            short |= lacking
            answer = CostModel(program, groups).run(deadline.bounding(self.options()))
        if answer is None:
            raise Unsolved("the solver contradicts itself about what can be carried")
        counts, gap, closed = answer
        return self.concluded(program, SearchResult(counts, gap, closed or gap <= max(self.gap, OPTIMAL)), short)

    def concluded(self, program: Program, found: SearchResult, short: Short) -> Plan:
        """The plan with these counts."""
        return conclude(
            program,
            found.counts,
            solver=self.name,
            status="optimal" if found.proven else "feasible",
            short=short,
            reason="" if found.proven else f"stopped at its limit, {found.gap:.2%} from optimal at most",
            gap=found.gap,
        )

    def options(self) -> dict[str, Any]:
        """Limits of one run of HiGHS, as scipy names them, except its time."""
        options: dict[str, Any] = {"mip_rel_gap": self.gap}
        if self._node_limit is not None:
            options["node_limit"] = self._node_limit
        return options


def possible_groups(program: Program) -> tuple[dict[int, DemandGroup], Short]:
    """The groups that have candidates, and what the others lack, which is everything."""
    groups = dict(enumerate(program.groups))
    hopeless = {g: (group.need, group.least) for g, group in groups.items() if not group.candidates}
    return {g: group for g, group in groups.items() if group.candidates}, hopeless


def reduced(
    program: Program, groups: dict[int, DemandGroup], options: dict[str, Any]
) -> tuple[dict[int, DemandGroup], Short]:
    """These groups with needs that can be carried, and what they then lack: as little as possible. Raises Unsolved."""
    short = CostModel(program, groups, elastic=True).shortage(options)
    lacking = {g: lack for g, lack in short.items() if lack[1] or lack[0] > 1e-6 * groups[g].need}
    return {g: _less(group, *short.get(g, (0.0, 0))) for g, group in groups.items()}, lacking


def _less(group: DemandGroup, missing: float, instances: int) -> DemandGroup:
    """The group without what is missing. A need within the solver's tolerance becomes 0."""
    left = group.need - missing
    return group._replace(need=left * (1 - 1e-7) if left > 1e-6 * group.need else 0.0, least=group.least - instances)


_FIRST = 0.5  # of the time that is left, for each run before the last


class ExactAccuracySolver:
    """As much load as can be carried, then the most accuracy, then the least cost.

    Each is a run of its own, which bounds the next: weights that keep such an order apart differ too much for a solver. When the limits end
    the search before it finds a better plan than the greedy solver, the greedy plan is the answer.

    exact: whose limits hold; its gap is at least SAME.
    """

    name = "ilp"

    def __init__(self, exact: ExactSolver) -> None:
        self._exact = exact
        self._greedy = GreedyAccuracySolver()

    def solve(self, problem: PlanningProblem) -> Plan:
        """Never raises Unsolved. `solver` in the plan names the solver that found it."""
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
        groups, short = possible_groups(program)
        model = AccuracyModel(program, groups)
        best = model.most_accurate(deadline.bounding(self._exact.options(), _FIRST))
        if best is None:
            groups, lacking = reduced(program, groups, deadline.bounding(self._exact.options(), _FIRST))
            short |= lacking
            model = AccuracyModel(program, groups)
            best = model.most_accurate(deadline.bounding(self._exact.options(), _FIRST))
        if best is None:
            raise Unsolved("the solver contradicts itself about what can be carried")
        found = self._cheapest(model, best, deadline)
        return self._exact.concluded(program, SearchResult(found.counts, found.gap, found.proven), short)

    def _cheapest(self, model: AccuracyModel, best: AccuracyResult, deadline: Deadline) -> AccuracyResult:
        """The same accuracy at less cost, if there is time left to find it."""
        try:
            found = model.cheapest(best.worth - SAME, deadline.bounding(self._exact.options()))
        except Unsolved:
            found = None
        if found is None:
            return best._replace(proven=False)
        return found._replace(gap=max(best.gap, found.gap), proven=best.proven and found.proven)
