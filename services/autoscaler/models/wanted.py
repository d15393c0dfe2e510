"""Which load a worker has to carry, and by which variants it may be: one entry for each requirement class. Pure."""

from collections.abc import Mapping
from math import inf

from msgspec import Struct

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import WorkerHeartbeat
from services.autoscaler.models.loads import LINGER, Load, share_of
from services.autoscaler.models.others import Others
from services.autoscaler.models.supply import Facts
from services.core.catalog import Catalog
from services.core.lifecycle import COUNTED

WITHOUT_APP = "_."  # queries that name a model and no app are counted under this prefix


class Wanted(Struct, frozen=True):
    """One demand to be: an app, the variants that may answer, whose load it is (None: what must stay), items/s, instances."""

    app: str
    scope: tuple[VariantRecord, ...]
    load: Load | None
    rate: float
    least: int


def variants_for(
    app: str, needs_model: str | None, version: str | None, variant: str | None, catalog: Catalog
) -> tuple[VariantRecord, ...]:
    """The variants that queries of an app with these names may get, as selection allows them."""
    if needs_model is None and version is None and variant is None and not app.startswith(WITHOUT_APP):
        return catalog.variants_of(app)
    if app.startswith(WITHOUT_APP):
        needs_model = app.removeprefix(WITHOUT_APP)
        record = catalog.model(needs_model)
        links = {} if record is None else {record.model: record.version}
    else:
        known = catalog.app(app)
        links = {} if known is None else known.links
    if variant is not None:
        found = catalog.variant(variant)
        return (found,) if found is not None and found.model in links else ()
    return tuple(
        record
        for model, current in sorted(links.items())
        if needs_model in (None, model)
        for record in catalog.variants_at(model, version or current)
    )


def wanted_by(
    mine: WorkerHeartbeat,
    others: Others,
    catalog: Catalog,
    loads: list[Load],
    now: float,
    only: Mapping[str, str],
) -> list[Wanted]:
    worker = mine.worker
    by_app: dict[str, list[Load]] = {}
    for load in loads:
        by_app.setdefault(load.needs.app, []).append(load)
    held = {one.variant for one in mine.instances if one.state in COUNTED}
    wanted: list[Wanted] = []
    for app in sorted({*by_app, *(record.app for record in catalog.apps)}):
        of_app = by_app.get(app, [])
        everything = _allowed(app, variants_for(app, None, None, None, catalog), only)
        holds = any(record.variant in held for record in everything)
        if not of_app and not holds:
            continue
        latest = max(of_app, key=lambda load: load.last, default=None)
        holder = others.holder(everything)
        first = holds and (holder is None or worker < holder)
        candidates = [worker] if first else [holder] if holder is not None else _able(everything, mine, others)
        for load in of_app:
            needs = load.needs
            scope = _allowed(app, variants_for(app, needs.model, needs.version, needs.variant, catalog), only)
            rate = share_of(worker, load, of_app, candidates)
            if rate <= 0 and first and now - load.last < LINGER:
                rate = 1.0 / LINGER
            if rate > 0 and scope:
                wanted.append(Wanted(app, scope, load, rate, 0))
        record = catalog.app(app)
        least = record.min_instances if record is not None else 0
        if first and least and everything:
            # While nothing comes, what stays is of use to those who came last.
            busy = any(one.app == app for one in wanted)
            # What others have counts, but for one that is kept here: theirs go without asking anybody.
            least = max(1, least - others.instances(everything, mine))
            wanted.append(Wanted(app, everything, None if busy else latest, 0.0, least))
    return wanted


def _allowed(app: str, records: tuple[VariantRecord, ...], only: Mapping[str, str]) -> tuple[VariantRecord, ...]:
    name = only.get(app)
    return records if name is None else tuple(record for record in records if record.variant == name)


def _able(records: tuple[VariantRecord, ...], mine: WorkerHeartbeat, others: Others) -> list[str]:
    """The first worker that could load one of them, if any."""
    kinds = {(record.hardware, record.simulated) for record in records}
    names = [mine.worker] if any(d.alive and (d.kind, d.simulated) in kinds for d in mine.devices) else []
    other = others.able(kinds)
    if other is not None:
        names.append(other)
    return [min(names)] if names else []


def strictest(wanted: list[Wanted], facts: Facts) -> dict[str, float]:
    """For each variant the shortest latency, in s, of those that would be answered by it."""
    found: dict[str, float] = {}
    for one in wanted:
        if one.load is None or one.load.needs.latency_ms is None:
            continue
        limit = one.load.needs.latency_ms / 1000.0
        for record in one.scope:
            if facts.table(record).seconds(1) <= limit:
                found[record.variant] = min(limit, found.get(record.variant, inf))
    return found
