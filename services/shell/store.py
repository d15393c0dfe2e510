"""The database: an administrator prepares it once (`prepare`), one role writes, another reads.

It is PostgreSQL 16 or newer, ours or any other by its DSN. `python -m services.shell.store prepare` reads the administrator's DSN and
the two roles' passwords from the environment: INFAAS_STORE__SUPERUSER_DSN, INFAAS_STORE__WRITER_PASSWORD and
INFAAS_STORE__READER_PASSWORD, each also as ..._FILE (a file that holds it), and the settings of section [store] from variables
and from the file that INFAAS_CONFIG names.
"""

import hashlib
import os
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from msgspec.structs import asdict
from psycopg import sql
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Format

from services.shell.host.endpoints import SCHEMA, newest_schema
from services.shell.settings import SettingsError, load
from services.shell.timescale import KEEP_DAYS, Level, LevelError, detect, shape

WRITER = "infaas_writer"
READER = "infaas_reader"
OLDEST = 160000  # server_version_num
_UUID, _UUID_ARRAY = 2950, 2951  # pg_type.oid
_LOCK = 0x1FAA5  # advisory lock of a database: one migrator at a time
# A connection over a broken network must end as an error within seconds. TCP's own limits are hours.
_PATIENCE = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


class StoreError(OSError):
    """The database cannot be used, which is a failure outside. The text says why and what to do."""


# ---- prepare


def prepare(
    superuser_dsn: str,
    *,
    writer_password: str,
    reader_password: str,
    schema: Path = SCHEMA,
    most: Level = "tsl",
    keep_days: Mapping[str, float] = KEEP_DAYS,
) -> list[str]:
    """Make roles, schema and grants, or bring them up to date; returns the names of the migrations that were new.

    superuser_dsn: a superuser, or the database's owner with CREATEROLE; a database that is not there is made. most: what may
    be used of TimescaleDB where the server has it. keep_days: of each relation's rows, 0 for ever. Idempotent; several may run
    at once. Raises StoreError.
    """
    try:
        _administer(superuser_dsn).close()  # makes the database
        found = detect(superuser_dsn, most)
        with closing(_administer(superuser_dsn)) as connection:
            if connection.info.server_version < OLDEST:
                version = connection.info.server_version // 10000
                raise StoreError(f"the database server is PostgreSQL {version}; 16 or newer is needed")
            _check_version(connection, schema)
            connection.execute("SET lock_timeout = '60s'")
            connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
            for role, password in ((WRITER, writer_password), (READER, reader_password)):
                _role(connection, role, password)
            new = migrate(connection, schema)
            shape(connection, schema, found, keep_days)
            _grant(connection, schema)
            return new
    except LevelError as error:
        raise StoreError(str(error)) from error
    except psycopg.Error as error:
        raise StoreError(f"cannot prepare the database: {one_line(error)}") from error


def migrations(connection: psycopg.Connection[Any]) -> dict[int, str]:
    """Names of the SQL files that this database has seen, by number."""
    if connection.execute("SELECT to_regclass('infaas_internal.migrations')").fetchone() == (None,):
        return {}
    return dict(connection.execute("SELECT number, name FROM infaas_internal.migrations").fetchall())


def _check_version(connection: psycopg.Connection[Any], directory: Path) -> None:
    """Refuse a database of a newer version, before anything is changed. Raises StoreError."""
    applied, known = migrations(connection), newest_schema(directory)
    if applied and max(applied) > known:
        raise StoreError(
            f"the database is of a newer version, with {applied[max(applied)]}, and this one knows up to {known:04}: start that version"
            " again, or restore a backup of this one into another database"
        )


