"""Which jobs are taken, which variants may compute them, which variant is cheapest, and how large a chunk is.

INFaaS, section 4.2: offline queries name an accuracy or a model, not a latency. They run on spare capacity, so only the cost of an item
counts.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from bus.fields import filled
from bus.messages.catalog import AppRecord, Signature, VariantRecord, value_of
from bus.messages.jobs import JobRecord, JobStatus, SubmitJob
from bus.messages.public import Error, Requirements
from bus.subjects import Subjects
from services.core.catalog import Catalog
from services.core.cost import LatencyTable, UnknownPrice, cost_per_1000, instance_price_per_s, latency_ms
from services.core.demand import meeting
from services.core.selection.refusals import kept, misstated, offered
from services.core.settings import JobsSettings
from services.core.validation import WrongField, check_name
from services.jobs.commands import BadUrl, JobRoute, ParsedUrl, parse

NEEDS = ("accuracy", "metric", "model", "variant")  # those needs of queries that a job has, too


def eligible(
    catalog: Catalog,
    app: str,
    *,
    accuracy: float | None,
    model: str | None,
    variant: str | None,
    simulated: bool = False,
) -> list[VariantRecord]:
    """The variants that may compute this job, in no order.

    A variant that is named may be of any version that fits the app; otherwise the versions count that serve it now. A simulated variant must be named,
    because its outputs may be zeros. simulated: the whole system is simulated, and its variants count as real ones.
    """
    if variant is not None:
        record = catalog.variant(variant)
        linked = catalog.app(app)
        found = []
        if record is not None and linked is not None and record.model in linked.links:
            found = (
                [*catalog.seen(app, [record])] if record.version in catalog.versions_for(linked, record.model) else []
            )
    else:
        found = [record for record in catalog.variants_of(app) if simulated or not record.simulated]
    able = [record for record in found if record.profile.rows and model in (None, record.model)]
    return list(meeting(able, accuracy or 0.0, catalog.app(app), named=variant is not None))


def accuracy_of(record: VariantRecord) -> float:
    """The measured accuracy. A variant without one meets every demand, as it does for online queries."""
    return 1.0 if record.accuracy is None else record.accuracy


def cost_per_item(
    record: VariantRecord, items: int, prices: Mapping[str, float], cores: int = 0, memory_mb: float = 0.0
) -> float:
    """US$ of one item in chunks of so many. cores, memory_mb: of the device; 0: the device is just large enough."""
    cores, memory_mb = cores or max(1, record.threads), memory_mb or max(1.0, record.profile.memory_mb)
    try:
        per_s = instance_price_per_s(record, prices, cores, memory_mb)
    except UnknownPrice:
        return float("inf")
    return cost_per_1000(record, per_s, max(1, min(items, record.max_batch))) / 1000.0


def chunk_items(records: Iterable[VariantRecord], prices: Mapping[str, float], most: int, seconds: float) -> int:
    """Items of a chunk: one batch of the cheapest variant, which takes at most so many seconds, because online queries wait for it."""
    sizes = {record.variant: batch_within(record, most, seconds) for record in records}
    best = min(records, key=lambda r: (cost_per_item(r, sizes[r.variant], prices), r.variant), default=None)
    return 1 if best is None else sizes[best.variant]


def batch_within(record: VariantRecord, most: int, seconds: float) -> int:
    """The largest batch of a variant, from 1 to `most`, that is predicted to take at most so many seconds."""
    return max(1, min(most, LatencyTable(record).largest_batch_within(seconds)))


def signature_of(app: AppRecord, records: Sequence[VariantRecord]) -> Signature | None:
    """The names, datatypes and shapes of a job's items."""
    return app.signature or (records[0].signature if records else None)


