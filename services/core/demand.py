"""Requirement classes: queries carry their own needs, and scaling plans for classes of them.

Similar needs (latency and cost within a quarter of an octave, accuracy within 0.02) form one class, which has the strictest needs of its
members. Queries that name a model, a version or a variant form a class of their own, and so do those that state no accuracy.

A query that states no accuracy gets that of its model, as it was uploaded. A variant answers as its model does if its accuracy is at most FLOOR below the model's own, and its further outputs agree with the model's.
For errors (mae, rmse): if its error is at most FLOOR of it larger, and all answers but a share of FLOOR agree. A variant of a model of
unknown accuracy does, too. It is what was measured at registration that says this, whatever labels say of the world.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil, floor, inf, log2, sqrt
from typing import Literal, Protocol, get_args

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from bus.messages.catalog import FLOOR, TARGETS, AppRecord, VariantRecord, is_error
from bus.messages.scaling import ClassDemand
from bus.subjects import WITHOUT_APP
from services.core.catalog import Catalog
from services.core.cost import merit
from services.core.planning.problem import RequirementClass

NOISE = 1e-6  # of a computed accuracy

# of an app: what a query without an accuracy gets: its model's own answers, or any variant's
Default = Literal["own", "any"]
DEFAULTS: tuple[Default, ...] = get_args(Default)


def as_registered(record: VariantRecord) -> VariantRecord:
    """A variant as no app in particular sees it."""
    return record if record.live is None else replace(record, accuracy=record.measured, live=None, registered=None)


class _Measured(Protocol):
    @property
    def model_accuracy(self) -> float | None: ...
    @property
    def metric(self) -> str: ...


def floor_of(record: _Measured) -> float:
    """The least accuracy of a variant that answers as its model does; 0.0 if the model's own is not known."""
    own = record.model_accuracy
    if not own:
        return 0.0
    if is_error(record.metric) or record.metric == "r2":
        return 1.0 / (1.0 + (1.0 / own - 1.0) * (1.0 + FLOOR)) - NOISE
    return own - FLOOR - NOISE


def answers_as_model(record: VariantRecord) -> bool:
    """Whether this variant answers as its model does."""
    agrees = record.metric not in TARGETS or record.agreement is None or record.agreement >= 1.0 - FLOOR
    return agrees and not record.differing and (record.measured is None or record.measured >= floor_of(record))


def defaults(records: Sequence[VariantRecord], app: AppRecord | None) -> list[bool]:
    """Of each of an app's variants, whether a query that states no accuracy may get it. Where none of a model's does, its best ones serve."""
    if app is not None and app.accuracy == "any":
        return [True] * len(records)
    best: dict[tuple[str, str], float] = {}
    as_model = [answers_as_model(record) for record in records]
    for record, kept in zip(records, as_model, strict=True):
        version = (record.model, record.version)
        best[version] = max(best.get(version, 0.0), float("inf") if kept else merit(record.measured))
    return [
        kept or merit(record.measured) >= best[record.model, record.version]
        for record, kept in zip(records, as_model, strict=True)
    ]


