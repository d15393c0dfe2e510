"""The database as contract section 3 fixes it: relations, columns and roles, and what an administrator's `prepare` promises."""

import re
import subprocess
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg import errors

from services.recorder.tables import TABLES
from services.shell.host.postgres import EmbeddedPostgres, role_dsn
from services.shell.store import READER, SCHEMA, WRITER, Store, StoreError, prepare
from services.shell.timescale import when_free
from tests.support.servers.postgres import READER_PASSWORD, WRITER_PASSWORD
from tests.support.servers.processes import eventually, python

RELATIONS = {
    "state_events": "time app model variant worker device from_state to_state reason",
    "query_outcomes": "time uid id app model variant worker hardware outcome code latency_ms slo_ms accuracy"
    " accuracy_required cost_limit priority items batch cached simulated cost version policy context input_digest parent stage"
    " confidence missing",
    "cost_events": "time seconds worker hardware app model variant busy_seconds cost simulated",
    "scaling_events": "time scaler worker app model variant action count reason solver solve_ms objective",
    "shadow_events": "time policy scaler worker app variant action count reason cost_rate",
    "objective_events": "time app slo_target reached load forecast capacity headroom",
    "selection_events": "time app context query member probability loss weight reevaluated",
    "client_errors": "time app code count",
    "drift_events": "time app column_name distance since ended model",
    "release_events": "time release app model version old_version share state reason",
    "pipeline_events": "time pipeline vertex action from_replicas to_replicas lambda_max window_s reason",
    "worker_events": "time worker hardware from_state to_state reason",
    "worker_samples": "time worker device",
    "instance_samples": "time worker device app model variant reclaimable",
    "variant_states": "app model variant worker device state since",
    "cost_by_app_hourly": "hour app cost queries cost_per_1000",
    "cost_by_variant_hourly": "hour app model variant hardware cost queries cost_per_1000",
    "slo_by_app_minutely": "minute app queries late refused errors attainment p50_ms p99_ms slo_target",
    "slo_by_pipeline_minutely": "minute pipeline queries late refused errors attainment p50_ms p99_ms slo_target cost",
    "variants": "app model version variant hardware framework precision threads max_batch accuracy load_ms latency_ms"
    " memory_mb saturation_qps price_per_hour cost_per_1000 state simulated",
    "apps": "app models latency_ms slo_target",
    "models": "model version",
    "profiles": "variant batch p50_ms p99_ms",
    "prices": "hardware price_per_hour",
    "feedback": "time app id context label input_digest",
    "registrations": "registration app model version state",
    "jobs": "job app state input output",
}


def _columns(dsn: str, schema: str = "infaas") -> dict[str, dict[str, str]]:
    """By relation, its columns in their order with their types."""
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    with closing(psycopg.connect(dsn)) as connection:
        rows = connection.execute(
            "SELECT relname, attname, format_type(atttypid, NULL) FROM pg_attribute JOIN pg_class c ON c.oid = attrelid"
            " WHERE relnamespace = %s::regnamespace AND relkind IN ('r', 'v') AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            [schema],
        )
        for relation, column, kind in rows:
            found[relation][column] = kind
    return found


def test_relations_have_the_columns_of_the_contract_in_its_order(empty_dsn: str) -> None:
    found = _columns(empty_dsn)
    for relation, promised in RELATIONS.items():
        assert [column for column in found[relation] if column in promised.split()] == promised.split(), relation
        for column, kind in found[relation].items():
            if column in ("time", "since", "hour", "minute", "created", "updated", "started"):
                assert kind == "timestamp with time zone", (relation, column)
            if column.startswith("cost") or column == "price_per_hour":
                assert kind == "double precision", (relation, column)


def test_each_kind_of_event_fits_its_table(empty_dsn: str) -> None:
    """A field without a column, or of another type, would hold up every event of this kind."""
    sql = {"text": "text", "int8": "bigint", "float8": "double precision", "bool": "boolean", "uuid": "uuid"}
    sql["timestamptz"] = "timestamp with time zone"
    found = {schema: _columns(empty_dsn, schema) for schema in ("infaas", "infaas_internal")}
    for table in TABLES.values():
        if table.name:
            schema, _, relation = table.name.partition(".")
            columns = found[schema][relation]
            wanted = {column: sql[type_] for column, type_ in zip(table.columns, table.types, strict=True)}
            assert {column: columns.get(column) for column in wanted} == wanted, table.name


