"""`infaas run dashboard`, as far as it comes without a visitor."""

import json
import socket
from datetime import UTC, datetime

import psycopg
import pytest

from dashboard.login import allowed
from dashboard.store import SQL, statement
from dashboard.window import latest
from tests.support.servers.processes import infaas


@pytest.mark.parametrize("address", ["127.0.0.2", "127.0.0.3"])
def test_it_listens_at_the_address_and_port_of_the_settings(address: str) -> None:
    """Which somebody else has, so that it ends and names them."""
    with socket.socket() as taken:
        taken.bind((address, 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = infaas("run", "dashboard", INFAAS_DASHBOARD__ADDRESS=address, INFAAS_DASHBOARD__PORT=str(port))
    assert (busy.returncode, busy.stderr.count("\n")) == (1, 1)
    assert f"cannot listen on {address}:{port}" in busy.stderr


# -- Who may see the dashboard once they have logged in.


@pytest.mark.parametrize(
    ("email", "allow", "may"),
    [
        ("ann@example.org", [], True),
        (None, [], True),
        ("ann@example.org", ["ann@example.org"], True),
        ("Ann@Example.org", ["ann@example.org"], True),
        ("ann@example.org", ["@example.org"], True),
        ("ann@evil-example.org", ["@example.org"], False),
        ("ann@example.org.evil.net", ["@example.org"], False),
        ("bob@example.org", ["ann@example.org"], False),
        (None, ["@example.org"], False),
        ("", ["ann@example.org"], False),
    ],
)
def test_who_is_allowed(email: str | None, allow: list[str], may: bool) -> None:
    assert allowed(email, allow) is may


# -- Every statement of the dashboard runs, for the reading role, on a database where nothing happened yet.
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


# -- A table's names are whole, beside a reason that is too long for any screen.


def test_the_shortest_of_long_texts_are_whole() -> None:
    pytest.importorskip("streamlit")
    from streamlit.testing.v1 import AppTest

    def page() -> None:
        import pandas as pd

        from dashboard import widgets

        rows = pd.DataFrame({"model": ["m" * 44], "reason": ["why " * 70], "state": ["failed"]})
        widgets.table(rows, {name: name for name in rows}, "rows")

    shown = AppTest.from_function(page, default_timeout=60).run().dataframe[0]
    widths = {name: one.get("width") for name, one in json.loads(shown.proto.columns).items()}
    assert widths["model"] > 44 * 6
    assert widths["reason"] > 600
