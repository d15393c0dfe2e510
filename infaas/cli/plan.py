"""`infaas plan`: the leader's programme and the model-autoscaler's reaction on a planning file (docs/planning.md).

Needs no system.
"""

import re
import time
import tomllib
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from msgspec import Struct

from infaas.cli.options import Json, Wide
from infaas.cli.output import Column, fail, for_the_result, number, print_table, show, usage
from services.core.planning.plan import Plan
from services.core.planning.problem import (
    CandidateVariant,
    InvalidPlanningProblem,
    Objective,
    PlanningProblem,
    RequirementClass,
    check,
)
from services.core.planning.solvers import cheapest, greedy

_LIMIT_S = 0.4
_COLUMNS = (
    Column("variant", "variant"),
    Column("hardware", "hardware", rank=1),
    Column("instances now", "now", rank=2),
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
    if found.reason:
        document["reason"] = found.reason
    if found.unmet:
        document["unmet"] = [{"app": one.app, "missing_qps": one.missing, "reason": one.reason} for one in found.unmet]
    return document


def _render(problem: PlanningProblem, found: Plan, solve_ms: float, wide: bool) -> None:
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
    print_table(rows, _COLUMNS, "", wide=wide)
    print(f"{found.status}, by {found.solver} in {solve_ms:.1f} ms: {number(found.cost_per_s)} US$/s")
    if found.reason and found.status != "infeasible":
        print(found.reason)


# The planning file. Every error names file, key and reason.


class _Block(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file. An unknown key is an error."""


class VariantBlock(_Block, frozen=True, kw_only=True):
    """`[[variant]]`. app: one name, or several if the variant answers several apps."""

    app: str | list[str]
    name: str
    latency_ms: float
    saturation_qps: float
    cost_per_s: float
    model: str = ""
    hardware: str = ""
    load_s: float = 0.0
    accuracy: float | None = None
    running: int = 0
    uses: dict[str, float] = {}


class AppBlock(_Block, frozen=True, kw_only=True):
    """`[[app]]`: one requirement class. Several blocks may have the same name. cost: limit in US$ per 1,000 queries."""

    name: str
    qps: float
    latency_ms: float | None = None
    accuracy: float = 0.0
    cost: float | None = None
    model: str | None = None


class PlanFile(_Block, frozen=True, kw_only=True, rename={"weight": "lambda"}):
    """The whole file. weight: `lambda` in the file. budget_per_hour: limit for all instances together, in US$."""

    variant: list[VariantBlock]
    app: list[AppBlock]
    resources: dict[str, float] = {}
    slack: float = 1.05
    weight: float = 0.1
    objective: Objective = "multiplicative"
    budget_per_hour: float | None = None


# names of the planning problem: names in the file
_PARTS = {"candidates": "variant", "demands": "app"}
_KEYS = {"loading_weight": "lambda", "load": "qps", "budget_per_s": "budget_per_hour"}
_LARGEST = 16 * 2**20  # bytes
_WORDS = {
    "`float`": "a number",
    "`int`": "a whole number",
    "`str`": "text",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "a table",
    "`date`": "a date",
    "`time`": "a time",
    "`datetime`": "a date and time",
    " | null": "",
}


def read_plan_file(path: Path) -> PlanningProblem:
    """The planning problem that the file describes. Ends the command (bad usage) if the file is wrong."""
    raw = _read(path)
    try:
        file = msgspec.convert(raw, PlanFile)
    except msgspec.ValidationError as error:
        _refuse(path, raw, str(error))
    for part, blocks in (("variant", file.variant), ("app", file.app)):
        if not blocks:
            usage(f"{path}: {part}: there must be at least one [[{part}]]")
    _names(path, file, raw)
    problem = _problem(file)
    try:
        check(problem)
    except InvalidPlanningProblem as error:
        flaw = error.flaw
        part, key = _PARTS.get(flaw.part, flaw.part), _KEYS.get(flaw.key, flaw.key)
        usage(f"{path}: {_place(part, flaw.number, key, raw)}: {flaw.reason}")
    return problem


def _names(path: Path, file: PlanFile, raw: dict[str, Any]) -> None:
    """Check that names are printable and unambiguous."""
    for i, one in enumerate(file.variant):
        apps = [one.app] if isinstance(one.app, str) else one.app
        if not apps:
            usage(f"{path}: {_place('variant', i, 'app', raw)}: must name at least one app")
        if len(set(apps)) < len(apps):
            usage(f"{path}: {_place('variant', i, 'app', raw)}: names an app twice")
        for key, name in (("name", one.name), *(("app", app) for app in apps)):
            if not _is_printable(name):
                usage(f"{path}: {_place('variant', i, key, raw)}: must be some printable text, not {name!r}")
    for i, asked in enumerate(file.app):
        if not _is_printable(asked.name):
            usage(f"{path}: {_place('app', i, 'name', raw)}: must be some printable text, not {asked.name!r}")


def _is_printable(name: str) -> bool:
    return bool(name.strip()) and name.isprintable()


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as opened:
            content = opened.read(_LARGEST + 1)  # the path may be an endless device
        if len(content) > _LARGEST:
            usage(f"cannot read {path}: it is larger than {_LARGEST >> 20} MiB, which no plan needs")
        return tomllib.loads(content.decode("utf-8-sig"))
    except OSError as error:
        usage(f"cannot read {path}: {error.strerror}")
    except UnicodeDecodeError as error:
        usage(f"{path} is not valid TOML: byte {error.start} is not UTF-8 text")
    except tomllib.TOMLDecodeError as error:
        usage(f"{path} is not valid TOML: {error}")
    except RecursionError:
        usage(f"{path} is not valid TOML: it is nested too deeply")


def _problem(file: PlanFile) -> PlanningProblem:
    return PlanningProblem(
        candidates=tuple(
            CandidateVariant(
                name=one.name,
                apps=(one.app,) if isinstance(one.app, str) else tuple(one.app),
                model=one.model,
                hardware=one.hardware,
                latency_ms=one.latency_ms,
                saturation_qps=one.saturation_qps,
                cost_per_s=one.cost_per_s,
                load_s=one.load_s,
                accuracy=one.accuracy,
                uses=one.uses,
                running=one.running,
            )
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
            )
            for one in file.app
        ),
        resources=file.resources,
        slack=file.slack,
        loading_weight=file.weight,
        objective=file.objective,
        budget_per_s=inf if file.budget_per_hour is None else file.budget_per_hour / 3600.0,
    )


def _refuse(path: Path, raw: Any, message: str) -> NoReturn:
    """End the command. Translates msgspec's text, as "Expected `float`, got `str` - at `$.variant[0].latency_ms`"."""
    reason, _, at = message.partition(" - at ")
    found = re.fullmatch(r"`\$\.?(?:(variant|app)\[(\d+)\])?\.?(.*)`", at)
    part, at_number, key = found.groups() if found else ("", None, at.strip("`$."))
    number = None if at_number is None else int(at_number)
    if key.endswith("[...]"):  # an entry of resources or uses: find the first that is no number
        key = key.removesuffix("[...]")
        table = (raw[part][number] if part and number is not None else raw)[key]
        wrong = (
            name for name, amount in table.items() if isinstance(amount, bool) or not isinstance(amount, int | float)
        )
        key = f"{key}.{next(wrong, '*')}"
    missing = re.search(r"(?:missing required|contains unknown) field `(.*)`", reason)
    if missing:
        key = missing.group(1)
        reason = "is missing" if "missing" in reason else f"there is no such key{_meant(part or '', key)}"
    for theirs, ours in _WORDS.items():
        reason = reason.replace(theirs, ours)
    usage(f"{path}: {_place(part or '', number, key, raw)}: {reason[:1].lower()}{reason[1:]}")


def _meant(part: str, key: str) -> str:
    block = {"variant": VariantBlock, "app": AppBlock}.get(part, PlanFile)
    near = get_close_matches(key, block.__struct_encode_fields__, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _place(part: str, number: int | None, key: str, raw: dict[str, Any]) -> str:
    """The place in the file: the block with its number from 1 and its name, then the key."""
    if not part or number is None:
        return f"{part}.{key}" if part else key
    block = raw[part][number]
    name = block.get("name") if isinstance(block, dict) else None
    name = name if isinstance(name, str) and _is_printable(name) else None
    return f"[[{part}]] {number + 1}{f' ({name})' * bool(name)}{f': {key}' * bool(key)}"
