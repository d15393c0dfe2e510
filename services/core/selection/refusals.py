"""Why no instance answers a query: the error in words, what is on offer instead, and when to ask again. Pure.

Answers, explain, events and logs all have these texts from here.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import combinations
from math import floor, log10
from typing import NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from bus.fields import TYPO, meant
from bus.messages.catalog import ACCURACIES, METRICS, VariantRecord, accuracy_of, is_error, value_of
from bus.messages.public import Closest, Code, Error, Requirements
from services.core.cost import HANDLING_MS
from services.core.placement import arithmetic_words, is_container, quarantined_words
from services.core.selection.cluster import LOAD_AGAIN, ClusterView
from services.core.selection.eligibility import INFINITE, AppView, Ask, VariantInstances
from services.core.selection.instances import CAUTION, OVERHEAD, WAY
from services.core.validation import stated_in

NEEDS = "needs"  # the field of an error where no variant has what is asked for, rather than none that has it serves
OFFERS = 16  # nearest variants of which the first one that can be served is offered

EXPIRED = Error(code="deadline", message="the deadline passed before the query could be dispatched: allow more time")


def loading(seconds: float) -> Error:
    """The error while a variant is loaded for these needs. seconds: until it can answer."""
    text = "a variant that meets the requirements is being loaded and cannot answer in time: ask again"
    return Error(code="deadline", message=text, retry_after_ms=round(seconds * 1000.0, 3))


def full(excess: float) -> Error:
    """The error while all instances are busy. excess: seconds by which the soonest is too late."""
    text = "all instances that meet the requirements are full: ask again later, or loosen the requirements"
    return Error(code="overloaded", message=text, retry_after_ms=round(excess * 1000.0, 3))


def too_little_time(left: float, takes: float) -> Error:
    """The error where not even an idle instance is in time. left: seconds until the deadline. takes: seconds to answer."""
    text = f"the deadline leaves {1e3 * max(left, 0.0):.3g} ms, and an idle instance takes {1e3 * takes:.3g} ms: allow more time"
    return Error(code="deadline", message=text)


def not_loaded(ask: Ask, view: ClusterView, now: float, *, waits: bool = False) -> Error | None:
    """Why no variant with these needs is loaded, and none will be soon. None: one is, is being loaded, or a worker may load one.

    With `retry_after_ms`, that may change by itself. waits: the query waits for it.
    """
    app = view.apps.get(ask.app)
    if app is None:
        return None
    eligible = app.eligibility(ask)
    if eligible.active or eligible.troubled or eligible.loading:
        return None
    reasons, lasting = _hindrances(eligible.loadable, view)
    if not reasons:
        return None
    text = unserved(app, view) or _none_of(" that meets the requirements", reasons)
    if not lasting:
        records = [one.record for one in eligible.loadable if not is_container(one.record.hardware)]
        soon = [view.comes(one, now, waits=waits) for one in records if not any(view.able(one))]
        code: Code = "deadline" if soon else "overloaded"  # a worker may start until then
        return Error(code=code, message=text, retry_after_ms=round(min(soon, default=LOAD_AGAIN) * 1000.0, 3))
    return Error(code="unsatisfiable", message=text, closest=_offer(ask, app, nearest(ask, app, view, servable=True)))


def unserved(app: AppView, view: ClusterView) -> str:
    """Why no query of this app can be answered, whatever it asks for; empty: one may be, or the app has no variants. All doors have it from here."""
    if not app.current.any() or ((app.has_active | app.has_loading | app.has_troubled) & app.current).any():
        return ""
    groups = [group for group, current in zip(app.groups, app.current, strict=True) if current]
    reasons, _ = _hindrances(groups, view, view.heard)
    return _none_of("", reasons) if reasons else ""


def _none_of(which: str, reasons: list[str]) -> str:
    first, *more = dict.fromkeys(reasons)
    return f"no instance{which} and none can be started: {first}" + (f"; and {len(more)} more" if more else "")


def _hindrances(groups: Iterable[VariantInstances], view: ClusterView, now: float = 0.0) -> tuple[list[str], bool]:
    """Why no worker loads one of these variants, and whether that lasts until somebody does something; no reason: one may. now: a worker that
    refused for the moment may load after its `until`.
    """
    reasons: list[str] = []
    lasting = True
    for group in groups:
        record = group.record
        able = list(view.able(record))
        if not able:
            reasons.append(_absent(record, view))
            lasting = lasting and is_container(record.hardware)  # else a worker may start
        quarantined, refused = view.quarantines(record.variant), view.refusals(record.variant)
        for worker in able:
            if worker in quarantined:
                reasons.append(quarantined_words(record.variant, f"on {worker}", quarantined[worker]))
            elif (no := refused.get(worker)) is not None and (no.lasting or no.until > now):
                reasons.append(f"{worker} cannot load it: {no.reason}")
                lasting = lasting and no.lasting
            else:
                return [], False
    return reasons, lasting


def _absent(record: VariantRecord, view: ClusterView) -> str:
    """Why no worker is there that this variant runs on."""
    others = view.adding_otherwise(record)
    if others:
        return arithmetic_words(record, *next(iter(others.items())))
    container = is_container(record.hardware)
    what = f"of {record.model}@{record.version}" if container else f"with {record.hardware}"
    command, itself = "infaas container" if container else "infaas run", "one starts by itself"
    gone = view.gone.get(record.hardware)
    if gone is None:
        return f"no {'container' if container else 'worker'} {what} runs: {itself if view.starts(record) else f'start it ({command})'}"
    at = datetime.fromtimestamp(gone[1], UTC).strftime("%H:%M")
    remedy = itself if view.starts(record) else f"start it again ({command})"
    return f"{'container' if container else 'worker'} {gone[0]} {what} has gone at {at} UTC: {remedy}"


# -- what no variant can do, and what comes nearest


def misstated(wish: Requirements, name: str, metrics: frozenset[str]) -> Error | None:
    """The error where a query states its accuracy in another measure than its app's. name: of the app; metrics: of its models."""
    if not (wish.accuracy or wish.metric) or stated_in(wish.metric, metrics):
        return None
    metric, asked = min(metrics), wish.metric or "accuracy"
    meant = "accuracy" if metric in ACCURACIES else metric
    what = METRICS.get(metric, "a function of its owner")
    text = f"{asked}: the metric of app {name!r} is {metric}, {what}: ask for {meant} in place of {asked}"
    return Error(code="bad_request", message=text, field=asked)


