"""The answer to a planning problem: how counts of instances become a plan, why it does not carry what it does not carry, and `infaas plan`'s
two ways to it: the cheapest, by the leader's programme, and the paper's greedy reaction.

The programme is that of `fleet.py` with one pool: one machine that has the file's totals. First nothing may be missing. Only where
there is no such plan, load may be, and is weighed against all that serving could cost.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from services.core.planning.fleet import Infeasible, Unsolved, solve_fleet
from services.core.planning.problem import (
    BUDGET,
    ROUNDING,
    CandidateVariant,
    ClassNeed,
    FleetPlan,
    FleetProblem,
    PlanningProblem,
    Pool,
    PooledVariant,
    react,
)

Status = Literal["optimal", "feasible", "infeasible"]
ActionKind = Literal["load", "replicate", "upgrade", "downgrade", "unload"]


class Action(Struct, frozen=True, gc=False):
    """Instances of a variant to add (delta > 0) or to remove (delta < 0)."""

    variant: str
    delta: int
    kind: ActionKind


class Unmet(Struct, frozen=True, kw_only=True, gc=False):
    """A demand that the plan does not carry. missing: items/s below slack × load."""

    app: str
    demand: int
    missing: float
    reason: str


class Plan(Struct, frozen=True, kw_only=True):
    """The answer to a problem.

    status: optimal (proven, within the solver's gap or 10⁻⁴), feasible (meets every constraint), infeasible (no plan meets every
    demand; this one carries as much as it found room for, and `unmet` says what is missing and why). instances: of every
    candidate, after the plan. cost_per_s: US$ per second of all of them. objective: cost of the actions, as the problem
    defines it. solver: who found it. reason: for people, empty when there is nothing to say. gap: how far from optimal it
    may be at most, relative; None when unknown. accuracy: of its answers in the mean, by app for which it counts.
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
    accuracy: dict[str, float] = {}


def conclude(
    problem: PlanningProblem,
    counts: Sequence[int],
    *,
    solver: str,
    status: Status,
    lacking: Mapping[int, float] | None = None,
    reason: str = "",
    gap: float | None = None,
    accuracy: tuple[float | None, ...] = (),
) -> Plan:
    """The plan that has so many instances of each candidate.

    lacking: by demand, items/s that it does not carry; any makes it infeasible.
    """
    unmet = (*_unmet(problem, counts, lacking or {}), *_inaccurate(problem, accuracy))
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
        accuracy=_by_app(problem, accuracy),
    )


def _by_app(problem: PlanningProblem, accuracy: Sequence[float | None]) -> dict[str, float]:
    """By app that asks for it, the mean accuracy of its answers."""
    found: dict[str, list[tuple[float, float]]] = {}
    for demand, mean in zip(problem.demands, accuracy, strict=False):
        if mean is not None and (demand.accuracy_mean or demand.worth):
            found.setdefault(demand.app, []).append((demand.load, mean))
    return {app: sum(load * mean for load, mean in of) / sum(load for load, _ in of) for app, of in found.items()}


def _inaccurate(problem: PlanningProblem, accuracy: Sequence[float | None]) -> Iterator[Unmet]:
    """Apps whose answers are less accurate in the mean than is wanted."""
    reached = _by_app(problem, accuracy)
    for k, demand in enumerate(problem.demands):
        mean = reached.pop(demand.app, None)
        if mean is not None and mean < demand.accuracy_mean - INACCURATE:
            reason = f"{demand.app} reaches a mean accuracy of {mean:.4g}, less than {demand.accuracy_mean:g}: lower accuracy_mean, or add variants or room"
            yield Unmet(app=demand.app, demand=k, missing=0.0, reason=reason)


def objective(problem: PlanningProblem, counts: Sequence[int]) -> float:
    """Cost of the actions that lead to these counts."""
    total = 0.0
    for one, n in zip(problem.candidates, counts, strict=True):
        delta = n - one.running
        total += delta * (problem.fresh_price(one) if delta > 0 else one.cost_per_s)
    return total


def actions(problem: PlanningProblem, counts: Sequence[int]) -> tuple[Action, ...]:
    """What the plan does, in the order of the candidates.

    A variant that does not run yet is an upgrade or a downgrade by its hardware cost (paper, section 4.2.1), against the dearest of
    its apps' variants that lose instances, or else of those that run; it is a load when none runs.
    """
    deltas = [n - one.running for one, n in zip(problem.candidates, counts, strict=True)]
    pairs = list(zip(problem.candidates, deltas, strict=True))
    return tuple(Action(one.name, delta, _kind(one, delta, pairs)) for one, delta in pairs if delta)


def _kind(one: CandidateVariant, delta: int, all_of_them: Sequence[tuple[CandidateVariant, int]]) -> ActionKind:
    if delta < 0:
        return "unload"
    if one.running:
        return "replicate"
    apps = set(one.apps)
    there = [(other.cost_per_s, change) for other, change in all_of_them if other.running and apps & set(other.apps)]
    compared = [value for value, change in there if change < 0] or [value for value, _ in there]
    if not compared:
        return "load"
    return "upgrade" if one.cost_per_s >= max(compared) else "downgrade"


def _unmet(problem: PlanningProblem, counts: Sequence[int], lacking: Mapping[int, float]) -> tuple[Unmet, ...]:
    able = problem.accepted()
    found = []
    for k, missing in sorted(lacking.items()):
        app = problem.demands[k].app
        why = _why(problem, counts, able[k], missing) if able[k] else _no_candidate(problem, k)
        found.append(Unmet(app=app, demand=k, missing=missing, reason=f"app {app}: {why}"))
    return tuple(found)


