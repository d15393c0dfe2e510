"""What a solver answers, and the one interface of all of them."""

from typing import Literal, Protocol

from msgspec import Struct

from services.core.planning.problem import Problem

Status = Literal["optimal", "feasible", "infeasible"]
Kind = Literal["load", "replicate", "upgrade", "downgrade", "unload"]


class Action(Struct, frozen=True, gc=False):
    """Instances of a variant to add (delta > 0) or to remove (delta < 0)."""

    variant: str
    delta: int
    kind: Kind


class Unmet(Struct, frozen=True, kw_only=True, gc=False):
    """A demand that the plan does not carry. missing: items/s short of slack × load, instances: short of its `least`."""

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
    """Any way to solve a problem. Takes the same problem to the same plan, unless it was given a limit on time."""

    name: str

    def solve(self, problem: Problem) -> Plan: ...
