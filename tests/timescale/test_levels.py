"""The three levels on a real TimescaleDB: the same relations and answers, and the way up in place."""

import random
import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import errors

from bus.messages.events import CostEvent, StateEvent, WorkerSample
from bus.natsbus import NatsBus
from bus.subjects import Subjects
from services.core.settings import BusSettings
from services.recorder.__main__ import streams
from services.recorder.edge import Counter
from services.recorder.events import EventWriter, Maintenance
from services.shell.host.postgres import EmbeddedPostgres
from services.shell.store import READER, WRITER, Store, StoreError, prepare
from services.shell.timescale import KEEP_DAYS, REFRESH, Level, level_of, when_free
from tests.contract.test_sql_command import QUERIES
from tests.support.clients.responders import until
from tests.support.data.events import event, message, outcome
from tests.support.data.rollups import Shown, shown, some, truth
from tests.timescale.wasm import WasmTimescale, missing

pytestmark = [pytest.mark.timescale, pytest.mark.timeout(900)]

HOUR = 3600.0
DAY = 24 * HOUR
PASSWORDS = {"writer_password": "w", "reader_password": "r"}


class System:
    """Prepares, writes and maintains one database."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.store = Store(dsn, "test")
        self.ledger = EventWriter(self.store)
        self.keeper = Maintenance(self.store)

    def prepare(self, most: Level = "tsl", **keep_days: float) -> None:
        self.store.close()
        prepare(self.dsn, **PASSWORDS, most=most, keep_days={**KEEP_DAYS, **keep_days})

    def ask(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with closing(psycopg.connect(self.dsn, autocommit=True)) as connection:
            cursor = connection.execute(query.encode(), values)
            return cursor.fetchall() if cursor.description else []

    def call(self, statement: bytes, *values: object) -> None:
        with closing(psycopg.connect(self.dsn, autocommit=True)) as connection:
            when_free(connection, statement, *values)

    def one(self, query: str, *values: Any) -> Any:
        return self.ask(query, *values)[0][0]

    def level(self) -> Level:
        with closing(psycopg.connect(self.dsn, autocommit=True)) as connection:
            return level_of(connection)

    def maintain(self) -> None:
        """What the recorder does all the time, and on the highest level TimescaleDB's scheduler."""
        while self.keeper.maintain():
            pass
        if self.level() == "tsl":
            for kind in ("%_minute", "%_hour"):
                self.jobs("policy_refresh_continuous_aggregate", kind)
            self.jobs("expire_aggregated")

    def jobs(self, procedure: str, relation: str = "%") -> int:
        found = self.ask(
            "SELECT job_id FROM timescaledb_information.jobs WHERE proc_name = %s AND coalesce(hypertable_name, '') LIKE %s"
            " ORDER BY 1",
            procedure,
            relation,
        )
        for (job,) in found:
            self.call(b"CALL run_job(%s)", job)
        return len(found)

    def views(self) -> Shown:
        with closing(psycopg.connect(self.dsn, autocommit=True)) as connection:
            return shown(connection)

    def truth(self) -> Shown:
        with closing(psycopg.connect(self.dsn, autocommit=True)) as connection:
            return truth(connection)

    def close(self) -> None:
        self.store.close()


@pytest.fixture
def system(fresh_dsn: str) -> Iterator[System]:
    with closing(System(fresh_dsn)) as made:
        yield made


def test_the_way_up_changes_no_answer(system: System) -> None:
    """From none to apache to tsl with rows at each, late ones too; hours whose raw rows went on the first level stay."""
    rng = random.Random(8)
    now = time.time()
    gone = (now - 50 * DAY) // HOUR * HOUR
    system.prepare("none")
    system.ledger.write(some(rng, 40, gone, gone + 2 * HOUR))
    expected_old = system.truth()
    system.ledger.write(some(rng, 80, now - 3 * HOUR, now))
    system.maintain()
    assert system.one("SELECT count(*) FROM infaas.query_outcomes") == 80, "the oldest rows should have gone"
    before = system.views()
    assert all(set(expected_old[view]) <= set(before[view]) for view in before)

    levels: tuple[Level, ...] = ("apache", "tsl")
    for level in levels:
        system.prepare(level)
        assert system.level() == level
        assert system.views() == before, f"moving to {level} changed what the views show"
        system.ledger.write(some(rng, 40, now - 3 * HOUR, now))
        system.maintain()
        before, raw = system.views(), system.truth()
        assert all(set(raw[view]) <= set(before[view]) for view in before), f"wrong on {level}"
        assert all(len(before[view]) == len(raw[view]) + len(expected_old[view]) for view in before)
        system.prepare(level)
        assert system.views() == before
    assert system.ask(
        "SELECT hypertable_name FROM timescaledb_information.hypertables WHERE hypertable_schema = 'infaas' ORDER BY 1"
    ) == [(name,) for name in sorted(set(KEEP_DAYS) - {"slo_by_app_minutely"})]


