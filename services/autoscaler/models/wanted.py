"""Which load a worker has to carry, and by which variants it may be: one entry for each requirement class. Pure."""

from collections.abc import Mapping
from math import inf

from msgspec import Struct

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import WorkerHeartbeat
from services.autoscaler.models.loads import LINGER, Load, share_of
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


def variants_for(app: str, needs_model: str | None, version: str | None, variant: str | None, catalog: Catalog) -> tuple[VariantRecord, ...]:  # fmt: skip
    """The variants that queries of an app with these names may get, as selection allows them."""
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
    worker: str,
    beats: Mapping[str, WorkerHeartbeat],
    catalog: Catalog,
    loads: list[Load],
    now: float,
    only: Mapping[str, str],
) -> list[Wanted]:
    by_app: dict[str, list[Load]] = {}
    for load in loads:
        by_app.setdefault(load.needs.app, []).append(load)
    wanted: list[Wanted] = []
    for app in sorted({*by_app, *(record.app for record in catalog.apps)}):
        of_app = by_app.get(app, [])
        everything = _allowed(app, variants_for(app, None, None, None, catalog), only)
        holders = _holders(everything, beats)
        if not of_app and worker not in holders:
            continue
        latest = max(of_app, key=lambda load: load.last, default=None)
        first = bool(holders) and holders[0] == worker
        candidates = holders or _able(everything, beats)
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
            wanted.append(Wanted(app, everything, None if busy else latest, 0.0, least))
    return wanted


def _allowed(app: str, records: tuple[VariantRecord, ...], only: Mapping[str, str]) -> tuple[VariantRecord, ...]:
    name = only.get(app)
    return records if name is None else tuple(record for record in records if record.variant == name)


def _holders(records: tuple[VariantRecord, ...], beats: Mapping[str, WorkerHeartbeat]) -> list[str]:
    """Workers that have one of these variants, or are loading it, in order of their names."""
    names = {record.variant for record in records}
    return [
        name
        for name, beat in sorted(beats.items())
        if not beat.draining and any(i.variant in names and i.state in COUNTED for i in beat.instances)
    ]


def _able(records: tuple[VariantRecord, ...], beats: Mapping[str, WorkerHeartbeat]) -> list[str]:
    kinds = {(record.hardware, record.simulated) for record in records}
    return [
        name
        for name, beat in sorted(beats.items())
        if not beat.draining and any(d.alive and (d.kind, d.simulated) in kinds for d in beat.devices)
    ]


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
