"""Questions about much history: `python benches/history.py [--rows 10000000] [--days 7 | --hours 1] [--server DSN | --wasm]`.

An embedded PostgreSQL, as `infaas up` runs it, is filled with so many outcomes of 20 apps and what their instances cost,
evenly over the time. Shown: what the recorder's maintenance takes to bring the rollups up to date, bytes on disk, then each question through
the views (first and best time of five, all rows fetched), and each page of the dashboard
over the windows that it offers (first and median time of five, of the page and of its statements), the slowest first. Wanted: cost by
the hour over 10 million outcomes within 1 s, each page within 2 s.

--server: a superuser's DSN of an empty database; where it has TimescaleDB, hypertables are compressed and aggregates refreshed.
--wasm: the TimescaleDB of `make test-timescale`, whose one backend is WebAssembly and answers all connections in turn.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psycopg
import rig
import streamlit
from psycopg.conninfo import make_conninfo
from streamlit.testing.v1 import AppTest

from bus.codec import encode
from bus.login import SystemAddress
from dashboard.serve import set_system_address
from dashboard.store import statement
from dashboard.window import latest
from infaas.connecting import read_endpoints
from services.core.catalog import key_of
from services.recorder.catalog import CatalogWriter
from services.recorder.events import Maintenance
from services.shell.host.postgres import EmbeddedPostgres, role_dsn
from services.shell.store import READER, Store, prepare
from services.shell.timescale import AGGREGATES, KEEP_DAYS, level_of
from tests.support.data.events import app_record, model_record, variant_record
from tests.support.servers.dashboard_pages import APP, PAGES
from tests.timescale.wasm import WasmTimescale

PIECE = 500_000  # rows of one INSERT
WINDOWS = ("15m", "6h", "30d")  # the default, the longest that reads rows, and the longest
OF_APP = ("explain", "queries")
OTHERS = {"explain", "logs", "members", "try_query"}  # pages that read no long history
SIZES = """SELECT relname, pg_total_relation_size(oid) FROM pg_class
WHERE relkind = 'r' AND relnamespace::regnamespace::text LIKE 'infaas%' ORDER BY 2 DESC LIMIT 6"""
CHUNKS = """SELECT name, total_bytes FROM (
  SELECT hypertable_name::text, hypertable_schema, hypertable_name FROM timescaledb_information.hypertables UNION ALL
  SELECT view_name::text, materialization_hypertable_schema, materialization_hypertable_name FROM timescaledb_information.continuous_aggregates
) known (name, schema, relation), LATERAL (
  SELECT sum(total_bytes)::bigint AS total_bytes FROM hypertable_detailed_size(format('%I.%I', schema, relation)::regclass)
) found ORDER BY 2 DESC NULLS LAST LIMIT 8"""
INDEXES = (
    "query_outcomes_time",
    "query_outcomes_uid",
    "query_outcomes_buckets",
    "query_outcomes_parent",
    "query_outcomes_missing",
)
OF_PARTS = {"parts": "app-0", "missing": "app-2", "stages": "app-2", "visits": "app-2"}  # of pages that show one app
OUTCOMES = """
    INSERT INTO infaas.query_outcomes (time, uid, app, outcome, model, variant, worker, hardware, latency_ms, slo_ms, accuracy,
                                       batch, items, cached, simulated, cost, version, policy, parent, stage, payer, missing)
    SELECT %(begin)s::timestamptz + n * %(step)s::float8 * interval '1 second', md5(n::text)::uuid, 'app-' || n %% 20,
           CASE WHEN n %% 50 = 0 THEN 'late' WHEN n %% 333 = 0 THEN 'refused' ELSE 'ok' END, 'mlp',
           'mlp-v1-ort-fp32-t' || 1 + n %% 3 || '-b64', 'w' || n %% 4, 'cpu', 2 + n %% 97 * 0.1, 50, 0.97, 8, 1, false, false,
           1e-8, '1', 'infaas', CASE WHEN n %% 20 < 2 THEN md5((n - n %% 20 + 2)::text)::uuid END,
           CASE WHEN n %% 20 < 2 THEN 'part-' || n %% 20 ELSE '' END, CASE WHEN n %% 20 < 2 THEN 'app-2' END,
           CASE WHEN n %% 20 = 2 THEN (n %% 5000 = 2)::int END
    FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n"""
COSTS = """
    INSERT INTO infaas.cost_events (time, seconds, worker, hardware, app, model, variant, busy_seconds, cost)
    SELECT at, 10, 'w' || n %% 4, 'cpu', CASE WHEN n < 60 THEN 'app-' || n %% 20 END, CASE WHEN n < 60 THEN 'mlp' END,
           CASE WHEN n < 60 THEN 'mlp-v1-ort-fp32-t' || 1 + n %% 3 || '-b64' END, 4, 1e-4
    FROM generate_series(%(begin)s::timestamptz, %(end)s::timestamptz, %(every)s * interval '1 second') AS at, generate_series(0, 63) AS n"""
SAMPLES = """
    INSERT INTO infaas.worker_samples (time, worker, device, hardware, utilisation, memory_mb, memory_used_mb, load, queue)
    SELECT at, 'w' || n, 'cpu', 'cpu', 0.4, 8000, 900, 100, 2
    FROM generate_series(%(begin)s::timestamptz, %(end)s::timestamptz, interval '5 seconds') AS at, generate_series(0, 3) AS n"""
REFRESH = """CALL refresh_continuous_aggregate(
    %s, date_trunc('day', now()) - %s * interval '1 day', date_trunc('hour', now()) - %s * interval '1 day')"""
COMPRESS = "SELECT compress_chunk(chunk, true) FROM show_chunks(%s::regclass, older_than => %s::timestamptz) AS chunk"
QUESTIONS = {
    "cost by app and hour, all of it": "SELECT * FROM cost_by_app_hourly",
    "cost by variant and hour, all of it": "SELECT * FROM cost_by_variant_hourly",
    "cost by app and hour, last day": "SELECT * FROM cost_by_app_hourly WHERE hour > now() - interval '1 day'",
    "objectives by app and minute, last hour": "SELECT * FROM slo_by_app_minutely WHERE minute > now() - interval '1 hour'",
}


def fill(connection: psycopg.Connection[Any], rows: int, seconds: float) -> None:
    """So many outcomes, and costs of 64 instances every 10 s or more, up to now; indexes afterwards, as quicker. Chunks are compressed meanwhile."""
    chunks = level_of(connection) == "tsl"
    definitions = connection.execute(
        "SELECT indexdef FROM pg_indexes WHERE schemaname = 'infaas' AND indexname = ANY (%s)", (list(INDEXES),)
    ).fetchall()
    if not chunks:
        connection.execute("SET maintenance_work_mem = '512MB'")
        for index in INDEXES:
            connection.execute(f"DROP INDEX infaas.{index}".encode())
        connection.execute("ALTER TABLE infaas.query_outcomes DISABLE TRIGGER USER")
    end = time.time()
    begin = psycopg.Timestamp(*time.gmtime(end - seconds)[:6])
    until = psycopg.Timestamp(*time.gmtime(end)[:6])
    for first in range(0, rows, PIECE):
        last = min(first + PIECE, rows) - 1
        connection.execute(OUTCOMES, {"begin": begin, "step": seconds / rows, "first": first, "last": last})
        if chunks:
            reached = begin + timedelta(seconds=(last + 1) * seconds / rows)
            connection.execute(COMPRESS, ("infaas.query_outcomes", min(reached, until - timedelta(days=7))))
    every = max(10.0, 64 * seconds / rows)  # no more costs than outcomes
    connection.execute(COSTS, {"begin": begin, "end": until, "every": every})
    connection.execute(SAMPLES, {"begin": max(begin, until - timedelta(days=7)), "end": until})
    if chunks:
        for relation, days in (("infaas.cost_events", 7), ("infaas.worker_samples", 2)):
            connection.execute(COMPRESS, (relation, until - timedelta(days=days)))
    else:
        for (definition,) in definitions:
            connection.execute(definition.encode())
        connection.execute("ALTER TABLE infaas.query_outcomes ENABLE TRIGGER USER")
    for relation in ("query_outcomes", "cost_events", "worker_samples"):
        connection.execute(f"VACUUM ANALYZE infaas.{relation}".encode())
    connection.execute("CHECKPOINT")


def catalogue(dsn: str) -> None:
    """The 20 apps and three variants of which there are rows, as the recorder mirrors them."""
    records: list[Any] = [model_record()]
    records += [variant_record(variant=f"mlp-v1-ort-fp32-t{threads}-b64", threads=threads) for threads in (1, 2, 3)]
    records += [app_record(app=f"app-{number}") for number in range(20)]
    with closing(Store(dsn, "bench")) as store:
        CatalogWriter(store, {"cpu": 0.1}, 0.99).write({key_of(one): encode(one) for one in records}, None)


def ask(dsn: str, query: str, times: int) -> tuple[list[float], int]:
    """Seconds of each time on one connection, and how many rows came."""
    took, rows = [], 0
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        connection.execute("SET statement_timeout = 0; SET search_path = infaas, public")
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


def refresh(connection: psycopg.Connection[Any], seconds: float) -> tuple[float, float]:
    """The same by TimescaleDB's aggregates, of 30 days at a time: all of a year takes more memory than WebAssembly has."""
    took = []
    for name in AGGREGATES:
        for since in range(int(seconds / 86400.0 / 30.0), -1, -1):
            began = time.perf_counter()
            connection.execute(REFRESH, (f"infaas_internal.{name}", 30 * (since + 1), 30 * since))
            took.append(time.perf_counter() - began)
    return sum(took), max(took)


