"""Plausible events and catalogue records for tests; every field may be overridden."""

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bus.codec import encode
from bus.messages.catalog import (
    AppRecord,
    ModelRecord,
    PipelineRecord,
    PipelineVertex,
    Profile,
    ProfileRow,
    Signature,
    TensorSpec,
    VariantRecord,
)
from bus.messages.events import (
    AppObjective,
    ClientError,
    CostEvent,
    DriftEvent,
    Event,
    FeedbackEvent,
    InstanceEventSample,
    JobEvent,
    OutcomeEvent,
    PipelineEvent,
    RegistrationEvent,
    ReleaseEvent,
    ScalingEvent,
    SelectionEvent,
    ShadowEvent,
    StateEvent,
    WorkerEvent,
    WorkerSample,
)
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from services.core.actor import Changed
from services.core.catalog import Catalog, key_of
from services.recorder.events import EventMessage

PIPELINE = PipelineRecord(vertices=[PipelineVertex(name="lang", app="digits")])
VARIANT = "mlp-v1-ort-fp32-t1-b64"
_DEFAULTS: dict[type[Event], dict[str, Any]] = {
    OutcomeEvent: {
        "id": None, "app": "digits", "outcome": "ok", "model": "mlp", "variant": VARIANT, "worker": "w1", "hardware": "cpu",
        "latency_ms": 2.5, "slo_ms": 50.0, "accuracy": 0.97, "batch": 8, "cost": 1e-7, "version": "1", "policy": "infaas",
    },
    StateEvent: {
        "app": "digits", "model": "mlp", "variant": VARIANT, "worker": "w1", "device": "cpu", "instance": "i1",
        "from_state": "Loading", "to_state": "Active", "reason": "loaded",
    },
    ClientError: {"app": "nobody", "code": "unknown_app", "count": 3},
    CostEvent: {
        "seconds": 10.0, "worker": "w1", "hardware": "cpu", "app": "digits", "model": "mlp", "variant": VARIANT,
        "busy_seconds": 4.0, "cost": 0.001,
    },
    ScalingEvent: {
        "scaler": "dispatcher", "worker": "w1", "app": "digits", "model": "mlp", "variant": VARIANT, "action": "load",
        "count": 1, "reason": "no instance",
    },
    ShadowEvent: {
        "policy": "static", "scaler": "model", "worker": "w1", "app": "digits", "variant": VARIANT, "action": "load", "count": 1,
        "reason": "load", "cost_rate": 0.2, "apps_cost_rate": 0.05,
    },
    WorkerEvent: {"worker": "w1", "hardware": "cpu", "from_state": "starting", "to_state": "ready", "reason": "up"},
    WorkerSample: {
        "worker": "w1", "device": "cpu", "hardware": "cpu", "utilisation": 0.4, "memory_mb": 8000.0,
        "memory_used_mb": 900.0, "load": 100.0, "queue": 2,
    },
    InstanceEventSample: {
        "worker": "w1", "device": "cpu", "app": "digits", "model": "mlp", "variant": VARIANT, "instance": "i1",
        "utilisation": 0.4, "memory_mb": 20.0, "load": 100.0, "queue": 2, "latency_ms": 1.5, "mean_batch": 4.0,
    },
    RegistrationEvent: {
        "registration": "r1", "app": "digits", "model": "mlp", "version": None, "state": "accepted", "reason": None,
        "progress": 0.0,
    },
    JobEvent: {
        "job": "j1", "app": "digits", "model": None, "variant": None, "accuracy": 0.9, "input": "file:///in.npy",
        "output": "file:///out.npy", "state": "running", "total": 500, "done": 32, "failed": 0, "reason": None, "cost": 1e-6,
        "created": 1.7e9, "started": 1.7e9, "finished": None,
    },
    AppObjective: {
        "app": "digits", "slo_target": 0.99, "reached": 0.995, "load": 100.0, "forecast": 120.0, "capacity": 150.0,
        "headroom": 1.25,
    },
    SelectionEvent: {
        "app": "digits", "context": None, "member": "mlp", "probability": 0.25, "loss": 1.0, "weight": 0.2,
    },
    DriftEvent: {
        "app": "digits", "model": "mlp", "column_name": "x[3]", "distance": 0.5, "since": 1.7e9, "ended": None,
        "cells": '{"edges": [0.5], "expected": [9, 1, 0], "found": [2, 8, 0]}',
    },
    PipelineEvent: {
        "pipeline": "social", "vertex": "lang", "action": "up", "from_replicas": 3, "to_replicas": 5, "lambda_max": 250.0,
        "window_s": 0.08, "reason": "12 queries in 0.04 s",
    },
    ReleaseEvent: {
        "release": "digits-1", "app": "digits", "model": "mlp", "version": "2", "old_version": "1", "share": 0.1,
        "state": "step", "reason": "an operator's order",
    },
    FeedbackEvent: {"app": "digits", "id": "q1", "context": None, "label": "7", "input_digest": None},
}  # fmt: skip
FOLDED = {"registration": "infaas.registrations", "job": "infaas.jobs"}  # of these only the last one is kept
_numbers = itertools.count(1)


