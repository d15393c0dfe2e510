"""`infaas sql`: contract section 1."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bus.codec import encode
from bus.messages.events import EVENTS, Event, OutcomeEvent, ScalingEvent, StateEvent
from services.recorder.catalog import CatalogWriter
from services.recorder.events import EventMessage, EventWriter
from services.shell.host.postgres import EmbeddedPostgres
from services.shell.store import Store
from tests.support.clients.commands import ran
from tests.support.data.events import (
    PIPELINE,
    VARIANT,
    app_record,
    event,
    message,
    model_record,
    outcome,
    variant_record,
)
from tests.support.servers.postgres import database
from tests.support.servers.processes import infaas
from tools.reference import sql_page

Sql = Callable[..., Any]


@pytest.fixture
def sql(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sql:
    """What the command prints that asks this database and ends with this code."""

    def run(dsn: str, *words: str, code: int = 0) -> Any:
        monkeypatch.setenv("INFAAS_SQL_DSN", dsn)
        return ran(capsys, ["sql", *words], code)

    return run


def test_a_query_as_json_is_one_document(database_dsn: str, reader_dsn: str, sql: Sql) -> None:
    store = Store(database_dsn, "test")
    uid = bytes(range(16))
    EventWriter(store).write([message(outcome(time=1.7e9, uid=uid, id="q1", batch=None, cost=0.5))])
    store.close()
    query = "SELECT time, uid, id, batch, cost, cached, 'nan'::float8, 1.5::numeric, 2::numeric, ARRAY[1], '{\"a\": 1}'::jsonb FROM query_outcomes"
    said = sql(reader_dsn, "--query", query, "--json")
    assert said.err == ""
    assert json.loads(said.out) == {
        "columns": ["time", "uid", "id", "batch", "cost", "cached", "float8", "numeric", "numeric", "array", "jsonb"],
        "rows": [
            ["2023-11-14T22:13:20+00:00", "00010203-0405-0607-0809-0a0b0c0d0e0f", "q1", None, 0.5, False, None, 1.5, 2, [1], {"a": 1}]
        ],
    }  # fmt: skip


def test_a_table_is_aligned_and_harmless(empty_dsn: str, sql: Sql) -> None:
    query = "SELECT * FROM (VALUES ('a', 1), (E'b\\x1b[31m', 22.5), (NULL, NULL)) rows (name, number)"
    assert sql(empty_dsn, query).out.splitlines() == [
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
def test_what_the_database_refuses_is_one_line_and_exit_1(empty_dsn: str, query: str, reason: str, sql: Sql) -> None:
    out, err = sql(empty_dsn, query, code=1)
    assert (out, err.count("\n")) == ("", 1)
    assert reason in err


def test_a_mightier_role_does_not_write_and_json_needs_a_query(superuser_dsn: str, empty_dsn: str, sql: Sql) -> None:
    assert "read-only transaction" in sql(superuser_dsn, "DELETE FROM infaas.jobs", code=1).err
    sql(empty_dsn, "--json", code=2)


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        ("postgresql://a:secret@127.0.0.1:1/infaas", "cannot reach the database"),
        ("no address", "not a database's address"),
    ],
)
def test_a_database_that_is_not_there_is_one_line_and_exit_1(dsn: str, said: str, sql: Sql) -> None:
    out, err = sql(dsn, "SELECT 1", code=1)
    assert (out, "secret" in err, err.count("\n")) == ("", False, 1)
    assert said in err


def test_without_a_query_psql_is_opened_as_the_reader(postgres: EmbeddedPostgres, empty_dsn: str) -> None:
    done = infaas("sql", input="SELECT current_user, 6 * 7 AS answer;\n", INFAAS_SQL_DSN=empty_dsn)
    assert done.returncode == 0, done.stderr
    assert "infaas_reader |     42" in done.stdout


# -- Every query of docs/sql.md and examples/questions.sql runs with the read-only role and finds what a system that did
# everything has left.
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "sql.md").read_text()
EXAMPLES = re.findall(
    r"^(?:SELECT|WITH).*?;$", (ROOT / "examples" / "questions.sql").read_text(), re.DOTALL | re.MULTILINE
)
QUERIES = re.findall(r"```sql\n(.*?)```", TEXT, re.DOTALL) + EXAMPLES


def test_there_are_thirty_queries_and_every_relation_is_named(empty_dsn: str) -> None:
    """In the list of the page, and with its columns where `make docs` ends it."""
    assert len(QUERIES) >= 30
    assert len(EXAMPLES) == (ROOT / "examples" / "questions.sql").read_text().count(";\n")
    made = sql_page()
    with closing(psycopg.connect(empty_dsn)) as connection:
        found = connection.execute("SELECT table_name FROM information_schema.tables WHERE table_schema = 'infaas'")
        assert [name for (name,) in found if f"`{name}`" not in TEXT or f"### `{name}`" not in made] == []


@pytest.fixture(scope="module")
def used_dsn(postgres: EmbeddedPostgres) -> Iterator[str]:
    """The read-only DSN of a database in which everything has happened at least once. Nobody can write by it."""
    with database(postgres) as fresh:
        everything(Store(fresh.writer, "test"))
        yield fresh.reader


def everything(store: Store) -> None:
    now = time.time()
    catalogue = {
        f"variant.{VARIANT}": encode(variant_record()),
        "model.mlp.1": encode(model_record()),
        "app.digits": encode(app_record()),
        "app.social": encode(app_record(app="social", links={}, pipeline=PIPELINE)),
    }
    CatalogWriter(store, {"cpu": 0.048}, 0.99).write(catalogue, frozenset(catalogue))
    others: list[Event] = [event(kind, time=now - 5) for kind in EVENTS if kind not in (OutcomeEvent, StateEvent)]
    states = [event(StateEvent, time=now - 9), event(StateEvent, time=now - 8, to_state="Overloaded")]
    others.append(event(ScalingEvent, time=now - 6, scaler="model", action="upgrade", reason="accuracy"))
    outcomes = [outcome(id=f"q{i}", batch=i + 1) for i in range(8)] + [outcome(outcome="refused", code="deadline")]
    whole = outcome(variant=None, confidence=0.5, missing=1, cost=2e-7)
    outcomes.append(outcome(app="social", model=None, variant=None))
    outcomes += [whole, *(outcome(parent=whole.uid, stage=member) for member in ("mlp", "cnn"))]
    ledger = EventWriter(store)
    ledger.write([message(*outcomes), message(*states), *(message(row) for row in others)])
    ledger.write([EventMessage("infaas.event.outcome", b"\xc1")])
    store.close()


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.split("FROM")[1].split()[0].strip("(;"))
def test_a_query_of_the_page_answers(used_dsn: str, query: str) -> None:
    with closing(psycopg.connect(used_dsn)) as connection:
        assert connection.execute(query.encode()).fetchall()
