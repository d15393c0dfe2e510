"""`infaas plan`'s two ways to a plan: the cheapest, by the leader's programme, and the paper's greedy reaction.

The programme is that of `fleet.py` with one pool: one machine that has the file's totals. First nothing may be missing. Only where
there is no such plan, load may be, and is weighed against all that serving could cost.
"""

from collections.abc import Sequence
from math import ceil

from msgspec.structs import replace

from services.core.planning.fleet import (
    ClassNeed,
    FleetPlan,
    FleetProblem,
    Infeasible,
    Pool,
    PooledVariant,
    Unsolved,
    solve_fleet,
)
from services.core.planning.plan import Plan, conclude
from services.core.planning.problem import ROUNDING, CandidateVariant, PlanningProblem
from services.core.planning.reaction import react

OPTIMAL = 1e-4  # relative gap below which a plan counts as optimal
CHURN = 1e-7  # relative price of a change: of two plans that cost the same, the one that changes less is cheaper
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
            )
            for one in problem.candidates
        ),
        needs=tuple(
            ClassNeed(
                name=problem.demands[k].app,
                load=problem.demands[k].load,
                options={at[one.name]: (needs[k] / one.saturation_qps,) for one in able[k]},
                layers=(1.0,),
            )
            for k in served
        ),
        strict=True,
    )
