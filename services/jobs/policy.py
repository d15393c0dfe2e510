"""What offline jobs decide: which variants may compute a job, which is cheapest, how large a chunk is. Pure.

INFaaS, section 4.2: offline queries name an accuracy or a model, not a latency; they run on spare capacity, so what counts is
what an item costs.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from bus.messages.catalog import AppRecord, Signature, VariantRecord
from bus.messages.jobs import JobRecord, JobStatus, SubmitJob
from bus.messages.public import Closest, Error
from services.core.catalog import Catalog
from services.core.cost import LatencyTable, UnknownPrice, cost_per_1000, instance_price_per_s, latency_ms
from services.core.validation import BadRequest, check_name
from services.jobs.commands import JobRoute
from services.jobs.urls import BadUrl, parse


def eligible(
    catalog: Catalog,
    app: str,
    *,
    accuracy: float | None,
    model: str | None,
    variant: str | None,
    simulated: bool = False,
) -> list[VariantRecord]:
    """The variants that may compute this job, in no order. Simulated ones only by name: their outputs may be zeros.

    A variant named is taken in whatever version; otherwise each model's version that serves now. simulated: in a system that is
    simulated as a whole those count as others do.
    """
    if variant is not None:
        record = catalog.variant(variant)
        linked = catalog.app(app)
        found = [record] if record is not None and linked is not None and record.model in linked.links else []
    else:
        found = [record for record in catalog.variants_of(app) if simulated or not record.simulated]
    return [
        record
        for record in found
        if record.profile.rows and model in (None, record.model) and (accuracy or 0.0) <= accuracy_of(record)
    ]


def accuracy_of(record: VariantRecord) -> float:
    """As measured; a variant without a measure passes, as it does for online queries."""
    return 1.0 if record.accuracy is None else record.accuracy


def obstacle(
    catalog: Catalog,
    app: str,
    *,
    accuracy: float | None,
    model: str | None,
    variant: str | None,
    prices: Mapping[str, float],
    simulated: bool = False,
) -> Error | None:
    """Why no variant can compute this job; None when one can."""
    record = catalog.app(app)
    if record is None:
        return Error(code="unknown_app", message=f"no app {app!r}: see infaas.list.apps, or register a model for it")
    if model is not None and model not in record.links:
        known = ", ".join(sorted(record.links))
        return Error(code="unknown_model", message=f"model: {app} has no model {model!r}, only {known}")
    if variant is not None and not eligible(catalog, app, accuracy=None, model=model, variant=variant):
        return Error(code="bad_request", message=f"variant: {app} has no variant {variant!r}: see infaas.list.variants")
    if eligible(catalog, app, accuracy=accuracy, model=model, variant=variant, simulated=simulated):
        return None
    candidates = eligible(catalog, app, accuracy=None, model=model, variant=variant, simulated=simulated)
    if not candidates:
        return Error(code="unsatisfiable", message=f"{app} has no variant that really computes yet")
    best = max(candidates, key=accuracy_of)
    nearest = Closest(
        model=best.model,
        variant=best.variant,
        accuracy=best.accuracy,
        latency_ms=latency_ms(best, 1),
        cost=cost_per_item(best, best.max_batch, prices) * 1000.0,
    )
    text = f"accuracy: no variant reaches {accuracy:g}, the most accurate one has {accuracy_of(best):g}"
    return Error(code="unsatisfiable", message=text, closest=nearest)


def cost_per_item(
    record: VariantRecord, items: int, prices: Mapping[str, float], cores: int = 0, memory_mb: float = 0.0
) -> float:
    """US$ of one item in chunks of so many. cores, memory_mb: of the device; unknown ones are taken to be just large enough."""
    cores, memory_mb = cores or max(1, record.threads), memory_mb or max(1.0, record.profile.memory_mb)
    try:
        per_s = instance_price_per_s(record, prices, cores, memory_mb)
    except UnknownPrice:
        return float("inf")
    return cost_per_1000(record, per_s, max(1, min(items, record.max_batch))) / 1000.0


def chunk_items(records: Iterable[VariantRecord], prices: Mapping[str, float], most: int, seconds: float) -> int:
    """Items of a chunk: one batch of the variant that is cheapest then, no longer than an online query may have to wait."""
    sizes = {record.variant: batch_within(record, most, seconds) for record in records}
    best = min(records, key=lambda r: (cost_per_item(r, sizes[r.variant], prices), r.variant), default=None)
    return 1 if best is None else sizes[best.variant]


def batch_within(record: VariantRecord, most: int, seconds: float) -> int:
    """The largest batch of a variant up to `most` that is predicted to take no longer; at least one."""
    return max(1, min(most, LatencyTable(record).largest_batch_within(seconds)))


def signature_of(app: AppRecord, records: Sequence[VariantRecord]) -> Signature | None:
    """What the job's items must look like."""
    return app.signature or (records[0].signature if records else None)


