"""Rollups without continuous aggregates: the views show what raw rows add up to, whatever comes late, and keep it when those go."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from bus.messages.events import CostEvent, OutcomeEvent, WorkerSample
from bus.messages.scaling import DemandHistory
from dashboard.store import statement
from services.recorder.events import EventWriter, Maintenance, demand_history
from services.shell.store import SCHEMA, Store, prepare
from services.shell.timescale import KEEP_DAYS, LevelError, TimescaleSupport, level_of, shape
from tests.support.data.events import event, message, outcome
from tests.support.data.rollups import ADDED, IN_RANGE, OF_PAGES, TRUTH, rounded, shown, some, truth
from tests.support.servers.postgres import READER_PASSWORD, WRITER_PASSWORD

HOUR = 3600.0
DAY = 24 * HOUR


class Recorder:
    """Writes and maintains as the recorder does, looks as the owner may."""

    def __init__(self, writer: str, owner: str) -> None:
        self.store = Store(writer, "test")
        self.ledger = EventWriter(self.store)
        self.maintenance = Maintenance(self.store)
        self.owner = psycopg.connect(owner, autocommit=True)

    def maintain(self) -> None:
        while self.maintenance.maintain():
            pass

    def one(self, query: str) -> Any:
        row = self.owner.execute(query.encode()).fetchone()
        return None if row is None else row[0]

    def stored(self) -> tuple[int, int, int]:
        """Rows in the stores of cost, queries and objectives."""
        return tuple(  # type: ignore[return-value]
            self.one(f"SELECT count(*) FROM infaas_internal.{store}") for store in ("cost_hours", "query_hours", "slo_minutes")
        )  # fmt: skip

    def close(self) -> None:
        self.store.close()
        self.owner.close()


@pytest.fixture
def db(database_dsn: str, superuser_dsn: str) -> Iterator[Recorder]:
    with closing(Recorder(database_dsn, superuser_dsn)) as recorder:
        yield recorder


def test_views_show_what_raw_rows_add_up_to_at_every_step(db: Recorder) -> None:
    rng = random.Random(5)
    now = time.time()
    for step in range(4):
        # each step brings newer rows, and rows of hours that are in the stores already
        db.ledger.write(some(rng, 60, now - (5 - step) * HOUR, now - (4 - step) * HOUR))
        db.ledger.write(some(rng, 20, now - 5 * HOUR, now - (4 - step) * HOUR))
        assert _without_percentiles(shown(db.owner)) == _without_percentiles(truth(db.owner))
        db.maintain()
        assert shown(db.owner) == truth(db.owner)
    assert all(count > 10 for count in db.stored())
    assert db.one("SELECT count(*) FROM infaas_internal.slo_minutes WHERE stale") == 0


def _without_percentiles(views: dict[str, list[tuple[Any, ...]]]) -> dict[str, list[tuple[Any, ...]]]:
    """Those of minutes that rows came late to are right after the next maintenance."""
    return views | {"slo_by_app_minutely": [row[:7] for row in views["slo_by_app_minutely"]]}


def test_a_range_is_what_its_rows_add_up_to_and_whole_hours_stay_without_them(db: Recorder) -> None:
    """Across hours and within one, before and after they are added up, with rows that came late; and what pages make of it."""
    rng = random.Random(16)
    base = time.time() // HOUR * HOUR - 6 * HOUR

    def ask(query: str | bytes, since: float, until: float) -> list[tuple[Any, ...]]:
        start, end = (datetime.fromtimestamp(base + hours * HOUR, UTC) for hours in (since, until))
        values = {"start": start, "end": end, "step": timedelta(hours=1), "app": "digits"}
        return rounded(db.owner.execute(query if isinstance(query, bytes) else query.encode(), values).fetchall())

    between = ADDED.format("outcomes_between(%(start)s, %(end)s)")
    rows = TRUTH["outcomes_hourly"].replace("FROM infaas.query_outcomes", IN_RANGE)
    for _ in range(3):
        db.ledger.write(some(rng, 150, base, base + 5.5 * HOUR))
        for keep_up in (lambda: None, db.maintain):
            keep_up()
            for since, until in ((0.4, 5.2), (1.0, 4.0), (2.9, 3.2), (3.3, 3.6), (0.0, 9.0)):
                assert ask(between, since, until) == ask(rows, since, until), (since, until)
                for name, raw in OF_PAGES.items():
                    if since % 1 == 0 or name not in ("offline", "agreement"):  # their buckets begin with an hour
                        assert ask(statement(name), since, until) == ask(raw, since, until), (name, since, until)
    whole = [ask(query, 1.0, 4.0) for query in (between, *map(statement, OF_PAGES))]
    assert all(whole)
    db.owner.execute("DELETE FROM infaas.query_outcomes")
    assert [ask(query, 1.0, 4.0) for query in (between, *map(statement, OF_PAGES))] == whole


def test_what_was_held_back_while_nothing_came_is_not_late(db: Recorder) -> None:
    """NATS away for ten minutes: the watermark waits, so minutes that come afterwards are whole at once."""
    now = time.time()
    db.ledger.write([message(*[outcome(time=now - 700 + i) for i in range(60)])])
    db.maintain()
    db.ledger.write([message(*[outcome(time=now - 600 + i) for i in range(500)])])
    assert db.one("SELECT count(*) FROM infaas_internal.slo_minutes WHERE stale") == 0
    assert shown(db.owner) == truth(db.owner)


def test_a_row_from_the_future_moves_nothing_beyond_the_present(db: Recorder) -> None:
    now = time.time()
    db.ledger.write([message(outcome(time=now + 1e6), outcome(time=now - 1))])
    db.maintain()
    assert db.one("SELECT upto < now() FROM infaas_internal.watermarks WHERE source = 'query_outcomes'")
    db.ledger.write([message(outcome(time=now))])
    assert shown(db.owner) == truth(db.owner)


def test_writers_and_the_watermark_do_not_miss_each_other(db: Recorder, database_dsn: str) -> None:
    """Three writers with late rows against one that keeps moving the watermark."""
    now = time.time()
    wrong: list[BaseException] = []
    writing = threading.Barrier(4)

    def write(seed: int) -> None:
        rng = random.Random(seed)
        store = Store(database_dsn, "writer")
        ledger = EventWriter(store)
        try:
            writing.wait(60)
            for step in range(25):
                ledger.write(some(rng, 8, now - 2 * HOUR, now - 2 * HOUR + (step + 1) * 240))
        except BaseException as error:
            wrong.append(error)
        finally:
            store.close()

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    writing.wait(60)
    moves = 0
    while any(thread.is_alive() for thread in threads):
        db.maintenance.maintain()
        moves += 1
    for thread in threads:
        thread.join()
    assert wrong == []
    assert moves > 1
    db.maintain()
    assert shown(db.owner) == truth(db.owner)


def test_few_rows_over_a_long_time_are_added_and_go_in_few_pieces(db: Recorder) -> None:
    """A year's rows took a piece for every five minutes."""
    rng = random.Random(7)
    now = time.time()
    db.owner.execute(
        "ALTER TABLE infaas.query_outcomes DISABLE TRIGGER USER; ALTER TABLE infaas.cost_events DISABLE TRIGGER USER"
    )
    db.ledger.write(some(rng, 300, now - 25 * DAY, now))  # none of them is late
    db.ledger.write(some(rng, 300, now - 300 * DAY, now - 40 * DAY))
    db.owner.execute(
        "ALTER TABLE infaas.query_outcomes ENABLE TRIGGER USER; ALTER TABLE infaas.cost_events ENABLE TRIGGER USER"
    )
    expected = truth(db.owner)
    calls = 1
    while db.maintenance.maintain():
        calls += 1
    assert calls <= 3
    assert db.one("SELECT count(*) FROM infaas.query_outcomes WHERE time < now() - interval '31 days'") == 0
    assert shown(db.owner)["cost_by_app_hourly"] == expected["cost_by_app_hourly"]


