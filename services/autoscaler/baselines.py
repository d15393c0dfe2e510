"""Policies to compare with: `replicate` (one variant for each app, in any number) and `static` (chosen once, never changed). Pure.

They are SM+ and Clipper+ of INFaaS (Romero et al., Table 5): the developer chooses a variant, and the system serves it. They stand
where a user's own `scale` stands (services/core/policy.py): they say how many instances there are, and the plan for all workers
finds the room.
"""

from collections.abc import Iterable, Mapping
from math import ceil

from services.core.planning.problem import CandidateVariant, PlanningProblem, RequirementClass
from services.core.settings import AutoscalerSettings, StaticVariant

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

    def scale(self, problem: PlanningProblem, now: float) -> dict[str, int]:
        """Instances of the chosen variants, by variant; of the others, those that there are."""
        del now
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