def page(name: str, window: str) -> AppTest:
    """As a visitor with this address sees it first."""
    test = AppTest.from_file(str(APP), default_timeout=120)
    test.query_params["range"] = window
    if name in OF_APP:
        test.query_params["app"] = "app-0"
    return test.run() if name == "overview" else test.switch_page(f"views/{name}.py").run()


def show_parts(dsn: str) -> None:
    """What Members and Pipelines ask of an app whose queries, a twentieth of all rows, have two parts each: first and best time of five."""
    for name, app in OF_PARTS.items():
        for window in WINDOWS:
            took = []
            with closing(psycopg.connect(dsn, autocommit=True)) as connection:
                for _ in range(5):
                    began = time.perf_counter()
                    values = latest(window, datetime.now(UTC)).parameters
                    rows = len(connection.execute(statement(name), {**values, "app": app}).fetchall())
                    took.append(time.perf_counter() - began)
            print(f"{f'{name}, {window}':42} {rows:7,} {took[0]:8.3f} {min(took):8.3f}", flush=True)


def show_pages(of_server: int | None) -> None:
    """Each page over each window, with nothing cached, the slowest first. of_server: the process whose CPU time is shown, with its descendants."""
    found = []
    for name in sorted({*PAGES} - OTHERS):
        for window in WINDOWS:
            took, used = [], []
            for _ in range(5):
                streamlit.cache_data.clear()
                before, began = _cpu(of_server), time.perf_counter()
                shown = page(name, window)
                took.append(time.perf_counter() - began)
                used.append(_cpu(of_server) - before)
                if shown.exception or any("did not answer" in each.value for each in shown.error):
                    raise SystemExit(f"{name}, {window}: {[each.value for each in (*shown.exception, *shown.error)]}")
            found.append((median(took), took[0], median(used), f"{name}, {window}"))
    print(f"{'page of the dashboard':42} {'first s':>8} {'median s':>8} {'CPU of the server s':>20}")
    for middle, first, cpu, what in sorted(found, reverse=True)[:12]:
        print(f"{what:42} {first:8.3f} {middle:8.3f} {cpu:20.3f}", flush=True)


