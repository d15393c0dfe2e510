"""The baselines of InferLine's evaluation (paper 004, section 6.1): the pipeline as one unit, replicated for a rate. Pure.

A unit is one replica of each vertex on its fastest hardware, the dearer one of equals. Its batch is the largest for which one query through it
meets the objective: Σ latency on the longest path. `cg-mean` has units for the mean rate of the sample, `cg-peak` for the largest rate in any
window as long as the objective. Whether queries then wait too long is for the estimator to say, after the fact.
"""

from math import ceil

from bus.messages.catalog import PipelinePlan
from services.core.pipelines.envelope import most_in
from services.core.pipelines.inferline import fastest, infeasible
from services.core.pipelines.problem import PlanningWorkspace, ServingChoice


def plan_coarse(space: PlanningWorkspace, *, policy: str) -> PipelinePlan:
    """policy: "cg-mean" or "cg-peak"."""
    options = fastest(space)
    if space.unqueued(options) > space.objective:
        return infeasible(space, policy)
    batch = max((n for n in _sizes(space, options) if _path_seconds(space, options, n) <= space.objective), default=1)
    sizes = [min(batch, len(space.seconds[v][o]) - 1) for v, o in enumerate(options)]
    unit = min(
        space.throughput(v, o, n) / space.scales[v]
        for v, (o, n) in enumerate(zip(options, sizes, strict=True))
        if space.scales[v] > 0
    )
    rate = space.rate
    if policy == "cg-peak":
        rate = most_in(space.problem.arrivals, space.objective) / space.objective
    units = max(1, ceil(rate / unit - 1e-9))
    choices = tuple(ServingChoice(o, n, units) for o, n in zip(options, sizes, strict=True))
    steps = [f"a unit in batches of {batch} serves {unit:.4g} queries/s", f"{units} units for {rate:.4g} queries/s"]
    return space.plan(choices, policy=policy, steps=steps)


def _sizes(space: PlanningWorkspace, options: list[int]) -> set[int]:
    return {n for v, o in enumerate(options) for n in space.batches(v, o)}


def _path_seconds(space: PlanningWorkspace, options: list[int], batch: int) -> float:
    """Of one query through an idle unit in full batches, on its longest path."""
    hop = space.problem.hop_ms / 1000.0
    tables = [space.seconds[v][o] for v, o in enumerate(options)]
    weights = {name: table[min(batch, len(table) - 1)] + hop for name, table in zip(space.order, tables, strict=True)}
    return space.graph.longest_path(weights)[0] + hop