# ---- raw rows go


def test_hourly_cost_stays_when_raw_rows_go_and_they_do_not_go_before(db: Recorder) -> None:
    rng = random.Random(6)
    now = time.time()
    old = now - 40 * DAY
    db.ledger.write(some(rng, 50, old, old + 3 * HOUR))
    db.ledger.write(some(rng, 50, now - HOUR, now))
    expected = truth(db.owner)
    db.maintenance.expire("query_outcomes")
    db.maintenance.expire("cost_events")
    assert truth(db.owner) == expected, "rows went before they were aggregated"
    db.maintain()
    assert db.one("SELECT count(*) FROM infaas.query_outcomes WHERE time < now() - interval '31 days'") == 0
    assert db.one("SELECT count(*) FROM infaas.cost_events WHERE time < now() - interval '31 days'") == 0
    assert db.one("SELECT count(*) FROM infaas.cost_events") == 50
    assert shown(db.owner) == expected


@pytest.mark.parametrize("relation", ["query_outcomes", "cost_events", "worker_samples"])
def test_what_is_kept_for_ever_does_not_go_whoever_asks(db: Recorder, relation: str) -> None:
    old = time.time() - 40 * DAY
    db.ledger.write(
        [message(one) for one in (outcome(time=old), event(CostEvent, time=old), event(WorkerSample, time=old))]
    )
    db.ledger.write([message(outcome(time=time.time())), message(event(CostEvent, time=time.time()))])
    db.owner.execute("UPDATE infaas_internal.retention SET keep = NULL")
    db.maintain()
    assert not db.maintenance.expire(relation)
    assert db.one(f"SELECT count(*) FROM infaas.{relation} WHERE time < now() - interval '31 days'") == 1
    assert db.one("SELECT max(upto) > '-infinity' FROM infaas_internal.watermarks")


