"""Checks of registrations and operators' requests: an error names each wrong field and says what it must be; also of what the machines could never
hold, so that operators hear at once, with the figures. Pure.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import NODEFAULT, UNSET, Raw, Struct, ValidationError, convert

from bus.codec import BadMessage, decode, encode, explain
from bus.fields import TYPO, faults, filled, meant, similar, unread_keys
from bus.messages.catalog import AGREEMENT, METRICS, MOST_SOURCE, TARGETS, Ensemble, PipelinePlan, VariantRecord
from bus.messages.fleet import DeviceStatus, WorkerHeartbeat
from bus.messages.public import ContainerReport, Error, Register
from bus.messages.verbs import (
    ADMIN_VERBS,
    AddApp,
    AdminVerb,
    DeployPipeline,
    SetApp,
    SetReplicas,
    SetSelection,
    body_of,
)
from bus.subjects import WITHOUT_APP
from services.core.catalog import Catalog
from services.core.placement import REMOTE
from services.core.settings import DispatcherSettings, MachineKind, MonitorSettings, RegistrarSettings
from services.registrar.commands import MOST_DEFAULT, error_of
from services.registrar.pipelines import absent_hardware, plan_of

CONTAINER = "container"  # a user's own process, which has measured itself
POLICIES = ("exp3", "exp4", "majority", "weighted")
AROUND = ("onnx", "pt2")  # formats of models that functions of their owners may go around
IMPORT_PATH = re.compile(r"(?=.{3,200}\Z)[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z", re.ASCII)
NO_SELECTION = Ensemble()
LEARNING = ("exp3", "exp4")  # policies that learn at the rate `eta`; a class of one's own gets none
# What a request that remeasures says itself.
OF_REQUEST = (
    "app",
    "version",
    "registration",
    "validation",
    "inputs_key",
    "labels_key",
    "release",
    "remeasures",
    "dry_run",
)
READ_BY_VERBS = frozenset(name for kind in ADMIN_VERBS.values() for name in body_of(kind))


def registration_error(request: Register, settings: RegistrarSettings) -> Error | None:
    """All that is wrong with a registration request, as far as it shows by itself; None when nothing is."""
    if request.format == "torchscript" and not settings.allow_torchscript:
        return error_of(
            "format: TorchScript runs code from the file and is switched off here; upload ONNX or a .pt2 of"
            " torch.export, or have the operator set registrar.allow_torchscript",
            "forbidden",
        )
    wrong = [f"{fault.key}: {fault.reason}" for fault in faults(request)]
    wrong += (_file_fields if request.container is None else _container_fields)(request)
    wrong += filter(None, [default_fault(request.default_output)])
    if sum(map(len, request.labels)) + 3 * len(request.labels) > MOST_DEFAULT:
        wrong.append(f"labels: must fit into {MOST_DEFAULT // 1024} kB")
    if sum(map(len, request.columns)) + 3 * len(request.columns) > MOST_DEFAULT:
        wrong.append(f"columns: must fit into {MOST_DEFAULT // 1024} kB")
    if (request.target or request.unit) and request.metric not in TARGETS:
        what = "unit" if request.unit else "target"
        wrong.append(f"{what}: is of a regressor's number, but metric {request.metric} is of classes; leave it out")
    if request.contexts > 1 and request.format in (CONTAINER, REMOTE):
        wrong.append(f"contexts: format {request.format} computes one batch at a time; leave it out")
    if request.contexts > 1 and request.contended:
        wrong.append("contexts: contended measures one batch at a time; give one of both")
    if request.contended and request.format in (CONTAINER, REMOTE):
        wrong.append(f"contended: format {request.format} is measured alone; leave it out")
    if request.release != "at-once" and request.app == WITHOUT_APP:
        wrong.append("release: a model without an app has no queries to share; leave it out")
    if request.functions is not None:
        wrong += _functions(request)
    if request.inputs_key == request.labels_key:
        wrong.append("labels_key: must differ from inputs_key")
    return error_of("; ".join(wrong)) if wrong else None


def measured_anew(request: Register, catalog: Catalog) -> Register | Error:
    """The request; where it remeasures a version, with that one's file and what was said of it."""
    if request.remeasures is None:
        return request
    known = catalog.model(request.model, request.remeasures)
    if known is None:
        return error_of(
            f"remeasures: model {request.model} has no version {request.remeasures}: see infaas.list.models",
            "unknown_model",
        )
    report = request.container
    if known.format == CONTAINER and report is None:
        return error_of(
            f"remeasures: {request.model} is a process of its owner's: give as `container` what it answers right; `infaas remeasure` does so"
        )
    if known.metric not in METRICS or known.metric in (AGREEMENT, "ndcg"):
        return error_of(
            f"remeasures: labels of single queries do not give {known.metric}: register {request.model} again with a validation set"
        )
    of_request = {name: getattr(request, name) for name in OF_REQUEST}
    if known.format == CONTAINER and report is not None:
        own = next(one for one in catalog.variants_at(known.model, known.version) if one.framework == CONTAINER)
        found = {name: getattr(report, name) for name in ("accuracy", "accuracy_low", "accuracy_high", "distribution")}
        of_request["container"] = filled(ContainerReport, own, **found)
    return filled(Register, known, object=known.source, **of_request)


