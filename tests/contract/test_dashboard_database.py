"""The dashboard's pages and their database: when there is nothing in it, when there is none, many visitors, and no rights."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import store
from dashboard.serve import set_system_address
from dashboard.window import between
from infaas.connecting import SystemAddress
from tests.support.servers.dashboard_pages import APP, NOWHERE, looking, page, text
from tests.support.servers.nats import free_port

__all__ = ["looking"]  # a fixture that every test uses

PAGES = (
    "overview",
    "variants",
    "workers",
    "cost",
    "slo",
    "applications",
    "members",
    "pipelines",
    "shadow",
    "explain",
    "jobs",
    "try_query",
    "queries",
    "registrations",
    "logs",
)

# ---- nothing to show


@pytest.mark.parametrize("name", PAGES)
def test_an_empty_database_says_what_to_do(name: str, empty_dsn: str) -> None:
    test = page(name, empty_dsn)
    assert not test.exception and not test.error
    assert "`infaas " in text(test)
    assert "was answered in time" not in text(test)


@pytest.mark.parametrize("name", ["overview", "slo", "explain", "jobs"])
def test_no_database_says_what_to_do(name: str) -> None:
    test = page(name, f"postgresql://infaas_reader:secret@127.0.0.1:{free_port()}/infaas")
    assert not test.exception
    assert ["the database does not answer" in each.value for each in test.error] == [True]  # once, however many parts
    assert "infaas doctor" in text(test)
    assert "secret" not in text(test)


def test_a_database_that_comes_back_is_asked_again(reader_dsn: str) -> None:
    away = f"postgresql://infaas_reader@127.0.0.1:{free_port()}/infaas"
    assert page("jobs", away).error
    with pytest.raises(store.NoData):
        store.query("apps")
    set_system_address(SystemAddress(NOWHERE, reader_dsn))
    assert store.query("apps").empty


def test_a_connection_that_has_gone_silent_is_given_up(reader_dsn: str) -> None:
    """As one does whose server hangs, or to which the network swallows everything: TCP alone would wait for minutes."""
    set_system_address(SystemAddress(NOWHERE, reader_dsn))
    with store._pool(reader_dsn).connection() as connection:
        (pid,) = connection.execute("SELECT pg_backend_pid()").fetchone() or (0,)
    os.kill(pid, signal.SIGSTOP)
    try:
        # Another connection answers, or there is none just now; then the page says so, and asks anew.
        for _ in range(10):
            with suppress(store.NoData):
                assert store.query("prices").empty
                break
            time.sleep(store.CONNECT_S)
        else:
            pytest.fail("no other connection was made")
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_database_without_our_schema_says_so(postgres: Any) -> None:
    test = page("overview", postgres.dsn("postgres", postgres.password, "postgres"))
    assert "Roles and set-up" in text(test)


# ---- many visitors, few rights


def test_many_visitors_cost_one_query(empty_dsn: str) -> None:
    set_system_address(SystemAddress(NOWHERE, empty_dsn))
    window = between(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=1))
    pool = store._pool(empty_dsn)  # other tests may have asked through it
    with pool.connection(timeout=60.0):
        pass  # it is connected, however long that takes
    before = pool.get_stats().get("requests_num", 0)
    began = time.monotonic()
    with ThreadPoolExecutor(16) as visitors:
        answers = list(visitors.map(lambda _: store.history("traffic", window), range(200)))
    assert len(answers) == 200
    spans = 1 + int((time.monotonic() - began) / store.CACHE_S)  # one, unless the machine is slow
    assert 1 <= pool.get_stats()["requests_num"] - before <= min(spans, 100)


def test_nothing_can_be_written_whatever_the_role(superuser_dsn: str) -> None:
    with store._pool(superuser_dsn).connection() as connection, pytest.raises(Exception, match="read-only"):
        connection.execute("DELETE FROM infaas.query_outcomes")


def test_who_is_not_logged_in_sees_nothing(empty_dsn: str) -> None:
    set_system_address(SystemAddress(NOWHERE, empty_dsn))
    test = AppTest.from_file(str(APP), default_timeout=120)
    test.secrets["auth"] = {
        "redirect_uri": "http://localhost:8501/oauth2callback",
        "cookie_secret": "s",
        "client_id": "c",
    }
    test.run()
    assert [button.label for button in test.button] == ["Log in"]
    assert not test.metric and not test.dataframe
