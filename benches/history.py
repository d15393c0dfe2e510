"""Questions about much history: `python benches/history.py [--rows 10000000] [--days 7 | --hours 1]`.

An embedded PostgreSQL, as `infaas up` runs it, is filled with so many outcomes of 20 apps and what their instances cost,
evenly over the time. Shown: what the recorder's maintenance takes to bring the rollups up to date, then each question through the
views (first and best time of five, all rows fetched) beside the same computed from raw rows once. Wanted: cost by the hour
over 10 million outcomes within 1 s.
"""

import argparse
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psycopg

from services.recorder.events import Maintenance
from services.shell.host.postgres import EmbeddedPostgres, role_dsn
from services.shell.store import READER, Store, prepare
from services.shell.timescale import KEEP_DAYS

PIECE = 500_000  # rows of one INSERT
INDEXES = ("query_outcomes_time", "query_outcomes_uid", "query_outcomes_buckets")
OUTCOMES = """
    INSERT INTO infaas.query_outcomes (time, uid, app, outcome, model, variant, worker, hardware, latency_ms, slo_ms, accuracy,
                                       batch, items, cached, simulated, cost, version, policy)
    SELECT %(begin)s::timestamptz + n * %(step)s::float8 * interval '1 second', gen_random_uuid(), 'app-' || n %% 20,
           CASE WHEN n %% 50 = 0 THEN 'late' WHEN n %% 333 = 0 THEN 'refused' ELSE 'ok' END, 'mlp',
           'mlp-v1-ort-fp32-t' || 1 + n %% 3 || '-b64', 'w' || n %% 4, 'cpu', 2 + n %% 97 * 0.1, 50, 0.97, 8, 1, false, false,
           1e-8, '1', 'infaas'
    FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n"""
COSTS = """
    INSERT INTO infaas.cost_events (time, seconds, worker, hardware, app, model, variant, busy_seconds, cost)
    SELECT at, 10, 'w' || n %% 4, 'cpu', CASE WHEN n < 60 THEN 'app-' || n %% 20 END, CASE WHEN n < 60 THEN 'mlp' END,
           CASE WHEN n < 60 THEN 'mlp-v1-ort-fp32-t' || 1 + n %% 3 || '-b64' END, 4, 1e-4
    FROM generate_series(%(begin)s::timestamptz, %(end)s::timestamptz, %(every)s * interval '1 second') AS at, generate_series(0, 63) AS n"""
QUESTIONS = {
    "cost by app and hour, all of it": (
        "SELECT * FROM cost_by_app_hourly",
        """SELECT hour, app, sum(cost), sum(queries) FROM (
             SELECT date_trunc('hour', time) AS hour, app, cost, 0 AS queries FROM cost_events
             UNION ALL SELECT date_trunc('hour', time), app, 0, 1 FROM query_outcomes
           ) rows GROUP BY 1, 2""",
    ),
    "cost by variant and hour, all of it": (
        "SELECT * FROM cost_by_variant_hourly",
        """SELECT hour, app, model, variant, hardware, sum(cost), sum(queries) FROM (
             SELECT date_trunc('hour', time) AS hour, app, model, variant, hardware, cost, 0 AS queries FROM cost_events
             UNION ALL SELECT date_trunc('hour', time), app, model, variant, hardware, 0, 1 FROM query_outcomes
           ) rows GROUP BY 1, 2, 3, 4, 5""",
    ),
    "cost by app and hour, last day": (
        "SELECT * FROM cost_by_app_hourly WHERE hour > now() - interval '1 day'",
        """SELECT hour, app, sum(cost), sum(queries) FROM (
             SELECT date_trunc('hour', time) AS hour, app, cost, 0 AS queries FROM cost_events
             UNION ALL SELECT date_trunc('hour', time), app, 0, 1 FROM query_outcomes
           ) rows WHERE hour > now() - interval '1 day' GROUP BY 1, 2""",
    ),
    "objectives by app and minute, last hour": (
        "SELECT * FROM slo_by_app_minutely WHERE minute > now() - interval '1 hour'",
        """SELECT date_trunc('minute', time), app, count(*), percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms)
           FROM query_outcomes WHERE time > now() - interval '1 hour' GROUP BY 1, 2""",
    ),
}


