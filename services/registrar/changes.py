"""Changes of the catalogue that operators and registrations ask for.

How a change alters an app's record is a pure function: the edge repeats it when somebody else has written the record in between.
"""

from typing import TypeVar

from msgspec import UNSET
from msgspec.structs import replace

from bus.messages.catalog import AppRecord, BatchingRule, Ensemble, PipelineRecord, VariantRecord
from bus.messages.public import AdminRequest, Error
from bus.subjects import WITHOUT_APP
from services.core.batching import FIELDS, LARGEST_BATCH, SCOPES, rule_errors
from services.core.catalog import Catalog, selection_asked
from services.core.placement import REMOTE
from services.core.settings.fields import TARGET
from services.registrar.checks import CONTAINER, app_fields, names, selection_fields
from services.registrar.commands import (
    AddApp,
    AppChange,
    Change,
    ChangeApps,
    ChangeRefused,
    DeleteApp,
    DeleteVersion,
    DeployPipeline,
    LinkModel,
    RefitPlan,
    ReleaseVariant,
    ResetSelection,
    SetApp,
    SetBatching,
    SetPipeline,
    SetReplicas,
    SetSelection,
    UnlinkModel,
)
from services.registrar.pipelines import (
    change_of_pipeline,
    deploy,
    ended,
    in_use,
    other_speeds,
    plan_of,
    refit,
    retargeted,
    set_pipeline,
    with_settings,
)

T = TypeVar("T")


def amend(record: AppRecord | None, change: Change, catalog: Catalog) -> AppRecord | ChangeRefused | None:
    """The app's record after this change; None when the app is to be deleted; ChangeRefused when the change is not allowed.

    catalog: where the change is a DependentChange, what there is beside the app. Others do not read it.
    """
    if isinstance(change, AddApp):
        return _add(record, change)
    if isinstance(change, SetPipeline):
        return set_pipeline(record, change, catalog)
    if record is not None and record.pipeline is not None and isinstance(change, AppChange):
        refused = change_of_pipeline(change)
        if refused is not None:
            return refused
    if isinstance(change, LinkModel):
        return _link(record, change, catalog)
    if record is None:
        return _unknown_app(change.app)
    if isinstance(change, DeployPipeline):
        return deploy(record, change, catalog)
    if isinstance(change, RefitPlan):
        return refit(record, catalog)
    if isinstance(change, DeleteApp):
        return in_use(record, change, catalog)
    if isinstance(change, SetApp):
        given = {name: value for name in SETTINGS if (value := getattr(change, name)) is not UNSET}
        after = replace(
            record, **{name: DEFAULTS.get(name) if value is None else value for name, value in given.items()}
        )
        return after if record.pipeline is None else with_settings(after)
    if isinstance(change, SetSelection):
        return _select(record, change)
    if isinstance(change, SetReplicas):
        return _replicate(record, change)
    return _unlink(record, change, catalog)


def note_of(before: AppRecord | None, after: AppRecord | None, change: Change, catalog: Catalog) -> str:
    """What the sender of a change that was carried out is to know of it; empty: nothing. catalog: as for `amend`."""
    if isinstance(change, DeployPipeline):
        return "; ".join(other_speeds(after, catalog)) if after is not None else ""
    return ended(before, after) or retargeted(before, after)


def _add(record: AppRecord | None, change: AddApp) -> AppRecord | ChangeRefused:
    if record is not None:
        return ChangeRefused("bad_request", f"app: {change.app} exists already")
    return AppRecord(
        app=change.app,
        links={},
        latency_ms=change.latency_ms,
        default_output=change.default_output,
        min_instances=change.min_instances,
        created=change.at,
        input_type=change.input_type,
        slo_target=change.slo_target,
        accuracy=change.accuracy or "own",
    )


def _select(record: AppRecord, change: SetSelection) -> AppRecord | ChangeRefused:
    members = (change.selection and change.selection.members) or ()
    unknown = [model for model in members if model not in record.links]
    if unknown:
        linked = f"it links {', '.join(sorted(record.links))}" if record.links else "it links none"
        return ChangeRefused(
            "unknown_model",
            f"members: app {change.app} does not link {', '.join(unknown)}; {linked}: use link-model first, or name those",
        )
    return replace(record, selection=change.selection)


