"""What the model-autoscaler asks of its edge. Pure."""

from msgspec import Struct

from services.core.planning.plan import Plan
from services.core.planning.problem import Problem


class Solve(Struct, frozen=True):
    """Plan for this problem; the answer is `Solved`."""

    problem: Problem


class Solved(Struct, frozen=True):
    """The plan, and how long it took in milliseconds."""

    plan: Plan
    milliseconds: float