def test_relations_and_columns_are_the_same_on_all_levels(system: System) -> None:
    columns = (
        "SELECT table_name, column_name, data_type, ordinal_position FROM information_schema.columns"
        " WHERE table_schema = 'infaas' ORDER BY 1, 4"
    )
    unexplained = (
        "SELECT count(*) FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
        " WHERE c.relnamespace = 'infaas'::regnamespace AND c.relkind IN ('r', 'v') AND col_description(c.oid, a.attnum) IS NULL"
    )
    found = []
    levels: tuple[Level, ...] = ("none", "apache", "tsl")
    for level in levels:
        system.prepare(level)
        found.append(system.ask(columns))
        assert system.ask(unexplained) == [(0,)]
    assert found[0] == found[1] == found[2]
    assert len({row[0] for row in found[0]}) >= 18


def test_the_highest_level_at_once(system: System) -> None:
    rng = random.Random(9)
    now = time.time()
    system.prepare()
    system.ledger.write(some(rng, 60, now - 3 * HOUR, now))
    assert system.views() == system.truth()
    system.maintain()
    system.ledger.write(some(rng, 60, now - 3 * HOUR, now))
    system.maintain()
    assert system.views() == system.truth()
    assert system.one("SELECT count(*) FROM infaas_internal.query_hours") == 0


BEFORE = """
DROP VIEW infaas_internal.query_hourly CASCADE;
DROP VIEW infaas_internal.slo_minutely CASCADE;
DROP MATERIALIZED VIEW infaas_internal.query_minute CASCADE;
DROP MATERIALIZED VIEW infaas_internal.slo_minute;
CREATE MATERIALIZED VIEW infaas_internal.query_minute WITH (timescaledb.continuous, timescaledb.materialized_only = false) AS
SELECT time_bucket('1 minute', time) AS minute, app, model, variant, hardware,
       count(*) AS queries, sum(items)::bigint AS items, sum(cost) AS charged{minutes}
FROM infaas.query_outcomes GROUP BY 1, 2, 3, 4, 5{payer} WITH NO DATA;
CREATE MATERIALIZED VIEW infaas_internal.query_hour WITH (timescaledb.continuous, timescaledb.materialized_only = false) AS
SELECT time_bucket('1 hour', minute) AS hour, app, model, variant, hardware,
       sum(queries)::bigint AS queries, sum(items)::bigint AS items, sum(charged) AS charged{hours}
FROM infaas_internal.query_minute GROUP BY 1, 2, 3, 4, 5{payer} WITH NO DATA;
CREATE MATERIALIZED VIEW infaas_internal.slo_minute WITH (timescaledb.continuous, timescaledb.materialized_only = false) AS
SELECT time_bucket('1 minute', time) AS minute, app, count(*) AS queries,
       count(*) FILTER (WHERE outcome IN ('ok', 'default')) AS good, count(*) FILTER (WHERE outcome = 'late') AS late,
       count(*) FILTER (WHERE outcome = 'refused') AS refused, count(*) FILTER (WHERE outcome = 'error') AS errors,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default')) AS p50_ms,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE outcome IN ('ok', 'late', 'default')) AS p99_ms
FROM infaas.query_outcomes WHERE policy IS DISTINCT FROM 'offline' GROUP BY 1, 2 WITH NO DATA"""
PARTS = {
    "minutes": ", 3 * count(*) AS asked, sum(items)::bigint AS asked_items",
    "hours": ", sum(asked)::bigint AS asked, sum(asked_items)::bigint AS asked_items",
    "payer": "",
}
PAYERS = {name: f"{columns}, payer" for name, columns in PARTS.items()}