def unsatisfiable(ask: Ask, app: AppView, view: ClusterView) -> Error:
    """The error when no variant can ever serve this. It names what fails, and the nearest variant."""
    allowed = app.pinned(ask)
    if not allowed.any():
        named = app.index.get(ask.variant or "")
        if named is not None:
            one = app.records[named]
            text = f"variant {ask.variant!r} is of model {one.model!r}, version {one.version!r}: leave model and version out, or name these"
            return Error(code="unknown_model", message=text)
        what = f"variant {ask.variant!r}" if ask.variant else f"model {ask.model!r}" if ask.model else "model"
        version = f" of version {ask.version!r}" if ask.version and not ask.variant else ""
        known = app.index if ask.variant else {one.model for one in app.records}
        hint = meant(ask.variant or ask.model or "", known, TYPO)
        return Error(
            code="unknown_model", message=f"app {ask.app!r} has no {what}{version}: see infaas.list.variants{hint}"
        )
    default = allowed & app.accurate(ask) if not ask.accuracy else allowed
    group = nearest(ask, app, view)
    assert group is not None, "some variant is allowed"
    place = app.index[group.record.variant]
    record, is_default = app.seen(ask)[place], default[place]
    what = "no variant" if is_default else "no variant as accurate as its model"
    text = f"{what} of app {ask.app!r} {_failing(ask, app, default)}; ask for less, or register another model"
    if not is_default and record.accuracy is not None:
        what = "an accuracy" if record.metric in ACCURACIES else f"a {record.metric}"
        text += f", or state {what}: {record.variant} has {value_of(kept(record.accuracy, record.metric), record.metric):.4g}"
    offered = group if is_servable(group, view) else None
    field = UNSET if app.promised(ask).any() else NEEDS  # what was promised is no mistake of who asks for it
    return Error(code="unsatisfiable", message=text, closest=_offer(ask, app, offered), field=field)


