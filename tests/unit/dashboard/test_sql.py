"""Every statement of the dashboard runs, for the reading role, on a database where nothing happened yet."""

from datetime import UTC, datetime

import psycopg
import pytest

from dashboard.store import SQL, statement
from dashboard.window import latest

NAMES = sorted(file.stem for file in SQL.glob("*.sql"))
PARAMETERS = latest("1h", datetime(2026, 1, 1, tzinfo=UTC)).parameters | {
    "app": "digits",
    "context": None,
    "outcome": None,
    "text": None,
    "uid": "00000000-0000-0000-0000-000000000000",
    "whole": True,
    "variant": "mlp-v1-ort-fp32-t1-b64",
}


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_names_no_table_of_ours(name: str, empty_dsn: str) -> None:
    assert b"infaas_internal" not in statement(name)
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        cursor = connection.execute(statement(name), PARAMETERS)
        columns = [column.name for column in cursor.description or ()]
    assert len(columns) == len(set(columns))
