"""A TimescaleDB for tests: any server by TEST_TIMESCALE_DSN (a superuser's), else the WebAssembly one of this directory."""

import itertools
import os
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.timescale.wasm import WasmTimescale, missing

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def timescale(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The DSN of a server with TimescaleDB, under its own licence."""
    if dsn := os.environ.get("TEST_TIMESCALE_DSN"):
        yield dsn
        return
    if reason := missing():
        pytest.skip(reason)
    with WasmTimescale(tmp_path_factory.mktemp("timescale") / "data") as server:
        yield server.dsn


@pytest.fixture
def fresh_dsn(timescale: str) -> Iterator[str]:
    """A database without anything of ours."""
    if os.environ.get("TEST_TIMESCALE_DSN"):
        name = f"infaas_test_{os.getpid()}_{next(_numbers)}"
        with closing(psycopg.connect(timescale, autocommit=True)) as server:
            server.execute(f"CREATE DATABASE {name}".encode())
        yield make_conninfo(timescale, dbname=name)
        with closing(psycopg.connect(timescale, autocommit=True)) as server:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
        return
    yield timescale
    with closing(psycopg.connect(timescale, autocommit=True)) as connection:
        if connection.execute("SELECT 1 FROM pg_extension WHERE extname = 'timescaledb'").fetchone():
            connection.execute(
                "SELECT delete_job(job_id) FROM timescaledb_information.jobs WHERE proc_schema = 'infaas_internal'"
            )
        connection.execute("DROP SCHEMA IF EXISTS infaas, infaas_internal CASCADE")