def _functions(request: Register) -> list[str]:
    functions, wrong = request.functions, []
    assert functions is not None
    if request.format not in AROUND:
        wrong.append(
            f"functions: run before and after {' and '.join(AROUND)} models, not {request.format}: put them into what is served there"
        )
    if not functions.words:
        wrong.append("functions: name one, before or after")
    if sum(map(len, functions.sources.values())) > 2 * MOST_SOURCE:
        wrong.append(f"functions.sources: at most {MOST_SOURCE >> 10} kB each")
    for name in filter(None, (functions.before, functions.after)):
        file, _, function = name.rpartition(":")
        if file not in functions.sources or not function.isidentifier():
            wrong.append(f"functions: {name[:80]!r} must be FILE:FUNCTION, and FILE among the sources")
    return wrong


def _file_fields(request: Register) -> list[str]:
    wrong = []
    if request.format == CONTAINER:
        wrong.append(f"format: {CONTAINER} is of what `infaas container` registers, which has measured itself")
    if not request.validation:
        wrong.append("validation: is missing")
    elif request.object == request.validation:
        wrong.append("validation: must be another object than the model file")
    return wrong


def _container_fields(request: Register) -> list[str]:
    report = request.container
    assert report is not None
    wrong = [] if request.format == CONTAINER else [f"format: must be one of {CONTAINER}"]
    if request.dry_run:
        wrong.append("dry_run: a container is inspected in its own process: `infaas container --dry-run`")
    if not report.signature.inputs or not report.signature.outputs:
        wrong.append("container.signature: must have inputs and outputs")
    return wrong


def default_fault(default_output: Any) -> str:
    """What is wrong with an app's default output; empty: nothing is."""
    if default_output is UNSET or len(encode(default_output)) <= MOST_DEFAULT:
        return ""
    return f"default_output: must fit into {MOST_DEFAULT // 1024} kB"


def selection_errors(asked: Ensemble) -> list[str]:
    """What is wrong with how several models of an app answer together. Whether the app links the members is for its record to say."""
    wrong = [f"{fault.key}: {fault.reason}" for fault in faults(asked)]
    policy, members = asked.policy, asked.members
    if policy is not None and policy not in POLICIES and IMPORT_PATH.match(policy) is None:
        wrong.append(
            f"policy: must be one of {', '.join(POLICIES)}, or the import path of a class as module:Class, or left out"
        )
    if members is not None:
        if policy is None:
            wrong.append("members: are asked by a policy only; give policy, or leave members out")
        if not members:
            wrong.append("members: must name at least one model; left out, all models that the app links are asked")
        if len(set(members)) < len(members):
            wrong.append("members: must name each model once")
    wrong += [
        f"{field}: is read by a policy only; give policy, or leave {field} out"
        for field in ("eta", "contextual", "confidence", "wait_share")
        if policy is None and getattr(asked, field) != getattr(NO_SELECTION, field)
    ]
    if policy is not None and policy not in LEARNING and asked.eta != NO_SELECTION.eta:
        wrong.append(f"eta: {policy} does not learn at a rate; leave it out, or use {' or '.join(LEARNING)}")
    if policy in ("majority", "weighted") and asked.contextual:
        wrong.append(
            f"contextual: {policy} gives no context weights of its own; leave it out, or use {' or '.join(LEARNING)}"
        )
    return wrong


# -- operators' verbs


def verb_asked(verb: str, body: bytes | Raw) -> AdminVerb | Error:
    """An operator's request, or all that is wrong with it by itself. Null in a field that null does not take back is as if left out."""
    kind = ADMIN_VERBS.get(verb)
    if kind is None:
        near = meant(verb, ADMIN_VERBS, TYPO)
        return error_of(f"verb: {verb!r} is not known here; known are {', '.join(ADMIN_VERBS)}{near}")
    fields = body_of(kind)
    try:
        sent = decode(dict[str, Any], body)
    except BadMessage as error:
        return error_of(str(error))
    nullable = {name for name, one in fields.items() if one.default is UNSET} | kind.taken_back.keys()
    given = {name: value for name, value in sent.items() if value is not None or name in nullable}
    wrong = [
        f"{name}: {verb} does not read it; it reads {', '.join(fields)}"
        for name in given
        if name in READ_BY_VERBS and name not in fields
    ]
    strange = [name for name in given if name not in READ_BY_VERBS]  # of later releases, or misspelt
    found = {close: name for name in strange if (close := similar(name, fields.keys() - given, 0.8))}
    wrong += [f"{name}: {verb} does not read it; did you mean {close}?" for close, name in found.items()]
    wrong += [
        f"{key}: {verb} does not read it; did you mean {close}?" for key, close in unread_keys(given, kind) if close
    ]
    wrong += [
        f"{name}: {verb} needs it: {one.meaning}"
        for name, one in fields.items()
        if one.default is NODEFAULT and name not in given and name not in found
    ]
    if wrong:
        return error_of("; ".join(wrong))
    try:
        request = convert(given, kind)
    except ValidationError as error:
        return error_of(explain(error))
    wrong = [f"{fault.key}: {fault.reason}" for fault in faults(request)]
    return error_of("; ".join(wrong)) if wrong else request


