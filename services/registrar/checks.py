"""Checks of registrations and operators' requests: an error names each wrong field and says what it must be."""

import re
from math import isfinite
from typing import Any

import msgspec

from bus.messages.catalog import METRICS
from bus.messages.public import AdminRequest, Error, Register
from bus.subjects import WITHOUT_APP, valid_name
from services.core.accuracy import DEFAULTS
from services.core.batching import MOST_CONTEXTS
from services.core.placement import FORMATS, REMOTE
from services.core.settings import RegistrarSettings
from services.core.settings.fields import TARGET, Number

CONTAINER = "container"  # a user's own process, which has measured itself
INPUT_TYPES = ("integers", "floats", "doubles", "bytes", "strings")
POLICIES = ("exp3", "exp4", "majority", "weighted")
IMPORT_PATH = re.compile(r"(?=.{3,200}\Z)[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z", re.ASCII)
SELECTION_BOUNDS = {
    "eta": Number(most=1),
    "confidence": Number(most=1),
    "wait_share": Number(above=0, most=1),
    "cache_mb": Number(),
}
LEARNING = ("exp3", "exp4")  # policies that learn at the rate `eta`; a class of one's own gets none
OBJECT_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,254}\Z")
ARRAY_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z")
MOST_BATCH = 1024
MOST_TASK = 200  # characters of a task
MOST_DEFAULT = 64 * 1024  # bytes of a default output: every service keeps the whole catalogue in memory
NAME_RULE = "1 to 64 of A-Z a-z 0-9 _ and -, the first a letter or digit"


def registration_error(request: Register, settings: RegistrarSettings) -> Error | None:
    """All that is wrong with a registration request, as far as it shows by itself; None when nothing is."""
    if request.format == "torchscript" and not settings.allow_torchscript:
        return Error(
            code="forbidden",
            message="format: TorchScript runs code from the file and is switched off here; upload ONNX or a .pt2 of"
            " torch.export, or have the operator set registrar.allow_torchscript",
        )
    wrong = [
        *names(**({} if request.app == WITHOUT_APP else {"app": request.app}), model=request.model),
        *names(**{k: v for k in ("version", "registration") if (v := getattr(request, k)) is not None}),
        *_one_of("metric", request.metric, METRICS),
        *_matches("object", request.object, OBJECT_KEY),
        *(_file_fields if request.container is None else _container_fields)(request),
        *_matches("inputs_key", request.inputs_key, ARRAY_KEY),
        *_matches("labels_key", request.labels_key, ARRAY_KEY),
        *app_fields(request.latency_ms, request.default_output, request.slo_target, accuracy=request.accuracy),
    ]
    if request.task is not None and not 0 < len(request.task) <= MOST_TASK:
        wrong.append(f"task: must be 1 to {MOST_TASK} characters long")
    if sum(map(len, request.labels)) + 3 * len(request.labels) > MOST_DEFAULT:
        wrong.append(f"labels: must fit into {MOST_DEFAULT // 1024} kB")
    if not 1 <= request.contexts <= MOST_CONTEXTS:
        wrong.append(f"contexts: must be from 1 to {MOST_CONTEXTS} batches at once")
    if request.contexts > 1 and request.format in (CONTAINER, REMOTE):
        wrong.append(f"contexts: format {request.format} computes one batch at a time; leave it out")
    if request.contexts > 1 and request.contended:
        wrong.append("contexts: contended measures one batch at a time; give one of both")
    if request.contended and request.format in (CONTAINER, REMOTE):
        wrong.append(f"contended: format {request.format} is measured alone; leave it out")
    if request.inputs_key == request.labels_key:
        wrong.append("labels_key: must differ from inputs_key")
    return Error(code="bad_request", message="; ".join(wrong)) if wrong else None


def _file_fields(request: Register) -> list[str]:
    wrong = [*_one_of("format", request.format, FORMATS), *_matches("validation", request.validation, OBJECT_KEY)]
    if request.object == request.validation:
        wrong.append("validation: must be another object than the model file")
    return wrong


def _container_fields(request: Register) -> list[str]:
    report = request.container
    assert report is not None
    wrong = _one_of("format", request.format, (CONTAINER,))
    if request.dry_run:
        wrong.append("dry_run: a container is inspected in its own process: `infaas container --dry-run`")
    if not report.signature.inputs or not report.signature.outputs:
        wrong.append("container.signature: must have inputs and outputs")
    if not 1 <= report.max_batch <= MOST_BATCH:
        wrong.append(f"container.max_batch: must be 1 to {MOST_BATCH}")
    return wrong


def names(**fields: Any) -> list[str]:
    """Errors of fields that must be names."""
    return [f"{field}: must be {NAME_RULE}" for field, value in fields.items() if not valid_name(value)]


def app_fields(
    latency_ms: float | None,
    default_output: Any,
    slo_target: float | None,
    input_type: str | None = None,
    accuracy: str | None = None,
) -> list[str]:
    """Errors of an app's settings."""
    wrong = []
    if latency_ms is not None and not (isfinite(latency_ms) and latency_ms > 0):
        wrong.append("latency_ms: must be a number above 0")
    if default_output is not None and len(msgspec.msgpack.encode(default_output)) > MOST_DEFAULT:
        wrong.append(f"default_output: must fit into {MOST_DEFAULT // 1024} kB")
    if slo_target is not None and (refused := TARGET.refuse(slo_target)) is not None:
        wrong.append(f"slo_target: {refused}; 0.99 means that 99 of 100 queries are to be answered in time")
    if input_type is not None:
        wrong += _one_of("input_type", input_type, INPUT_TYPES)
    if accuracy is not None:
        wrong += _one_of("accuracy", accuracy, DEFAULTS)
    return wrong


def selection_fields(request: AdminRequest) -> list[str]:
    """Errors of how several models of an app answer together. Whether the app links the members is for its record to say."""
    wrong = []
    policy, members = request.policy, request.members
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
        if not all(map(valid_name, members)):
            wrong.append(f"members: each must be {NAME_RULE}")
    wrong += [
        f"{field}: is read by a policy only; give policy, or leave {field} out"
        for field in ("eta", "contextual", "confidence", "wait_share")
        if policy is None and getattr(request, field)
    ]
    if policy is not None and policy not in LEARNING and request.eta is not None:
        wrong.append(f"eta: {policy} does not learn at a rate; leave it out, or use {' or '.join(LEARNING)}")
    if policy in ("majority", "weighted") and request.contextual:
        wrong.append(
            f"contextual: {policy} gives no context weights of its own; leave it out, or use {' or '.join(LEARNING)}"
        )
    for field, bounds in SELECTION_BOUNDS.items():
        if (value := getattr(request, field)) is not None and (refused := bounds.refuse(value)) is not None:
            wrong.append(f"{field}: {refused}")
    return wrong


def _one_of(field: str, value: str, known: tuple[str, ...]) -> list[str]:
    return [] if value in known else [f"{field}: must be one of {', '.join(known)}"]


def _matches(field: str, value: str, pattern: re.Pattern[str]) -> list[str]:
    if pattern.match(value) and ".." not in value:
        return []
    return [f"{field}: must be letters, digits and . _ - only, begin with a letter or digit, and hold no '..'"]