def nearest(ask: Ask, app: AppView, view: ClusterView, *, servable: bool = False) -> VariantInstances | None:
    """The variant that misses the fewest stated needs; among those, one that is accurate enough, then the least sum of relative misses, of
    which loading is a part, then a loaded one.

    Of the nearest ones, the first that is loaded or can be. If there is none, the very nearest; with `servable`, None.
    """
    allowed = np.flatnonzero(app.pinned(ask))
    latency = app.latency(ask.items, ask.length)[allowed] + app.way
    accuracy, cost = app.accuracies(ask)[allowed], app.charge(ask.items, ask.length)[allowed]
    inaccurate, absent = ~app.accurate(ask)[allowed], ~(app.has_active | app.has_troubled)[allowed]
    count = (latency > ask.latency_s).astype(np.int64) + (cost > ask.cost) + (inaccurate & (ask.accuracy > 0.0))
    miss = np.where(inaccurate, (ask.accuracy or 1.0) - accuracy, 0.0) / (ask.accuracy or 1.0)
    if ask.latency_s < INFINITE:
        late = np.maximum(0.0, latency + absent * app.load_s[allowed] - ask.latency_s)
        miss = miss + late / max(ask.latency_s, 1e-9)
    if ask.cost < INFINITE:
        miss = miss + np.maximum(0.0, cost - ask.cost) / max(ask.cost, 1e-12)
    found = [app.groups[i] for i in allowed[np.lexsort((absent, miss, inaccurate, count))[:OFFERS]].tolist()]
    served = (group for group in found if is_servable(group, view))
    return next(served, None if servable or not found else found[0])


def is_servable(group: VariantInstances, view: ClusterView) -> bool:
    """Whether it is loaded, or a worker may load it."""
    if group.where:
        return True
    variant = group.record.variant
    shut = {*view.quarantines(variant), *(worker for worker, one in view.refusals(variant).items() if one.lasting)}
    return any(worker not in shut for worker in view.able(group.record))


def _offer(ask: Ask, app: AppView, group: VariantInstances | None) -> Closest | UnsetType:
    """What is on offer instead: a query with exactly these needs is served, also as people see and type them."""
    if group is None:
        return UNSET
    record, seconds = group.record, offered_s(group, ask.items, ask.length)
    cost = app.offered_charge(app.index[record.variant], ask.items, ask.length)
    return offered(record, app.seen(ask)[app.index[record.variant]].accuracy, seconds, cost)


def offered(record: VariantRecord, accuracy: float | None, seconds: float, cost: float, **more: str) -> Closest:
    """An offer in figures that are short, and never better than what there is. cost: as predicted; batches of a busy machine take longer."""
    return Closest(
        **{"model": record.model, "variant": record.variant, **more},
        accuracy=None if accuracy is None else kept(accuracy, record.metric),
        latency_ms=_short(1000.0 * seconds, up=True),
        cost=_short(CAUTION * cost, up=True),
        metric=record.metric,
        unit=record.signature.target[1],
    )


def kept(accuracy: float, metric: str) -> float:
    """The best accuracy that this one reaches and that is short in its metric."""
    return accuracy_of(_short(value_of(accuracy, metric), 4, up=is_error(metric)), metric)


def _short(value: float, digits: int = 3, *, up: bool) -> float:
    """The next number of so many digits, up or down."""
    near = float(f"{value:.{digits}g}")
    if near == value or (near > value) == up:
        return near
    step = 10.0 ** (floor(log10(abs(value))) - digits + 1)
    return float(f"{near + (step if up else -step):.{digits}g}")


