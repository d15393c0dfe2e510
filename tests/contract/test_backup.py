"""Copies of files beside NATS, the history as files and back, and databases and directories of a newer version: on real servers."""

import hashlib
import random
import shutil
import time
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from bus.codec import encode
from bus.natsbus import NatsBus
from bus.subjects import Subjects
from services.core.catalog import key_of
from services.recorder.catalog import CatalogWriter
from services.recorder.edge_copies import LARGE, PART, FileCopies, HistoryError, HistoryTable, loaded, read_copy, save
from services.recorder.events import EventWriter, Maintenance
from services.shell.host.endpoints import SCHEMA, check_version, newest_schema
from services.shell.host.postgres import EmbeddedPostgres
from services.shell.host.process import ServerError
from services.shell.store import Store, StoreError, prepare
from tests.support.data.events import model_record, variant_record
from tests.support.data.rollups import shown, some
from tests.support.servers.postgres import database

SOURCE, VALIDATION, ARTIFACT = b"source", bytes(PART + 1), b""


def named(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def test_a_file_is_copied_mended_from_either_side_and_dropped(
    nats_url: str, prefix: str, database_dsn: str, tmp_path: Path
) -> None:
    records = [
        model_record(source=named(SOURCE), validation=named(VALIDATION)),
        variant_record(artifact=named(ARTIFACT)),
    ]
    keys, subjects, store = [key_of(one) for one in records], Subjects(prefix), Store(database_dsn, "test")
    bus = await NatsBus.connect(nats_url, name="test")
    try:
        objects = await bus.object_store(subjects.artifacts_bucket)
        for body in (SOURCE, VALIDATION, ARTIFACT):
            await objects.put(named(body), body)
        mirror, copies = CatalogWriter(store, {}, 0.99), FileCopies(bus, subjects, store)
        mirror.write({key_of(one): encode(one) for one in records}, None)
        assert await copies.keep(()) == 0
        with store.transaction() as connection:
            for body in (SOURCE, VALIDATION, ARTIFACT):
                assert read_copy(connection, named(body), tmp_path / "copy")
                assert (tmp_path / "copy").read_bytes() == body

        await objects.delete(named(VALIDATION))
        await objects.put(named(SOURCE), b"flipped")
        with store.transaction() as connection:
            connection.execute("DELETE FROM infaas_internal.files WHERE digest = %s", (named(ARTIFACT),))
        assert await copies.keep(()) == 0  # what is missing is copied again, and nothing else looked at
        assert await objects.get(named(SOURCE)) == b"flipped"
        with store.transaction() as connection:
            connection.execute("UPDATE infaas_internal.files SET body = 'x' WHERE digest = %s", (named(ARTIFACT),))
        assert await copies.keep(keys) == 0
        assert (await objects.get(named(SOURCE)), await objects.get(named(VALIDATION))) == (SOURCE, VALIDATION)
        with store.transaction() as connection:
            assert read_copy(connection, named(ARTIFACT), tmp_path / "copy")
            connection.execute("UPDATE infaas_internal.files SET body = 'x'")
        await objects.delete(named(SOURCE))
        assert await copies.keep(keys) == 1

        mirror.write({keys[0]: None}, None)
        await copies.keep(())
        with store.transaction() as connection:
            left = connection.execute("SELECT digest FROM infaas_internal.files").fetchall()
            assert left == [(named(ARTIFACT),)]
            connection.execute(
                "INSERT INTO infaas_internal.files SELECT 'large', part, '' FROM generate_series(1, %s) part", (LARGE,)
            )
            written = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        await copies.keep(())
        with (
            store.transaction() as connection
        ):  # what a large one has taken of the write-ahead log is given back at once
            (given_back,) = (
                connection.execute("SELECT redo_lsn >= %s FROM pg_control_checkpoint()", written).fetchone() or ()
            )
        assert given_back
    finally:
        store.close()
        await bus.close()


@pytest.mark.parametrize("rolled_up", [False, True])
def test_a_history_comes_back_as_it_was(rolled_up: bool, postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    rng, now = random.Random(1), time.time()
    with database(postgres) as old, database(postgres) as new:
        store = Store(old.writer, "test")
        EventWriter(store).write(some(rng, 300, now - 9000.0, now))
        if rolled_up:
            maintenance = Maintenance(store)
            while maintenance.maintain():
                pass
            with store.transaction() as connection:
                assert connection.execute(
                    "SELECT min(upto) > '-infinity' FROM infaas_internal.watermarks"
                ).fetchone() == (True,)
        store.close()
        other = Store(new.writer, "test")
        EventWriter(other).write(some(rng, 10, now - 300.0, now))  # its own, of before
        other.close()
        with closing(psycopg.connect(old.writer, autocommit=True)) as connection:
            tables = save(connection, tmp_path / "history", lambda _: None)
        with closing(psycopg.connect(new.writer, autocommit=True)) as connection:
            stranger = HistoryTable("infaas.query_outcomes", ["time", "mood"], 1)
            for wrong in ([stranger], [HistoryTable("infaas.moods", ["mood"], 1)]):
                with (
                    pytest.raises(HistoryError, match="mood: restore with the version"),
                    loaded(connection, tmp_path / "history", wrong, lambda _: None),
                ):
                    pytest.fail("it was loaded")
            with loaded(connection, tmp_path / "history", tables, lambda _: None):
                pass
        with closing(psycopg.connect(old.owner)) as before, closing(psycopg.connect(new.owner)) as after:
            assert shown(after) == shown(before)
            for table in tables:
                rows = f"SELECT count(*) FROM {table.name}".encode()
                assert before.execute(rows).fetchone() == after.execute(rows).fetchone() == (table.rows,)


def test_what_a_newer_version_has_used_is_left_alone(superuser_dsn: str, tmp_path: Path) -> None:
    newer = tmp_path / "schema"
    shutil.copytree(SCHEMA, newer)
    (newer / "9999_later.sql").write_text("CREATE TABLE infaas_internal.later (a integer);")
    passwords = {"writer_password": "other", "reader_password": "other"}
    with closing(psycopg.connect(superuser_dsn, autocommit=True)) as connection:
        verifiers = "SELECT rolpassword FROM pg_authid WHERE rolname LIKE 'infaas%' ORDER BY rolname"
        prepare(superuser_dsn, schema=newer, **passwords)
        before = connection.execute(verifiers).fetchall()
        with pytest.raises(
            StoreError,
            match=f"newer version, with 9999_later.sql, and this one knows up to {newest_schema():04}: start",
        ):
            prepare(superuser_dsn, **passwords)
        assert connection.execute(verifiers).fetchall() == before

    (tmp_path / "endpoints.json").write_text(f'{{"schema": {newest_schema()}}}')
    check_version(tmp_path)
    check_version(tmp_path / "new")
    (tmp_path / "endpoints.json").write_text('{"schema": 9999}')
    with pytest.raises(ServerError, match=r"was used by a newer version \(schema 9999.*start that version again"):
        check_version(tmp_path)