def test_unique_keys_of_events_contain_the_time(superuser_dsn: str) -> None:
    """What create_hypertable asks for, so that TimescaleDB can take these tables over as they are."""
    with closing(psycopg.connect(superuser_dsn)) as connection:
        rows = connection.execute(
            "SELECT c.relname, array_agg(a.attname::text) FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid"
            " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey)"
            " WHERE i.indisunique AND c.relnamespace = 'infaas'::regnamespace GROUP BY c.relname, i.indexrelid"
        ).fetchall()
    hyper = {table.name.removeprefix("infaas.") for table in TABLES.values() if table.name}
    keys = [columns for name, columns in rows if name in hyper]
    assert keys
    assert all("time" in columns for columns in keys)


def _unexplained(dsn: str) -> list[str]:
    """Relations of the schema and columns of theirs (relation.column) of which the database says nothing."""
    with closing(psycopg.connect(dsn)) as connection:
        rows = connection.execute(
            "SELECT concat_ws('.', c.relname, a.attname) FROM pg_class c"
            " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
            " WHERE c.relnamespace = 'infaas'::regnamespace AND c.relkind IN ('r', 'v')"
            " AND (col_description(c.oid, a.attnum) IS NULL OR obj_description(c.oid, 'pg_class') IS NULL)"
        )
        return [name for (name,) in rows]


def test_columns_are_explained_with_their_units(empty_dsn: str) -> None:
    assert _unexplained(empty_dsn) == []
    told = (SCHEMA / "comments.sql").read_text()
    lines = re.findall(r"^      \('([a-z_0-9*]+)', '(\w*)',", told, re.MULTILINE)
    columns = _columns(empty_dsn)
    everywhere = set().union(*(columns[relation] for relation, _ in lines if relation != "*"))
    assert len(lines) > 200
    assert [
        line for line in lines if line[1] and line[1] not in (everywhere if line[0] == "*" else columns[line[0]])
    ] == []
    assert len(lines) == len(set(lines))
    # Who reads the comments alone knows what a number counts.
    with closing(psycopg.connect(empty_dsn)) as connection:
        rows = connection.execute(
            "SELECT a.attname, col_description(a.attrelid, a.attnum) FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
            " WHERE c.relnamespace = 'infaas'::regnamespace AND c.relkind IN ('r', 'v') AND a.attnum > 0"
            " AND a.atttypid = 'double precision'::regtype"
        ).fetchall()
    unit = re.compile(r"US\$|\bms\b|MB|0\.\.1|/s\b|seconds|items| / |confidence interval|to 1 \(wrong\)|solver's")
    assert [name for name, meaning in rows if not unit.search(meaning)] == []


# ---- roles


def test_the_reader_reads_everything_of_the_contract_and_writes_nothing(empty_dsn: str) -> None:
    with closing(psycopg.connect(empty_dsn, autocommit=True)) as connection:
        for relation in RELATIONS:
            connection.execute(f"SELECT * FROM {relation}".encode())  # search_path: infaas
        assert connection.execute("SHOW statement_timeout").fetchone() == ("30s",)
        with pytest.raises(errors.ReadOnlySqlTransaction):
            connection.execute("DELETE FROM infaas.jobs")


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO infaas.prices VALUES ('cpu', 0, 'core')",
        "UPDATE infaas.query_outcomes SET cost = 0",
        "DELETE FROM infaas.cost_events",
        "TRUNCATE infaas.query_outcomes",
        "DROP VIEW infaas.variants",
        "CREATE TABLE infaas.mine (a int)",
        "CREATE TABLE public.mine (a int)",
        "CREATE TEMPORARY TABLE mine (a int)",
        "CREATE SCHEMA mine",
        "SELECT * FROM infaas_internal.rejected",
        "SELECT * FROM infaas_internal.batches",
        "COPY (SELECT 1) TO PROGRAM 'true'",
        "SELECT pg_read_file('/etc/hostname')",
        "SELECT lo_create(0)",
        "SELECT lo_from_bytea(0, 'x')",
        "ALTER ROLE infaas_reader CREATEDB",
        "SET ROLE infaas_writer",
    ],
)
def test_the_reader_may_do_nothing_else_even_when_it_lifts_its_guard_rails(empty_dsn: str, statement: str) -> None:
    with closing(psycopg.connect(empty_dsn, autocommit=True)) as connection:
        connection.execute("SET default_transaction_read_only = off; SET statement_timeout = 0")
        with pytest.raises(errors.InsufficientPrivilege):
            connection.execute(statement.encode())