@pytest.mark.parametrize(
    ("known", "asked"),
    [({"minutes": "", "hours": "", "payer": ""}, 5), (PARTS, 15), (PAYERS, 15)],
    ids=["before parts", "before payers", "before outcomes"],
)
def test_older_aggregates_are_made_anew_and_nothing_is_lost(system: System, known: dict[str, str], asked: int) -> None:
    """Hours whose raw rows are gone too: only the old aggregates know of them, and those whose rows are there are counted again."""
    now = time.time()
    system.prepare()
    for statement in BEFORE.format(**known).split(";"):
        system.ask(statement)
    old = [outcome(time=now - 20 * DAY + i, items=2) for i in range(5)]
    system.ledger.write([message(*old), message(*[outcome(time=now - HOUR + i) for i in range(7)])])
    for name in ("query_minute", "query_hour", "slo_minute"):
        system.call(REFRESH, f"infaas_internal.{name}", timedelta(0))
    system.ask("SELECT drop_chunks('infaas.query_outcomes', now() - interval '15 days')")
    assert system.one("SELECT count(*) FROM infaas.query_outcomes") == 7
    visits = [outcome(time=now - HOUR + i, parent=secrets.token_bytes(16), payer="social") for i in range(3)]
    system.ledger.write([message(*visits)])

    for _ in range(2):
        system.prepare()
        system.maintain()
        rows = system.ask(
            "SELECT sum(queries)::int, sum(items)::int, sum(asked)::int, sum(asked_items)::int"
            " FROM infaas.cost_by_variant_hourly GROUP BY hour ORDER BY hour"
        )
        old_rows, new_rows = rows[0], [sum(column) for column in zip(*rows[1:], strict=True)]
        assert old_rows == (5, 10, asked, 10)
        assert new_rows == [7, 7, 10, 10]
        assert system.one("SELECT sum(asked)::int FROM infaas.cost_by_variant_hourly WHERE app = 'social'") == 3
        assert system.one("SELECT sum(queries)::int FROM infaas.slo_by_app_minutely") == 12
        assert system.jobs("policy_refresh_continuous_aggregate", "%") == 5
    assert system.one("SELECT count(*) FROM infaas_internal.query_hours") == 1


def test_an_outcome_is_recorded_once(system: System) -> None:
    system.prepare()
    uid = secrets.token_bytes(16)
    now = time.time()
    system.ledger.write([message(outcome(time=now, uid=uid), outcome(time=now))])
    system.ledger.write([message(outcome(time=now + 1, uid=uid), outcome(time=now))])
    assert system.one("SELECT count(*) FROM infaas.query_outcomes") == 3


def test_raw_rows_go_after_they_are_aggregated_and_hourly_cost_stays(system: System) -> None:
    rng = random.Random(10)
    now = time.time()
    system.prepare()
    system.ledger.write(some(rng, 40, now - 20 * DAY, now - 20 * DAY + HOUR))
    system.ledger.write(some(rng, 40, now - HOUR, now))
    system.ledger.write([message(event(WorkerSample, time=now - 20 * DAY), event(WorkerSample, time=now))])
    expected = system.truth()
    system.prepare(query_outcomes=10.0, cost_events=10.0)
    system.jobs("expire_aggregated")
    assert system.truth() == expected, "rows went before they were aggregated"
    system.prepare()  # as it was: a refresh reaches back to them
    system.maintain()
    system.prepare(query_outcomes=10.0, cost_events=10.0)
    system.maintain()
    assert system.jobs("policy_retention") >= 5
    assert system.one("SELECT count(*) FROM infaas.query_outcomes") == 40
    assert system.one("SELECT count(*) FROM infaas.worker_samples") == 1
    system.maintain()
    assert system.views() == expected


