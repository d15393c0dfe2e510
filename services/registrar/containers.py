"""Whether a user's own process (`infaas container`) is a new version of its model, or one more replica of a registered one. Pure."""

from bus.messages.catalog import AppRecord, ModelRecord
from bus.messages.public import Error
from bus.messages.work import ContainerPlace, PlaceContainer
from services.core.catalog import Catalog
from services.registrar.checks import CONTAINER
from services.registrar.policy import next_version


def place_of(question: PlaceContainer, catalog: Catalog, agreement: float) -> ContainerPlace | Error:
    """The place of this process. agreement: the share of equal answers that a replica must give, at least."""
    request = question.request
    app = catalog.app(request.app)
    known = sorted(catalog.versions(request.model).values(), key=lambda record: record.created)
    version = request.version or next(
        (record.version for record in reversed(known) if record.format == CONTAINER),
        str(next_version(record.version for record in known)),
    )
    record = catalog.model(request.model, version)
    place = ContainerPlace(version=version, signature=None if app is None else app.signature, agreement=agreement)
    if record is None:
        return place
    named = f"version {version} of model {request.model}"
    variants = [one for one in catalog.variants_at(request.model, version) if one.framework == CONTAINER]
    if record.format != CONTAINER or not variants:
        return _refused(f"version: {named} is a registered file, and no container; give another --version")
    if app is None or record.model not in app.links:
        link = f"infaas admin link-model {request.app} --model {record.model} --version {version}"
        return _refused(f"app: {named} is registered, but not for app {request.app}; link it with `{link}`")
    wrong = without_effect(question, record, app)
    if wrong:
        return _refused(f"{wrong[0]}; a replica changes nothing: leave it out, or give another --version")
    return ContainerPlace(
        version=version, signature=app.signature, agreement=agreement, variant=variants[0], reference=record.source
    )


def without_effect(question: PlaceContainer, record: ModelRecord, app: AppRecord) -> list[str]:
    """Options of a replica that say something else than what is registered, which one more process does not change."""
    asked, named, of_app = question.request, f"version {record.version} of model {record.model}", f"app {app.app}"
    return [
        f"--{option}: {whose} has {kept!r} and not {wanted!r}"
        for option, wanted, kept, whose in (
            ("task", asked.task, record.task, named),
            ("metric", question.metric, record.metric, named),
            ("labels", asked.labels or None, record.labels, named),
            ("latency-ms", asked.latency_ms, app.latency_ms, of_app),
            ("slo-target", asked.slo_target, app.slo_target, of_app),
            ("default-output", asked.default_output, app.default_output, of_app),
            ("accuracy", asked.accuracy, app.accuracy, of_app),
        )
        if wanted is not None and wanted != kept
    ]


def _refused(text: str) -> Error:
    return Error(code="bad_request", message=text)
