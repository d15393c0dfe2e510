"""Planners by the names that the command line and scenarios use. Pure.

inferline: one variant for each vertex, the most accurate. model-less: any variant that meets the vertex's accuracy floor, where it names one, so
that the plan chooses models as well. cg-mean, cg-peak: the baselines, which have a tuner of their own.
"""

from collections.abc import Mapping

from bus.messages.catalog import PipelinePlan
from services.core.pipelines.coarse import CoarseTuner, plan_coarse
from services.core.pipelines.inferline import EFFORT, ROUNDS, plan_inferline
from services.core.pipelines.problem import PipelineProblem, PlanningWorkspace, StageOption, allowed, most_accurate
from services.core.pipelines.tuner import PipelineTuner, ReplicaTuner

POLICIES = ("inferline", "model-less", "cg-mean", "cg-peak")
COARSE = POLICIES[2:]


def plan_pipeline(
    problem: PipelineProblem, policy: str = "inferline", *, effort: int = EFFORT, rounds: int = ROUNDS
) -> PipelinePlan:
    """Plan a problem without errors. The same problem always has the same plan. Raises ValueError for other policies.

    effort: visits that the estimator may follow beyond the paper's steps, in each round. rounds: plans that are made until one holds for other
    samples too; 1: the sample is taken as it is.
    """
    if policy not in POLICIES:
        raise ValueError(f"there is no policy {policy!r}; there are: {', '.join(POLICIES)}")
    space = workspace(problem, policy)
    if policy in COARSE:
        return plan_coarse(space, policy=policy)
    return plan_inferline(space, policy=policy, effort=effort, rounds=rounds)


def make_tuner(plan: PipelinePlan, now: float, replicas: Mapping[str, int] | None = None) -> ReplicaTuner | None:
    """The tuner that goes with a plan's policy. None: the plan does not say what traffic it is for.

    now: Unix seconds. replicas: of each vertex, those that a tuner before this one had; None: the plan's.
    """
    if not (plan.rate > 0 and plan.envelope):
        return None
    kind = CoarseTuner if plan.policy in COARSE else PipelineTuner
    return kind(plan, now, replicas=replicas)


def workspace(problem: PipelineProblem, policy: str) -> PlanningWorkspace:
    """The problem with the options that the policy may take."""
    options: dict[str, list[StageOption]] = {}
    for vertex in problem.pipeline.vertices:
        mine = allowed(vertex, (option for option in problem.options if option.vertex == vertex.name))
        chooses = policy == "model-less" and vertex.accuracy is not None
        options[vertex.name] = mine if chooses else most_accurate(mine)
    return PlanningWorkspace(problem, options)
