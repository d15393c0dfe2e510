"""Solvers by the names that settings and the command line use. The default, "ilp", is greedy first, then HiGHS, then the better plan."""

from msgspec.structs import replace

from services.core.planning.exact import Clock, ExactAccuracySolver, ExactSolver
from services.core.planning.flow import SAME
from services.core.planning.greedy import GreedySolver
from services.core.planning.greedy_accuracy import GreedyAccuracySolver
from services.core.planning.highs import Unsolved
from services.core.planning.plan import Plan, Solver
from services.core.planning.problem import PlanningProblem
from services.core.planning.program import compile_program

SOLVERS = ("ilp", "greedy")
PATIENCE_S = 0.004
_FEW = 50  # groups: patience is not less than for so many


class ExactOrGreedy:
    """The cheapest plan within limits.

    1. The greedy solver, which takes milliseconds. Its plan is final where its own bound proves it optimal within the gap.
    2. HiGHS.
    3. The cheaper of both plans. The greedy plan, where HiGHS found none within its limits.
    """

    name = "ilp"

    def __init__(self, exact: ExactSolver, greedy: GreedySolver, *, patience_s: float | None = None) -> None:
        """patience_s: for each group of demands, and for at least 50 groups. HiGHS stops after so long where greedy has a plan.

        None: HiGHS stops at its own limit only. Without a clock patience has no effect.
        """
        self._exact, self._greedy, self._patience = exact, greedy, patience_s

    def solve(self, problem: PlanningProblem) -> Plan:
        """Never raises Unsolved. `solver` in the plan names the solver that found it."""
        deadline = self._exact.deadline()
        program = compile_program(problem)
        rough = self._greedy.concluded(program, self._greedy.pack(program))
        if rough.gap is not None and rough.gap <= self._exact.gap:
            return replace(rough, status="optimal", solver=self.name)
        planned = rough.status != "infeasible"
        if planned and self._patience is not None:
            deadline = deadline.since(self._patience * max(_FEW, len(program.groups)))
        try:
            plan = self._exact.solve_program(program, deadline)
        except Unsolved as unsolved:
            return replace(rough, reason="; ".join(filter(None, (f"exact solver: {unsolved}", rough.reason))))
        if not planned or rough.objective > plan.objective:
            return plan
        if plan.status == "optimal":  # equally cheap within the gap: the greedy plan keeps more of what runs
            return replace(rough, status="optimal", solver=self.name, gap=plan.gap)
        return replace(rough, reason="the exact solver stopped at its limit with no cheaper plan")


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
    """The solver with this name: "ilp" (`ExactOrGreedy`) or "greedy". Raises ValueError for other names.

    time_limit_s: of a whole solve, by `clock` (seconds, such as time.monotonic). Without a clock, of each run of HiGHS.
    gap: relative distance from the optimum at which HiGHS stops; at least 10⁻⁴ where accuracy is the goal.
    node_limit: of each run of HiGHS. With it and without a time limit, the same problem has the same plan on any machine.
    patience_s: see `ExactOrGreedy`. Where accuracy is the goal, there is no patience.
    """
    if name == "ilp":
        exact = ExactSolver(time_limit_s=time_limit_s, gap=gap, node_limit=node_limit, clock=clock)
        coarse = ExactSolver(time_limit_s=time_limit_s, gap=max(gap, SAME), node_limit=node_limit, clock=clock)
        return ByGoal(ExactOrGreedy(exact, GreedySolver(), patience_s=patience_s), ExactAccuracySolver(coarse))
    if name == "greedy":
        return ByGoal(GreedySolver(), GreedyAccuracySolver())
    raise ValueError(f"there is no solver {name!r}; there are: {', '.join(SOLVERS)}")
