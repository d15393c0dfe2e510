"""The history in SQL as files of COPY, for `infaas backup` and `infaas restore`: event tables and what stays of them when raw rows go."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from msgspec import Struct
from psycopg import sql

from services.shell.timescale import level_of

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
