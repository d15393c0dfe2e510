"""`infaas sql`: contract section 1."""

import json
import subprocess
import sys
from typing import Any

import pytest

from services.recorder.events import EventWriter
from services.shell.host.postgres import EmbeddedPostgres
from services.shell.store import Store
from tests.support.data.events import message, outcome
from tests.support.servers.processes import environ, infaas


def test_a_query_as_json_is_one_document(database_dsn: str, reader_dsn: str) -> None:
    store = Store(database_dsn, "test")
    uid = bytes(range(16))
    EventWriter(store).write([message(outcome(time=1.7e9, uid=uid, id="q1", batch=None, cost=0.5))])
    store.close()
    query = "SELECT time, uid, id, batch, cost, cached, 'nan'::float8, 1.5::numeric, 2::numeric, ARRAY[1], '{\"a\": 1}'::jsonb FROM query_outcomes"
    done = infaas("sql", "--query", query, "--json", INFAAS_SQL_DSN=reader_dsn)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "columns": ["time", "uid", "id", "batch", "cost", "cached", "float8", "numeric", "numeric", "array", "jsonb"],
        "rows": [
            ["2023-11-14T22:13:20+00:00", "00010203-0405-0607-0809-0a0b0c0d0e0f", "q1", None, 0.5, False, None, 1.5, 2, [1], {"a": 1}]
        ],
    }  # fmt: skip


def test_a_table_is_aligned_and_harmless(empty_dsn: str) -> None:
    query = "SELECT * FROM (VALUES ('a', 1), (E'b\\x1b[31m', 22.5), (NULL, NULL)) rows (name, number)"
    done = infaas("sql", query, INFAAS_SQL_DSN=empty_dsn)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "name    number",
        "------  ------",
        "a            1",
        "b\ufffd[31m    22.5",
        "",
        "(3 rows)",
    ]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("SELECT * FROM nowhere", 'relation "nowhere" does not exist'),
        ("SELEC 1", 'syntax error at or near "SELEC"'),
        ("DELETE FROM query_outcomes", "read-only transaction"),
        ("SELECT * FROM infaas_internal.rejected", "permission denied"),
        ("SELECT 1/0", "division by zero"),
    ],
)
def test_what_the_database_refuses_is_one_line_and_exit_1(empty_dsn: str, query: str, reason: str) -> None:
    done = infaas("sql", query, INFAAS_SQL_DSN=empty_dsn)
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_mightier_role_does_not_write_either(superuser_dsn: str) -> None:
    done = infaas("sql", "DELETE FROM infaas.jobs", INFAAS_SQL_DSN=superuser_dsn)
    assert done.returncode == 1
    assert "read-only transaction" in done.stderr


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        ("postgresql://a:secret@127.0.0.1:1/infaas", "cannot reach the database"),
        ("no address", "not a database's address"),
    ],
)
def test_a_database_that_is_not_there_is_one_line_and_exit_1(dsn: str, said: str) -> None:
    done = infaas("sql", "SELECT 1", INFAAS_SQL_DSN=dsn)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert "secret" not in done.stderr
    assert done.stderr.count("\n") == 1


def _without_query(**more: str) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "infaas.cli", "sql"],
        input="SELECT current_user, 6 * 7 AS answer;\n",
        capture_output=True,
        text=True,
        env=environ(**more),
        timeout=60,
        check=False,
    )


def test_without_a_query_psql_is_opened_as_the_reader(postgres: EmbeddedPostgres, empty_dsn: str) -> None:
    done = _without_query(INFAAS_SQL_DSN=empty_dsn)
    assert done.returncode == 0, done.stderr
    assert "infaas_reader |     42" in done.stdout


def test_json_without_a_query_is_bad_usage(empty_dsn: str) -> None:
    assert infaas("sql", "--json", INFAAS_SQL_DSN=empty_dsn).returncode == 2
