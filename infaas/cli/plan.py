"""`infaas plan`: the leader's programme and the model-autoscaler's reaction on a planning file (docs/planning.md).

Needs no system.
"""

import time
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number
from msgspec import Struct
from msgspec.structs import asdict, replace

from bus.fields import PART, SHARE
from bus.fields import Number as Bounds
from infaas.cli.options import Json, Wide
from infaas.cli.output import Column, fail, for_the_result, number, print_table, show, usage
from services.core.planning.plan import Plan, cheapest, greedy
from services.core.planning.problem import LARGEST, MOST, CandidateVariant, Objective, PlanningProblem, RequirementClass
from services.core.toml import Location, TomlError, one_of, struct_at
from services.shell.settings import read_toml

_LIMIT_S = 0.4


def plan(
    file: Path,
    /,
    *,
    policy: Literal["ilp", "greedy"] = "ilp",
    time_limit: Annotated[float | None, Parameter(validator=Number(gt=0))] = None,
    wide: Wide = False,
    json: Json = False,
) -> int:
    """Plan which variants should run, and how many instances of each, for the loads and objectives in a file.

    Prints scaling actions, instances and cost. Exits 1 if no plan meets every demand; then it prints the demands that can be met, and
    why the others cannot.

    Example: `infaas plan examples/plan.toml`

    Parameters
    ----------
    file
        A planning file (TOML), described in docs/planning.md.
    policy
        ilp: the cheapest plan, by integer programming. greedy: what runs, and the cheapest single variant for what it lacks.
    time_limit
        Seconds that ilp may search for a better plan. Default: 0.4.

    """
    if policy == "greedy" and time_limit is not None:
        usage("--time-limit: greedy does not search: leave it out, or plan with ilp")
    problem = read_plan_file(file)
    if policy == "greedy" and any(one.accuracy_mean or one.worth for one in problem.demands):
        usage("--policy: greedy knows no accuracy_mean and no worth: leave them out, or plan with ilp")
    if policy == "ilp":
        import scipy.optimize  # noqa: F401, PLC0415  (so that loading it does not count as solving)
    with for_the_result():
        began = time.perf_counter()
        found = (
            greedy(problem)
            if policy == "greedy"
            else cheapest(problem, time_limit_s=_LIMIT_S if time_limit is None else time_limit)
        )
        solve_ms = 1000.0 * (time.perf_counter() - began)
    document = _document(found, solve_ms)
    show(document, json, lambda _: _render(problem, found, solve_ms, wide))
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
    if found.accuracy:
        document["accuracy"] = found.accuracy
    if found.reason:
        document["reason"] = found.reason
    if found.unmet:
        document["unmet"] = [{"app": one.app, "missing_qps": one.missing, "reason": one.reason} for one in found.unmet]
    return document


def _render(problem: PlanningProblem, found: Plan, solve_ms: float, wide: bool) -> None:
    kinds = {action.variant: f"{action.kind} {action.delta:+d}" for action in found.actions}
    columns = (
        Column("variant", "name"),
        Column("hardware", "hardware", rank=1),
        Column("instances now", "running", rank=2),
        Column("planned", lambda one: found.instances[one["name"]]),
        Column("action", lambda one: kinds.get(one["name"])),
        Column("items/s", lambda one: one["saturation_qps"] * found.instances[one["name"]]),
        Column("US$/s", lambda one: one["cost_per_s"] * found.instances[one["name"]]),
    )
    print_table([asdict(one) for one in problem.candidates], columns, "", wide=wide)
    means = "".join(f"; {app}: {accuracy:.4g} accurate" for app, accuracy in found.accuracy.items())
    print(f"{found.status}, by {found.solver} in {solve_ms:.1f} ms: {number(found.cost_per_s)} US$/s{means}")
    if found.reason and found.status != "infeasible":
        print(found.reason)


# The planning file. Every error names file, key and reason.

_POSITIVE = Bounds(above=0, most=LARGEST)
_AMOUNT = Bounds(most=LARGEST)


class OfferedVariant(Struct, frozen=True, kw_only=True):
    """`[[variant]]`. app: one name, or several if the variant answers several apps."""

    app: str | list[str]
    name: str
    latency_ms: Annotated[float, _POSITIVE]
    saturation_qps: Annotated[float, _POSITIVE]
    cost_per_s: Annotated[float, _AMOUNT]
    model: str = ""
    hardware: str = ""
    load_s: Annotated[float, _AMOUNT] = 0.0
    accuracy: Annotated[float | None, SHARE] = None
    running: Annotated[int, Bounds(most=MOST)] = 0
    uses: dict[str, Annotated[float, _AMOUNT]] = {}

    @property
    def apps(self) -> tuple[str, ...]:
        return (self.app,) if isinstance(self.app, str) else tuple(self.app)


