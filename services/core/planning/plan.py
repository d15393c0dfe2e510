"""What a solver answers, the interface of all solvers, and how counts of instances become a plan."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from services.core.cost import merit
from services.core.planning.flow import deliver
from services.core.planning.problem import CandidateVariant, PlanningProblem
from services.core.planning.program import BUDGET, ROUNDING, Program, fresh_price

Status = Literal["optimal", "feasible", "infeasible"]
ActionKind = Literal["load", "replicate", "upgrade", "downgrade", "unload"]


class Action(Struct, frozen=True, gc=False):
    """Instances of a variant to add (delta > 0) or to remove (delta < 0)."""

    variant: str
    delta: int
    kind: ActionKind


class Unmet(Struct, frozen=True, kw_only=True, gc=False):
    """A demand that the plan does not carry. missing: items/s below slack × load. instances: how many are missing below `least`."""

    app: str
    demand: int
    missing: float
    instances: int
    reason: str


class Plan(Struct, frozen=True, kw_only=True):
    """The answer to a problem.

    status: optimal (proven, within the solver's gap or 10⁻⁴), feasible (meets every constraint), infeasible (no plan meets every
    demand; this one carries as much as it found room for, and `unmet` says what is missing and why). instances: of every
    candidate, after the plan. cost_per_s: US$ per second of all of them. objective: cost of the actions, as the problem
    defines it. solver: who found it. reason: for people, empty when there is nothing to say. gap: how far from optimal it
    may be at most, relative; None when unknown. accuracy: where that is the goal, the mean over the load that is carried.
    """

    status: Status
    actions: tuple[Action, ...]
    instances: dict[str, int]
    cost_per_s: float
    objective: float
    solver: str
    reason: str = ""
    unmet: tuple[Unmet, ...] = ()
    gap: float | None = None
    accuracy: float | None = None


class Solver(Protocol):
    """A way to solve problems. Without a time limit, the same problem always has the same plan."""

    name: str

    def solve(self, problem: PlanningProblem) -> Plan: ...


# -- From counts of instances to a plan

Short = Mapping[int, tuple[float, int]]  # group: items/s and instances that are missing


def conclude(
    program: Program,
    counts: Sequence[int],
    *,
    solver: str,
    status: Status,
    short: Short | None = None,
    reason: str = "",
    gap: float | None = None,
) -> Plan:
    """The plan that has so many instances of each candidate. short: what it does not carry; anything makes the plan infeasible."""
    problem = program.problem
    unmet = _unmet(program, counts, short or {})
    return Plan(
        status="infeasible" if unmet else status,
        actions=actions(problem, counts),
        instances={one.name: n for one, n in zip(problem.candidates, counts, strict=True)},
        cost_per_s=sum(one.cost_per_s * n for one, n in zip(problem.candidates, counts, strict=True)),
        objective=objective(problem, counts),
        solver=solver,
        reason="; ".join([*([reason] if reason else []), *(one.reason for one in unmet)]),
        unmet=unmet,
        gap=None if unmet else gap,
        accuracy=deliver(program, counts).accuracy if problem.goal == "accuracy" else None,
    )


def objective(problem: PlanningProblem, counts: Sequence[int]) -> float:
    """Cost of the actions that lead to these counts."""
    total = 0.0
    for one, n in zip(problem.candidates, counts, strict=True):
        delta = n - one.running
        total += delta * (fresh_price(problem, one) if delta > 0 else one.cost_per_s)
    return total


def actions(problem: PlanningProblem, counts: Sequence[int]) -> tuple[Action, ...]:
    """What the plan does, in the order of the candidates.

    A variant that does not run yet is an upgrade or a downgrade by its hardware cost (paper, section 4.2.1), or by its accuracy
    where that is the goal: against the dearest (most accurate) of its apps' variants that lose instances, or else of those
    that run; it is a load when none runs.
    """
    deltas = [n - one.running for one, n in zip(problem.candidates, counts, strict=True)]
    pairs = list(zip(problem.candidates, deltas, strict=True))
    worth = _accuracy if problem.goal == "accuracy" else _price
    return tuple(Action(one.name, delta, _kind(one, delta, pairs, worth)) for one, delta in pairs if delta)


def _price(one: CandidateVariant) -> float:
    return one.cost_per_s


def _accuracy(one: CandidateVariant) -> float:
    return merit(one.accuracy)


def _kind(
    one: CandidateVariant,
    delta: int,
    all_of_them: Sequence[tuple[CandidateVariant, int]],
    worth: Callable[[CandidateVariant], float],
) -> ActionKind:
    if delta < 0:
        return "unload"
    if one.running:
        return "replicate"
    apps = set(one.apps)
    there = [(worth(other), change) for other, change in all_of_them if other.running and apps & set(other.apps)]
    compared = [value for value, change in there if change < 0] or [value for value, _ in there]
    if not compared:
        return "load"
    return "upgrade" if worth(one) >= max(compared) else "downgrade"


def _unmet(program: Program, counts: Sequence[int], short: Short) -> tuple[Unmet, ...]:
    found = []
    for g, (missing, instances) in sorted(short.items()):
        group = program.groups[g]
        load = sum(program.problem.demands[k].load for k in group.demands)
        for k in group.demands:
            demand = program.problem.demands[k]
            share = missing / (1 - ROUNDING) * demand.load / load if load > 0 else 0.0
            lacking = min(instances, demand.least)
            if share > 0 or lacking:
                why = _why(program, counts, g, k, share, lacking)
                found.append(
                    Unmet(app=demand.app, demand=k, missing=share, instances=lacking, reason=f"app {demand.app}: {why}")
                )
    return tuple(found)


def _why(program: Program, counts: Sequence[int], g: int, k: int, missing: float, instances: int) -> str:
    problem, group = program.problem, program.groups[g]
    if not group.candidates:
        return _no_candidate(problem, k)
    amount = f"{missing:.4g} items/s more than" if missing > 0 else f"{instances} instances more than"
    scarce = [name for row, name in enumerate(program.rows) if _binds(program, counts, group.candidates, row)]
    if not scarce:
        return f"needs {amount} its variants may have instances for"
    return f"needs {amount} fits in {' and '.join(_described(problem, name) for name in scarce)}"


def _no_candidate(problem: PlanningProblem, k: int) -> str:
    """Why no candidate may answer this demand: what to change, and the nearest value there is."""
    demand = problem.demands[k]
    mine = [one for one in problem.candidates if demand.app in one.apps]
    if not mine:
        return "has no variant"
    named = [one for one in mine if demand.model in (None, one.model) and demand.variant in (None, one.name)]
    if not named:
        return f"has no variant {demand.variant!r}" if demand.variant else f"has no variant of model {demand.model!r}"
    fastest = min(named, key=lambda one: one.latency_ms)
    if fastest.latency_ms > demand.latency_ms:
        return f"no variant answers within {demand.latency_ms:g} ms: {fastest.name} takes {fastest.latency_ms:g} ms"
    best = max(named, key=lambda one: 1.0 if one.accuracy is None else one.accuracy)
    if best.accuracy is not None and best.accuracy < demand.accuracy:
        return f"no variant has accuracy {demand.accuracy:g}: {best.name} has {best.accuracy:g}"
    cheapest = min(named, key=lambda one: one.item_cost)
    if cheapest.item_cost > demand.cost:
        limit, found = 1000 * demand.cost, 1000 * cheapest.item_cost
        return f"no variant costs at most US$ {limit:.6g} per million answers: {cheapest.name} costs {found:.4g}"
    return "no variant meets latency, accuracy and cost together"


def _binds(program: Program, counts: Sequence[int], candidates: Sequence[int], row: int) -> bool:
    """Whether another instance of one of these candidates would not fit in this resource."""
    name = program.rows[row]
    of = program.problem.candidates
    total, taken = _total(program.problem, name), 0.0
    kept = program.problem.make_before_break and name not in program.problem.time_shared
    for one, n in zip(of, counts, strict=True):
        there = max(n, one.running) if kept else n
        taken += there * _amount(one, name)
    return any(_amount(of[c], name) > 0 and taken + _amount(of[c], name) > total * (1 + ROUNDING) for c in candidates)


def _total(problem: PlanningProblem, name: str) -> float:
    return problem.budget_per_s if name == BUDGET else problem.resources[name]


def _amount(one: CandidateVariant, name: str) -> float:
    return one.cost_per_s if name == BUDGET else one.uses.get(name, 0.0)


def _described(problem: PlanningProblem, name: str) -> str:
    if name == BUDGET:
        return f"the budget of {3600 * problem.budget_per_s:,.6g} US$/h"
    return f"{name} ({problem.resources[name]:g})"
