"""The default: exact within its limits, with what the greedy solver knows; greedy where that is not enough."""

from math import inf

from msgspec.structs import replace

from services.core.planning.exact import Clock, Deadline, ExactAccuracySolver, ExactSolver, SearchResult
from services.core.planning.flow import SAME
from services.core.planning.greedy import GreedySolver, PackingResult
from services.core.planning.greedy_accuracy import GreedyAccuracySolver
from services.core.planning.highs import Unsolved
from services.core.planning.patterns import Cheapest, PatternSearch
from services.core.planning.plan import Plan, Solver
from services.core.planning.problem import PlanningProblem
from services.core.planning.program import Program, compile_program, cost
from services.core.planning.trim import trimmed

_NARROW = 0.25  # of what a group costs on average: optimal plans are mostly nearer to the bound than that
_FIRST = 0.3  # share of the limits for looking there
_LAST = 0.5  # share for each of up to three runs, where patterns led to no plan
_SOME = 0.6  # share of the time for patterns
_FEW = 20  # groups
_LONGER = 1.25  # times as long
_ENOUGH = 0.01  # relative gap that will do once a solve has taken longer than it should


class ExactOrGreedy:
    """Greedy first, since that takes milliseconds.

    Where its own bound proves that its plan is optimal, within the exact solver's gap, nothing needs to be searched: that
    plan counts as the exact solver's. Otherwise HiGHS searches among the instances that a plan near the bound can have,
    and, unless that proves enough, among those that a plan no dearer than the best known can have. The greedy plan is
    taken when that ends without a plan, or with a dearer one.
    """

    name = "ilp"

    def __init__(self, exact: ExactSolver, greedy: GreedySolver, *, patience_s: float | None = None) -> None:
        """patience_s: for each group of demands, and for at least 20 of them; after it a plan within 1 % of the cheapest will do,
        after a quarter more one within 7 %. None: until the limit. Without a clock it counts for nothing.
        """
        self._exact, self._greedy, self._patience = exact, greedy, patience_s

    def solve(self, problem: PlanningProblem) -> Plan:
        """Never raises Unsolved; `solver` in the plan says whose it is."""
        deadline = self._exact.deadline()
        program = compile_program(problem)
        packed = self._greedy.pack(program)
        rough = self._greedy.concluded(program, packed)
        if rough.gap is not None and rough.gap <= self._exact.gap:
            return replace(rough, status="optimal", solver=self.name)
        try:
            plan = self._planned(program, packed, rough, deadline)
        except Unsolved as unsolved:
            return replace(rough, reason="; ".join(filter(None, (f"exact solver: {unsolved}", rough.reason))))
        if rough.status == "infeasible" or rough.objective > plan.objective:
            return plan
        if plan.status == "optimal":  # within the gap: the plan that keeps more of what runs goes first
            return replace(rough, status="optimal", solver=self.name, gap=plan.gap)
        return replace(rough, reason="the exact solver stopped at its limit with no cheaper plan")

    def _planned(self, program: Program, packed: PackingResult, rough: Plan, deadline: Deadline) -> Plan:
        cheapest = self._by_patterns(program, packed, rough, deadline)
        best = inf if rough.status == "infeasible" else packed.packing.cost()
        if cheapest is None:
            return self._by_instances(program, packed, best, deadline)
        counts = list(packed.packing.counts) if cheapest.counts is None else cheapest.counts
        known = self._exact.concluded(program, SearchResult(counts, cheapest.gap, cheapest.proven), short={})
        if cheapest.proven or cheapest.stopped:
            return known
        try:
            other = self._by_instances(program, packed, cost(program, counts), deadline)
        except Unsolved:
            return known
        return known if other.status == "infeasible" or other.objective > known.objective else other

    def _by_patterns(self, program: Program, packed: PackingResult, rough: Plan, deadline: Deadline) -> Cheapest | None:
        """The cheapest plan, or the best found in time; None where it cannot be found like this."""
        best = inf if rough.status == "infeasible" else packed.packing.cost()
        if any(not group.candidates for group in program.groups):
            return None
        some, soon, last = deadline.sooner(_SOME * deadline.left()), None, deadline
        if self._patience is not None and deadline.limited:
            patience = self._patience * max(_FEW, len(program.groups))
            soon, last = deadline.since(patience), deadline.since(_LONGER * patience)
        try:
            search = PatternSearch(
                program, packed.prices, best, self._exact.gap, deadline=some, soon=soon, last=last, enough=_ENOUGH
            )
            return search.run(self._exact.options())
        except Unsolved:
            return None

    def _by_instances(self, program: Program, packed: PackingResult, best: float, deadline: Deadline) -> Plan:
        if best == inf or packed.bound is None:
            return self._exact.solve_program(program, deadline, 1.0 if packed.bound is None else _LAST)
        return self._near(program, packed, packed.bound, best, deadline)

    def _near(self, program: Program, packed: PackingResult, bound: float, best: float, deadline: Deadline) -> Plan:
        """Of a programme with a plan that costs `best`, whose cost `bound` says to be at least so much."""
        narrow = min(best, bound * (1 + _NARROW / len(program.groups)))
        try:
            found = self._exact.search(trimmed(program, packed.prices, narrow - bound), deadline, _FIRST)
        except Unsolved:
            found = None
        if found is not None:
            reached = cost(program, found.counts)
            if found.proven and reached <= narrow * (1 + max(found.gap, self._exact.gap)):
                return self._exact.concluded(program, found, short={})
            best = min(best, reached)
        return self._exact.solve_program(trimmed(program, packed.prices, best - bound), deadline, 1 - _FIRST)


# -- Solvers by the names that settings and the command line use.

SOLVERS = ("ilp", "greedy")
PATIENCE_S = 0.0016


class ByGoal:
    """The solver for the goal that a problem states."""

    def __init__(self, cheapest: Solver, most_accurate: Solver) -> None:
        self.name = cheapest.name
        self._cheapest, self._most_accurate = cheapest, most_accurate

    def solve(self, problem: PlanningProblem) -> Plan:
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
        return ByGoal(ExactOrGreedy(exact, GreedySolver(), patience_s=patience_s), ExactAccuracySolver(coarse))
    if name == "greedy":
        return ByGoal(GreedySolver(), GreedyAccuracySolver())
    raise ValueError(f"there is no solver {name!r}; there are: {', '.join(SOLVERS)}")