class JobPolicy(Struct, eq=False):
    """Turns requests for jobs into records, as far as their text and the catalogue tell.

    subjects: of the cluster. prices: US$ an hour by device kind. simulated: see `eligible`.
    """

    catalog: Catalog
    subjects: Subjects
    prices: Mapping[str, float]
    settings: JobsSettings
    simulated: bool

    def error(self, app: str, ask: SubmitJob) -> Error | None:
        """Why a job is refused before any file is opened; None when it is not."""
        try:
            check_name(app, "app")
            check_name(ask.model, "model")
            check_name(ask.variant, "variant")
            check_name(ask.job, "job")
            itself = parse(ask.input, "input", self.subjects, app) == self.target(app, ask.output)
        except (WrongField, BadUrl) as error:
            return Error(code="bad_request", message=str(error))
        stated = [need for need in Requirements.__struct_fields__ if getattr(ask, need) is not None]
        if foreign := [need for need in stated if need not in NEEDS]:
            text = f"field `{foreign[0]}` is no need of a job, which runs when there is room: leave it out; a job takes {', '.join(NEEDS)}"
            return Error(code="bad_request", message=text)
        if ask.accuracy is not None and not 0.0 <= ask.accuracy <= 1.0:
            return Error(code="bad_request", message=f"field `accuracy` is {ask.accuracy}: give 0 to 1")
        if itself:
            return Error(code="bad_request", message="output: it is the input itself")
        return self._no_variant(app, ask)

    def _no_variant(self, app: str, ask: SubmitJob) -> Error | None:
        """Why no variant can compute this job; None when one can."""
        record, model, variant = self.catalog.app(app), ask.model, ask.variant
        if record is None:
            return Error(code="unknown_app", message=self.catalog.no_app(app))
        if record.pipeline is not None:
            text = f"app: {app} is a pipeline: offline jobs run one model; submit them to the apps of its stages"
            return Error(code="bad_request", message=text)
        if model is not None and model not in record.links:
            known = ", ".join(sorted(record.links))
            return Error(code="unknown_model", message=f"model: {app} has no model {model!r}, only {known or 'none'}")
        candidates = self._eligible(app, ask, ignore_accuracy=True)
        if variant is not None and not candidates:
            text = f"variant: {app} has no variant {variant!r}: see infaas.list.variants"
            return Error(code="bad_request", message=text)
        metrics = frozenset(one.metric for one in candidates)
        if (wrong := misstated(Requirements(accuracy=ask.accuracy, metric=ask.metric), app, metrics)) is not None:
            return wrong
        if self._eligible(app, ask):
            return None
        if not candidates:
            return Error(code="unsatisfiable", message=f"{app} has no variant that really computes yet")
        best = max(candidates, key=accuracy_of)
        cost = cost_per_item(best, best.max_batch, self.prices) * 1000.0
        nearest = offered(best, best.accuracy, latency_ms(best, 1) / 1000.0, cost)
        wanted, metric = ask.accuracy or 0.0, best.metric
        text = f"{ask.metric or 'accuracy'}: no variant reaches {value_of(wanted, metric):g}, the most accurate one has {value_of(kept(accuracy_of(best), metric), metric):g}"
        return Error(code="unsatisfiable", message=text, closest=nearest)

    def route_of(self, status: JobStatus) -> JobRoute | None:
        """Where the job's items come from and go to; None when its app or models are gone."""
        record = self.catalog.app(status.app)
        signature = None if record is None else signature_of(record, self._eligible(status.app, status))
        if signature is None or not signature.inputs:
            return None
        source, target = (
            parse(status.input, "input", self.subjects, status.app),
            self.target(status.app, status.output),
        )
        return JobRoute(status.job, source, target, signature)

    def target(self, app: str, output: str) -> ParsedUrl:
        """The place that a job writes to, however its URL is written. Raises BadUrl."""
        return parse(output, "output", self.subjects, app)

    def record_of(self, app: str, ask: SubmitJob, job: str, owner: str, now: float) -> JobRecord:
        """The job as it is kept when it begins."""
        status = filled(
            JobStatus, ask, job=job, app=app, state="accepted", cost=0.0, created=now, step="reading the input"
        )
        settings = self.settings
        items = chunk_items(self._eligible(app, ask), self.prices, settings.chunk_items, settings.batch_ms / 1000.0)
        return JobRecord(status=status, owner=owner, chunk_items=items)

    def _eligible(
        self, app: str, wanted: SubmitJob | JobStatus, *, ignore_accuracy: bool = False
    ) -> list[VariantRecord]:
        return eligible(
            self.catalog,
            app,
            accuracy=None if ignore_accuracy else wanted.accuracy,
            model=wanted.model,
            variant=wanted.variant,
            simulated=self.simulated,
        )


def is_same(status: JobStatus, app: str, ask: SubmitJob) -> bool:
    """Whether a job is the very one that is asked for."""
    fields = ("input", "output", *NEEDS)
    return status.app == app and all(
        getattr(status, field) == getattr(ask, field) for field in fields if field != "metric"
    )


def listed(records: Iterable[JobRecord], app: str | None, model: str | None) -> list[JobStatus]:
    """The jobs that a list shows, newest first."""
    found = [r.status for r in records if app in (None, r.status.app) and model in (None, r.status.model)]
    return sorted(found, key=lambda status: (-status.created, status.job))