def _replicate(record: AppRecord, change: SetReplicas) -> AppRecord | ChangeRefused:
    if change.model is None:
        return replace(record, min_instances=change.count)
    if change.model not in record.links:
        return _unlinked(change)
    return replace(
        record,
        replicas=_without(record.replicas, change.model) | ({change.model: change.count} if change.count else {}),
    )


def _without(values: dict[str, T], model: str) -> dict[str, T]:
    return {name: value for name, value in values.items() if name != model}


def _unlinked(change: SetReplicas | UnlinkModel) -> ChangeRefused:
    return ChangeRefused("unknown_model", f"model: app {change.app} does not link {change.model}")


def _unlink(record: AppRecord, change: UnlinkModel, catalog: Catalog) -> AppRecord | ChangeRefused:
    if change.model not in record.links:
        return _unlinked(change)
    needed = in_use(record, change, catalog)
    if needed is not None:
        return needed
    if record.selection is not None and change.model in (record.selection.members or ()):
        return ChangeRefused(
            "bad_request",
            f"model: {change.model} is a member of the selection of app {change.app}; use set-selection without it in"
            " `members` first",
        )
    return replace(record, links=_without(record.links, change.model), replicas=_without(record.replicas, change.model))


def _link(record: AppRecord | None, change: LinkModel, catalog: Catalog) -> AppRecord | ChangeRefused:
    model, version, made_for = change.record.model, change.record.version, change.record.app
    if record is None:
        if not change.create:
            return _unknown_app(change.app)
        record = AppRecord(app=change.app, links={}, created=change.at)
    if change.linked and model not in record.links:
        return ChangeRefused("unknown_model", f"model: app {change.app} does not link {model}; use link-model first")
    difference = catalog.misfit(record, change.record)
    if difference is not None and made_for == change.app:
        return ChangeRefused(
            "bad_request",
            f"the model does not fit app {change.app}, whose first registration fixed its signature: {difference};"
            " export the model with the app's names and shapes, or register it under another app",
        )
    if difference is not None:
        maker = "no app" if made_for == WITHOUT_APP else f"app {made_for}"
        return ChangeRefused(
            "bad_request",
            f"version: version {version} of model {model} was registered for {maker} and does not fit app {change.app}:"
            f" {difference}; register a version for app {change.app}",
        )
    return replace(
        record,
        links={**record.links, model: version},
        signature=record.signature or change.record.signature,
        latency_ms=record.latency_ms if change.latency_ms is None else change.latency_ms,
        default_output=record.default_output if change.default_output is None else change.default_output,
        slo_target=record.slo_target if change.slo_target is None else change.slo_target,
        accuracy=change.accuracy or record.accuracy,
    )


def _unknown_app(app: str) -> ChangeRefused:
    return ChangeRefused("unknown_app", f"app: there is no app {app}: see infaas.list.apps")


# -- operators' verbs

NEEDS = {
    "add-app": ("app",),
    "set-app": ("app",),
    "delete-app": ("app",),
    "link-model": ("app", "model"),
    "unlink-model": ("app", "model"),
    "set-version": ("app", "model", "version"),
    "set-replicas": (),
    "set-target": ("app",),
    "set-selection": ("app",),
    "reset-selection": ("app",),
    "delete-version": ("model", "version"),
    "release-variant": ("variant",),
    "set-batching": (),
    "set-pipeline": (),
    "deploy-pipeline": ("app",),
}
SETTINGS = ("latency_ms", "default_output", "min_instances", "input_type", "slo_target", "accuracy")
DEFAULTS = {"min_instances": 1, "accuracy": "own"}  # of settings that are not None by default
READS = {  # fields that a verb may have beside those that it needs
    "add-app": SETTINGS,
    "set-app": SETTINGS,
    "link-model": ("version", "latency_ms", "default_output"),
    "set-replicas": ("app", "model", "count"),
    "set-target": ("slo_target",),
    "set-selection": tuple(Ensemble.__struct_fields__),
    "reset-selection": ("context",),
    "release-variant": ("worker",),
    "set-batching": (*SCOPES, "policy", *FIELDS),
    "set-pipeline": ("pipeline", "vertex", "edge", "output", "plan"),  # its file, which may say how to plan it
    "deploy-pipeline": ("plan",),
}