def test_the_writer_writes_but_owns_nothing(database_dsn: str) -> None:
    with closing(psycopg.connect(database_dsn, autocommit=True)) as connection:
        connection.execute("INSERT INTO infaas.prices VALUES ('cpu', 1, 'core')")
        for statement in (
            "DROP TABLE infaas.prices",
            "ALTER TABLE infaas.prices ADD COLUMN a int",
            "TRUNCATE infaas.prices",
        ):
            with pytest.raises(errors.InsufficientPrivilege):
                connection.execute(statement.encode())


def test_others_may_not_even_connect(postgres: EmbeddedPostgres, superuser_dsn: str) -> None:
    with closing(psycopg.connect(superuser_dsn, autocommit=True)) as connection:
        connection.execute("DROP ROLE IF EXISTS stranger; CREATE ROLE stranger LOGIN PASSWORD 'stranger'")
    with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
        psycopg.connect(role_dsn(superuser_dsn, "stranger", "stranger"))


# ---- prepare


def test_prepare_again_changes_nothing_but_passwords(superuser_dsn: str) -> None:
    assert prepare(superuser_dsn, writer_password="new", reader_password=READER_PASSWORD) == []
    psycopg.connect(role_dsn(superuser_dsn, WRITER, "new")).close()
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(role_dsn(superuser_dsn, WRITER, WRITER_PASSWORD))


def test_prepare_makes_a_database_that_is_not_there(postgres: EmbeddedPostgres) -> None:
    dsn = postgres.dsn("postgres", postgres.password, "made-by-prepare")
    new = prepare(dsn, writer_password=WRITER_PASSWORD, reader_password=READER_PASSWORD)
    assert new == sorted(file.name for file in SCHEMA.glob("0*.sql"))
    psycopg.connect(role_dsn(dsn, READER, READER_PASSWORD)).close()


def test_a_new_migration_is_applied_once_and_an_edited_one_refused(superuser_dsn: str, tmp_path: Path) -> None:
    passwords = {"writer_password": WRITER_PASSWORD, "reader_password": READER_PASSWORD}
    for file in SCHEMA.glob("*.sql"):
        (tmp_path / file.name).write_text(file.read_text())
    added = tmp_path / "9000_added.sql"
    added.write_text("CREATE TABLE infaas.added (time timestamptz); INSERT INTO infaas.added VALUES (now());")
    assert prepare(superuser_dsn, **passwords, schema=tmp_path) == ["9000_added.sql"]
    assert prepare(superuser_dsn, **passwords, schema=tmp_path) == []
    with closing(psycopg.connect(role_dsn(superuser_dsn, READER, READER_PASSWORD))) as connection:
        assert connection.execute("SELECT count(*) FROM infaas.added").fetchone() == (1,)
    added.write_text("CREATE TABLE infaas.added (time timestamptz, more text);")
    with pytest.raises(StoreError, match=r"9000_added\.sql was changed after it was applied"):
        prepare(superuser_dsn, **passwords, schema=tmp_path)


def test_a_migration_that_fails_leaves_nothing_behind(superuser_dsn: str, tmp_path: Path) -> None:
    for file in SCHEMA.glob("*.sql"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "9000_broken.sql").write_text("CREATE TABLE infaas.half (a int); SELECT 1/0;")
    with pytest.raises(StoreError, match="division by zero"):
        prepare(superuser_dsn, writer_password="w", reader_password="r", schema=tmp_path)
    with closing(psycopg.connect(superuser_dsn)) as connection:
        assert connection.execute("SELECT to_regclass('infaas.half')").fetchone() == (None,)


def test_role_dsn_survives_every_character(superuser_dsn: str) -> None:
    password = " /@:?#[]%&'\"\\+ü"
    prepare(superuser_dsn, writer_password=WRITER_PASSWORD, reader_password=password)
    psycopg.connect(role_dsn(superuser_dsn, READER, password)).close()


