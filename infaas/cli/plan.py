"""`infaas plan`: the model-autoscaler's solvers on a file; nothing needs to run."""

import time
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from infaas.cli.options import Json
from infaas.cli.output import fail, for_the_result, show
from infaas.cli.planfile import read_plan_file
from infaas.cli.table import Column, number, print_table
from services.core.planning.plan import Plan
from services.core.planning.problem import PlanningProblem
from services.core.planning.solvers import make_solver

_COLUMNS = (
    Column("variant", "variant"),
    Column("hardware", "hardware"),
    Column("instances now", "now"),
    Column("planned", "planned"),
    Column("action", "action"),
    Column("items/s", "items_per_s"),
    Column("US$/s", "cost_per_s"),
)


def plan(
    file: Path,
    /,
    *,
    policy: Literal["ilp", "greedy"] = "ilp",
    time_limit: Annotated[float, Parameter(validator=Number(gt=0))] = 0.4,
    json: Json = False,
) -> int:
    """Plan which variants should run, and how many of each, for the loads and objectives in a file.

    Prints scaling actions, instances and cost. Exits 1 when no plan meets every demand; what can be met, and why the rest
    cannot, is printed all the same.

    Parameters
    ----------
    file
        A planning file (TOML): docs/planning.md; an example is docs/examples/plan.toml.
    policy
        ilp: the cheapest plan, by integer programming; greedy: a good one in milliseconds.
    time_limit
        Seconds that ilp may search; then the best plan so far counts. The default is the autoscaler's.

    """
    problem = read_plan_file(file)
    solver = make_solver(policy, time_limit_s=time_limit, gap=0.0, clock=time.perf_counter, patience_s=None)
    if policy == "ilp":
        import scipy.optimize  # noqa: F401, PLC0415  (reading it from disk is not solving)
    with for_the_result():
        began = time.perf_counter()
        found = solver.solve(problem)
        solve_ms = 1000.0 * (time.perf_counter() - began)
    document = _document(found, solve_ms)
    show(document, json, lambda _: _render(problem, found, solve_ms))
    if found.status == "infeasible":
        fail(f"infeasible: {found.reason}")
    return 0


def _document(found: Plan, solve_ms: float) -> dict[str, Any]:
    document: dict[str, Any] = {
        "status": found.status,
        "cost_per_s": float(found.cost_per_s),
        "instances": found.instances,
        "actions": [{"variant": one.variant, "delta": one.delta, "kind": one.kind} for one in found.actions],
        "solve_ms": round(solve_ms, 3),
        "solver": found.solver,
        "objective": found.objective,
    }
    if found.accuracy is not None:
        document["accuracy"] = found.accuracy
    if found.reason:
        document["reason"] = found.reason
    if found.unmet:
        document["unmet"] = [{"app": one.app, "missing_qps": one.missing, "reason": one.reason} for one in found.unmet]
    return document


def _render(problem: PlanningProblem, found: Plan, solve_ms: float) -> None:
    kinds = {action.variant: f"{action.kind} {action.delta:+d}" for action in found.actions}
    rows = [
        {
            "variant": one.name,
            "hardware": one.hardware,
            "now": one.running,
            "planned": found.instances[one.name],
            "action": kinds.get(one.name),
            "items_per_s": one.saturation_qps * found.instances[one.name],
            "cost_per_s": one.cost_per_s * found.instances[one.name],
        }
        for one in problem.candidates
    ]
    print_table(rows, _COLUMNS, "")
    accuracy = "" if found.accuracy is None else f", accuracy {found.accuracy:.4g}"
    print(f"{found.status}, by {found.solver} in {solve_ms:.1f} ms: {number(found.cost_per_s)} US$/s{accuracy}")
    if found.reason and found.status != "infeasible":
        print(found.reason)
