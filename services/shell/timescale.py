"""Chunks, rollups and expiry of the recorder's events in the database, by what the server can do.

There are three levels: "none" (plain PostgreSQL), "apache" (TimescaleDB under its Apache licence: hypertables) and "tsl" (all of TimescaleDB:
continuous aggregates, compression, policies too). Relations, columns and answers are the same. A database may go up a level,
never down. The SQL is in services/recorder/schema: numbered files make what holds data, and every `prepare`
runs the others.
"""

import time
from collections.abc import Mapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psycopg
from msgspec.structs import asdict
from psycopg import sql

from services.core.settings import KeepDays

Level = Literal["none", "apache", "tsl"]
LEVELS: tuple[Level, ...] = ("none", "apache", "tsl")
OLDEST_EXTENSION = (2, 18)  # the first in which a trigger sees the rows of a statement on a hypertable
AGGREGATES = ("cost_minute", "cost_hour", "query_minute", "query_hour", "slo_minute")
REFRESH = b"CALL refresh_continuous_aggregate(%s, NULL, now() - %s)"  # not within a transaction
FREE_AGAIN = 0.1  # s between two tries of what a background job does just now
KEEP_DAYS: Mapping[str, float] = asdict(KeepDays())


class LevelError(Exception):
    """The database cannot be brought to this level, or kept there. The text says why and what to do."""


class TimescaleSupport(NamedTuple):
    """What a server offers. level: the highest. version: of the extension in the database, as 2.23.0; "" without."""

    level: Level
    version: str


def detect(dsn: str, most: Level) -> TimescaleSupport:
    """Find out what the server of this database can do, up to `most`; makes the extension if the server has it.

    It uses a connection of its own: CREATE EXTENSION closes the session when the server did not preload TimescaleDB. Raises
    LevelError when the extension is too old for us.
    """
    if most == "none":
        return TimescaleSupport("none", "")
    try:
        with closing(psycopg.connect(dsn, autocommit=True, connect_timeout=10)) as connection:
            available = connection.execute(
                "SELECT installed_version FROM pg_available_extensions WHERE name = 'timescaledb'"
            ).fetchone()
            if available is None:
                return TimescaleSupport("none", "")
            if available[0] is None:
                connection.execute("CREATE EXTENSION IF NOT EXISTS timescaledb")
    except psycopg.Error:
        return TimescaleSupport("none", "")  # not preloaded, or not ours to make
    with closing(psycopg.connect(dsn, autocommit=True, connect_timeout=10)) as connection:
        _enter_extension(connection)
        row = connection.execute("SELECT extversion FROM pg_extension WHERE extname = 'timescaledb'").fetchone()
        assert row is not None
        version: str = row[0]
        try:  # functions that are not under the Apache licence fail under it
            connection.execute("SELECT alter_job(-1, if_exists => true)")
            licensed = True
        except psycopg.errors.FeatureNotSupported:
            licensed = False
    if tuple(int(part) for part in version.split("-", maxsplit=1)[0].split(".")[:2]) < OLDEST_EXTENSION:
        oldest = ".".join(map(str, OLDEST_EXTENSION))
        raise LevelError(
            f"TimescaleDB {version} is too old, {oldest} or newer is needed: ALTER EXTENSION timescaledb UPDATE,"
            " or set store.timescale to off"
        )
    return TimescaleSupport("tsl" if licensed and most == "tsl" else "apache", version)


def shape(
    connection: psycopg.Connection[Any],
    directory: Path,
    found: TimescaleSupport,
    keep_days: Mapping[str, float] = KEEP_DAYS,
) -> None:
    """Bring a migrated database to this level, or up to date on it. Repeating it changes nothing.

    connection: the owner's, in autocommit. keep_days: by relation, as in the settings; 0: for ever. Raises LevelError, psycopg.Error.
    """
    used = level_of(connection)
    if LEVELS.index(found.level) < LEVELS.index(used):
        raise LevelError(
            f"this database uses TimescaleDB ({used}) and only {found.level} was found or is allowed: set timescaledb.license"
            " and store.timescale as they were; the only way down is dumping the rows into another database"
        )
    level = found.level
    connection.execute("SET lock_timeout = '60s'")
    before = _aggregates(connection)
    with connection.transaction():
        _keep(connection, keep_days)
        if level == "none":
            files = ["shim.sql", "rollups.sql"]
            if connection.execute("SELECT 1 FROM pg_extension WHERE extname = 'timescaledb'").fetchone():
                files.remove("shim.sql")
        else:
            _enter_extension(connection)
            files = ["hypertables.sql", *(["rollups.sql", "chunks.sql"] if level == "apache" else ["aggregates.sql"])]
        for file in ["outcomes.sql", *files, "views.sql", "comments.sql"]:
            connection.execute((directory / file).read_bytes())
    if level == "tsl":
        # Of one that was there, hours whose raw rows are gone would be emptied.
        for made in sorted(_aggregates(connection) - before, key=lambda one: AGGREGATES.index(one.name)):
            when_free(connection, REFRESH, f"infaas_internal.{made.name}", timedelta(minutes=2))
        with connection.transaction():
            connection.execute((directory / "policies.sql").read_bytes())
    connection.execute("RESET search_path")


def when_free(connection: psycopg.Connection[Any], statement: bytes, *values: object, patience_s: float = 60.0) -> None:
    """Run a statement that TimescaleDB refuses while one of its background jobs does the same work: it is tried again until then.

    connection: in autocommit. patience_s: seconds after which the last refusal is raised. Raises psycopg.Error.
    """
    give_up = time.monotonic() + patience_s
    while True:
        try:
            connection.execute(statement, values)
        except psycopg.errors.LockNotAvailable:
            if time.monotonic() >= give_up:
                raise
            time.sleep(FREE_AGAIN)
        else:
            return


def level_of(connection: psycopg.Connection[Any]) -> Level:
    """What this database uses already."""
    row = connection.execute(
        "SELECT to_regclass('infaas_internal.query_hour') IS NOT NULL,"
        " EXISTS (SELECT FROM pg_extension WHERE extname = 'timescaledb')"
    ).fetchone()
    assert row is not None
    if row[0]:
        return "tsl"
    if (
        row[1]
        and connection.execute(
            "SELECT 1 FROM timescaledb_information.hypertables WHERE hypertable_schema = 'infaas'"
        ).fetchone()
    ):
        return "apache"
    return "none"


class _Aggregate(NamedTuple):
    name: str
    oid: int  # another one when it was made anew


def _aggregates(connection: psycopg.Connection[Any]) -> set[_Aggregate]:
    """The continuous aggregates that are there."""
    rows = connection.execute(
        "SELECT relname, oid::bigint FROM pg_class"
        " WHERE relnamespace = 'infaas_internal'::regnamespace AND relname = ANY (%s)",
        (list(AGGREGATES),),
    )
    return {_Aggregate(*row) for row in rows}


def _keep(connection: psycopg.Connection[Any], keep_days: Mapping[str, float]) -> None:
    connection.cursor().executemany(
        "INSERT INTO infaas_internal.retention (relation, keep) VALUES (%s, %s)"
        " ON CONFLICT (relation) DO UPDATE SET keep = excluded.keep",
        [(relation, timedelta(days=days) if days else None) for relation, days in keep_days.items()],
    )


def _enter_extension(connection: psycopg.Connection[Any]) -> None:
    """Let names be found in the extension's schema, wherever an administrator put it."""
    row = connection.execute(
        "SELECT nspname FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace WHERE extname = 'timescaledb'"
    ).fetchone()
    assert row is not None
    connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(row[0])))