def event(kind: type[Event], **fields: Any) -> Any:
    """One event that happened now."""
    unique = {name: secrets.token_bytes(16) for name in ("uid", "query") if name in kind.__struct_fields__}
    return kind(**({"time": time.time()} | unique | _DEFAULTS[kind] | fields))


def outcome(**fields: Any) -> OutcomeEvent:
    made: OutcomeEvent = event(OutcomeEvent, **fields)
    return made


def message(*rows: Event, id: str = "", prefix: str = "infaas") -> EventMessage:
    """A message with these rows, all of one kind, under an id of its own unless one is given."""
    return EventMessage(f"{prefix}.event.{rows[0].kind}", encode({"id": id or f"batch-{next(_numbers)}", "rows": rows}))


def floats(inputs: Mapping[str, Sequence[int]], outputs: Mapping[str, Sequence[int]]) -> Signature:
    """Of FP32 tensors: their shapes by name."""
    given, made = (
        [TensorSpec(name=name, datatype="FP32", shape=list(shape)) for name, shape in of.items()]
        for of in (inputs, outputs)
    )
    return Signature(inputs=given, outputs=made)


SIGNATURE = floats({"x": [64]}, {"y": [10]})


def variant_record(**fields: Any) -> VariantRecord:
    """A variant whose batch of one takes 0.1 ms."""
    rows = [
        ProfileRow(batch=1, p50_ms=0.1, p99_ms=0.2, cpu_ms=0.1, wall_over_cpu=1.0),
        ProfileRow(batch=64, p50_ms=0.8, p99_ms=1.1, cpu_ms=0.8, wall_over_cpu=1.0),
    ]
    defaults: dict[str, Any] = {
        "variant": VARIANT, "model": "mlp", "version": "1", "framework": "ort", "precision": "fp32", "threads": 1,
        "max_batch": 64, "hardware": "cpu", "artifact": "0" * 64, "format": "onnx", "accuracy": 0.97, "agreement": 1.0,
        "profile": Profile(rows=rows, load_ms=20.0, memory_mb=12.0, saturation_qps=80_000.0), "signature": SIGNATURE,
    }  # fmt: skip
    return VariantRecord(**(defaults | fields))


def model_record(**fields: Any) -> ModelRecord:
    defaults: dict[str, Any] = {
        "model": "mlp", "version": "1", "task": None, "metric": "top1", "format": "onnx", "source": "0" * 64,
        "validation": "1" * 64, "signature": SIGNATURE, "created": 1.7e9, "registration": "r1",
    }  # fmt: skip
    return ModelRecord(**(defaults | fields))


def app_record(**fields: Any) -> AppRecord:
    defaults: dict[str, Any] = {"app": "digits", "links": {"mlp": "1"}, "signature": SIGNATURE, "created": 1.7e9}
    return AppRecord(**(defaults | fields))


def change_of(record: Any, bucket: str = "infaas-catalog") -> Changed:
    """What a follower of the catalogue hears of this record."""
    return Changed(bucket, key_of(record), encode(record))


def catalog_of(*records: Any) -> Catalog:
    catalog = Catalog()
    for record in records:
        catalog.apply(key_of(record), encode(record))
    return catalog


# -- Heartbeats of workers, with what a test says of them and the rest as on an idle machine.


def device(name: str = "cpu", **fields: Any) -> DeviceStatus:
    """Of the kind that its name begins with."""
    given = {
        "kind": name.partition("-")[0], "cores": 2, "memory_mb": 4000.0, "memory_used_mb": 0.0, "cores_used": 0.0,
        "utilisation": 0.1, "price_per_hour": 0.1,
    }  # fmt: skip
    return DeviceStatus(device=name, **(given | fields))


def instance(name: str = "i", variant: str = "v", **fields: Any) -> InstanceStatus:
    given = {"device": "cpu", "state": "Active", "since": 0.0}
    return InstanceStatus(instance=name, variant=variant, **(given | fields))


def beat(*instances: InstanceStatus, devices: Sequence[DeviceStatus] | None = None, **fields: Any) -> WorkerHeartbeat:
    """devices: a CPU unless a test has others, of whose kind the worker is."""
    there = [device()] if devices is None else list(devices)
    given = {"worker": "w0", "hardware": there[0].kind if there else "cpu", "incarnation": 1, "at": 0.0}
    return WorkerHeartbeat(devices=there, instances=list(instances), **(given | fields))