@pytest.mark.parametrize("level", ["apache", "tsl"])
async def test_what_is_missing_is_counted_in_chunks_too(
    level: Level, system: System, nats_url: str, prefix: str
) -> None:
    """Also in compressed ones. A chunk that is too old is not missing. Aggregates of TimescaleDB follow their rows: none is missing there."""
    now = time.time()
    system.prepare(level)
    times = (now - 5 * DAY, now - 1.5 * DAY, now - 2 * HOUR, now - HOUR)
    system.ledger.write([message(*[outcome(time=at)] * 4, id=f"d-0-a-{n}") for n, at in enumerate(times, 1)])
    assert system.one("SELECT count(*) FROM infaas.query_outcomes") == 4, "of one query one counts"
    system.ledger.write(
        [message(*[outcome(time=at) for _ in range(9)], id=f"d-0-b-{n}") for n, at in enumerate(times, 1)]
    )
    system.maintain()
    if level == "tsl":
        system.ask(
            "SELECT compress_chunk(chunk, true) FROM show_chunks('infaas.query_outcomes', now() - interval '1 day') AS chunk"
        )
    spec = streams(Subjects(prefix), BusSettings())["events"]
    bus = await NatsBus.connect(nats_url, name="test")
    try:
        await bus.ensure_stream(spec)
        counter = Counter(bus, spec.name, system.store, late=0.05)

        async def found(batches: int, outcomes: int) -> None:
            async def counted() -> bool:
                return await counter.count(10 * 24.0) == {"batches": batches, "outcomes": outcomes}

            await until(counted)

        await found(0, 0)
        system.ask("DELETE FROM infaas_internal.batches WHERE id = 'd-0-b-3'")
        system.ask("DELETE FROM infaas.query_outcomes WHERE time = to_timestamp(%s)", times[2])
        await found(1, 10 if level == "apache" else 0)
        system.prepare(level, query_outcomes=3.0)
        system.maintain()
        assert system.one("SELECT count(*) FROM infaas.query_outcomes") == 20
        await found(1, 10 if level == "apache" else 0)
    finally:
        await bus.close()


def test_policies_follow_the_settings(system: System) -> None:
    def kept(relation: str) -> list[tuple[Any, ...]]:
        return system.ask(
            "SELECT (config->>'drop_after')::interval FROM timescaledb_information.jobs"
            " WHERE proc_name = 'policy_retention' AND hypertable_name = %s",
            relation,
        )

    system.prepare(worker_samples=3.0)
    assert kept("worker_samples") == [(timedelta(days=3),)]
    system.prepare(worker_samples=5.0, state_events=0.0, query_outcomes=0.0)
    assert kept("worker_samples") == [(timedelta(days=5),)]
    assert kept("state_events") == []
    assert kept("query_outcomes") == []  # its rows go by a job of ours, which asks whether they are aggregated
    assert system.one("SELECT count(*) FROM timescaledb_information.jobs WHERE proc_name = 'expire_aggregated'") == 1


def test_old_chunks_are_compressed_and_take_late_rows(system: System) -> None:
    rng = random.Random(11)
    now = time.time()
    system.prepare()
    system.ledger.write(some(rng, 60, now - 10 * DAY, now - 10 * DAY + HOUR))
    system.ledger.write([message(*[event(StateEvent, time=now - 60 * DAY + i) for i in range(5)])])
    assert system.jobs("policy_compression") == 12
    compressed = system.ask(
        "SELECT DISTINCT hypertable_name FROM timescaledb_information.chunks WHERE is_compressed ORDER BY 1"
    )
    assert {"cost_events", "query_outcomes", "state_events"} <= {name for (name,) in compressed}
    system.maintain()
    assert system.views() == system.truth()
    system.ledger.write(some(rng, 20, now - 10 * DAY, now - 10 * DAY + HOUR))
    system.maintain()
    assert system.views() == system.truth()
    assert system.one("SELECT count(*) FROM infaas.query_outcomes") == 80


