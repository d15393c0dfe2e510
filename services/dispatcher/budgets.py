"""What the parts of a query may cost, so that together they keep its limit: its `cost` is divided as they cost at least. Pure."""

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from bus.messages.public import Closest, Error
from services.core.ensemble.base import Member
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import INFINITE, Ask, VariantInstances
from services.core.selection.refusals import NEEDS, is_servable, kept, nearest, offered, offered_s, unsatisfiable
from services.core.validation import stated_in
from services.dispatcher.apps import Apps, members_of
from services.dispatcher.needs import needs_of_member, needs_of_stage
from services.dispatcher.stages import NESTED, ServedPipeline

# By part, US$ per 1,000 queries; None: nobody meets its other needs, so it is refused anyway.
Least = Mapping[str, float | None]


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


LEAST = 1e-9  # s, or US$: what no variant has, so that the fastest, or cheapest, is nearest
MOST_KEPT = 256  # objectives, by needs


def too_fast(ask: Ask, served: ServedPipeline, view: ClusterView) -> Error | None:
    """The refusal of a query of a pipeline whose stages cannot answer within its objective even if they are idle. None: they can."""
    if ask.latency_s >= INFINITE:
        return None
    key = (ask.accuracy, ask.wish.metric, ask.items)
    least = served.least.get(key)
    if least is None:
        needed = {name for name in served.stages if served.graph.needs(name)}
        least = _objective(served, {name: _fastest(ask, served, name) for name in needed})
        if len(served.least) < MOST_KEPT:
            served.least[key] = least
    if least <= ask.latency_s:
        return None
    text = f"pipeline {served.app.app!r} answers within {1e3 * least:.3g} ms at best, and not within {1e3 * ask.latency_s:.6g} ms"
    return offer(ask, served, view, f"{text}: allow more time, or register faster models")


def too_dear(ask: Ask, served: ServedPipeline, least: Least, view: ClusterView) -> Error | None:
    """The refusal of a query of a pipeline whose stages may cost more than its limit together. None: they cannot. least: what each costs."""
    total = dearest(least, served)
    if total <= ask.cost:
        return None
    text = f"pipeline {ask.app!r} may cost US$ {total:.6g} per 1,000 queries, more than US$ {ask.cost:.6g}"
    return offer(ask, served, view, f"{text}: allow more, or ask for less accuracy", cheapest=True)


def too_wrong(ask: Ask, served: ServedPipeline, view: ClusterView, found: float) -> Error:
    """The refusal of an answer of a pipeline that does not reach its query's accuracy. found: what such answers reach by their labels."""
    text = f"the answers of pipeline {ask.app!r} reach {found:.4g} by their labels: ask for less accuracy"
    error = replace(offer(ask, served, view, text), field=UNSET)  # what was promised is no mistake of who asks for it
    if not isinstance(error.closest, Closest):
        return error
    return replace(error, closest=replace(error.closest, accuracy=kept(found, error.closest.metric)))


def offer(ask: Ask, served: ServedPipeline, view: ClusterView, text: str, *, cheapest: bool = False) -> Error:
    """`unsatisfiable` with what the pipeline can do instead: a query with exactly these needs is served. It keeps the accuracy if it can.

    cheapest: it has of each stage the cheapest variant that meets the other needs, else the fastest. Its cost has some margin: a stage that
    takes longer than its profile says leaves less to those behind it.
    """
    groups: dict[str, VariantInstances] = {}
    seconds: dict[str, float] = {}
    costs: dict[str, float] = {}
    for name, stage in served.stages.items():
        if stage.app.app.pipeline is not None or not stage.app.groups:
            return Error(code="unsatisfiable", message=text, field=NEEDS)
        asked = needs_of_stage(ask, stage, ask.items, None, INFINITE, ask.deadline)
        asked = replace(asked, cost=LEAST) if cheapest else replace(asked, latency_s=LEAST)
        group = nearest(asked, stage.app, view, servable=True)
        if group is None:
            return Error(code="unsatisfiable", message=text, field=NEEDS)
        groups[name], seconds[name] = group, offered_s(group, ask.items, None)
        costs[name] = stage.items * stage.app.offered_charge(stage.app.index[group.record.variant], ask.items)
    records = [group.record for group in groups.values()]
    counting = [one for one in records if stated_in(ask.wish.metric, frozenset({one.metric}))] or records
    accuracies = [one.accuracy for one in counting if one.accuracy is not None]
    least = max(ask.latency_s if ask.latency_s < INFINITE else 0.0, _objective(served, seconds))
    closest = offered(
        counting[0],
        min(accuracies) if len(accuracies) == len(counting) else None,
        least,
        dearest(costs, served),
        model=served.app.app,
        variant=", ".join(one.variant for one in records),
    )
    return Error(code="unsatisfiable", message=text, closest=closest, field=NEEDS)


def told_of(error: Error, stage: str, ask: Ask, served: ServedPipeline, view: ClusterView) -> Error:
    """A stage's refusal, as the pipeline's client is told of it: with what the whole pipeline can do, where that is on offer."""
    text = f"vertex {stage}: {error.message}"
    if error.code != "unsatisfiable":
        return replace(error, message=text)
    return replace(offer(ask, served, view, text), field=error.field)


def _fastest(ask: Ask, served: ServedPipeline, name: str) -> float:
    """Seconds of an idle instance of the fastest variant that is accurate enough; 0.0: this says another refusal, or a pipeline within."""
    stage = served.stages[name]
    asked = needs_of_stage(ask, stage, ask.items, None, INFINITE, ask.deadline)
    allowed = stage.app.pinned(asked) & stage.app.accurate(asked)
    return float(np.min(stage.app.latency(ask.items)[allowed])) + stage.app.way if allowed.any() else 0.0


def _objective(served: ServedPipeline, seconds: Mapping[str, float]) -> float:
    """The least objective within which stages that take so long answer, one after the other."""
    shares = (served.stages[name].objective(takes) for name, takes in seconds.items())
    path, _ = served.graph.longest_path({name: seconds.get(name, 0.0) for name in served.stages})
    return max(path, *shares, 0.0)