class StatedDemand(Struct, frozen=True, kw_only=True):
    """`[[app]]`: one requirement class. Several blocks may have the same name. cost: limit in US$ per 1,000 queries. accuracy_mean: of all
    answers of that name. worth: US$ per 1,000 answers for a point of accuracy more. Left out: the file's.
    """

    name: str
    qps: Annotated[float, _AMOUNT]
    latency_ms: Annotated[float | None, _POSITIVE] = None
    accuracy: Annotated[float, SHARE] = 0.0
    cost: Annotated[float | None, _AMOUNT] = None
    model: str | None = None
    accuracy_mean: Annotated[float | None, PART] = None
    worth: Annotated[float | None, _AMOUNT] = None


class PlanFile(Struct, frozen=True, kw_only=True, rename={"weight": "lambda"}):
    """The whole file. weight: `lambda` in the file. budget_per_hour: limit for all instances together, in US$."""

    variant: list[OfferedVariant]
    app: list[StatedDemand]
    resources: dict[str, Annotated[float, _AMOUNT]] = {}
    slack: Annotated[float, _POSITIVE] = 1.05
    weight: Annotated[float, _AMOUNT] = 0.1
    objective: Objective = "multiplicative"
    budget_per_hour: Annotated[float | None, _AMOUNT] = None
    accuracy_mean: Annotated[float, SHARE] = 0.0
    worth: Annotated[float, _AMOUNT] = 0.0


def read_plan_file(path: Path) -> PlanningProblem:
    """The planning problem that the file describes. Ends the command (bad usage) if the file is wrong."""
    location = Location(str(path))
    try:
        file = struct_at(read_toml(path), location, PlanFile)
        _check(file, location)
        problem = _problem(file)
        _sizes(problem, location.at("app"))
    except TomlError as error:
        usage(str(error))
    return problem


def _check(file: PlanFile, location: Location) -> None:
    """What no block by itself can say. Raises TomlError."""
    for part, blocks in (("variant", file.variant), ("app", file.app)):
        if not blocks:
            location.at(part).refuse(f"there must be at least one [[{part}]]")
    named: set[str] = set()
    for i, one in enumerate(file.variant):
        at = location.at("variant").at(i)
        if not one.apps:
            at.at("app").refuse("must name at least one app")
        if len(set(one.apps)) < len(one.apps):
            at.at("app").refuse("names an app twice")
        if one.name in named:
            at.at("name").refuse(f"{one.name!r} is there twice")
        named.add(one.name)
        for app in one.apps:
            one_of(app, at.at("app"), {block.name for block in file.app}, "[[app]]")
    asked: set[StatedDemand] = set()
    means: dict[str, float | None] = {}
    for i, block in enumerate(file.app):
        if means.setdefault(block.name, block.accuracy_mean) != block.accuracy_mean:
            location.at("app").at(i).at("accuracy_mean").refuse(
                f"is another one than in the first block of {block.name!r}: it is of all answers of an app"
            )
        if replace(block, qps=0.0) in asked:
            location.at("app").at(i).at("name").refuse(f"{block.name!r} is there twice with the same requirements")
        asked.add(replace(block, qps=0.0))


def _sizes(problem: PlanningProblem, location: Location) -> None:
    for i, (demand, accepted) in enumerate(zip(problem.demands, problem.accepted(), strict=True)):
        rates = [one.saturation_qps for one in accepted]
        if rates and problem.slack * demand.load / max(rates) > MOST:
            location.at(i).at("qps").refuse(f"needs more than {MOST} instances of any variant")


def _problem(file: PlanFile) -> PlanningProblem:
    return PlanningProblem(
        candidates=tuple(
            CandidateVariant(apps=one.apps, **{name: value for name, value in asdict(one).items() if name != "app"})
            for one in file.variant
        ),
        demands=tuple(
            RequirementClass(
                app=one.name,
                load=one.qps,
                latency_ms=inf if one.latency_ms is None else one.latency_ms,
                accuracy=one.accuracy,
                cost=inf if one.cost is None else one.cost,
                model=one.model,
                accuracy_mean=file.accuracy_mean if one.accuracy_mean is None else one.accuracy_mean,
                worth=file.worth if one.worth is None else one.worth,
            )
            for one in file.app
        ),
        resources=file.resources,
        slack=file.slack,
        loading_weight=file.weight,
        objective=file.objective,
        budget_per_s=inf if file.budget_per_hour is None else file.budget_per_hour / 3600.0,
    )
