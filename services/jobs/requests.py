"""What is asked for in a job's name: checked as far as the text and the catalogue go. Pure."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from bus.messages.catalog import VariantRecord
from bus.messages.jobs import JobRecord, JobStatus, SubmitJob
from bus.messages.public import Error
from services.core.catalog import Catalog
from services.core.intake import BadRequest, check_name
from services.jobs import policy
from services.jobs.commands import Route
from services.jobs.urls import BadUrl, parse


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
    return policy.obstacle(
        catalog,
        app,
        accuracy=ask.accuracy,
        model=ask.model,
        variant=ask.variant,
        prices=prices,
        simulated=limits.simulated,
    )


def route_of(status: JobStatus, catalog: Catalog, prefix: str, limits: Limits) -> Route | None:
    """The job's places and what its items look like; None when its app or models are gone."""
    record = catalog.app(status.app)
    if record is None:
        return None
    found = _eligible(catalog, status.app, status, limits)
    signature = policy.signature_of(record, found)
    if signature is None or not signature.inputs:
        return None
    return Route(status.job, parse(status.input, "input", prefix), parse(status.output, "output", prefix), signature)


def _eligible(catalog: Catalog, app: str, ask: SubmitJob | JobStatus, limits: Limits) -> list[VariantRecord]:
    return policy.eligible(
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
        status=status, owner=owner, chunk_items=policy.chunk_items(found, prices, limits.chunk_items, limits.batch_s)
    )


def listed(records: Iterable[JobRecord], app: str | None, model: str | None) -> list[JobStatus]:
    """The jobs that a list shows, newest first."""
    found = [r.status for r in records if app in (None, r.status.app) and model in (None, r.status.model)]
    return sorted(found, key=lambda status: (-status.created, status.job))