def test_the_reader_reads_all_of_it_and_nothing_else(system: System) -> None:
    system.prepare()
    now = time.time()
    system.ledger.write(some(random.Random(12), 20, now - 3 * HOUR, now))
    system.maintain()
    with closing(psycopg.connect(system.dsn, autocommit=True)) as connection:
        relations = connection.execute("SELECT table_name FROM information_schema.tables WHERE table_schema = 'infaas'")
        names = [name for (name,) in relations.fetchall()]
        (chunk,) = connection.execute("SELECT show_chunks('infaas.query_outcomes') LIMIT 1").fetchall()
        connection.execute(f"SET ROLE {READER}; SET search_path = infaas, public")
        for name in names:
            connection.execute(f"SELECT * FROM {name}".encode()).fetchall()
        assert connection.execute(
            "SELECT time_bucket('1 hour', time), count(*) FROM query_outcomes GROUP BY 1"
        ).fetchall()
        for statement in (
            "DELETE FROM query_outcomes",
            f"DELETE FROM {chunk[0]}",
            "SELECT * FROM infaas_internal.cost_hour",
            "SELECT drop_chunks('infaas.query_outcomes', now())",
            "SELECT remove_retention_policy('infaas.worker_samples')",
        ):
            with pytest.raises((errors.InsufficientPrivilege, errors.ReadOnlySqlTransaction)):
                connection.execute(statement.encode())
        connection.execute(f"RESET ROLE; SET ROLE {WRITER}")
        with pytest.raises(errors.InsufficientPrivilege):
            connection.execute("SELECT drop_chunks('infaas.query_outcomes', now())")
        connection.execute("RESET ROLE; RESET search_path")


def test_every_question_of_the_page_runs(system: System) -> None:
    system.prepare()
    system.ledger.write(some(random.Random(15), 20, time.time() - 3 * HOUR, time.time()))
    with closing(psycopg.connect(system.dsn, autocommit=True)) as connection:
        connection.execute(f"SET ROLE {READER}; SET search_path = infaas, public")
        for query in QUERIES:
            connection.execute(query.encode()).fetchall()
        connection.execute("RESET ROLE")


def test_our_time_bucket_is_timescales(system: System, postgres: EmbeddedPostgres) -> None:
    rng = random.Random(13)
    widths = [
        "1 second",
        "90 seconds",
        "1 minute",
        "7 minutes",
        "1 hour",
        "5 hours",
        "1 day",
        "7 days",
        "10 days",
        "1 month",
    ]
    widths += ["5 months", "1 year", "2 years"]
    cases = [(rng.choice(widths), datetime.fromtimestamp(rng.uniform(0, 2.5e9), UTC)) for _ in range(300)]
    zones = [(width, at, rng.choice(["Europe/Berlin", "America/New_York", "UTC"])) for width, at in cases]
    system.prepare()
    found = []
    for dsn, schema in ((system.dsn, "public"), (postgres.superuser_dsn, "infaas")):
        with closing(psycopg.connect(dsn, autocommit=True)) as connection:
            found.append(
                [connection.execute(f"SELECT {schema}.time_bucket(%s::interval, %s)", case).fetchone() for case in cases]
                + [connection.execute(f"SELECT {schema}.time_bucket(%s::interval, %s, %s)", case).fetchone() for case in zones]
            )  # fmt: skip
    assert [(case, a, b) for case, a, b in zip(cases + zones, *found, strict=True) if a != b] == []


# ---- by licence


@pytest.fixture
def wasm(tmp_path: Path) -> Path:
    if reason := missing():
        pytest.skip(reason)
    return tmp_path / "data"


def test_the_licence_decides_and_a_better_one_is_used(wasm: Path) -> None:
    """Here apache is the server's licence, not our setting; then the same data under the other one; then back, which is refused."""
    rng = random.Random(14)
    now = time.time()
    with WasmTimescale(wasm, "apache") as server, closing(System(server.dsn)) as system:
        system.prepare()
        assert system.level() == "apache"
        for _ in range(2):
            system.ledger.write(some(rng, 40, now - 3 * HOUR, now))
            system.maintain()
            assert system.views() == system.truth()
        old = now - 50 * DAY
        system.ledger.write([message(event(CostEvent, time=old, cost=4.0)), message(outcome(time=old))])
        system.maintain()
        assert system.one("SELECT count(*) FROM infaas.cost_events") == 80, "the oldest chunk should have gone"
        before = system.views()
    with WasmTimescale(wasm) as server, closing(System(server.dsn)) as system:
        system.prepare()
        assert system.level() == "tsl"
        assert system.views() == before
        system.maintain()
        assert system.views() == before
    refused = pytest.raises(StoreError, match=r"uses TimescaleDB \(tsl\) and only apache was found")
    with WasmTimescale(wasm, "apache") as server, closing(System(server.dsn)) as system, refused:
        system.prepare()