def migrate(connection: psycopg.Connection[Any], directory: Path) -> list[str]:
    """Apply the numbered SQL files that this database has not seen, each in a transaction; returns their names.

    Raises StoreError when a file was changed after it was applied.
    """
    connection.execute("CREATE SCHEMA IF NOT EXISTS infaas")
    connection.execute("CREATE SCHEMA IF NOT EXISTS infaas_internal")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS infaas_internal.migrations (number integer PRIMARY KEY, name text NOT NULL,"
        " sha256 text NOT NULL, applied timestamptz NOT NULL DEFAULT now())"
    )
    applied = dict(connection.execute("SELECT number, sha256 FROM infaas_internal.migrations").fetchall())
    new = []
    for file in sorted(directory.glob("[0-9][0-9][0-9][0-9]_*.sql")):
        number, text = int(file.name[:4]), file.read_text()
        digest = hashlib.sha256(text.encode()).hexdigest()
        if number in applied:
            if applied[number] != digest:
                raise StoreError(f"{file.name} was changed after it was applied: add a new file instead")
            continue
        with connection.transaction():
            connection.execute(text.encode())
            connection.execute(
                "INSERT INTO infaas_internal.migrations (number, name, sha256) VALUES (%s, %s, %s)",
                (number, file.name, digest),
            )
        new.append(file.name)
    return new


def _administer(dsn: str) -> psycopg.Connection[Any]:
    try:
        return psycopg.connect(dsn, autocommit=True, connect_timeout=10, application_name="infaas prepare")
    except psycopg.OperationalError:
        name = conninfo_to_dict(dsn).get("dbname")
        if not name or not _create_database(dsn, str(name)):
            raise
        return psycopg.connect(dsn, autocommit=True, connect_timeout=10, application_name="infaas prepare")


def _create_database(dsn: str, name: str) -> bool:
    """Make the database if only the database is missing; False if something else is wrong."""
    try:
        with closing(
            psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True, connect_timeout=10)
        ) as server:
            if server.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone():
                return False
            server.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            return True
    except psycopg.errors.DuplicateDatabase:
        return True
    except psycopg.Error:
        return False


def _role(connection: psycopg.Connection[Any], role: str, password: str) -> None:
    """Make the role if it is missing, and set its password. Only a verifier of the password leaves this process."""
    if not password:
        raise StoreError(
            f"the password of {role} is empty: set INFAAS_STORE__{role.removeprefix('infaas_').upper()}_PASSWORD"
        )
    name = sql.Identifier(role)
    if not connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).fetchone():
        try:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
        except (psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation):
            pass  # another database of this server is being prepared too
    secret = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
    connection.execute(sql.SQL("ALTER ROLE {} LOGIN PASSWORD {}").format(name, sql.Literal(secret)))
    if role == READER:
        for setting, value in (
            ("default_transaction_read_only", "on"),
            ("statement_timeout", "30s"),
            ("idle_in_transaction_session_timeout", "60s"),
        ):
            connection.execute(
                sql.SQL("ALTER ROLE {} SET {} = {}").format(name, sql.Identifier(setting), sql.Literal(value))
            )
        # public: where TimescaleDB's functions usually are
        connection.execute(sql.SQL("ALTER ROLE {} SET search_path = infaas, public").format(name))


def _grant(connection: psycopg.Connection[Any], directory: Path) -> None:
    database = sql.Identifier(connection.info.dbname)
    with connection.transaction():
        connection.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(database))  # CONNECT and TEMPORARY
        connection.execute(
            sql.SQL("GRANT CONNECT ON DATABASE {} TO {}, {}").format(
                database, sql.Identifier(WRITER), sql.Identifier(READER)
            )
        )
        connection.execute((directory / "roles.sql").read_bytes())


# ---- write