def change_for(
    verb: str, request: AdminRequest, catalog: Catalog, now: float
) -> Change | ChangeApps | ReleaseVariant | ResetSelection | SetBatching | DeleteVersion | Error:
    """The change that an operator asks for, or what is wrong with the request."""
    needs = NEEDS.get(verb)
    if needs is None:
        return Error(code="bad_request", message=f"verb: {verb!r} is not known here; known are {', '.join(NEEDS)}")
    reads = (*needs, *READS.get(verb, ()))
    unread = [
        field
        for field in AdminRequest.__struct_fields__
        if field not in reads and getattr(request, field) not in (None, UNSET)
    ]
    called = {field: getattr(request, field) for field in ("app", "model", "version", "variant", "worker")}
    wrong = names(**{field: value for field, value in called.items() if field in needs or value is not None})
    wrong += [f"{field}: {verb} does not read it; it reads {', '.join(reads)}" for field in unread]
    given = {field: value for field in SETTINGS if (value := getattr(request, field)) is not UNSET}
    least = given.get("min_instances")
    wrong += app_fields(
        given.get("latency_ms"),
        given.get("default_output"),
        given.get("slo_target"),
        given.get("input_type"),
        given.get("accuracy"),
    )
    wrong += [
        f"{field}: must be 0 or more"
        for field, value in (("min_instances", least), ("count", request.count))
        if value is not None and value < 0
    ]
    if verb == "set-replicas" and request.count is None:
        wrong.append("count: must be the least number of instances that the app, or the model, keeps")
    if verb == "set-replicas" and request.app is None and request.model is None:
        wrong.append("app: name the app, or the model, that keeps so many instances")
    if verb == "set-target" and "slo_target" not in given:
        wrong.append(
            f"slo_target: must be the share of the app's queries to be answered in time, {TARGET.words}; null: that of the settings"
        )
    if verb == "set-app" and not given:
        wrong.append(f"set-app: give at least one of {', '.join(SETTINGS)}")
    if verb == "set-selection":
        wrong += selection_fields(request)
    if wrong:
        return Error(code="bad_request", message="; ".join(wrong))
    if verb == "set-batching":
        return _batching(request, catalog)
    if verb == "set-pipeline":
        return _pipeline(request, now)
    if verb == "release-variant":
        return ReleaseVariant(variant=request.variant or "", worker=request.worker)
    app, model = request.app or "", request.model or ""
    if verb == "add-app":
        return AddApp(
            app=app,
            at=now,
            **{field: value for field, value in given.items() if value is not None},
        )
    if verb == "set-app":
        return SetApp(app=app, **given)
    if verb == "set-replicas":
        return _replicas(app, model, request.count or 0, catalog)
    if verb == "set-target":
        return SetApp(app=app, slo_target=request.slo_target)
    if verb == "set-selection":
        return SetSelection(app=app, selection=selection_asked(request))
    if verb == "reset-selection":
        if catalog.app(app) is None:
            return Error(code="unknown_app", message=_unknown_app(app).message)
        return ResetSelection(app=app, context=request.context)
    if verb == "deploy-pipeline":
        plan = plan_of(request)
        return plan if isinstance(plan, Error) else DeployPipeline(app=app, plan=plan)
    if verb == "delete-app":
        return DeleteApp(app=app)
    if verb == "unlink-model":
        return UnlinkModel(app=app, model=model)
    record = catalog.model(model, request.version)
    known = catalog.app(app)
    if request.version is None and known is not None:
        fitting = catalog.versions_for(known, model).values()
        record = max(fitting, key=lambda one: (one.created, one.version), default=record)
    if record is None:
        return Error(code="unknown_model", message=_unknown_model(model, request.version, catalog))
    if verb == "delete-version":
        return DeleteVersion(model=model, version=record.version)
    return LinkModel(
        app=app,
        record=record,
        at=now,
        linked=verb == "set-version",
        latency_ms=given.get("latency_ms"),
        default_output=given.get("default_output"),
    )


