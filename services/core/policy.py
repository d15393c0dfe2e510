"""A user's own policy, and the guard around it: which instance answers a query, how many instances there are, what is learnt. Pure.

A user writes one class with a `name` and any of the three methods: `select` and `observe` as `SelectionPolicy` has them, `scale` as
`ScalingPolicy`; it need be no subclass of these. `dispatcher.policy` names a class with `select`, `autoscaler.policy` one with
`scale` (docs/scaling.md). Each process has an object of its own, made without arguments: a dispatcher calls `select` and `observe`, the
VM-autoscaler that leads calls `scale`. What a method gets is the caller's own and must not be changed. A method must return at
once: no I/O, no clock, no randomness of its own. So the simulator runs the same class.

The baselines are policies to compare with: `replicate` (one variant for each app, in any number) and `static` (chosen once, never changed).
They are SM+ and Clipper+ of INFaaS (Romero et al., Table 5): the developer chooses a variant, and the system serves it. They stand
where a user's own `scale` stands: they say how many instances there are, and the plan for all workers
finds the room.
"""

from collections.abc import Callable, Iterable, Mapping
from math import ceil
from typing import Any, Protocol

from msgspec.structs import replace

from bus.messages.events import OutcomeEvent
from services.core.metric import MetricFamily, counter
from services.core.planning.problem import MOST, CandidateVariant, PlanningProblem, RequirementClass
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask
from services.core.selection.policy import Decision, SelectionPolicy
from services.core.settings import AutoscalerSettings, StaticVariant

METHODS = ("select", "scale", "observe")


class ScalingPolicy(Protocol):
    """How many instances of each variant there are: a user's own class, and the baselines. name: in the reason of its orders."""

    name: str

    def scale(self, problem: PlanningProblem, now: float) -> Mapping[str, int] | None:
        """Decide for all workers, whenever the leader plans: every ten seconds, and when the load or what runs has changed. now:
        Unix seconds.

        The problem has the load that is expected, by class of needs (items/s), the variants that may serve it, with their instances
        (`running`) and throughput (items/s), and the cores and memory of the machines that there are. Returns the instances wanted,
        by variant; the plan finds the room for them. The plan decides on those that it leaves out. None leaves
        all to it.
        """
        ...


def goal_of(own: Any) -> Any:
    """What the view orders variants by for a user's own policy. Its class may have a `goal`; without one it is the cost."""
    return own.goal if hasattr(own, "goal") else SelectionPolicy.goal


def policy_failures(failures: Mapping[str, int]) -> MetricFamily:
    """The metric of `GuardedPolicy.failures`. No samples where no user's own policy runs."""
    return counter(
        "infaas_policy_failures_total", "Times that a user's own policy failed and the built-in one decided, by method."
    ).add_all(failures, "method")


class InvalidDecision(ValueError):
    """A user's own policy returned what cannot be carried out. The text says what is wrong."""


class GuardedPolicy(SelectionPolicy):
    """A user's own policy. Where one of its methods raises or returns what cannot be carried out, the built-in one decides instead.

    own: the user's object. path: as it was named. tell: called with a text at a method's first failure, the second, the fourth and so on.
    builtin: decides on queries where `own` does not; a dispatcher's policy has one. failures: how many there were, by method. strict: an
    error is raised instead, for a simulation is to show what the user's policy does and no other.
    """

    def __init__(self, own: Any, path: str, tell: Callable[[str], None], *, strict: bool = False) -> None:
        self.name: str = own.name
        self.goal = goal_of(own)
        self.failures: dict[str, int] = {method: 0 for method in METHODS if callable(getattr(own, method, None))}
        self.builtin: SelectionPolicy | None = None
        self.observe = self._observe if "observe" in self.failures else None
        self._own = own
        self._path = path
        self._tell = tell
        self._strict = strict

    def select(self, ask: Ask, now: float, view: ClusterView) -> Decision:
        """The user's decision, or the built-in policy's."""
        try:
            decision: Decision | None = self._own.select(ask, now, view)
            if decision is not None:
                return checked(decision, ask, view)
        except Exception as error:
            self._failed("select", error)
        assert self.builtin is not None, "a dispatcher's policy has one"
        return self.builtin.select(ask, now, view)

    def scale(self, problem: PlanningProblem, now: float) -> Mapping[str, int] | None:
        """The instances that the user's policy wants, by variant. None: the plan decides."""
        try:
            wanted = self._own.scale(problem, now)
            if wanted is not None:
                check_wanted(wanted, problem)
                return dict(wanted)
        except Exception as error:
            self._failed("scale", error)
        return None

    def _observe(self, outcome: OutcomeEvent) -> None:
        try:
            self._own.observe(outcome)
        except Exception as error:
            self._failed("observe", error)

    def _failed(self, method: str, error: Exception) -> None:
        if self._strict:
            raise error
        self.failures[method] += 1
        count = self.failures[method]
        if count & (count - 1) == 0:
            instead = "" if method == "observe" else ": the built-in policy decides instead"
            what = str(error) if isinstance(error, InvalidDecision) else f"{type(error).__name__}: {error}"
            self._tell(f"{method}() of the policy {self._path} failed (number {count}){instead}: {what}"[:500])


