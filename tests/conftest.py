"""Fixtures that every test may ask for."""

import os

# Once a test has used gRPC, it would start threads in every process that is forked; one with several threads cannot enter
# the user namespace in which root's PostgreSQL runs. Read when gRPC is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from hypothesis import HealthCheck, settings

from tests.support.servers.nats import nats_server, nats_url, prefix
from tests.support.servers.postgres import database_dsn, empty_database, empty_dsn, postgres, reader_dsn, superuser_dsn
from tests.support.servers.system import system

__all__ = [
    "database_dsn",
    "empty_database",
    "empty_dsn",
    "nats_server",
    "nats_url",
    "postgres",
    "prefix",
    "reader_dsn",
    "superuser_dsn",
    "system",
]

# The same examples every time, so that a red test means a changed system; HYPOTHESIS_PROFILE=explore looks for new ones.
# Their number never changes, so how long it takes to make them says something about the machine only.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
