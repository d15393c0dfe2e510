"""Fixtures that every test may ask for."""

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