def test_what_comes_after_its_hour_has_gone_is_added(db: Recorder) -> None:
    now = time.time()
    old = (now - 40 * DAY) // HOUR * HOUR
    db.ledger.write(
        [message(event(CostEvent, time=old + 10, cost=1.0)), message(outcome(time=old + 10, latency_ms=3.0))]
    )
    db.ledger.write([message(event(CostEvent, time=now)), message(outcome(time=now))])
    db.maintain()
    db.ledger.write(
        [message(event(CostEvent, time=old + 20, cost=0.5)), message(outcome(time=old + 20, latency_ms=9.0))]
    )
    db.maintain()
    hour = datetime.fromtimestamp(old, UTC)
    found = db.owner.execute("SELECT cost, queries FROM infaas.cost_by_app_hourly WHERE hour = %s", (hour,)).fetchall()
    assert found == [(1.5, 2)]
    found = db.owner.execute(
        "SELECT queries, p50_ms FROM infaas.slo_by_app_minutely WHERE minute = %s", (hour,)
    ).fetchall()
    assert found == [(2, 3.0)]  # percentiles of what is gone stay as they were
    assert db.one("SELECT count(*) FROM infaas.cost_events WHERE time < now() - interval '31 days'") == 0


def test_each_relation_is_kept_for_as_long_as_the_settings_say(db: Recorder, superuser_dsn: str) -> None:
    passwords = {"writer_password": WRITER_PASSWORD, "reader_password": READER_PASSWORD}
    now = time.time()
    db.ledger.write([message(*[event(WorkerSample, time=now - days * DAY) for days in (1, 3, 8)])])
    prepare(superuser_dsn, **passwords, keep_days={**KEEP_DAYS, "worker_samples": 0.0})
    db.maintain()
    assert db.one("SELECT count(*) FROM infaas.worker_samples") == 3
    prepare(superuser_dsn, **passwords, keep_days={**KEEP_DAYS, "worker_samples": 2.0})
    db.maintain()
    assert db.one("SELECT count(*) FROM infaas.worker_samples") == 1
    assert db.one("SELECT keep FROM infaas_internal.retention WHERE relation = 'query_outcomes'") == timedelta(days=30)
    days = {name: 10.0 + n for n, name in enumerate(KEEP_DAYS)}
    prepare(superuser_dsn, **passwords, keep_days=days)
    for name, kept in days.items():
        found = db.one(f"SELECT keep FROM infaas_internal.retention WHERE relation = '{name}'")
        assert found == timedelta(days=kept), name


# ---- speed, and what is the same everywhere


def test_old_hours_are_read_from_the_store(db: Recorder) -> None:
    now = time.time()
    db.ledger.write(some(random.Random(7), 40, now - 3 * HOUR, now))
    db.maintain()
    db.owner.execute("SET enable_seqscan = off")
    plan = "\n".join(
        row[0]
        for row in db.owner.execute("EXPLAIN (ANALYZE, COSTS OFF) SELECT * FROM infaas.cost_by_app_hourly").fetchall()
    )
    assert "query_outcomes_time" in plan, plan
    assert "Index Cond: (\"time\" >= infaas_internal.upto('query_outcomes'::text))" in plan


def test_time_bucket_is_there(reader_dsn: str) -> None:
    with closing(psycopg.connect(reader_dsn)) as connection:
        row = connection.execute(
            "SELECT time_bucket('15 minutes', t), time_bucket('7 days', t), time_bucket('1 month', t),"
            " time_bucket('1 day', t, 'Europe/Berlin') FROM (VALUES (timestamptz '2026-03-15 23:20Z')) AS v (t)"
        ).fetchone()
    assert row == (
        datetime(2026, 3, 15, 23, 15, tzinfo=UTC),
        datetime(2026, 3, 9, tzinfo=UTC),
        datetime(2026, 3, 1, tzinfo=UTC),
        datetime(2026, 3, 15, 23, tzinfo=UTC),
    )


def test_no_way_down(db: Recorder) -> None:
    assert level_of(db.owner) == "none"
    db.owner.execute("CREATE TABLE infaas_internal.query_hour ()")  # what the highest level is known by
    with pytest.raises(LevelError, match="only none was found"):
        shape(db.owner, SCHEMA, TimescaleSupport("none", ""))