def fill(connection: psycopg.Connection[Any], rows: int, seconds: float) -> None:
    """So many outcomes, and costs of 64 instances every 10 s or more, up to now; indexes afterwards, as quicker."""
    definitions = connection.execute(
        "SELECT indexdef FROM pg_indexes WHERE schemaname = 'infaas' AND indexname = ANY (%s)", (list(INDEXES),)
    ).fetchall()
    connection.execute("SET maintenance_work_mem = '512MB'")
    for index in INDEXES:
        connection.execute(f"DROP INDEX infaas.{index}".encode())
    connection.execute("ALTER TABLE infaas.query_outcomes DISABLE TRIGGER USER")
    end = time.time()
    begin = psycopg.Timestamp(*time.gmtime(end - seconds)[:6])
    for first in range(0, rows, PIECE):
        connection.execute(
            OUTCOMES,
            {"begin": begin, "step": seconds / rows, "first": first, "last": min(first + PIECE, rows) - 1},
        )
    every = max(10.0, 64 * seconds / rows)  # no more costs than outcomes
    connection.execute(COSTS, {"begin": begin, "end": psycopg.Timestamp(*time.gmtime(end)[:6]), "every": every})
    for (definition,) in definitions:
        connection.execute(definition.encode())
    connection.execute("ALTER TABLE infaas.query_outcomes ENABLE TRIGGER USER")
    connection.execute("VACUUM ANALYZE infaas.query_outcomes, infaas.cost_events")
    connection.execute("CHECKPOINT")


def ask(dsn: str, query: str, times: int) -> tuple[list[float], int]:
    """Seconds of each time on one connection, and how many rows came."""
    took, rows = [], 0
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        connection.execute("SET statement_timeout = 0")
        for _ in range(times):
            began = time.perf_counter()
            rows = len(connection.execute(query.encode()).fetchall())
            took.append(time.perf_counter() - began)
    return took, rows


def maintain(dsn: str) -> tuple[float, float]:
    """Seconds until there is nothing more to do, and of the longest piece: for so long the recorder writes nothing."""
    store = Store(dsn, "bench")
    keeper = Maintenance(store)
    began, longest, more = time.perf_counter(), 0.0, True
    while more:
        piece = time.perf_counter()
        more = keeper.maintain()
        longest = max(longest, time.perf_counter() - piece)
    store.close()
    return time.perf_counter() - began, longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--hours", type=float)
    options = parser.parse_args()
    seconds = options.hours * 3600 if options.hours else options.days * 86400
    with tempfile.TemporaryDirectory() as directory, EmbeddedPostgres(Path(directory)) as server:
        prepare(server.superuser_dsn, writer_password="w", reader_password="r", keep_days=dict.fromkeys(KEEP_DAYS, 0.0))
        reader = role_dsn(server.superuser_dsn, READER, "r")
        with closing(psycopg.connect(server.superuser_dsn, autocommit=True)) as connection:
            began = time.perf_counter()
            fill(connection, options.rows, seconds)
            print(
                f"{options.rows:,} outcomes over {seconds / 3600:g} h: filled in {time.perf_counter() - began:.0f} s",
                flush=True,
            )
            took, longest = maintain(server.superuser_dsn)
            print(f"rollups up to date in {took:.1f} s, longest piece {longest:.2f} s", flush=True)
            connection.execute("ANALYZE infaas_internal.cost_hours, infaas_internal.query_hours")
        print(f"{'question':42} {'rows':>7} {'first s':>8} {'best s':>8} {'raw s':>8}")
        for name, (view, raw) in QUESTIONS.items():
            through, rows = ask(reader, view, 5)
            from_raw, _ = ask(reader, raw, 1)
            print(f"{name:42} {rows:7,} {through[0]:8.3f} {min(through):8.3f} {min(from_raw):8.3f}", flush=True)


if __name__ == "__main__":
    main()