def _why(problem: PlanningProblem, counts: Sequence[int], able: Sequence[CandidateVariant], missing: float) -> str:
    limits = problem.limits()
    taken = dict.fromkeys(limits, 0.0)
    for one, n in zip(problem.candidates, counts, strict=True):
        for name in taken:
            taken[name] += n * one.takes(name)
    scarce = [
        name
        for name, total in limits.items()
        if any(0 < one.takes(name) > total * (1 + ROUNDING) - taken[name] for one in able)
    ]
    if not scarce:
        return f"needs {missing:.4g} items/s more than its variants may have instances for"
    return f"needs {missing:.4g} items/s more than fits in {' and '.join(_described(problem, name) for name in scarce)}"


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
        limit, found = demand.cost, cheapest.item_cost
        return f"no variant costs at most US$ {limit:.6g} per 1,000 queries: {cheapest.name} costs {found:.4g}"
    return "no variant meets latency, accuracy and cost together"


def _described(problem: PlanningProblem, name: str) -> str:
    if name == BUDGET:
        return f"the budget of {3600 * problem.budget_per_s:,.6g} US$/h"
    return f"{name} ({problem.resources[name]:g})"


OPTIMAL = 1e-4  # relative gap below which a plan counts as optimal
CHURN = 1e-7  # relative price of a change: of two plans that cost the same, the one that changes less is cheaper
INACCURATE = 1e-6  # of a mean accuracy: rounding
SERVED = 1e-6  # share of a load below which what is missing of it is rounding


def greedy(problem: PlanningProblem) -> Plan:
    """What runs, and what the reaction adds."""
    found = react(problem)
    counts = [one.running + found.added.get(one.name, 0) for one in problem.candidates]
    return conclude(problem, counts, solver="greedy", status="feasible", lacking=found.lacking)


def cheapest(
    problem: PlanningProblem, *, time_limit_s: float | None = None, gap: float = OPTIMAL, node_limit: int | None = None
) -> Plan:
    """The cheapest plan; the greedy one where the limits end the search before HiGHS finds any. `solver` in the plan says which."""
    able = problem.accepted()
    needs = [problem.slack * demand.load * (1 - ROUNDING) for demand in problem.demands]
    served = [k for k, need in enumerate(needs) if need > 0 and able[k]]
    lacking = {k: need for k, need in enumerate(needs) if need > 0 and not able[k]}
    posed = _posed(problem, able, needs, served)
    limits = {"time_limit_s": time_limit_s, "gap": gap, "node_limit": node_limit}
    try:
        try:
            found: FleetPlan = solve_fleet(posed, **limits)  # type: ignore[arg-type]
        except Infeasible:
            found = solve_fleet(replace(posed, strict=False), **limits)  # type: ignore[arg-type]
    except Unsolved as unsolved:
        rough = greedy(problem)
        return replace(rough, reason="; ".join(filter(None, (f"exact solver: {unsolved}", rough.reason))))
    means = dict(zip(served, found.accuracy, strict=True))
    for k, missing in zip(served, found.missing, strict=True):
        if missing[0] > SERVED:
            lacking[k] = missing[0] * needs[k] / (1 - ROUNDING)
    proven = found.gap <= OPTIMAL
    return conclude(
        problem,
        found.instances,
        solver="ilp",
        status="optimal" if proven else "feasible",
        lacking=lacking,
        reason="" if proven else f"the search stopped at its limit, at most {found.gap:.2%} from the cheapest plan",
        gap=found.gap,
        accuracy=tuple(means.get(k) for k in range(len(problem.demands))),
    )


def _posed(
    problem: PlanningProblem, able: Sequence[Sequence[CandidateVariant]], needs: Sequence[float], served: Sequence[int]
) -> FleetProblem:
    at = {one.name: v for v, one in enumerate(problem.candidates)}
    limits = problem.limits()
    whole = dict.fromkeys(at, 0.0)  # instances that would carry all that a candidate may get
    for k in served:
        for one in able[k]:
            whole[one.name] += needs[k] / one.saturation_qps
    dearest = sum(max(ceil(needs[k] / one.saturation_qps) * one.cost_per_s for one in able[k]) for k in served)
    return FleetProblem(
        pools=(Pool(name="all", machines=1, least=1, most=1, price=dearest, resources=limits, elastic=False),),
        variants=tuple(
            PooledVariant(
                name=one.name,
                pool=0,
                uses={name: one.takes(name) for name in limits if one.takes(name) > 0},
                computes=("", 0.0),
                most=max(one.running, ceil(whole[one.name])),
                running=one.running,
                price=one.cost_per_s,
                load_s=one.load_s,
                adding=problem.fresh_price(one) - one.cost_per_s + CHURN * one.cost_per_s,
                limit=one.most,
                accuracy=one.accuracy or 0.0,
            )
            for one in problem.candidates
        ),
        needs=tuple(
            ClassNeed(
                name=problem.demands[k].app,
                load=problem.demands[k].load,
                options={at[one.name]: (needs[k] / one.saturation_qps,) for one in able[k]},
                layers=(1.0,),
                mean=problem.demands[k].accuracy_mean,
                worth=problem.demands[k].worth * problem.demands[k].load / 10.0,  # US$ a second
            )
            for k in served
        ),
        strict=True,
    )
