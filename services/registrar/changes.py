"""What operators and registrations change: how each change alters an app's record, and why one is refused before it begins.

How a change alters an app's record is a pure function: the edge repeats it when somebody else has written the record in between.
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import fields, replace

from bus.fields import TYPO, meant
from bus.messages.catalog import (
    ACCURACIES,
    LARGEST_BATCH,
    AppRecord,
    BatchingRule,
    ModelRecord,
    VariantRecord,
)
from bus.messages.public import Error, Register
from bus.messages.quality import ReleaseState
from bus.messages.scaling import Expectation
from bus.messages.verbs import (
    AbortRelease,
    AddApp,
    AdminVerb,
    DeleteApp,
    DeleteVersion,
    DeployPipeline,
    Expect,
    LinkModel,
    PauseRelease,
    PromoteRelease,
    ResetSelection,
    SetApp,
    SetBatching,
    SetPipeline,
    SetReplicas,
    SetSelection,
    SetTarget,
    SetVersion,
    StartRelease,
    UnlinkModel,
)
from bus.subjects import WITHOUT_APP
from services.core.batching import FIELDS, rule_errors
from services.core.catalog import Catalog
from services.core.placement import REMOTE
from services.core.validation import stated_in
from services.registrar.checks import CONTAINER, default_fault, selection_errors
from services.registrar.commands import LinkVersion, RefitPlan, StepRelease, error_of
from services.registrar.pipelines import (
    NO_MODELS,
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
from services.registrar.releases import moved_to, refused_by, started

T = TypeVar("T")
DEFAULTS = {field.name: field.default for field in fields(AppRecord)}  # what a setting has that is taken back
MOST_EXPECTED = 100  # of an app: the last ones are kept
ORDERED = "an operator's order"
ALL, MODELS = "", "model"  # beginnings of keys in the catalogue


class Amendment(NamedTuple):
    """How a change alters an app's record.

    alter: the record after it; None: the app is to be deleted. reads: the keys of the catalogue that this depends on, by their beginning;
    None: of the app's own only. makes: the app, where there is none. refits: other variants may serve afterwards than those that plans name.
    """

    alter: Callable[[Any, Any, Catalog], AppRecord | Error | None]
    reads: str | None = None
    makes: bool = False
    refits: bool = False


def amend(record: AppRecord | None, change: Any, catalog: Catalog) -> AppRecord | Error | None:
    """The app's record after this change; None when the app is to be deleted; Error when the change is not allowed.

    change: of AMENDMENTS. catalog: what the amendment reads of it.
    """
    way = AMENDMENTS[type(change)]
    if record is None and not way.makes:
        return _unknown_app(change.app)
    refused = None if record is None or record.pipeline is None else change_of_pipeline(change)
    if record is not None and isinstance(change, LinkModel | SetVersion | LinkVersion | UnlinkModel):
        refused = refused or refused_by(
            record, change.record.model if isinstance(change, LinkVersion) else change.model
        )
    return refused or way.alter(record, change, catalog)


def note_of(before: AppRecord | None, after: AppRecord | None, change: Any, catalog: Catalog) -> str:
    """What the sender of a change that was carried out is to know of it; empty: nothing. catalog: as for `amend`."""
    if isinstance(change, DeployPipeline):
        if after is None or before is None:
            return ""
        if before.plan is not None and after.plan is None:
            return f"the plan of pipeline {after.app} has ended: it is served as any other app"
        return "; ".join(other_speeds(after, catalog))
    return ended(before, after) or retargeted(before, after)


def _add(record: AppRecord | None, change: AddApp, _: Catalog) -> AppRecord | Error:
    if record is not None:
        return error_of(f"app: {change.app} exists already")
    return _with(AppRecord(app=change.app, links={}), change.given)


def _set(record: AppRecord, change: SetApp | SetTarget, _: Catalog) -> AppRecord | Error:
    after = _with(record, change.given)
    return after if record.pipeline is None else with_settings(after)


def _expect(record: AppRecord, change: Expect, _: Catalog) -> AppRecord | Error:
    kept = [one for one in record.expects if one.at != change.at]
    if not change.qps and len(kept) == len(record.expects):
        return error_of(f"at: nothing was said for that time of app {change.app}: see infaas.list.apps")
    said = [Expectation(change.at, change.qps, change.weekly)] if change.qps else []
    return replace(record, expects=sorted([*kept, *said], key=lambda one: one.at)[-MOST_EXPECTED:])


def _with(record: AppRecord, given: dict[str, Any]) -> AppRecord:
    return replace(record, **{name: DEFAULTS[name] if value is None else value for name, value in given.items()})


def _select(record: AppRecord, change: SetSelection, _: Catalog) -> AppRecord | Error:
    unknown = [model for model in change.members or () if model not in record.links]
    if unknown:
        linked = f"it links {', '.join(sorted(record.links))}" if record.links else "it links none"
        return error_of(
            f"members: app {change.app} does not link {', '.join(unknown)}; {linked}: use link-model first, or name those",
            "unknown_model",
        )
    return replace(record, selection=change.selection)


def _replicate(record: AppRecord, change: SetReplicas, _: Catalog) -> AppRecord | Error:
    if change.model is None:
        return replace(record, min_instances=change.count)
    if change.model not in record.links:
        return _unlinked(change, record)
    return replace(
        record,
        replicas=_without(record.replicas, change.model) | ({change.model: change.count} if change.count else {}),
    )


def _without(values: dict[str, T], model: str) -> dict[str, T]:
    return {name: value for name, value in values.items() if name != model}


def _start(record: AppRecord, change: StartRelease, catalog: Catalog) -> AppRecord | Error:
    if change.model not in record.links:
        return _unlinked(change, record)
    found = _newest(record, change, catalog)
    if isinstance(found, Error):
        return found
    unfit = _link(record, LinkVersion(app=change.app, record=found), catalog)
    return unfit if isinstance(unfit, Error) else started(record, change, found, catalog)


def _pause(record: AppRecord, change: PauseRelease, _: Catalog) -> AppRecord | Error:
    step = 0 if record.release is None else record.release.step
    goes_on: ReleaseState = "mirror" if step < 0 else "step"
    return moved_to(record, goes_on if change.resume else "paused", step, ORDERED)


def _promote(record: AppRecord, _: PromoteRelease, catalog: Catalog, reason: str = ORDERED) -> AppRecord | Error:
    release = record.releasing
    after = moved_to(record, "promoted", 0 if release is None else release.step, reason)
    if isinstance(after, Error) or release is None:
        return after
    found = catalog.model(release.model, release.version)
    if found is None:
        return _unknown_version(release.model, release.version, catalog)
    return _link(after, LinkVersion(app=record.app, record=found), catalog)


def _step(record: AppRecord, change: StepRelease, catalog: Catalog) -> AppRecord | Error:
    """As it was judged. What cannot be promoted any more ends."""
    release = record.release
    if release is None or (release.release, release.state, release.step) != change.was:
        return record
    if change.state != "promoted":
        return moved_to(record, change.state, change.step, change.reason)
    after = _promote(record, PromoteRelease(app=record.app), catalog, change.reason)
    return moved_to(record, "aborted", change.step, after.message) if isinstance(after, Error) else after


def _unlinked(change: SetReplicas | UnlinkModel | StartRelease, record: AppRecord) -> Error:
    linked = ", ".join(sorted(record.links)) or "none"
    return error_of(f"model: app {change.app} does not link {change.model}; it links {linked}", "unknown_model")


def _unlink(record: AppRecord, change: UnlinkModel, catalog: Catalog) -> AppRecord | Error:
    if change.model not in record.links:
        return _unlinked(change, record)
    needed = in_use(record, change, catalog)
    if needed is not None:
        return needed
    if record.selection is not None and change.model in (record.selection.members or ()):
        return error_of(
            f"model: {change.model} is a member of the selection of app {change.app}; use set-selection without it in"
            " `members` first"
        )
    return replace(record, links=_without(record.links, change.model), replicas=_without(record.replicas, change.model))


def _link_model(record: AppRecord, change: LinkModel, catalog: Catalog) -> AppRecord | Error:
    found = _newest(record, change, catalog)
    if isinstance(found, Error):
        return found
    link = LinkVersion(app=change.app, record=found, latency_ms=change.latency_ms, default_output=change.default_output)
    return _link(record, link, catalog)


def _newest(record: AppRecord, change: LinkModel | StartRelease, catalog: Catalog) -> ModelRecord | Error:
    """The version that is asked for; else the newest that fits the app, or of all, which `_link` refuses."""
    found = catalog.model(change.model, change.version)
    if change.version is None:
        fitting = catalog.versions_for(record, change.model).values()
        found = max(fitting, key=lambda one: (one.created, one.version), default=found)
    return found or _unknown_version(change.model, change.version, catalog)


def _set_version(record: AppRecord, change: SetVersion, catalog: Catalog) -> AppRecord | Error:
    found = catalog.model(change.model, change.version)
    if found is None:
        return _unknown_version(change.model, change.version, catalog)
    if change.model not in record.links:
        text = f"model: app {change.app} does not link {change.model}; use link-model first"
        return error_of(text, "unknown_model")
    return _link(record, LinkVersion(app=change.app, record=found), catalog)


def _link(record: AppRecord | None, change: LinkVersion, catalog: Catalog) -> AppRecord | Error:
    model, version, made_for = change.record.model, change.record.version, change.record.app
    if record is None:
        if not change.create:
            return _unknown_app(change.app)
        record = AppRecord(app=change.app, links={})
    difference = catalog.misfit(record, change.record)
    if difference is not None and made_for == change.app:
        return error_of(
            f"the model does not fit app {change.app}, whose first registration fixed its signature: {difference};"
            " export the model with the app's names and shapes, or register it under another app"
        )
    if difference is not None:
        maker = "no app" if made_for == WITHOUT_APP else f"app {made_for}"
        return error_of(
            f"version: version {version} of model {model} was registered for {maker} and does not fit app {change.app}:"
            f" {difference}; register a version for app {change.app}"
        )
    metric, labels = change.record.metric, change.record.labels
    stated = None if metric in ACCURACIES else metric
    for name, link in record.links.items():
        other = None if name == model else catalog.model(name, link)
        if other is not None and not stated_in(stated, frozenset({other.metric})):
            text = f"metric: is {metric}, and that of model {name}, which app {change.app} links, is {other.metric}"
            return error_of(f"{text}, so that no accuracy would hold for both: measure both alike, or use another app")
        if other is not None and other.labels and labels and other.labels != labels:
            first, second = next(
                pair for pair in zip_longest(labels, other.labels, fillvalue="none") if len({*pair}) > 1
            )
            text = (
                f"labels: a class is {first[:40]}, which is {second[:40]} in model {name}, which app {change.app} links"
            )
            return error_of(
                f"{text}, so that one score would mean two: give both the same, in one order, or use another app"
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


def _unknown_app(app: str) -> Error:
    return error_of(f"app: there is no app {app}: see infaas.list.apps", "unknown_app")


def _unknown_version(model: str, version: str | None, catalog: Catalog) -> Error:
    known = sorted(catalog.versions(model))
    if not known:
        return error_of(f"model: there is no model {model}{catalog.meant_model(model)}", "unknown_model")
    return error_of(f"version: model {model} has no version {version}, only {', '.join(known)}", "unknown_model")


AMENDMENTS: dict[type[Struct], Amendment] = {
    AddApp: Amendment(_add, makes=True),
    SetApp: Amendment(_set),
    SetTarget: Amendment(_set),
    Expect: Amendment(_expect),
    DeleteApp: Amendment(in_use, reads=ALL),
    LinkModel: Amendment(_link_model, reads=MODELS, refits=True),
    SetVersion: Amendment(_set_version, reads=MODELS, refits=True),
    StartRelease: Amendment(_start, reads=ALL),
    PauseRelease: Amendment(_pause),
    PromoteRelease: Amendment(_promote, reads=MODELS, refits=True),
    AbortRelease: Amendment(lambda app, *_: moved_to(app, "aborted", app.release.step if app.release else 0, ORDERED)),
    StepRelease: Amendment(_step, reads=MODELS, refits=True),
    LinkVersion: Amendment(_link, reads=MODELS, makes=True, refits=True),
    UnlinkModel: Amendment(_unlink, reads=ALL, refits=True),
    SetSelection: Amendment(_select, refits=True),
    SetReplicas: Amendment(_replicate),
    SetPipeline: Amendment(set_pipeline, reads=ALL, makes=True),
    DeployPipeline: Amendment(deploy, reads=ALL),
    RefitPlan: Amendment(refit, reads=ALL),
}


# -- what shows before a change begins


def not_now_for(app: AppRecord, request: Register) -> Error | None:
    """Why an app gets no version by this registration; None: it does."""
    if app.pipeline is not None:
        return error_of(f"app: {app.app} {NO_MODELS}")
    return None if request.release == "hold" else refused_by(app, request.model)


def refusal(request: AdminVerb, catalog: Catalog) -> Error | None:
    """Why a request of the right form is not carried out, as far as it shows now."""
    check = CHECKS.get(type(request))
    found = None if check is None else check(request, catalog)
    error = error_of(found) if found and isinstance(found, str) else found or None
    return error and told(error, getattr(request, "app", ""), catalog)


def told(refused: Error, app: str, catalog: Catalog) -> Error:
    """The refusal as its sender hears it. app: that the request names; "": none. catalog: all of it."""
    near = catalog.meant_app(app) if refused.code == "unknown_app" and app else ""
    return replace(refused, message=refused.message + near)


def _settings(request: AddApp | SetApp | LinkModel, _: Catalog) -> str:
    return default_fault(request.default_output)


def _deleted(request: DeleteVersion, catalog: Catalog) -> Error | None:
    known = catalog.model(request.model, request.version)
    return _unknown_version(request.model, request.version, catalog) if known is None else None


def _kept(request: SetReplicas, catalog: Catalog) -> Error | None:
    if request.app is not None or request.model is None or catalog.apps_linking(request.model):
        return None
    return error_of(f"model: no app links {request.model}; use link-model first", "unknown_model")


def _planned(request: DeployPipeline, _: Catalog) -> Error | None:
    plan = plan_of(request.plan)
    return plan if isinstance(plan, Error) else None


def _batching(request: SetBatching, catalog: Catalog) -> str | Error | None:
    (scope, name), rule = request.scope, request.rule
    if rule is None:
        wrong = [f"{field}: needs a policy" for field in FIELDS if getattr(request, field) is not None]
    else:
        wrong = [*rule_errors(rule), *_without_effect(rule, name, _in_scope(scope, name, catalog))]
    if wrong:
        return "; ".join(wrong)
    if scope == "app" and (known := catalog.app(name)) is None:
        return _unknown_app(name)
    if scope == "app" and known is not None and known.pipeline is not None:
        return f"app: {name} is a pipeline and forms no batches of its own; use set-batching on the app of a stage"
    if scope == "model" and catalog.model(name) is None:
        return _unknown_version(name, None, catalog)
    if scope == "variant" and catalog.variant(name) is None:
        return f"variant: there is no variant {name}: see infaas.list.variants{meant(name, (one.variant for one in catalog.variants), TYPO)}"
    return None


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


CHECKS: dict[type[AdminVerb], Callable[[Any, Catalog], str | Error | None]] = {
    AddApp: _settings,
    SetApp: _settings,
    LinkModel: _settings,
    SetSelection: lambda asked, _: "; ".join(selection_errors(asked)),
    ResetSelection: lambda asked, catalog: _unknown_app(asked.app) if catalog.app(asked.app) is None else None,
    DeleteVersion: _deleted,
    SetReplicas: _kept,
    DeployPipeline: _planned,
    SetBatching: _batching,
}