def offered_s(group: VariantInstances, items: int, length: int | None) -> float:
    """Seconds in which an idle instance answers, with some margin; where there is none yet, after loading it."""
    serving = (*group.active, *group.troubled)
    seconds = group.table.at(length).seconds(items) + group.table.tail_s + HANDLING_MS / 1000.0
    seconds *= max(1.0, min((one.factor for one in serving), default=1.0))
    return CAUTION * (seconds if serving else seconds + group.seconds_to_load) + OVERHEAD + WAY


class _Need(NamedTuple):
    """One need of a query over the variants of an app: smaller values are better. limit, found: its words, with `{}` for a figure."""

    values: NDArray[np.float64]
    most: float
    limit: str
    found: str
    best: str
    scale: float = 1.0

    def words(self, variant: int) -> tuple[str, str]:
        """The limit, and what this variant has, not better than it is, with as many digits as tell them apart."""
        most, value = self.most * self.scale, float(self.values[variant]) * self.scale
        said = [f"{_short(value, digits, up=self.scale > 0):.{digits}g}" for digits in range(3, 18)]
        for limit in (f"{most:.6g}", f"{most:.17g}"):  # a limit may be next to what there is
            found = next((one for one in said if most == value or one != limit), None)
            if found is not None:
                break
        return self.limit.format(limit), self.found.format(found or said[-1])


def _failing(ask: Ask, app: AppView, allowed: NDArray[np.bool_]) -> str:
    """What no variant does: each need that fails alone and the best there is; else those that fail together, and who meets all but one."""
    needs = []
    latency = app.latency(ask.items, ask.length) + app.way
    metrics = {record.metric for record, one in zip(app.records, allowed, strict=True) if one}
    if ask.accuracy > 0.0 and len(metrics) == 1 and not metrics <= {"top1", "top5"}:
        (metric,) = metrics
        sign = 1.0 if is_error(metric) else -1.0
        values = np.array([sign * value_of(one, metric) for one in app.accuracies(ask).tolist()])
        unit = app.records[int(np.argmax(allowed))].signature.target[1] if is_error(metric) else ""
        unit = f" {unit}".rstrip().replace("{", "{{").replace("}", "}}")
        limit, found = f"reaches a {metric} of {{}}{unit}", f"has a {metric} of {{}}{unit}"
        most = sign * value_of(ask.accuracy, metric)
        needs.append(_Need(values, most, limit, found, f"the best has {{}}{unit}", sign))
    elif ask.accuracy > 0.0:
        needs.append(
            _Need(
                -app.accuracies(ask), -ask.accuracy, "reaches accuracy {}", "has accuracy {}", "the best has {}", -1.0
            )
        )
    if ask.latency_s < INFINITE:
        needs.append(
            _Need(latency, ask.latency_s, "answers within {} ms", "takes {} ms", "the fastest takes {} ms", 1e3)
        )
    if ask.cost < INFINITE:
        limit, found = "costs at most US$ {} per 1,000 queries", "costs US$ {} per 1,000"
        needs.append(_Need(app.charge(ask.items, ask.length), ask.cost, limit, found, "the cheapest costs US$ {}"))
    alone = []
    for need in needs:
        best = int(np.argmin(np.where(allowed, need.values, INFINITE)))
        if need.values[best] > need.most:
            limit, found = need._replace(found=need.best).words(best)
            alone.append(f"{limit}: {found} ({app.records[best].variant})")
    if alone:
        return "; none ".join(alone)
    pairs = [pair for pair in combinations(needs, 2) if not _meeting(pair, allowed).any()]
    together = pairs[0] if pairs else tuple(needs)
    offers: dict[int, None] = {}
    for need in together:
        others = _meeting([one for one in together if one is not need], allowed)
        offers[int(np.argmin(np.where(others, need.values, INFINITE)))] = None
    limits = [need.words(next(iter(offers)))[0] for need in together]
    said = [f"{app.records[i].variant} {' and '.join(need.words(i)[1] for need in together)}" for i in offers]
    return f"{' and '.join(limits)}: {', '.join(said)}"


def _meeting(needs: Sequence[_Need], allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    for need in needs:
        allowed = allowed & (need.values <= need.most)
    return allowed
