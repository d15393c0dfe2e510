"""Which objective and which limit of cost a pipeline can meet on an idle fleet, and what is on offer where a query asks for less. Pure."""

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from bus.messages.catalog import stated_in
from bus.messages.public import Error
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import INFINITE, Ask, VariantInstances
from services.core.selection.refusals import NEEDS, nearest, offered, offered_s
from services.dispatcher.budgets import Least, dearest
from services.dispatcher.needs import needs_of_stage
from services.dispatcher.stages import ServedPipeline

LEAST = 1e-9  # s, or US$: what no variant has, so that the fastest, or cheapest, is nearest
MOST_KEPT = 256  # objectives, by needs


def too_fast(ask: Ask, served: ServedPipeline, view: ClusterView) -> Error | None:
    """The refusal of a query of a pipeline whose stages cannot answer within its objective even if they are idle. None: they can."""
    if ask.latency_s >= INFINITE:
        return None
    key = (ask.accuracy, ask.wish.metric, ask.items)
    least = served.least.get(key)
    if least is None:
        certain = {name for name in served.stages if served.graph.certain([name])}
        least = _objective(served, {name: _fastest(ask, served, name) for name in certain})
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