def _pipeline(request: AdminRequest, now: float) -> SetPipeline | Error:
    """The pipeline that is asked for. Whether its stages' apps fit is for their records to say."""
    head = request.pipeline
    if head is None:
        text = "pipeline: must say name and latency_ms: [pipeline] in the file"
        return Error(code="bad_request", message=text)
    wrong = [f"pipeline.{one}" for one in names(name=head.name)]
    wrong += [f"pipeline.{one}" for one in app_fields(head.latency_ms, None, head.slo_target)]
    if wrong:
        return Error(code="bad_request", message="; ".join(wrong))
    graph = PipelineRecord(vertices=request.vertex or [], edges=request.edge or [], output=request.output or {})
    return SetPipeline(app=head.name, pipeline=graph, latency_ms=head.latency_ms, at=now, slo_target=head.slo_target)


def _replicas(app: str, model: str, count: int, catalog: Catalog) -> Change | ChangeApps | Error:
    """The instances that an app keeps, or of one of its models; without an app, those of a model in all apps that link it."""
    if app:
        return SetReplicas(app=app, model=model or None, count=count)
    apps = sorted(catalog.apps_linking(model))
    if not apps:
        text = f"model: no app links {model}; use link-model first"
        return Error(code="unknown_model", message=text)
    return ChangeApps(tuple(SetReplicas(app=name, model=model, count=count) for name in apps))


def _batching(request: AdminRequest, catalog: Catalog) -> SetBatching | Error:
    """The rule that is asked for; without a policy, it is to be removed."""
    named = {scope: name for scope in SCOPES if (name := getattr(request, scope)) is not None}
    if len(named) != 1:
        return Error(code="bad_request", message="set-batching: name exactly one of app, model, variant")
    [(scope, name)] = named.items()
    rule = None
    if request.policy is not None:
        rule = BatchingRule(policy=request.policy, **{field: getattr(request, field) for field in FIELDS})
        wrong = rule_errors(rule)
    else:
        wrong = [f"{field}: needs a policy" for field in FIELDS if getattr(request, field) is not None]
    variant = catalog.variant(name) if scope == "variant" else None
    wrong += [] if rule is None else _without_effect(rule, name, _in_scope(scope, name, catalog))
    if wrong:
        return Error(code="bad_request", message="; ".join(wrong))
    if scope == "app" and catalog.app(name) is None:
        return Error(code="unknown_app", message=f"app: there is no app {name}: see infaas.list.apps")
    if scope == "app" and (known := catalog.app(name)) is not None and known.pipeline is not None:
        text = f"app: {name} is a pipeline and forms no batches of its own; use set-batching on the app of a stage"
        return Error(code="bad_request", message=text)
    if scope == "model" and catalog.model(name) is None:
        return Error(code="unknown_model", message=_unknown_model(name, None, catalog))
    if scope == "variant" and variant is None:
        return Error(code="bad_request", message=f"variant: there is no variant {name}")
    return SetBatching(scope=scope, name=name, rule=rule)


def _in_scope(scope: str, name: str, catalog: Catalog) -> list[VariantRecord]:
    if scope == "app":
        return list(catalog.variants_of(name))
    found = catalog.variant(name)
    if scope == "variant":
        return [] if found is None else [found]
    return [one for version in catalog.versions(name) for one in catalog.variants_at(name, version)]


def _without_effect(rule: BatchingRule, name: str, variants: list[VariantRecord]) -> list[str]:
    """What of a rule no variant of its scope could follow."""
    wrong = []
    most = max((one.max_batch for one in variants), default=LARGEST_BATCH)
    if (rule.batch or 1) > most:
        wrong.append(f"batch: {name} takes at most {most} items (the setting registrar.max_batches)")
    if (rule.contexts or 1) > 1 and variants and all(one.format in (CONTAINER, REMOTE) for one in variants):
        kinds = " or ".join(sorted({f"a {one.format}" for one in variants}))
        wrong.append(f"contexts: {name} is {kinds}, which computes one batch at a time; leave it out")
    return wrong


def _unknown_model(model: str, version: str | None, catalog: Catalog) -> str:
    known = sorted(catalog.versions(model))
    if not known:
        return f"model: there is no model {model}"
    return f"version: model {model} has no version {version}, only {', '.join(known)}"