def checked(given: Any, ask: Ask, view: ClusterView) -> Decision:
    """What a `select` returned, if it can be carried out. Raises InvalidDecision."""
    if not isinstance(given, Decision):
        raise InvalidDecision(f"select must return a Decision or None, not {type(given).__name__}")
    decision: Decision = given
    if isinstance(given.instance, tuple | list) and len(given.instance) == 1:  # as the port had it first
        decision = replace(given, instance=given.instance[0])
    if decision.instance is not None:
        instance = view.instances.get(decision.instance)
        if instance is None:
            raise InvalidDecision(f"instance: there is none {decision.instance!r}: take one of the view's")
        if all(one.variant != instance.record.variant for one in view.apps[ask.app].records):
            raise InvalidDecision(f"instance: {instance.id!r} does not serve the app {ask.app!r}")
    if decision.load is not None:
        if decision.load.worker not in view.workers:
            raise InvalidDecision(f"load.worker: there is no worker {decision.load.worker!r}: take one of the view's")
        if all(one is not decision.load.record for one in view.apps[ask.app].records):
            raise InvalidDecision(f"load.record: it is no variant of the app {ask.app!r}: take one of the view's")
    return decision


def check_wanted(wanted: Any, problem: PlanningProblem) -> None:
    """Check what a `scale` returned. Raises InvalidDecision."""
    if not isinstance(wanted, Mapping):
        raise InvalidDecision(
            f"scale must return a mapping of variant to instances, or None, not {type(wanted).__name__}"
        )
    known = {one.name for one in problem.candidates}
    for name, count in wanted.items():
        if name not in known:
            raise InvalidDecision(f"there is no variant {name!r} to scale: take the names of the problem's candidates")
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST:
            raise InvalidDecision(f"{name}: must be a whole number from 0 to {MOST}, not {count!r}")


BASELINES = ("static", "replicate")


def chosen(
    candidates: Iterable[CandidateVariant], demands: Iterable[RequirementClass], slack: float
) -> StaticVariant | None:
    """The static rule: the variant that meets all of an app's classes and carries their load at least cost, and how many of it do.

    None: none does.
    """
    demands = list(demands)
    able = [one for one in candidates if all(demand.accepts(one) for demand in demands)]
    if not able:
        return None
    load = sum(demand.load for demand in demands)
    best = min(able, key=lambda one: (needed(one, load, slack) * one.cost_per_s, one.name))
    return StaticVariant(variant=best.name, instances=needed(best, load, slack))


def needed(one: CandidateVariant, load: float, slack: float) -> int:
    """How many instances of this variant carry so many items/s."""
    return max(1, ceil(slack * load / one.saturation_qps - 1e-9))


class Baseline:
    """name: "static" or "replicate".

    given: the developer's choice by app; made from the first load, and kept, where it is missing.
    """

    def __init__(self, name: str, given: Mapping[str, StaticVariant]) -> None:
        self.name = name
        self._of = dict(given)

    def scale(self, problem: PlanningProblem, _now: float) -> dict[str, int]:
        """Instances of the chosen variants, by variant; of the others, those that there are."""
        candidates = {one.name: one for one in problem.candidates}
        by_app: dict[str, list[RequirementClass]] = {}
        for demand in problem.demands:
            by_app.setdefault(demand.app.rpartition("/")[0], []).append(demand)
        found: dict[str, int] = {}
        for app, demands in sorted(by_app.items()):
            if app not in self._of and any(demand.load > 0 for demand in demands):
                made = chosen(candidates.values(), demands, problem.slack)
                if made is not None:
                    self._of[app] = made
            choice = self._of.get(app)
            one = candidates.get(choice.variant) if choice is not None else None
            if choice is not None and one is not None:
                load = sum(demand.load for demand in demands)
                count = choice.instances if self.name == "static" else needed(one, load, problem.slack)
                found[one.name] = found.get(one.name, 0) + count
        return {name: one.running for name, one in candidates.items()} | found


def baseline_of(settings: AutoscalerSettings) -> Baseline | None:
    """The baseline that the settings name; None: they name none."""
    return Baseline(settings.policy, settings.choice) if settings.policy in BASELINES else None
