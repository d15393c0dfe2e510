"""Fixtures of the behaviour suites."""

from collections.abc import Iterator

import pytest

from services.shell.host.postgres import EmbeddedPostgres
from tests.support.data.recorded_history import minute
from tests.support.servers.buses import buses, connect
from tests.support.servers.postgres import database
from tests.support.servers.secured_nats import Secured, secured

__all__ = ["buses", "connect"]


@pytest.fixture(scope="session")
def past(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database with the recorded minute, as the role that reads."""
    with database(postgres) as fresh:
        minute(fresh.writer)
        yield fresh.reader


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A server at which each process has rights of its own."""
    with secured(tmp_path_factory.mktemp("secured")) as server:
        yield server
