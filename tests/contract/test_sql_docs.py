"""Every query of docs/sql.md and examples/questions.sql runs with the read-only role and finds what a system that did everything has left."""

import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from bus.codec import encode
from bus.messages.events import EVENTS, Event, OutcomeEvent, ScalingEvent, StateEvent
from services.recorder.catalog import CatalogWriter
from services.recorder.events import EventMessage, EventWriter
from services.shell.store import Store
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
from tools.reference import sql_page

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


@pytest.fixture
def used_dsn(database_dsn: str, reader_dsn: str) -> Iterator[str]:
    """The read-only DSN of a database in which everything has happened at least once."""
    store = Store(database_dsn, "test")
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
    yield reader_dsn


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.split("FROM")[1].split()[0].strip("(;"))
def test_a_query_of_the_page_answers(used_dsn: str, query: str) -> None:
    with closing(psycopg.connect(used_dsn)) as connection:
        assert connection.execute(query.encode()).fetchall()