def _cpu(pid: int | None) -> float:
    return sum(seconds for _, seconds in rig.cpu(pid).values()) if pid else 0.0


@contextmanager
def server(options: argparse.Namespace) -> Iterator[tuple[str, str, int | None]]:
    """A superuser's DSN, a reader's, and the server's process if it is of this machine."""
    if options.server:
        yield options.server, make_conninfo(options.server, user=READER, password="r"), None
        return
    with tempfile.TemporaryDirectory() as directory:
        if options.wasm:
            with WasmTimescale(Path(directory)) as wasm:
                yield wasm.dsn, wasm.dsn, rig.tree(os.getpid())[1].pid
        else:
            with EmbeddedPostgres(Path(directory)) as own:
                reader = role_dsn(own.superuser_dsn, READER, "r")
                yield (
                    own.superuser_dsn,
                    reader,
                    int(next(Path(directory).rglob("postmaster.pid")).read_text().split()[0]),
                )


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--hours", type=float)
    parser.add_argument("--server")
    parser.add_argument("--wasm", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # streamlit says at each step that there is no browser
    seconds = options.hours * 3600 if options.hours else options.days * 86400
    with server(options) as (dsn, reader, pid):
        prepare(dsn, writer_password="w", reader_password="r", keep_days=dict.fromkeys(KEEP_DAYS, 0.0))
        catalogue(dsn)
        with closing(psycopg.connect(dsn, autocommit=True)) as connection:
            level = level_of(connection)
            began = time.perf_counter()
            fill(connection, options.rows, seconds)
            print(
                f"{options.rows:,} outcomes over {seconds / 3600:g} h ({level}): filled in {time.perf_counter() - began:.0f} s",
                flush=True,
            )
            took, longest = refresh(connection, seconds) if level == "tsl" else maintain(dsn)
            print(f"rollups up to date in {took:.1f} s, longest piece {longest:.2f} s", flush=True)
            if level != "tsl":
                connection.execute(
                    "ANALYZE infaas_internal.cost_hours, infaas_internal.query_hours, infaas_internal.slo_minutes"
                )
            for relation, size in connection.execute(CHUNKS if level == "tsl" else SIZES):
                print(f"{relation}: {size / 2**20:,.0f} MB, {size / options.rows:.1f} bytes an outcome", flush=True)
        print(f"{'question':42} {'rows':>7} {'first s':>8} {'best s':>8}")
        for name, view in QUESTIONS.items():
            took_s, rows = ask(reader, view, 5)
            print(f"{name:42} {rows:7,} {took_s[0]:8.3f} {min(took_s):8.3f}", flush=True)
        show_parts(reader)
        with rig.system(fused=True) as system:  # whose dispatcher answers what pages ask it
            set_system_address(SystemAddress(read_endpoints(system.data_dir).nats, reader))
            show_pages(pid)


if __name__ == "__main__":
    main()
