"""A real PostgreSQL for tests: one server a session, one template with our schema, a clone of it a test that writes."""

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest
from psycopg import sql

from services.shell.host.postgres import EmbeddedPostgres, role_dsn
from services.shell.host.process import ServerError
from services.shell.store import READER, WRITER, prepare

WRITER_PASSWORD = "writes & 'quotes'"
READER_PASSWORD = "reads / @ only"

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """The session's server, its database `infaas` prepared (nobody writes to it: it is the template)."""
    directory: Path = tmp_path_factory.mktemp("postgres")
    # A test's data is worth nothing after a crash of the machine; crash safety has tests with servers of their own. Nor are
    # its passwords: thousands of logins of tests need no thousands of hashes each.
    server = EmbeddedPostgres(directory, options={"fsync": "off", "full_page_writes": "off", "scram_iterations": "1"})
    try:
        server.start()
    except ServerError as error:
        pytest.skip(f"PostgreSQL does not run here: {error}")
    try:
        prepare(server.superuser_dsn, writer_password=WRITER_PASSWORD, reader_password=READER_PASSWORD)
        yield server
    finally:
        server.stop()


def _server(postgres: EmbeddedPostgres) -> closing[psycopg.Connection]:
    return closing(psycopg.connect(postgres.dsn("postgres", postgres.password, "postgres"), autocommit=True))


def clone(postgres: EmbeddedPostgres) -> str:
    """Make a fresh prepared database; its name."""
    name = f"test{next(_numbers)}"
    with _server(postgres) as server:
        server.execute(f"CREATE DATABASE {name} TEMPLATE infaas".encode())
        # Rights on a database do not come with its template.
        rights = f"REVOKE ALL ON DATABASE {name} FROM PUBLIC; GRANT CONNECT ON DATABASE {name} TO {WRITER}, {READER}"
        server.execute(rights.encode())
    return name


def drop(postgres: EmbeddedPostgres, name: str) -> None:
    """Remove a database, whoever uses it; the roles, which belong to the whole server, get their known passwords back."""
    with _server(postgres) as server:
        server.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
        for role, password in ((WRITER, WRITER_PASSWORD), (READER, READER_PASSWORD)):
            server.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(password)))


class Database(NamedTuple):
    """DSNs of one database: of its superuser, and of the roles that write and read."""

    owner: str
    writer: str
    reader: str


@contextmanager
def database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """A fresh prepared database."""
    name = clone(postgres)
    owner = postgres.dsn("postgres", postgres.password, name)
    yield Database(owner, role_dsn(owner, WRITER, WRITER_PASSWORD), role_dsn(owner, READER, READER_PASSWORD))
    drop(postgres, name)


@pytest.fixture
def superuser_dsn(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A fresh prepared database, as its superuser."""
    with database(postgres) as fresh:
        yield fresh.owner


@pytest.fixture
def database_dsn(superuser_dsn: str) -> str:
    """A fresh database with our schema, as the role that writes."""
    return role_dsn(superuser_dsn, WRITER, WRITER_PASSWORD)


@pytest.fixture
def reader_dsn(superuser_dsn: str) -> str:
    """The same database as `database_dsn`, as the role that reads."""
    return role_dsn(superuser_dsn, READER, READER_PASSWORD)


@pytest.fixture(scope="session")
def empty_database(postgres: EmbeddedPostgres) -> Iterator[str]:
    """The name of a prepared database that stays empty, the same for the whole session."""
    name = clone(postgres)
    yield name
    drop(postgres, name)


@pytest.fixture
def empty_dsn(postgres: EmbeddedPostgres, empty_database: str) -> str:
    """A prepared database that stays empty, as the role that reads."""
    return role_dsn(postgres.dsn("postgres", postgres.password, empty_database), READER, READER_PASSWORD)