def reaching(
    records: Sequence[VariantRecord], accuracy: float, app: AppRecord | None, able: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which variants of an app reach this accuracy. One whose accuracy was not measured does.

    Where none of those that are able to answer does any more, by the labels, though one of them was registered with it: the best of them, and those
    that may be as good. An app that refuses such queries has none.
    """
    figures = np.array([1.0 if one.accuracy is None else one.accuracy for one in records], dtype=np.float64)
    reach: NDArray[np.bool_] = figures >= accuracy
    if (reach & able).any() or app is None or app.quality_act == "refuse":
        return reach
    promised = [one.registered is not None and one.registered >= accuracy for one in records]
    if not (np.array(promised, dtype=np.bool_) & able).any():
        return reach
    most = np.array([one.accuracy if one.truth is None else one.truth.high for one in records], dtype=np.float64)
    return np.asarray(able & (most >= figures[able].max()))


def meeting(
    records: Iterable[VariantRecord], accuracy: float, app: AppRecord | None, *, named: bool = False
) -> tuple[VariantRecord, ...]:
    """The variants of an app that meet a query's accuracy; 0.0: it states none. named: the query names its variant, which is enough.

    records: all of the versions that may answer. A variant whose accuracy was not measured meets every one.
    """
    pool = tuple(records)
    if accuracy > 0.0:
        meets = reaching(pool, accuracy, app, np.ones(len(pool), dtype=np.bool_))
        return tuple(record for record, serves in zip(pool, meets.tolist(), strict=True) if serves)
    if named:
        return pool
    return tuple(record for record, serves in zip(pool, defaults(pool, app), strict=True) if serves)


OCTAVE = 4  # bands in an octave of latency, and of cost
ACCURACY = 0.02  # width of a band of accuracy
MOST = 32  # classes of one app; with more, the bands get wider


SIGNIFICANT = 3.5  # standard deviations from which on a difference between two rates is not chance
ANY = "*"  # in place of a worker's name: any worker, or any other one

Band = tuple[str, int | None, int, int | None, str | None, str | None, str | None, bool]
Counted = tuple[ClassDemand, dict[str, int]]  # needs, and items by the worker that took them ("": no worker could)


def band(row: ClassDemand, coarse: int = 1) -> Band:
    """The class of these needs. coarse: how many times wider the bands are."""
    return (
        row.app,
        None if row.latency_ms is None else floor(OCTAVE * log2(max(row.latency_ms, 1e-6)) / coarse),
        floor(row.accuracy / (ACCURACY * coarse) + 1e-9) if row.accuracy else -1,
        None if row.cost is None else floor(OCTAVE * log2(max(row.cost, 1e-12)) / coarse),
        row.model,
        row.version,
        row.variant,
        row.new,
    )


KEPT_S = 900.0  # for which what was expected keeps its capacity
WEEK_S = 604800.0


def expected_qps(app: AppRecord | None, now: float, ahead_s: float) -> float:
    """The most queries/s that an operator has said to expect of an app at a time from now until then."""
    found = 0.0
    for one in app.expects if app is not None else ():
        weeks = max(0.0, ceil((now - KEPT_S - one.at) / WEEK_S)) if one.weekly else 0.0
        begins = one.at + WEEK_S * weeks
        if now - KEPT_S < begins <= now + ahead_s:
            found = max(found, one.qps)
    return found


def merged(one: ClassDemand, other: ClassDemand) -> ClassDemand:
    """Both together, with the stricter of each need."""
    return replace(
        one,
        items=one.items + other.items,
        latency_ms=_least(one.latency_ms, other.latency_ms),
        accuracy=max(one.accuracy, other.accuracy),
        cost=_least(one.cost, other.cost),
    )


def classes(counted: Iterable[Counted]) -> list[Counted]:
    """One entry for each class. When an app has more than MOST classes, the bands are widened until it has not."""
    rows = list(counted)
    coarse = 1
    while True:
        found: dict[Band, Counted] = {}
        for needs, items in rows:
            of = band(needs, coarse)
            known = found.get(of)
            found[of] = (needs, items) if known is None else (merged(known[0], needs), _added(known[1], items))
        sizes = Counter(of[0] for of in found)
        if coarse >= 64 or all(size <= MOST for size in sizes.values()):
            return list(found.values())
        rows, coarse = list(found.values()), coarse * 2


def _added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    both = dict(one)
    for worker, items in other.items():
        both[worker] = both.get(worker, 0) + items
    return both


def _least(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else min(one, other)


def variants_for(
    app: str,
    needs_model: str | None,
    version: str | None,
    variant: str | None,
    catalog: Catalog,
    accuracy: float = 0.0,
    *,
    new: bool = False,
) -> tuple[VariantRecord, ...]:
    """The variants that may answer queries of an app with these names and this accuracy (0.0: none is stated), as in selection.

    new: queries that get the new version of a release.
    """
    named = variants_named(app, needs_model, version, variant, catalog, new=new)
    return meeting(named, accuracy, catalog.app(app), named=variant is not None)


def variants_named(
    app: str, needs_model: str | None, version: str | None, variant: str | None, catalog: Catalog, *, new: bool = False
) -> tuple[VariantRecord, ...]:
    """The variants of an app that these names allow, whatever their accuracy."""
    if needs_model is version is variant is None and not new and not app.startswith(f"{WITHOUT_APP}."):
        return catalog.variants_of(app)
    if app.startswith(f"{WITHOUT_APP}."):
        needs_model = app.removeprefix(f"{WITHOUT_APP}.")
        record, known = catalog.model(needs_model), None
        links = {} if record is None else {record.model: record.version}
    else:
        known = catalog.app(app)
        links = {} if known is None else (new and known.released) or known.links
    if variant is not None:
        found = catalog.variant(variant)
        may = found is not None and all(
            one in links and _may_answer(app, one, at, catalog) for one, at in found.versions
        )
        return catalog.seen(app, [found]) if found is not None and may else ()
    records = [
        record
        for model, current in sorted(links.items())
        if needs_model in (None, model) and (version is None or _may_answer(app, model, version, catalog))
        for record in catalog.variants_at(model, version or current)
    ]
    if known is not None and needs_model is version is None:
        records += [one for one in catalog.cascades_of(known) if links.items() >= set(one.versions)]
    return catalog.seen(app, records)


def _may_answer(app: str, model: str, version: str, catalog: Catalog) -> bool:
    known = catalog.app(app)
    return known is None or version in catalog.versions_for(known, model)


def requirement_class(index: int, needs: ClassDemand, load: float) -> RequirementClass:
    """A class of demand in a planning problem. Its app has the class's index, since each has a scope of its own, which knows what is accurate
    enough. load: items/s.
    """
    return RequirementClass(
        app=f"{needs.app}/{index}",
        load=load,
        latency_ms=inf if needs.latency_ms is None else needs.latency_ms,
        cost=inf if needs.cost is None else needs.cost,
    )


def rate_of(periods: Sequence[float], counts: Sequence[float], peakedness: float = 1.0) -> float:
    """Items/s now, from the seconds and items of successive periods, the newest first.

    It is the mean over all, unless the newest part differs from the rest by more than chance explains (arrivals are Poisson). Then it is the
    mean of that part. peakedness: variance over mean of the counts, where they scatter more than Poisson's.
    """
    seconds, items = sum(periods), sum(counts)
    if seconds <= 0:
        return 0.0
    best, found = SIGNIFICANT, items / seconds
    new_s, new_n = 0.0, 0.0
    for i in range(len(periods) - 1):
        new_s, new_n = new_s + periods[i], new_n + counts[i]
        old_s, old_n = seconds - new_s, items - new_n
        if new_s <= 0 or old_s <= 0:
            continue
        # Both counts are Poisson and small. Their roots (Anscombe) are nearly normal, with the same spread at every rate.
        spread = sqrt(peakedness * (1.0 / new_s + 1.0 / old_s)) / 2.0
        distance = abs(sqrt((new_n + 0.375) / new_s) - sqrt((old_n + 0.375) / old_s)) / spread
        if distance > best:
            best, found = distance, new_n / new_s
    return found