# ---- a query that several models answer is one query


def ensemble(members: int, **fields: Any) -> list[OutcomeEvent]:
    """The rows of one query, of which each member takes 10 ms more than the one before, and the last one is missing."""
    parts = [f"m{i}" for i in range(members)]
    whole = outcome(**{
        "variant": None, "model": None, "worker": None, "hardware": None, "batch": None, "latency_ms": 5.0 + 10.0 * (members - 1),
        "cost": members * 1e-7, "policy": "exp4", "confidence": 0.6, "missing": 1,
    } | fields)  # fmt: skip
    return [whole] + [
        outcome(
            **{"model": name, "variant": f"{name}-v1", "latency_ms": 10.0 * (1 + i), "parent": whole.uid, "stage": name}
            | fields
        )
        for i, name in enumerate(parts)
    ]


def test_an_ensemble_of_five_counts_as_one_query_and_its_members_work_is_seen(db: Recorder) -> None:
    """Ten queries, items of two each: some before the watermark, some that come late, some that only raw rows tell."""
    minute = time.time() // HOUR * HOUR - 3 * HOUR
    for batch in (range(4), range(4, 7), range(7, 10)):
        db.ledger.write([message(*(row for i in batch for row in ensemble(5, time=minute + i, items=2, app="faces")))])
        if batch.start == 0:
            db.ledger.write([message(outcome(time=minute + 2 * HOUR, app="others"))])  # the watermark passes the minute
        counted = batch.stop
        by_app = db.owner.execute("SELECT queries FROM infaas.cost_by_app_hourly WHERE app = 'faces'").fetchall()
        assert by_app == [(counted,)]
        by_variant = db.owner.execute(
            "SELECT variant, queries, items, asked, asked_items FROM infaas.cost_by_variant_hourly WHERE app = 'faces' ORDER BY 1"
        ).fetchall()
        members = [(f"m{i}-v1", 0, 0, counted, 2 * counted) for i in range(5)]
        assert by_variant == [*members, (None, counted, 2 * counted, 0, 0)]
        seen = db.owner.execute(
            "SELECT queries, attainment, p50_ms FROM infaas.slo_by_app_minutely WHERE app = 'faces'"
        ).fetchall()
        assert seen == [(counted, 1.0, 45.0)], "latencies are those of queries"
        assert demand_history(db.store, "faces").items == [5 * 2 * counted], "what instances were asked for"
        db.maintain()
        assert shown(db.owner) == truth(db.owner)
    assert db.stored()[1] > 0


def test_what_a_member_costs_is_divided_by_the_parts_it_answered(db: Recorder) -> None:
    now = time.time()
    db.ledger.write([message(*(row for _ in range(4) for row in ensemble(2, time=now)))])
    db.ledger.write([message(event(CostEvent, time=now, model="m0", variant="m0-v1", cost=0.2))])
    cost = "SELECT cost_per_1000 FROM infaas.cost_by_variant_hourly WHERE variant = 'm0-v1'"
    assert db.one(cost) == pytest.approx(1000 * 0.2 / 4)


def test_visits_for_pipelines_are_demand_for_the_app_of_the_stage(db: Recorder) -> None:
    """Their cost is the pipeline's; what its own instances must carry is the app's."""
    now = time.time() - HOUR
    rows = [outcome(time=now), *(outcome(time=now, parent=bytes(16), stage="look", payer="social") for _ in range(3))]
    db.ledger.write([message(*rows, outcome(time=now + HOUR, app="others"))])
    for _ in range(2):
        assert demand_history(db.store, "digits").items == [4]
        assert demand_history(db.store, "social").items == []
        db.maintain()
    assert db.stored()[1] > 0


def test_the_history_of_demand_has_the_items_of_every_minute_in_the_stores_or_not(db: Recorder) -> None:
    minute = time.time() // 60.0 * 60.0 - 2 * DAY
    sent = {0: 3, 1: 5, 4: 2, 60 * 24: 7}  # queries by minute
    rows = [
        outcome(app="faces", items=4, time=minute + 60.0 * at + 0.5) for at, count in sent.items() for _ in range(count)
    ]
    db.ledger.write([message(*rows)])
    for _ in range(2):
        history = demand_history(db.store, "faces")
        assert history.start == minute
        assert len(history.items) == 60 * 24 + 1
        assert {at: items for at, items in enumerate(history.items) if items} == {
            at: pytest.approx(4.0 * count) for at, count in sent.items()
        }
        db.maintain()
    assert 0 < db.stored()[2] < len(sent)
    assert demand_history(db.store, "unknown\0") == DemandHistory(app="unknown\0")