def _command(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return python("-m", "services.shell.store", "prepare", **environ)


def test_the_command_prepares_with_passwords_from_files(superuser_dsn: str, tmp_path: Path) -> None:
    secret = tmp_path / "writer"
    secret.write_text(WRITER_PASSWORD + "\n")
    done = _command(
        {
            "INFAAS_STORE__SUPERUSER_DSN": superuser_dsn,
            "INFAAS_STORE__WRITER_PASSWORD_FILE": str(secret),
            "INFAAS_STORE__READER_PASSWORD": READER_PASSWORD,
        }
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the database is ready\n", "")


def test_the_command_takes_settings_from_the_file_and_from_variables(superuser_dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "infaas.toml"
    file.write_text("[store.keep_days]\nstate_events = 5\nworker_events = 6\n")
    environ = {
        "INFAAS_STORE__SUPERUSER_DSN": superuser_dsn,
        "INFAAS_STORE__WRITER_PASSWORD": WRITER_PASSWORD,
        "INFAAS_STORE__READER_PASSWORD": READER_PASSWORD,
        "INFAAS_CONFIG": str(file),
        "INFAAS_STORE__KEEP_DAYS__WORKER_EVENTS": "7",
    }
    assert _command(environ).returncode == 0
    with closing(psycopg.connect(superuser_dsn)) as connection:
        rows = connection.execute(
            "SELECT relation, extract(day FROM keep)::int FROM infaas_internal.retention"
        ).fetchall()
    kept = dict(rows)
    assert (kept["state_events"], kept["worker_events"], kept["scaling_events"]) == (5, 7, 90)
    refused = _command({**environ, "INFAAS_STORE__KEEP_DAYS__COST_EVENTS": "1"})
    assert refused.returncode == 1
    assert "store.keep_days.cost_events): must be 0 (for ever), or at least 2" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_the_command_says_in_one_line_what_is_wrong(superuser_dsn: str) -> None:
    passwords = {"INFAAS_STORE__WRITER_PASSWORD": "w", "INFAAS_STORE__READER_PASSWORD": "r"}
    unset = _command(passwords)
    assert (unset.returncode, unset.stderr) == (1, "INFAAS_STORE__SUPERUSER_DSN is not set\n")
    wrong = _command({**passwords, "INFAAS_STORE__SUPERUSER_DSN": role_dsn(superuser_dsn, "postgres", "wrong")})
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("cannot prepare the database: ")
    assert wrong.stderr.count("\n") == 1
    nowhere = _command({**passwords, "INFAAS_STORE__SUPERUSER_DSN": "postgresql://a:b@127.0.0.1:1/infaas"})
    assert nowhere.returncode == 1
    assert nowhere.stderr.count("\n") == 1


# ---- the writer's connection


def test_a_server_that_does_not_answer_can_be_cut_off(database_dsn: str, superuser_dsn: str) -> None:
    store = Store(database_dsn, "a test")
    with store.transaction() as connection:
        backend = connection.info.backend_pid
    with (
        ThreadPoolExecutor(1) as threads,
        closing(
            psycopg.connect(superuser_dsn, autocommit=True)
        ) as administrator,  # a transaction sees one state for ever
    ):

        def ask() -> None:
            with store.transaction() as connection:
                connection.execute("SELECT pg_sleep(3600)")

        waiting = threads.submit(ask)
        asked = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND query ~ 'pg_sleep' AND state = 'active'"
        assert eventually(lambda: administrator.execute(asked, (backend,)).fetchone() is not None)
        store.cut()
        with pytest.raises(psycopg.OperationalError):
            waiting.result()
        administrator.execute("SELECT pg_terminate_backend(%s)", (backend,))
    with store.transaction() as connection:
        assert connection.info.backend_pid != backend
    store.close()


def test_a_connection_that_died_is_opened_again(database_dsn: str, superuser_dsn: str) -> None:
    store = Store(database_dsn, "a test")
    with store.transaction() as connection:
        connection.execute("INSERT INTO infaas.prices VALUES ('one', 1, 'core')")
    with closing(psycopg.connect(superuser_dsn, autocommit=True)) as administrator:
        administrator.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'a test'"
        )
    with pytest.raises(psycopg.OperationalError), store.transaction() as connection:
        connection.execute("INSERT INTO infaas.prices VALUES ('two', 1, 'core')")
    with store.transaction() as connection:
        found = connection.execute("SELECT array_agg(hardware) FROM infaas.prices").fetchone()
    store.close()
    assert found == (["one"],)


def test_what_a_background_job_does_just_now_is_tried_again(superuser_dsn: str) -> None:
    """The error is the one that TimescaleDB raises for two refreshes of the same hours."""
    statement = b"DO 'BEGIN RAISE NOTICE $n$try$n$; LOCK TABLE busy NOWAIT; END'"
    tries = threading.Semaphore(0)
    with (
        psycopg.connect(superuser_dsn) as job,
        psycopg.connect(superuser_dsn, autocommit=True) as ours,
        ThreadPoolExecutor(1) as threads,
    ):
        ours.add_notice_handler(lambda _: tries.release())
        job.execute("CREATE TABLE busy (x int)")
        job.commit()
        job.execute("LOCK TABLE busy")
        with pytest.raises(errors.LockNotAvailable):
            when_free(ours, statement, patience_s=0.0)
        waiting = threads.submit(when_free, ours, statement)
        for _ in range(3):  # the one above, and two more
            tries.acquire()
        assert not waiting.done()
        job.commit()
        waiting.result()