class Ceiling(Struct, frozen=True, kw_only=True):
    """kinds: of machines that may be started. monitor: how much of a device instances may take. cache_mb: of a dispatcher's answers."""

    kinds: Mapping[str, MachineKind] = {}
    monitor: MonitorSettings = MonitorSettings()
    cache_mb: float = DispatcherSettings().cache_mb

    def refuse(self, request: AdminVerb, catalog: Catalog, workers: Sequence[WorkerHeartbeat]) -> Error | None:
        """Why a request asks for more than there can be; None: it does not, or nobody knows it. workers: those that are alive."""
        match request:
            case DeployPipeline() if workers and isinstance(plan := plan_of(request.plan), PipelinePlan):
                brought = {one for kind in self.kinds.values() for one in ("cpu", *kind.simulate, *kind.accelerators)}
                present = {device.kind for worker in workers for device in worker.devices}
                return absent_hardware(plan, present | brought)
            case SetSelection():
                return self._cache(request.app, request.cache_mb, catalog)
            case AddApp(min_instances=int(least)) | SetApp(min_instances=int(least)):
                return self._instances("min_instances", least, catalog.variants_of(request.app), workers)
            case SetReplicas(app=str(app), model=None):
                return self._instances("count", request.count, catalog.variants_of(app), workers)
            case SetReplicas(model=str(model)):
                linking = catalog.apps_linking(model)
                apps = linking if request.app is None else linking & {request.app}
                versions = {record.links[model] for app in apps if (record := catalog.app(app)) is not None}
                variants = [one for version in versions for one in catalog.variants_at(model, version)]
                return self._instances("count", request.count, variants, workers)
        return None

    def _cache(self, app: str, cache_mb: float, catalog: Catalog) -> Error | None:
        others = sum(one.selection.cache_mb for one in catalog.apps if one.selection is not None and one.app != app)
        if cache_mb == 0 or cache_mb + others <= self.cache_mb:
            return None
        text = (
            f"cache_mb: a dispatcher keeps at most {self.cache_mb:g} MB of answers (dispatcher.cache_mb), of which other apps"
            f" have {others:g}; give at most {max(0.0, self.cache_mb - others):g}, or raise the setting"
        )
        return error_of(text)

    def _instances(
        self, field: str, count: int, variants: Iterable[VariantRecord], workers: Sequence[WorkerHeartbeat]
    ) -> Error | None:
        fits = [(self._most(record, workers), record.variant, record) for record in variants] if workers else []
        most, _, record = max(fits, key=lambda one: one[:2], default=(0, "", None))
        if record is None or most == 0 or count <= most:  # 0: its only machine may come back
            return None
        text = (
            f"{field}: at most {most:g} instances fit, not {count}: each of {record.variant} takes"
            f" {record.profile.memory_mb:g} MB, and instances may take {self.monitor.memory_share:.0%} of a device"
            " (monitor.memory_share); start further workers first, or give a smaller number"
        )
        return error_of(text, "unsatisfiable")

    def _most(self, record: VariantRecord, workers: Sequence[WorkerHeartbeat]) -> float:
        """Instances of one variant on all devices that there are, or may be, with nothing else on them."""

        def alike(worker: WorkerHeartbeat) -> list[DeviceStatus]:
            return [one for one in worker.devices if (one.kind, one.simulated) == (record.hardware, record.simulated)]

        count = sum(self._on(device.memory_mb, record) for worker in workers for device in alike(worker))
        largest = max((device.memory_mb for worker in workers for device in alike(worker)), default=float("inf"))
        for name, kind in self.kinds.items():
            present = sum((worker.kind or worker.hardware) == name for worker in workers)
            devices = (
                {"cpu": 1} if record.hardware == "cpu" else kind.simulate if record.simulated else kind.accelerators
            )
            memory = (kind.memory_mb if record.hardware == "cpu" else kind.accelerator_mb) or largest
            if kind.maximum > present:
                each = devices.get(record.hardware, 0) * (kind.maximum - present)
                count += each * self._on(memory, record) if each else 0
        return count

    def _on(self, memory_mb: float, record: VariantRecord) -> float:
        allowed = memory_mb * self.monitor.memory_share
        if self.monitor.device_mb:
            allowed = min(allowed, self.monitor.device_mb)
        fits = allowed // record.profile.memory_mb if record.profile.memory_mb > 0 else float("inf")
        return min(fits, self.monitor.max_models) if self.monitor.max_models else fits