class Store:
    """One connection of the writing role, opened when needed and again after a failure. Not for several threads at once."""

    def __init__(self, dsn: str, name: str) -> None:
        """name: of the connection, as the administrator of the database sees it."""
        self.dsn = make_conninfo(dsn, application_name=name, **_PATIENCE)
        self._connection: psycopg.Connection[Any] | None = None

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Any]]:
        """A transaction. When the block ends it is committed and on disk. Raises psycopg.Error."""
        connection = self._open()
        try:
            with connection.transaction():
                yield connection
        except psycopg.OperationalError:
            self.close()
            raise

    def alone(self, *statements: LiteralString) -> None:
        """Carry out what no transaction may hold. Raises psycopg.Error."""
        for statement in statements:
            self._open().execute(statement)

    def _open(self) -> psycopg.Connection[Any]:
        connection = self._connection
        if connection is None or connection.broken or connection.closed:
            connection = self._connection = psycopg.connect(self.dsn, autocommit=True)
        return connection

    def cut(self) -> None:
        """From another thread: break the connection, so that whoever waits for the server gets psycopg.OperationalError."""
        if (connection := self._connection) is not None:
            with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as server:
                server.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. The next transaction opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def copy(
    connection: psycopg.Connection[Any],
    table: str,
    columns: Sequence[str],
    types: Sequence[str],
    rows: Iterable[Sequence[Any]],
) -> None:
    """Append rows by binary COPY: about 6 us of CPU for an outcome row, client and server together."""
    schema, _, name = table.partition(".")
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
        sql.Identifier(schema, name), sql.SQL(", ").join(map(sql.Identifier, columns))
    )
    with connection.cursor() as cursor, cursor.copy(statement) as out:
        out.set_types(types)
        write = out.write_row
        for row in rows:
            write(row)


class _UuidArray(bytes):
    """A uuid[] in PostgreSQL's binary form."""


class _UuidArrayDumper(Dumper):
    format = Format.BINARY
    oid = _UUID_ARRAY

    def dump(self, obj: Buffer) -> Buffer:
        return obj


psycopg.adapters.register_dumper(_UuidArray, _UuidArrayDumper)


def uuid_array(uids: Collection[bytes]) -> Buffer:
    """A parameter of type uuid[] from the uuids' bytes, without an object for each; raises ValueError for one that is none."""
    for uid in uids:
        if len(uid) != 16:
            raise ValueError(f"a uid has {len(uid)} bytes, not 16")
    length = (16).to_bytes(4)
    # array_send: dimensions, whether there are nulls, element type; then length and lower bound; then the elements.
    head = struct.pack(">5i", 1, 0, _UUID, len(uids), 1) if uids else struct.pack(">3i", 0, 0, _UUID)
    return _UuidArray(b"".join([head, *(length + uid for uid in uids)]))


# ---- python -m services.shell.store prepare

_OWN = ("INFAAS_STORE__SUPERUSER_DSN", "INFAAS_STORE__WRITER_PASSWORD", "INFAAS_STORE__READER_PASSWORD")
_CONFIG = "INFAAS_CONFIG"
AGAIN = 1.0  # s between attempts to reach a database that may be starting
_MOST: Mapping[str, Level] = {"auto": "tsl", "apache": "apache", "off": "none"}


def one_line(error: Exception) -> str:
    """The error in one line."""
    return " ".join(str(error).split()) or repr(error)


def _environ(name: str) -> str:
    if value := os.environ.get(name):
        return value
    if file := os.environ.get(f"{name}_FILE"):
        try:
            return Path(file).read_text().strip()
        except OSError as error:
            raise StoreError(f"cannot read the file that {name}_FILE names: {error.strerror}") from error
    raise StoreError(f"{name} is not set")


def main(arguments: Sequence[str]) -> int:
    match list(arguments):
        case ["prepare"]:
            end = time.monotonic()
        case ["prepare", "--wait", seconds] if seconds.isdecimal():
            end = time.monotonic() + int(seconds)
        case _:
            print("usage: python -m services.shell.store prepare [--wait SECONDS]", file=sys.stderr)
            return 2
    while True:
        try:
            new = _prepare()
        except StoreError as error:
            if time.monotonic() < end and isinstance(error.__cause__, psycopg.OperationalError):
                time.sleep(AGAIN)  # it may be starting
                continue
            print(error, file=sys.stderr)
            return 1
        except SettingsError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"the database is ready, {len(new)} migrations were new" if new else "the database is ready")
        return 0


def _prepare() -> list[str]:
    """Prepare what the variables name. Raises StoreError, SettingsError."""
    file = os.environ.get(_CONFIG)
    others = {name: value for name, value in os.environ.items() if not name.startswith((*_OWN, _CONFIG))}
    store = load(Path(file) if file else None, others).store
    return prepare(
        _environ(_OWN[0]),
        writer_password=_environ(_OWN[1]),
        reader_password=_environ(_OWN[2]),
        most=_MOST[store.timescale],
        keep_days=asdict(store.keep_days),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
