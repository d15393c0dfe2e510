"""Fixtures that every test may ask for."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.database import database_dsn, empty_dsn, postgres, reader_dsn, superuser_dsn
from tests.servers import nats_server, nats_url, prefix
from tests.system import system

__all__ = [
    "database_dsn",
    "empty_dsn",
    "nats_server",
    "nats_url",
    "postgres",
    "prefix",
    "reader_dsn",
    "superuser_dsn",
    "system",
]

TESTS = Path(__file__).parent

# The same examples every time, so that a red test means a changed system; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run in several processes (`make test`), those with servers and processes of their own stay in one of them, and
    all others with their file, since what a file has prepared another one's tests may change.
    """
    for item in items:
        place = item.path.relative_to(TESTS)
        shared = place.parts[0] in ("live", "browser", "contract")
        item.add_marker(pytest.mark.xdist_group("servers" if shared else str(place)))