# -- requests, checked as far as the text and the catalogue go


class Limits(Struct, frozen=True, kw_only=True):
    """The settings that decide a chunk's size, in items and seconds; window: chunks of one job under way; keep: ended jobs.

    sweep_s: between looks for silence; a coordinator without a word for silence_s is gone. simulated: the whole system is.
    """

    chunk_items: int = 64
    batch_s: float = 0.05
    window: int = 32
    keep: int = 1000
    sweep_s: float = 1.0
    silence_s: float = 3.0
    simulated: bool = False


def check(
    app: str, ask: SubmitJob, catalog: Catalog, prefix: str, prices: Mapping[str, float], limits: Limits
) -> Error | None:
    """Why a job is refused before any file is looked at."""
    try:
        check_name(app, "app")
        check_name(ask.model, "model")
        check_name(ask.variant, "variant")
        check_name(ask.job, "job")
        for url, field in ((ask.input, "input"), (ask.output, "output")):
            parse(url, field, prefix)
    except (BadRequest, BadUrl) as error:
        return Error(code="bad_request", message=str(error))
    if ask.accuracy is not None and not 0.0 <= ask.accuracy <= 1.0:
        return Error(code="bad_request", message=f"field `accuracy` is {ask.accuracy}: give 0 to 1")
    if ask.input == ask.output:
        return Error(code="bad_request", message="output: it is the input itself")
    return obstacle(
        catalog,
        app,
        accuracy=ask.accuracy,
        model=ask.model,
        variant=ask.variant,
        prices=prices,
        simulated=limits.simulated,
    )


def route_of(status: JobStatus, catalog: Catalog, prefix: str, limits: Limits) -> JobRoute | None:
    """The job's places and what its items look like; None when its app or models are gone."""
    record = catalog.app(status.app)
    if record is None:
        return None
    found = _eligible(catalog, status.app, status, limits)
    signature = signature_of(record, found)
    if signature is None or not signature.inputs:
        return None
    return JobRoute(status.job, parse(status.input, "input", prefix), parse(status.output, "output", prefix), signature)


def _eligible(catalog: Catalog, app: str, ask: SubmitJob | JobStatus, limits: Limits) -> list[VariantRecord]:
    return eligible(
        catalog, app, accuracy=ask.accuracy, model=ask.model, variant=ask.variant, simulated=limits.simulated
    )


def record_of(
    app: str,
    ask: SubmitJob,
    job: str,
    owner: str,
    now: float,
    catalog: Catalog,
    prices: Mapping[str, float],
    limits: Limits,
) -> JobRecord:
    """The job as it is kept when it begins."""
    found = _eligible(catalog, app, ask, limits)
    status = JobStatus(
        job=job,
        app=app,
        state="accepted",
        input=ask.input,
        output=ask.output,
        accuracy=ask.accuracy,
        model=ask.model,
        variant=ask.variant,
        created=now,
        step="reading the input",
    )
    return JobRecord(
        status=status, owner=owner, chunk_items=chunk_items(found, prices, limits.chunk_items, limits.batch_s)
    )


def listed(records: Iterable[JobRecord], app: str | None, model: str | None) -> list[JobStatus]:
    """The jobs that a list shows, newest first."""
    found = [r.status for r in records if app in (None, r.status.app) and model in (None, r.status.model)]
    return sorted(found, key=lambda status: (-status.created, status.job))
