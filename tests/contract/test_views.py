"""What the views of contract section 3 show: states now, the catalogue, cost by the hour, objectives by the minute."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from bus.codec import encode
from bus.messages.catalog import Profile
from bus.messages.events import CostEvent, FeedbackEvent, StateEvent, WorkerEvent, WorkerSample
from infaas.cli import doctor
from infaas.cli.machine_checks import run_async_check
from services.core.cost import HANDLING_MS
from services.recorder.catalog import CatalogWriter
from services.recorder.events import EventWriter
from services.shell.store import Store
from tests.support.data.events import (
    PIPELINE,
    SIGNATURE,
    VARIANT,
    app_record,
    event,
    message,
    model_record,
    outcome,
    variant_record,
)

HOUR = 1_699_999_200.0  # 2023-11-14 22:00 UTC
INT8 = "mlp-v1-ort-int8-t1-b64"
CATALOGUE = {
    "app.digits": encode(app_record()),
    "model.mlp.1": encode(model_record()),
    f"variant.{VARIANT}": encode(variant_record()),
    f"variant.{INT8}": encode(variant_record(variant=INT8, precision="int8", accuracy=0.96)),
}


class Recorder:
    """Writes as the recorder does, reads as a user does."""

    def __init__(self, writer: str, reader: str) -> None:
        self.store = Store(writer, "test")
        self.ledger = EventWriter(self.store)
        self.mirror = CatalogWriter(self.store, {"cpu": 0.048, "gpu": 3.0}, 0.99)
        self._reader = psycopg.connect(reader, autocommit=True)

    def ask(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._reader.execute(query.encode(), values).fetchall()

    def state(self, to: str, at: float = 0.0, **fields: Any) -> None:
        self.ledger.write([message(event(StateEvent, time=at or time.time(), to_state=to, **fields))])

    def worker(self, from_state: str, to: str, at: float, **fields: Any) -> None:
        self.ledger.write([message(event(WorkerEvent, time=at, from_state=from_state, to_state=to, **fields))])

    def states(self) -> list[tuple[Any, ...]]:
        return self.ask(
            "SELECT app, variant, worker, state FROM variant_states ORDER BY app, variant, worker, instance"
        )

    def close(self) -> None:
        self.store.close()
        self._reader.close()


@pytest.fixture
def db(database_dsn: str, reader_dsn: str) -> Iterator[Recorder]:
    with closing(Recorder(database_dsn, reader_dsn)) as recorder:
        yield recorder


# ---- states


def test_inactive_variants_are_shown_and_instances_take_their_place(db: Recorder) -> None:
    db.mirror.write(CATALOGUE, frozenset(CATALOGUE))
    assert db.states() == [("digits", VARIANT, None, "Inactive"), ("digits", INT8, None, "Inactive")]
    now = time.time()
    db.state("Loading", now - 3)
    db.state("Active", now - 2)
    db.state("Loading", now - 1, instance="i2", worker="w2")
    assert db.states() == [
        ("digits", VARIANT, "w1", "Active"),
        ("digits", VARIANT, "w2", "Loading"),
        ("digits", INT8, None, "Inactive"),
    ]
    assert db.ask("SELECT since FROM variant_states WHERE instance = 'i1'") == [(datetime.fromtimestamp(now - 2, UTC),)]
    db.state("Inactive", now, reason="unloaded")
    db.state("Inactive", now + 1, instance="i2", worker="w2")
    assert db.states() == [("digits", VARIANT, None, "Inactive"), ("digits", INT8, None, "Inactive")]
    since = db.ask("SELECT since FROM variant_states WHERE variant = %s", VARIANT)
    assert since == [(datetime.fromtimestamp(now + 1, UTC),)]


def test_a_later_fact_wins_in_whatever_order_the_two_arrive(db: Recorder) -> None:
    now = time.time()
    db.state("Active", now)
    db.state("Loading", now - 1)
    assert db.states() == [("digits", VARIANT, "w1", "Active")]


def test_one_apps_trouble_is_not_anothers(db: Recorder) -> None:
    db.mirror.write(CATALOGUE | {"app.scans": encode(app_record(app="scans"))}, None)
    now = time.time()
    db.state("Active", now - 2)
    db.state("Overloaded", now - 1)
    assert db.states()[0] == ("digits", VARIANT, "w1", "Overloaded")
    assert db.states()[2] == ("scans", VARIANT, "w1", "Active")
    db.state("Unloading", now)
    assert [state for _, variant, _, state in db.states() if variant == VARIANT] == ["Unloading", "Unloading"]


def test_an_instance_that_no_app_uses_yet_is_shown_for_every_linked_app(db: Recorder) -> None:
    db.mirror.write(CATALOGUE | {"app.scans": encode(app_record(app="scans"))}, None)
    db.state("Active", app=None)
    assert [row for row in db.states() if row[1] == VARIANT] == [
        ("digits", VARIANT, "w1", "Active"),
        ("scans", VARIANT, "w1", "Active"),
    ]


def test_instances_of_a_worker_that_fell_silent_are_gone(db: Recorder) -> None:
    now = time.time()
    db.state("Active", now - 100)
    db.ledger.write([message(event(WorkerSample, time=now - 40))])
    assert db.states() == []
    db.ledger.write([message(event(WorkerSample, time=now))])
    assert db.states() == [("digits", VARIANT, "w1", "Active")]


def test_a_new_monitor_makes_what_the_old_one_said_untrue(db: Recorder) -> None:
    now = time.time()
    db.worker("None", "Booting", now - 20)
    db.worker("Booting", "Ready", now - 19)
    db.state("Active", now - 10)
    assert len(db.states()) == 1
    one = event(WorkerEvent, time=now - 2, from_state="None", to_state="Booting")
    db.ledger.write([message(one, event(WorkerEvent, time=now - 1, from_state="Booting", to_state="Ready"))])
    assert db.states() == []
    db.state("Active", now, reason="found loaded")
    assert len(db.states()) == 1


@pytest.mark.parametrize("state", ["Stopped", "dead"])
def test_instances_of_a_worker_that_is_gone_are_gone(db: Recorder, state: str) -> None:
    now = time.time()
    db.state("Active", now - 10)
    db.state("Active", now - 10, worker="w2", instance="other")
    db.worker("Ready", state, now - 5)
    assert db.states() == [("digits", VARIANT, "w2", "Active")]


# ---- the catalogue


def test_the_catalogue_is_shown_with_prices_and_state(db: Recorder) -> None:
    db.mirror.write(CATALOGUE, frozenset(CATALOGUE))
    db.state("Active")
    (row,) = db.ask(
        "SELECT app, model, version, hardware, framework, precision, threads, max_batch, accuracy, load_ms, latency_ms,"
        " memory_mb, saturation_qps, price_per_hour, state, simulated FROM variants WHERE variant = %s",
        VARIANT,
    )
    assert row == (
        "digits", "mlp", "1", "cpu", "ort", "fp32", 1, 64, 0.97, 20.0, 0.1, 12.0, 80_000.0, 0.048, "Active", False
    )  # fmt: skip
    ((cost,),) = db.ask("SELECT cost_per_1000 FROM variants WHERE variant = %s", VARIANT)
    assert cost == pytest.approx((0.1 + HANDLING_MS) * 0.048 / 3600)
    assert db.ask("SELECT state FROM variants WHERE variant = %s", INT8) == [("Inactive",)]
    assert db.ask("SELECT app, models, versions, variants FROM apps") == [("digits", ["mlp"], {"mlp": "1"}, 2)]
    assert db.ask("SELECT model, version, apps, serving, variants FROM models") == [
        ("mlp", "1", ["digits"], ["digits"], 2)
    ]
    assert db.ask("SELECT inputs FROM models") == [([{"name": "x", "datatype": "FP32", "shape": [64]}],)]
    assert db.ask("SELECT batch, p50_ms FROM profiles WHERE variant = %s ORDER BY 1", VARIANT) == [(1, 0.1), (64, 0.8)]
    assert db.ask("SELECT * FROM prices ORDER BY 1") == [("cpu", 0.048, "core"), ("gpu", 3.0, "device")]


def test_changes_replace_and_deletions_remove(db: Recorder) -> None:
    db.mirror.write(CATALOGUE, frozenset(CATALOGUE))
    db.mirror.write(
        {"app.digits": encode(app_record(latency_ms=5.0, default_output=[1])), f"variant.{INT8}": None}, None
    )
    assert db.ask("SELECT latency_ms, default_output, variants FROM apps") == [(5.0, [1], 1)]
    assert db.ask("SELECT count(*) FROM profiles") == [(2,)]
    db.mirror.write({}, frozenset({"app.digits"}))
    assert db.ask("SELECT count(*) FROM models") == [(0,)]
    assert db.ask("SELECT count(*) FROM variants") == [(0,)]
    assert db.ask("SELECT app, variants FROM apps") == [("digits", 0)]


def test_a_new_version_takes_the_app_over(db: Recorder) -> None:
    second = {
        "model.mlp.2": encode(model_record(version="2")),
        "variant.mlp-v2": encode(variant_record(variant="mlp-v2", version="2")),
        "app.digits": encode(app_record(links={"mlp": "2"})),
    }
    db.mirror.write(CATALOGUE | second, None)
    assert db.ask("SELECT variant FROM variants WHERE app = 'digits'") == [("mlp-v2",)]
    assert db.ask("SELECT count(*) FROM variants WHERE app IS NULL") == [(2,)]
    assert db.ask("SELECT version, apps, serving FROM models ORDER BY 1") == [
        ("1", ["digits"], []),
        ("2", ["digits"], ["digits"]),
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"variant.{VARIANT}", b"\xc1"),
        (f"variant.{VARIANT}", encode(variant_record(accuracy=0.5, framework="nul\0"))),
        (f"variant.{VARIANT}", encode(variant_record(threads=2**40))),
    ],
)
def test_an_entry_that_is_no_record_is_set_aside_and_stops_no_other(db: Recorder, key: str, value: bytes) -> None:
    db.mirror.write(CATALOGUE, None)
    db.mirror.write({key: value, "app.more": encode(app_record(app="more", links={}))}, None)
    assert db.ask("SELECT app FROM apps ORDER BY 1") == [("digits",), ("more",)]
    assert db.ask("SELECT variant FROM variants") == [(INT8,)]
    assert db.ask("SELECT subject FROM rejected_events") == [(key,)]


def test_an_instance_costs_its_share_of_the_devices_that_are_there(db: Recorder) -> None:
    gpu = variant_record(variant="mlp-v1-simgpu-fp32-t1-b64", hardware="gpu", simulated=True)
    db.mirror.write({**CATALOGUE, "variant.mlp-v1-simgpu-fp32-t1-b64": encode(gpu)}, None)
    prices = "SELECT price_per_hour, cost_per_1000 FROM variants WHERE hardware = %s LIMIT 1"
    ((hourly, cost),) = db.ask(prices, "gpu")
    ((core, _),) = db.ask(prices, "cpu")
    assert hourly == pytest.approx(3.0)  # nobody knows of such a device: one of its own size
    now, share = time.time(), 1 / 8
    samples = [
        event(WorkerSample, time=now, device="gpu-0", hardware="gpu", memory_mb=gpu.profile.memory_mb / share),
        event(WorkerSample, time=now, memory_mb=gpu.profile.memory_mb / share),
    ]
    db.ledger.write([message(*samples)])
    assert db.ask(prices, "gpu") == [(pytest.approx(3.0 * share), pytest.approx(cost * share))]
    assert db.ask(prices, "cpu")[0][0] == core  # by its threads


def test_a_variant_without_a_price_or_a_measurement_is_shown_without(db: Recorder) -> None:
    empty = Profile(rows=[], load_ms=1.0, memory_mb=0.0, saturation_qps=0.0)
    record = variant_record(hardware="tpu", profile=empty, signature=SIGNATURE, simulated=True)
    db.mirror.write({f"variant.{VARIANT}": encode(record)}, None)
    found = db.ask("SELECT app, latency_ms, price_per_hour, cost_per_1000, simulated FROM variants")
    assert found == [(None, None, None, None, True)]


# ---- cost and objectives


def test_cost_by_the_hour_sets_the_bill_beside_the_queries(db: Recorder) -> None:
    spent = [
        event(CostEvent, time=HOUR + 10, cost=0.25),
        event(CostEvent, time=HOUR + 20, cost=0.5),
        event(CostEvent, time=HOUR + 3599.9, cost=1.0, app=None, model=None, variant=None),
        event(CostEvent, time=HOUR + 3600, cost=2.0),
        event(CostEvent, time=HOUR + 3600, cost=8.0, simulated=True),
    ]
    asked = [outcome(time=HOUR + i) for i in range(4)] + [
        outcome(time=HOUR, outcome="refused", model=None, variant=None, hardware=None)
    ]
    db.ledger.write([message(*spent), message(*asked)])
    first, second = datetime.fromtimestamp(HOUR, UTC), datetime.fromtimestamp(HOUR + 3600, UTC)
    assert db.ask("SELECT * FROM cost_by_app_hourly ORDER BY hour, app") == [
        (first, "digits", 0.75, 5, 150.0, 0.0),
        (first, None, 1.0, 0, None, 0.0),
        (second, "digits", 10.0, 0, None, 8.0),
    ]
    assert db.ask("SELECT app, variant, hardware, cost, queries, cost_per_1000 FROM cost_by_variant_hourly"
                  " WHERE hour = %s ORDER BY app, variant", first) == [
        ("digits", VARIANT, "cpu", 0.75, 4, 187.5),
        ("digits", None, None, 0.0, 1, 0.0),
        (None, None, "cpu", 1.0, 0, None),
    ]  # fmt: skip


def test_visits_of_stages_stand_beside_the_cost_of_the_pipeline_that_pays_them(db: Recorder) -> None:
    whole = outcome(time=HOUR, app="social", model=None, variant=None, hardware=None, missing=0)
    visits = [outcome(time=HOUR + i, parent=whole.uid, stage="look", payer="social") for i in range(4)]
    spent = [event(CostEvent, time=HOUR, cost=0.25), event(CostEvent, time=HOUR, app="social", cost=0.5)]
    db.ledger.write([message(whole, *visits, outcome(time=HOUR)), message(*spent)])
    assert db.ask("SELECT app, variant, cost, queries, asked, cost_per_1000 FROM cost_by_variant_hourly ORDER BY app, variant") == [
        ("digits", VARIANT, 0.25, 1, 1, 250.0),
        ("social", VARIANT, 0.5, 0, 4, 125.0),
        ("social", None, 0.0, 1, 0, None),
    ]  # fmt: skip
    assert db.ask("SELECT app, cost, queries FROM cost_by_app_hourly ORDER BY app") == [
        ("digits", 0.25, 1),
        ("social", 0.5, 1),
    ]


def test_objectives_by_the_minute(db: Recorder) -> None:
    minute = HOUR + 60
    kinds = ["ok"] * 5 + ["default"] + ["late"] + ["refused", "error", "error"]
    rows = [outcome(time=minute + i, outcome=kind, latency_ms=float(i + 1)) for i, kind in enumerate(kinds)]
    rows += [outcome(time=minute + at, outcome="cancelled") for at in (1, 2, 120)]  # they are in no objective
    db.ledger.write([message(*rows), message(outcome(time=minute + 60, app="other"))])
    found = db.ask("SELECT * FROM slo_by_app_minutely ORDER BY minute")
    assert len(found) == 2
    assert found[0] == (datetime.fromtimestamp(minute, UTC), "digits", 10, 1, 1, 2, 0.6, 4.0, pytest.approx(6.94), None)
    assert found[1][:3] == (datetime.fromtimestamp(minute + 60, UTC), "other", 1)


def test_accuracy_by_the_hour_is_that_of_the_labels_that_count(db: Recorder) -> None:
    def label(i: int, **fields: Any) -> FeedbackEvent:
        return FeedbackEvent(
            time=HOUR + i,
            app="hid",
            id=None,
            context=None,
            label="1",
            input_digest=None,
            uid=i.to_bytes(16, "big"),
            **fields,
        )

    counted = [label(i, variant=VARIANT, score=float(i % 2), promised=0.95) for i in range(994)]
    late = label(9000, score=1.0, promised=0.9, asked=HOUR + 5000.0)  # it counts in the hour of its query
    db.ledger.write([message(*counted, label(1000), late)])
    [first, second] = db.ask("SELECT * FROM accuracy_by_app_hourly ORDER BY time")
    assert first[:4] == (datetime.fromtimestamp(HOUR, UTC), "hid", pytest.approx(0.95), 0.5)
    assert first[4:6] == (pytest.approx(0.45, abs=0.01), pytest.approx(0.55, abs=0.01))
    assert first[6:] == (994, pytest.approx(10.0))
    assert second[3:7] == (1.0, 0.0, 1.0, 1)


async def test_the_doctor_says_that_an_older_schema_knows_no_drift(superuser_dsn: str, reader_dsn: str) -> None:
    assert (
        "no app's queries"
        in (await run_async_check("drift", lambda: asyncio.to_thread(doctor._drift, reader_dsn))).detail
    )
    with psycopg.connect(superuser_dsn, autocommit=True) as owner:
        owner.execute("DROP VIEW infaas.drift_events")
    found = await run_async_check("drift", lambda: asyncio.to_thread(doctor._drift, reader_dsn))
    assert (found.state, found.detail) == ("failed", "the database has an older version's schema, which knows no drift")
    assert "infaas up" in found.remedy


def test_targets_stand_beside_attainment_and_follow_the_catalogue(db: Recorder) -> None:
    db.ledger.write([message(outcome(time=HOUR), outcome(time=HOUR, app="own"), outcome(time=HOUR, app="gone"))])
    apps = {"app.digits": encode(app_record()), "app.own": encode(app_record(app="own", slo_target=0.999))}
    db.mirror.write(apps, frozenset(apps))
    assert db.ask("SELECT app, slo_target FROM slo_by_app_minutely ORDER BY app") == [
        ("digits", 0.99),  # the setting's
        ("gone", None),
        ("own", 0.999),
    ]
    assert db.ask("SELECT app, slo_target, own_target FROM apps ORDER BY app") == [
        ("digits", 0.99, False),
        ("own", 0.999, True),
    ]
    db.mirror.write({"app.own": encode(app_record(app="own", slo_target=0.9))}, None)
    assert db.ask("SELECT slo_target FROM slo_by_app_minutely WHERE app = 'own'") == [(0.9,)]


def test_pipelines_have_their_objectives_beside_what_their_instances_cost(db: Recorder) -> None:
    minute = HOUR + 120
    rows = [outcome(time=minute + i, app=app) for i in range(4) for app in ("digits", "social")]
    rows.append(outcome(time=minute + 60, app="social", outcome="late"))
    costs = [event(CostEvent, time=minute + 10 * i, app="social", cost=0.5) for i in range(6)]
    db.ledger.write([message(*rows), message(*costs), message(event(CostEvent, time=minute, cost=8.0))])
    apps = {"app.digits": encode(app_record()), "app.social": encode(app_record(app="social", pipeline=PIPELINE))}
    db.mirror.write(apps, frozenset(apps))
    assert db.ask("SELECT pipeline, queries, attainment, slo_target, cost FROM slo_by_pipeline_minutely ORDER BY minute") == [
        ("social", 4, 1.0, 0.99, 3.0),
        ("social", 1, 0.0, 0.99, None),
    ]  # fmt: skip
    assert db.ask("SELECT app FROM apps WHERE pipeline") == [("social",)]
    assert db.ask("SELECT count(*) FROM slo_by_app_minutely") == [(3,)]


def test_asking_for_some_minutes_reads_only_their_rows(db: Recorder) -> None:
    db.ask("SELECT set_config('enable_seqscan', 'off', false)")  # the table is empty here
    plan = "\n".join(
        row[0]
        for row in db.ask(
            "EXPLAIN SELECT * FROM slo_by_app_minutely WHERE minute >= timestamptz '2023-11-14 22:00Z'"
            " AND minute < timestamptz '2023-11-14 23:00Z'"
        )
    )
    assert "Index Cond" in plan
