"""What the parts of a query may cost, so that together they keep its limit: its `cost` is divided as they cost at least. Pure."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from bus.messages.public import Error
from services.core.ensemble.base import Member
from services.core.selection.eligibility import INFINITE, Ask
from services.core.selection.refusals import is_servable, unsatisfiable
from services.dispatcher.apps import Apps, members_of
from services.dispatcher.needs import needs_of_member, needs_of_stage
from services.dispatcher.stages import NESTED, ServedPipeline

Least = Mapping[
    str, float | None
]  # by part, US$ per 1,000 queries; None: nobody meets its other needs, so it is refused anyway


class Budgets:
    """served: a pipeline as it is now, by name; None: there is none."""

    served: Callable[[str], ServedPipeline | None]

    def __init__(self, apps: Apps) -> None:
        self._apps = apps

    def least(self, ask: Ask, depth: int = 0) -> float | None:
        """What the cheapest way to answer a query with these needs is predicted to cost, in US$ per 1,000. None: there is no way."""
        view = self._apps.view.apps.get(ask.app)
        if view is None:
            return None
        if view.app.pipeline is not None:
            served = self.served(ask.app)
            if served is None or served.missing or depth >= NESTED:
                return None
            found = self.of_stages(ask, served, depth + 1)
            return None if None in found.values() else dearest(found, served)
        if view.app.selection is not None and view.app.selection.policy is not None and not _pinned(ask):
            members = members_of(self._apps.catalog, ask.app)
            each = [one for one in self.of_members(ask, members).values() if one is not None]
            return min(each, default=None)
        charge = view.charge(ask.items, ask.length)
        meeting = np.flatnonzero(view.eligible(replace(ask, cost=INFINITE)))
        cheapest = meeting[np.argsort(charge[meeting], kind="stable")].tolist()
        servable = (i for i in cheapest if is_servable(view.groups[i], self._apps.view))
        return float(charge[next(servable, cheapest[0])]) if cheapest else None

    def of_members(self, ask: Ask, members: Sequence[Member]) -> dict[str, float | None]:
        """`least` of each member of an ensemble, by model."""
        return {one.model: self.least(needs_of_member(ask, one, INFINITE)) for one in members}

    def of_stages(self, ask: Ask, served: ServedPipeline, depth: int = 0) -> dict[str, float | None]:
        """`least` of each vertex of a pipeline, for as many items as a query is said to ask it for."""
        each = {
            name: self.least(needs_of_stage(ask, stage, ask.items, None, INFINITE, ask.deadline), depth)
            for name, stage in served.stages.items()
        }
        return {name: None if one is None else one * served.stages[name].items for name, one in each.items()}

    def too_dear(self, ask: Ask, members: Sequence[Member], least: Least) -> Error:
        """The refusal where no member is within the limit."""
        cheapest = min(members, key=lambda one: (least[one.model] is None, least[one.model] or 0.0))
        return unsatisfiable(needs_of_member(ask, cheapest, ask.cost), self._apps.view.apps[ask.app], self._apps.view)


def dearest(least: Least, served: ServedPipeline, visited: Collection[str] = ()) -> float:
    """What the stages that one query of a pipeline may visit cost together: on the dearest way, of those with the stages `visited`."""
    ways = (way for way in served.ways if all(name in way for name in visited))
    return max((sum(least.get(name) or 0.0 for name in way) for way in ways), default=_sum(least))


def fitting(limit: float, least: Least, weights: Mapping[str, float]) -> dict[str, float]:
    """Of members that a policy has chosen: those that fit the limit together, by model, and what each may cost. The weightier ones go first."""
    kept: dict[str, float | None] = {}
    for model in sorted(least, key=lambda model: -weights.get(model, 0.0)):
        if _sum(kept) + (least[model] or 0.0) <= limit:
            kept[model] = least[model]
    return {model: share(limit, kept[model], _sum(kept)) for model in least if model in kept}


def share(limit: float, own: float | None, total: float) -> float:
    """What a part may cost: as much of the limit as it has of the least that all cost together."""
    if own is None:
        return INFINITE  # it is refused for another need
    if total > limit:
        return limit * own / total
    return max(own, limit * own / total) if total else limit


def _sum(least: Least) -> float:
    return sum(one for one in least.values() if one is not None)


def _pinned(ask: Ask) -> bool:
    return ask.model is not None or ask.version is not None or ask.variant is not None
