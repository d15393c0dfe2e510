"""The integer programme of a problem, in the form that all solvers work on.

    minimise   Σ_v C_v (δ_v + λ T_v max(δ_v, 0))                               (or the additive form)
    subject to Σ_v x_vk ≥ slack · load_k,  x_vk = 0 unless v may answer k       (1), (2): carries each class, in time
               Σ_k x_vk ≤ Q_v (N_v + δ_v)                                      what a variant serves is shared
               Σ_v R_vr (N_v + δ_v) ≤ R_r for every resource r                 (3), the budget being one of them
               N_v + δ_v ≥ 0                                                   (4)

after INFaaS (Romero et al., section 4.2.1). The instances of a variant form two *supplies*, since their prices differ: those that run
already (at most N_v, at C_v each) and fresh ones (at C_v (1 + λ T_v)). A solver chooses how many of each. Demands that the same variants
may answer form one *group*.
"""

from collections.abc import Sequence
from math import ceil, isfinite
from typing import NamedTuple

from services.core.planning.problem import CandidateVariant, PlanningProblem

BUDGET = "budget, US$/s"  # a row like those of the resources
_CHURN = 1e-7  # relative price of a change: of two plans that cost the same, the one that changes less is cheaper
ROUNDING = 1e-9  # relative tolerance: 1.05 × 100 must not need more than 105


class InstanceSupply(NamedTuple):
    """Instances of one candidate that cost the same.

    candidate: index. rate: items/s of one. low, high: the fewest and the most of them. weights: (row, share of its total) that one takes.
    """

    candidate: int
    price: float
    rate: float
    low: int
    high: int
    weights: tuple[tuple[int, float], ...]


class DemandGroup(NamedTuple):
    """Demands (indices) that the same candidates (indices) may answer. need: items/s. least: the fewest instances."""

    demands: tuple[int, ...]
    candidates: tuple[int, ...]
    need: float
    least: int


class Program(NamedTuple):
    """The integer programme.

    rows: names of the limited resources. The weights of a plan add up to at most 1 in each. running, fresh: the supplies of each
    candidate, by its index. home: the groups (indices) of each candidate.
    """

    problem: PlanningProblem
    running: tuple[InstanceSupply, ...]
    fresh: tuple[InstanceSupply, ...]
    groups: tuple[DemandGroup, ...]
    home: tuple[tuple[int, ...], ...]
    rows: tuple[str, ...]

    def shared(self, candidate: int) -> bool:
        return len(self.home[candidate]) > 1


def compile_program(problem: PlanningProblem) -> Program:
    """The programme of a problem."""
    groups = _groups(problem)
    home: list[list[int]] = [[] for _ in problem.candidates]
    for g, group in enumerate(groups):
        for c in group.candidates:
            home[c].append(g)
    amounts = [_amounts(problem, one) for one in problem.candidates]
    rows, limits = _limits(problem, amounts)
    row_of = {name: row for row, name in enumerate(rows)}
    running, fresh = [], []
    for c, one in enumerate(problem.candidates):
        weights, stays, fits, keeps = [], [], True, True
        for name, amount in amounts[c].items():
            row = row_of[name]
            kept = problem.make_before_break and name not in problem.time_shared  # whether it runs on or not
            if amount > limits[row] * (1 + ROUNDING):
                fits, keeps = False, keeps and kept
            elif amount > 0:
                weights.append((row, amount / limits[row]))
                if not kept:
                    stays.append(weights[-1])
        need, needed = 0.0, one.least
        for g in home[c]:
            need += groups[g].need
            needed = max(needed, groups[g].least)
        needed = max(needed, ceil(need / one.saturation_qps))
        most = needed if one.most is None else min(needed, one.most)
        low = min(one.least, one.running)
        high = min(one.running, most) if keeps else low
        running.append(InstanceSupply(c, one.cost_per_s, one.saturation_qps, low, high, tuple(stays)))
        low = max(0, one.least - one.running)
        high = max(low, min(needed, one.most - one.running) if one.most is not None else needed) if fits else low
        price = fresh_price(problem, one) * (1 + _CHURN)
        fresh.append(InstanceSupply(c, price, one.saturation_qps, low, high, tuple(weights)))
    return Program(problem, tuple(running), tuple(fresh), groups, tuple(map(tuple, home)), rows)


def fresh_price(problem: PlanningProblem, one: CandidateVariant) -> float:
    """What adding an instance counts in the objective."""
    if problem.objective == "additive":
        return one.cost_per_s + problem.loading_weight * one.load_s
    return one.cost_per_s * (1 + problem.loading_weight * one.load_s)


def cost(program: Program, counts: Sequence[int]) -> float:
    """What so many instances of each candidate count in the objective, up to a constant."""
    return sum(cost_of(program, c, n) for c, n in enumerate(counts) if n)


def cost_of(program: Program, c: int, n: int) -> float:
    """The part of candidate c."""
    running = program.running[c]
    kept = min(n, running.high)
    return kept * running.price + (n - kept) * program.fresh[c].price


def _groups(problem: PlanningProblem) -> tuple[DemandGroup, ...]:
    members: dict[tuple[int, ...], list[int]] = {}
    by_app: dict[str, list[int]] = {}
    for c, one in enumerate(problem.candidates):
        for app in one.apps:
            by_app.setdefault(app, []).append(c)
    for k, demand in enumerate(problem.demands):
        if demand.load > 0 or demand.least > 0:
            able = [c for c in by_app.get(demand.app, ()) if demand.accepts(problem.candidates[c])]
            members.setdefault(tuple(able), []).append(k)
    demands = problem.demands
    return tuple(
        DemandGroup(
            tuple(of),
            able,
            problem.slack * sum(demands[k].load for k in of) * (1 - ROUNDING),
            max(demands[k].least for k in of),
        )
        for able, of in members.items()
    )


def _amounts(problem: PlanningProblem, one: CandidateVariant) -> dict[str, float]:
    """What one instance takes of everything that is limited."""
    limited = problem.resources
    if not limited:
        amounts = {}
    elif one.uses.keys() <= limited.keys():
        amounts = one.uses
    else:
        amounts = {name: amount for name, amount in one.uses.items() if name in limited}
    return {**amounts, BUDGET: one.cost_per_s} if isfinite(problem.budget_per_s) else amounts


def _limits(problem: PlanningProblem, amounts: list[dict[str, float]]) -> tuple[tuple[str, ...], list[float]]:
    """Names of the rows, and their limits. Instances that must stay (`least`) always fit, whatever the total.

    With make-before-break, everything that runs keeps what it takes, and the limit holds for what is added.
    """
    totals = problem.resources | ({BUDGET: problem.budget_per_s} if isfinite(problem.budget_per_s) else {})
    names, limits = [], []
    for name, total in totals.items():
        pairs = [(of[name], one) for of, one in zip(amounts, problem.candidates, strict=True) if name in of]
        if not pairs:
            continue
        if problem.make_before_break and name not in problem.time_shared:
            free = total - sum(amount * one.running for amount, one in pairs)
            held = sum(amount * max(0, one.least - one.running) for amount, one in pairs)
        else:
            free, held = total, sum(amount * one.least for amount, one in pairs)
        names.append(name)
        limits.append(max(free, held, 0.0))
    return tuple(names), limits
