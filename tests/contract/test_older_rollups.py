"""Stores of rollups that older schemas left: they are taken over, and added up again where there are rows."""

import random
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import psycopg

from services.recorder.events import EventWriter, Maintenance
from services.shell.host.postgres import EmbeddedPostgres
from services.shell.store import SCHEMA, Store, migrate, prepare
from tests.support.data.events import message, outcome
from tests.support.data.rollups import shown, some, truth
from tests.support.servers.postgres import READER_PASSWORD, WRITER_PASSWORD

HOUR = 3600.0
DAY = 24 * HOUR


def store_without(postgres: EmbeddedPostgres, place: Path, name: str, lacks: Callable[[str], bool]) -> str:
    """An empty database of this name, and in `place` the files of the schema but those that it lacks."""
    for file in SCHEMA.glob("*.sql"):
        if not lacks(file.name):
            (place / file.name).write_bytes(file.read_bytes())
    with closing(psycopg.connect(postgres.superuser_dsn, autocommit=True)) as server:
        server.execute(f'CREATE DATABASE "{name}"'.encode())
    return postgres.dsn("postgres", postgres.password, name)


def test_stores_of_before_there_were_parts_are_taken_over(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    dsn = store_without(postgres, tmp_path, "before-parts", lambda file: file >= "0014")
    with closing(psycopg.connect(dsn, autocommit=True)) as owner:
        migrate(owner, tmp_path)
        owner.execute(
            "INSERT INTO infaas_internal.query_hours (hour, app, queries, items, charged) VALUES ('2026-01-01Z', 'digits', 3, 9, 0)"
        )
        prepare(dsn, writer_password=WRITER_PASSWORD, reader_password=READER_PASSWORD)
        found = owner.execute("SELECT queries, items, asked, asked_items FROM infaas.cost_by_variant_hourly").fetchall()
    assert found == [(3, 9, 3, 9)]


def test_stores_of_before_there_were_payers_are_taken_over(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    """Their rows are the app's own. Late rows of their hour are added: those without a payer to them, those with one beside them."""
    dsn = store_without(postgres, tmp_path, "before-payers", lambda file: file >= "0023")
    at = time.time() // HOUR * HOUR - 3 * HOUR
    with closing(psycopg.connect(dsn, autocommit=True)) as owner:
        migrate(owner, tmp_path)
        owner.execute(
            "CREATE OR REPLACE VIEW infaas_internal.query_hourly AS"
            " SELECT hour, app, model, variant, hardware, queries, items, charged, asked, asked_items FROM infaas_internal.query_hours"
        )
        owner.execute(
            "INSERT INTO infaas_internal.query_hours (hour, app, model, variant, hardware, queries, items, charged, asked, asked_items)"
            " VALUES (to_timestamp(%s), 'digits', 'mlp', 'mlp-v1', 'cpu', 3, 9, 0, 4, 12)",
            (at,),
        )
        owner.execute("UPDATE infaas_internal.watermarks SET upto = to_timestamp(%s)", (at + HOUR,))
        for _ in range(2):
            prepare(dsn, most="none", writer_password=WRITER_PASSWORD, reader_password=READER_PASSWORD)
        own = {"time": at + 60, "app": "digits", "model": "mlp", "variant": "mlp-v1", "hardware": "cpu"}
        with closing(Store(dsn, "test")) as store:
            visit = outcome(**own, parent=bytes(16), stage="look", payer="social")
            EventWriter(store).write([message(outcome(**own), visit)])
        found = owner.execute(
            "SELECT app, queries, items, asked, asked_items FROM infaas.cost_by_variant_hourly ORDER BY app"
        ).fetchall()
        assert owner.execute("SELECT count(*) FROM infaas_internal.query_hours").fetchone() == (3,)
    assert found == [("digits", 4, 10, 5, 13), ("social", 0, 0, 1, 1)]


def test_hours_of_before_they_knew_how_queries_ended_are_added_up_again(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    """As far as there are rows; of the others what is known stays. Rows that come late are added to both."""
    dsn = store_without(postgres, tmp_path, "before-outcomes", lambda file: file >= "0034" or file == "rollups.sql")
    now = time.time()
    gone = now // HOUR * HOUR - 40 * DAY
    with closing(psycopg.connect(dsn, autocommit=True)) as owner:
        migrate(owner, tmp_path)
        with closing(Store(dsn, "test")) as store:
            EventWriter(store).write(some(random.Random(17), 80, now - 5 * HOUR, now))
        owner.execute(
            "INSERT INTO infaas_internal.query_hours (hour, app, queries, items, charged, asked, asked_items)"
            " VALUES (to_timestamp(%s), 'digits', 3, 9, 0, 3, 9), (date_trunc('hour', now()) - interval '3 hours', 'digits', 9, 9, 9, 9, 9)",
            (gone,),
        )
        owner.execute(
            "UPDATE infaas_internal.watermarks SET upto = now() - interval '2 hours', floor = to_timestamp(%s) WHERE source = 'query_outcomes'",
            (gone + HOUR,),
        )
        prepare(dsn, most="none", writer_password=WRITER_PASSWORD, reader_password=READER_PASSWORD)
        with closing(Store(dsn, "test")) as store:
            for _ in range(2):
                found, raw = shown(owner), truth(owner)
                assert found["outcomes_hourly"] == raw["outcomes_hourly"]
                assert [row for row in found["cost_by_app_hourly"] if row[0] == datetime.fromtimestamp(gone, UTC)] == [
                    (datetime.fromtimestamp(gone, UTC), "digits", 0, 3, 0, 0)
                ]
                assert set(raw["cost_by_variant_hourly"]) <= set(found["cost_by_variant_hourly"])
                while Maintenance(store).maintain():
                    pass
            assert shown(owner) == {**found, "slo_by_app_minutely": raw["slo_by_app_minutely"]}
            EventWriter(store).write([message(outcome(time=gone + 1, app="digits"))])
        assert owner.execute(
            "SELECT sum(queries)::int, sum(asked)::int FROM infaas.cost_by_variant_hourly WHERE hour = to_timestamp(%s)",
            (gone,),
        ).fetchall() == [(4, 4)]


def test_mistakes_of_before_they_were_counted_apart_leave_the_stores(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    """Those of the first hour are only there: raw rows before the floor may have gone."""
    dsn = store_without(postgres, tmp_path, "before-mistakes", lambda file: file >= "0019")
    at = time.time() // HOUR * HOUR - 3 * HOUR
    rows = [
        ("kept", "ok", None, None), ("kept", "refused", "bad_request", None), ("kept", "error", "bad_request", None), ("kept", "refused", "overloaded", None),
        ("nobody", "refused", "unknown_app", None), ("nobody", "refused", "unknown_app", None), ("_", "refused", "unknown_model", None), ("kept", "default", "unknown_model", None),
        ("kept", "refused", "bad_request", "offline"),
    ]  # fmt: skip
    insert = (
        "INSERT INTO infaas.query_outcomes (time, uid, app, outcome, code, items, cached, simulated, cost, policy, latency_ms)"
        " VALUES (to_timestamp(%s), gen_random_uuid(), %s, %s, %s, 2, false, false, 0, %s, 1)"
    )
    with closing(psycopg.connect(dsn, autocommit=True)) as owner:
        migrate(owner, tmp_path)
        for hour in (0, 2):
            owner.cursor().executemany(insert, [(at + hour * HOUR, *row) for row in rows])
        owner.execute(
            """INSERT INTO infaas_internal.query_hours
            SELECT date_trunc('hour', time), app, NULL, NULL, NULL, count(*), sum(items), 0, count(*), sum(items)
            FROM infaas.query_outcomes WHERE time = to_timestamp(%s) GROUP BY 1, 2""",
            (at,),
        )
        owner.execute(
            """INSERT INTO infaas_internal.slo_minutes (minute, app, queries, good, late, refused, errors, p50_ms, p99_ms)
            SELECT time, app, count(*), count(*) FILTER (WHERE outcome IN ('ok', 'default')), 0, count(*) FILTER (WHERE outcome = 'refused'),
            count(*) FILTER (WHERE outcome = 'error'), 1, 1
            FROM infaas.query_outcomes WHERE time = to_timestamp(%s) AND policy IS NULL GROUP BY 1, 2""",
            (at,),
        )
        owner.execute(
            "UPDATE infaas_internal.watermarks SET upto = to_timestamp(%(at)s), floor = to_timestamp(%(at)s)",
            {"at": at + HOUR},
        )
        prepare(dsn, most="none", writer_password=WRITER_PASSWORD, reader_password=READER_PASSWORD)
        mistakes = owner.execute(
            "SELECT app, code, sum(count) FROM infaas.client_errors GROUP BY 1, 2 ORDER BY 1, 2"
        ).fetchall()
        assert mistakes == [("kept", "bad_request", 4), ("nobody", "unknown_app", 4), (None, "unknown_model", 2)]
        assert owner.execute(
            "SELECT app, sum(queries), sum(refused), sum(errors) FROM infaas.slo_by_app_minutely GROUP BY 1"
        ).fetchall() == [("kept", 6, 2, 0)]
        found, raw = shown(owner), truth(owner)
        del found["outcomes_hourly"], raw["outcomes_hourly"]  # which knows only hours that are added up again
        assert found == raw
