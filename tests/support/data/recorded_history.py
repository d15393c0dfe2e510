"""A system's past that nobody had: a minute of queries, machines and cost, as the recorder would have written it."""

from typing import Any

import numpy as np

from bus.codec import encode
from bus.messages.events import CostEvent, Event, JobEvent, OutcomeEvent, ScalingEvent, WorkerSample
from services.recorder.catalog import CatalogWriter
from services.recorder.events import EventWriter
from services.shell.store import Store
from tests.support.data.events import VARIANT, app_record, event, message, model_record, variant_record

BEGINS = 1_763_366_400.0  # 2025-11-17 08:00 UTC
MINUTE = 60.0
PRICES = {"cpu": 0.048, "gpu": 3.06}
OTHER = "big-v1-ort-fp32-t1-b64"


def catalogue(dsn: str, *, apps: tuple[str, ...] = ("digits", "faces"), **variant: Any) -> None:
    """Two apps, one model each; `faces` is served by a better, slower one, and has a target of its own. Rows have accuracies in no metric."""
    records: dict[str, Any] = {
        f"variant.{VARIANT}": variant_record(**variant),
        f"variant.{OTHER}": variant_record(variant=OTHER, model="big", accuracy=0.99),
        "model.mlp.1": model_record(metric="mae"),
        "model.big.1": model_record(model="big", metric="mae"),
    }
    links = {"digits": {"mlp": "1"}, "faces": {"big": "1"}}
    targets = {"faces": 0.995}
    records |= {
        f"app.{app}": app_record(app=app, links=links[app], default_output={"secret": 1}, slo_target=targets.get(app))
        for app in apps
    }
    store = Store(dsn, "test")
    CatalogWriter(store, PRICES, 0.95).write({key: encode(one) for key, one in records.items()}, frozenset(records))
    store.close()


def outcomes(seed: int = 1, count: int = 900) -> list[OutcomeEvent]:
    """15 queries/s: two thirds for digits within 50 ms, a third for faces, now and then of several items; some late, some refused."""
    rng = np.random.default_rng(seed)
    found = []
    for i, at in enumerate(np.sort(rng.random(count)) * MINUTE):
        faces = i % 3 == 0
        fields: dict[str, Any] = {
            "time": BEGINS + float(at), "uid": i.to_bytes(16, "big"), "app": "faces" if faces else "digits",
            "slo_ms": None if faces else 50.0, "variant": OTHER if faces else VARIANT, "items": 4 if faces and i % 2 else 1,
            "accuracy": 0.99 if faces else 0.97, "accuracy_required": 0.98 if faces else None,
            "latency_ms": 1.0 + float(rng.exponential(2.0)), "id": "a label", "context": "somebody",
        }  # fmt: skip
        if i % 50 == 1:
            fields |= {"outcome": "late", "latency_ms": 70.0}
        if i % 100 == 2:
            fields |= {"outcome": "refused", "code": "deadline", "variant": None, "accuracy": None}
        found.append(event(OutcomeEvent, **fields))
    return found


def bills(workers: int = 1) -> list[CostEvent]:
    """Every ten seconds, for each worker: 4 cores, of which one instance for each app takes one."""
    core = PRICES["cpu"] / 3600.0
    found = []
    for i in range(1, 7):
        for worker in range(workers):
            common = {"time": BEGINS + 10.0 * i, "worker": f"w{worker}", "seconds": 10.0}
            found += [
                event(CostEvent, **common, cost=10 * core),
                event(CostEvent, **common, app="faces", model="big", variant=OTHER, cost=10 * core),
                event(CostEvent, **common, app=None, model=None, variant=None, busy_seconds=0.0, cost=20 * core),
            ]
    return found


def samples(workers: int = 1, **fields: Any) -> list[WorkerSample]:
    """Every two seconds."""
    return [
        event(WorkerSample, time=BEGINS + 2.0 * i, worker=f"w{worker}", utilisation=0.25, **fields)
        for i in range(30)
        for worker in range(workers)
    ]


def record(dsn: str, *kinds: list[Any]) -> None:
    """Through the recorder's own ledger; a list for each kind of event."""
    store = Store(dsn, "test")
    ledger = EventWriter(store)
    for rows in kinds:
        for at in range(0, len(rows), 200):
            ledger.write([message(*rows[at : at + 200])])
    store.close()


def minute(dsn: str) -> None:
    """All of it."""
    catalogue(dsn)
    job: list[Event] = [
        event(JobEvent, app="digits", accuracy=0.5, total=40, created=BEGINS + 5.0, time=BEGINS + 6.0, state="done")
    ]
    scaled: list[Event] = [event(ScalingEvent, time=BEGINS + 1.0), event(ScalingEvent, time=BEGINS + 2.0, count=0)]
    offline = [event(OutcomeEvent, time=BEGINS + 5.0 + i / 100, policy="offline", slo_ms=None) for i in range(10)]
    record(dsn, outcomes(), offline, bills(), samples(), scaled, job)
