"""Copies of what a system cannot make again: of models' files in the database, and of the history in files of COPY.

A model's file is in NATS' object store and in the database: what is damaged or lost on one side is mended from the other. `infaas backup` and
`infaas restore` save and load the history: event tables and what stays of them when raw rows go.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
from msgspec import Struct
from psycopg import sql

from bus.port import Bus, BusError, ObjectStore
from bus.subjects import Subjects
from services.core.catalog import files_of
from services.shell.store import Store
from services.shell.timescale import level_of

log = logging.getLogger(__name__)

PART = 2**20  # bytes of a row
LARGE = 16  # rows; so much more disk is given back at once
_NEEDED = "SELECT key, body FROM infaas.catalog WHERE bucket = 'catalog' AND key NOT LIKE 'app.%'"


class FileCopies:
    """The copies, written over a connection of their own: a large file delays no events. Not for several tasks at once."""

    def __init__(self, bus: Bus, subjects: Subjects, store: Store) -> None:
        self._bus = bus
        self._bucket = subjects.artifacts_bucket
        self._store = store

    async def keep(self, check: Collection[str]) -> int:
        """Copy what the mirrored records name, and drop all other copies.

        check: keys of the catalogue whose files are read through on both sides. Returns how many can be read on neither. Raises BusError,
        psycopg.Error.
        """
        needed, checked = await asyncio.to_thread(self._needed, check)
        copied = await asyncio.to_thread(self._copied, needed)
        if not checked and needed <= copied:
            return 0
        objects = await self._bus.object_store(self._bucket, create=False)
        damaged = 0
        with TemporaryDirectory(prefix="infaas-") as folder:
            there, copy = Path(folder) / "there", Path(folder) / "copy"
            for digest in sorted(needed - copied):
                if await fetch(objects, digest, there):
                    await asyncio.to_thread(self._put, digest, there)
            for digest in sorted(checked):
                intact = await fetch(objects, digest, there)
                if not await asyncio.to_thread(self._read, digest, copy):
                    if intact:
                        await asyncio.to_thread(self._put, digest, there)
                    else:
                        damaged += 1
                        log.error(
                            "a model's file can be read neither on NATS nor from its copy", extra={"file": digest}
                        )
                elif not intact:
                    await objects.put(digest, copy)
                    log.warning("a model's file was damaged or lost on NATS: it is there again", extra={"file": digest})
        return damaged

    def _needed(self, check: Collection[str]) -> tuple[set[str], set[str]]:
        with self._store.transaction() as connection:
            named = {key: files_of(key, body) for key, body in connection.execute(_NEEDED)}
        return set().union(*named.values()), set().union(*(files for key, files in named.items() if key in check))

    def _copied(self, needed: set[str]) -> set[str]:
        """Drop what is not needed; returns what is there."""
        with self._store.transaction() as connection:
            dropped = connection.execute("DELETE FROM infaas_internal.files WHERE digest <> ALL (%s)", (list(needed),))
            rows = connection.execute("SELECT DISTINCT digest FROM infaas_internal.files").fetchall()
        if dropped.rowcount >= LARGE:
            with suppress(psycopg.errors.InsufficientPrivilege):
                # Else the write-ahead log keeps them for ten minutes. Later, a vacuum would write each of their pages into it once more.
                self._store.alone("VACUUM infaas_internal.files", "CHECKPOINT")
        return {digest for (digest,) in rows}

    def _put(self, digest: str, path: Path) -> None:
        with self._store.transaction() as connection, path.open("rb") as file:
            connection.execute("DELETE FROM infaas_internal.files WHERE digest = %s", (digest,))
            part = 0
            while (body := file.read(PART)) or part == 0:
                connection.execute(
                    "INSERT INTO infaas_internal.files (digest, part, body) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
                    (digest, part, body),
                )
                part += 1

    def _read(self, digest: str, path: Path) -> bool:
        with self._store.transaction() as connection:
            return read_copy(connection, digest, path)


async def fetch(objects: ObjectStore, digest: str, path: Path) -> bool:
    """Write the object of this name to a file; False if it is not there or is damaged. Raises BusError if NATS is away."""
    try:
        await objects.get_to(digest, path)
    except BusError as error:
        await objects.exists(digest)
        log.warning("cannot read a model's file: %s", error)
        return False
    return await asyncio.to_thread(digest_of, path) == digest


def read_copy(connection: psycopg.Connection[Any], digest: str, path: Path) -> bool:
    """Write the copy in the database to a file; False if there is none or it is damaged. connection: within a transaction."""
    seen = hashlib.sha256()
    with path.open("wb") as file, connection.cursor(name="parts") as parts:
        parts.itersize = 8
        parts.execute("SELECT body FROM infaas_internal.files WHERE digest = %s ORDER BY part", (digest,))
        for (body,) in parts:
            seen.update(body)
            file.write(body)
    return seen.hexdigest() == digest


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- the history

MARKS = "infaas_internal.watermarks"
# What the running system writes itself: from the catalogue, of what runs now, and of the database.
OWN = frozenset(
    [
        "infaas.catalog",
        "infaas.profiles",
        "infaas.prices",
        "infaas_internal.app_models",
        "infaas_internal.apps",
        "infaas_internal.batches",
        "infaas_internal.files",
        "infaas_internal.instances",
        "infaas_internal.migrations",
        "infaas_internal.models",
        "infaas_internal.outcome_lock",
        "infaas_internal.retention",
        "infaas_internal.streams",
        "infaas_internal.variants",
        "infaas_internal.workers",
    ]
)
_TABLES = """
SELECT n.nspname || '.' || c.relname, array_agg(a.attname::text ORDER BY a.attnum)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE n.nspname IN ('infaas', 'infaas_internal') AND c.relkind = 'r' GROUP BY 1 ORDER BY 1"""
PATIENCE_S, AGAIN_S = 60.0, 0.05


class HistoryTable(Struct, frozen=True):
    """One table in a backup; the file has its name."""

    name: str
    columns: list[str]
    rows: int


class HistoryError(Exception):
    """The history cannot be saved or brought back. The text says why and what to do."""


def save(connection: psycopg.Connection[Any], folder: Path, say: Callable[[str], None]) -> list[HistoryTable]:
    """Write the tables, as of one moment, into this folder. None where TimescaleDB aggregates them: its own tools back that up."""
    folder.mkdir(mode=0o700)
    if level_of(connection) == "tsl":
        say("the history is not in it: TimescaleDB aggregates it by itself, pg_dump saves that")
        return []
    found = []
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        for name, columns in _tables(connection).items():
            say(f"table {name}")
            with (folder / name).open("wb") as file, connection.cursor() as cursor:
                with cursor.copy(_statement("COPY (SELECT {columns} FROM {table}) TO STDOUT", name, columns)) as rows:
                    for piece in rows:
                        file.write(piece)
                found.append(HistoryTable(name, columns, cursor.rowcount))
    return found


@contextmanager
def loaded(
    connection: psycopg.Connection[Any], folder: Path, tables: Sequence[HistoryTable], say: Callable[[str], None]
) -> Iterator[None]:
    """Replace the rows of these tables by those in this folder, committed when the block has ended well. Raises HistoryError."""
    with connection.transaction():
        give_up = time.monotonic() + PATIENCE_S
        while not _locked(connection):
            if time.monotonic() > give_up:
                raise HistoryError("the recorder keeps the database busy: start over when less is asked")
            time.sleep(AGAIN_S)
        _load(connection, folder, tables, say)
        yield


def _locked(connection: psycopg.Connection[Any]) -> bool:
    """Whoever writes events holds these rows, in any order: nobody is waited for while others are held."""
    try:
        with connection.transaction():
            connection.execute("SELECT FROM infaas_internal.watermarks FOR UPDATE NOWAIT")
    except psycopg.errors.LockNotAvailable:
        return False
    return True


def _load(
    connection: psycopg.Connection[Any], folder: Path, tables: Sequence[HistoryTable], say: Callable[[str], None]
) -> None:
    there = _tables(connection)
    for table in tables:
        if lost := [one for one in table.columns if one not in there.get(table.name, ())]:
            raise HistoryError(
                f"the database has no {table.name}.{lost[0]}: restore with the version that made the backup"
            )
    if tables:
        # No row is late then: the rollups come as they were.
        connection.execute("UPDATE infaas_internal.watermarks SET upto = '-infinity', floor = '-infinity'")
    for table in sorted(tables, key=lambda one: one.name == MARKS):
        say(f"table {table.name}: {table.rows} rows")
        connection.execute(_statement("DELETE FROM {table}", table.name))
        with connection.cursor() as cursor:
            with (
                (folder / table.name).open("rb") as file,
                cursor.copy(_statement("COPY {table} ({columns}) FROM STDIN", table.name, table.columns)) as rows,
            ):
                while piece := file.read(2**20):
                    rows.write(piece)
            if cursor.rowcount != table.rows:
                raise HistoryError(f"{table.name} got {cursor.rowcount} of its {table.rows} rows")


def _tables(connection: psycopg.Connection[Any]) -> dict[str, list[str]]:
    return {name: columns for name, columns in connection.execute(_TABLES) if name not in OWN}


def _statement(text: str, table: str, columns: Sequence[str] = ()) -> sql.Composed:
    return sql.SQL(text).format(
        table=sql.Identifier(*table.split(".")), columns=sql.SQL(", ").join(map(sql.Identifier, columns))
    )
