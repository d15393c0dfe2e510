"""`infaas backup`, `infaas restore` and `infaas catalog restore`: what took months, in a folder or in SQL, and back on NATS.

A backup is a folder: `catalogue` (the lasting records of the buckets), `files` (models and validation sets, named by SHA-256), `history` (a file of COPY a
table), `settings.json` without what is secret, with --keys `keys`, and `manifest.json`, which is written last and has the digest of each file.
"""

import asyncio
import hashlib
import json as jsonlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time
from typing import Annotated, Any, NamedTuple

import msgspec
import psycopg
from cyclopts import Parameter
from msgspec import Struct

from bus.codec import decode_kept
from bus.messages.public import RegistrationStatus
from bus.port import KeyValue, NotFound, WrongRevision
from infaas.cli.options import DataDir, Json, check_verb
from infaas.cli.output import Failure, one_line, progress, show
from infaas.client import Client
from infaas.connecting import locate, with_client
from services.core.catalog import LASTING, LASTING_BUCKETS, files_of, lasting
from services.recorder.edge_copies import HistoryError, HistoryTable, digest_of, fetch, loaded, read_copy, save
from services.shell.store import migrations

FORMAT = 1
MANIFEST, CATALOGUE, FILES, HISTORY, SETTINGS, KEYS = (
    "manifest.json", "catalogue", "files", "history", "settings.json", "keys"
)  # fmt: skip
TOGETHER = 500  # records that are written at a time
ATTEMPTS = 5
ENDED = ("done", "failed", "cancelled")  # states of registrations


class LastingRecord(NamedTuple):
    """One entry of a bucket. bucket: the end of its name."""

    bucket: str
    key: str
    body: bytes


# What `catalog restore` tells of files that it had from nowhere.
NOT_RESTORED = {"damaged": "damaged in SQL, too", "uncopied": "lost on NATS before they were copied to SQL"}


class Manifest(Struct, frozen=True, kw_only=True):
    """What a backup has. schema: numbers of the changes that its database had seen. files: size in bytes and SHA-256 of each, by path."""

    format: int
    version: str
    made: float
    schema: list[int]
    records: int
    tables: list[HistoryTable]
    files: dict[str, tuple[int, str]]


def backup(
    folder: Path,
    /,
    *,
    keys: Annotated[
        bool, Parameter(negative="", help="Also copy the passwords of the data directory, and the file of --config.")
    ] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """Copy a running system into a folder: catalogue, files of models, history, settings.

    It needs the writing role of the database (INFAAS_SQL_DSN; `infaas up` names it itself), and on a NATS with keys one of the role `backup`.

    Example: `infaas backup /backups/monday`

    Parameters
    ----------
    folder
        A folder that is not there yet.

    """
    place = locate(data_dir)
    if keys and place.data_dir is None:
        raise Failure("--keys: is for a data directory; the keys of `infaas auth` lie in its own directory: copy that")
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise Failure(f"{folder} is there already: name a folder that is not there yet") from None
    except OSError as error:
        raise Failure(f"{folder} cannot be made: {error.strerror}; choose another one") from None
    try:
        made = _backup(folder, data_dir, keys)
    except BaseException:
        shutil.rmtree(folder)
        raise
    size = sum(size for size, _ in made.files.values())
    told = {
        "folder": str(folder), "records": made.records, "files": sum(one.startswith(FILES) for one in made.files),
        "rows": sum(table.rows for table in made.tables), "mb": round(size / 2**20, 1),
    }  # fmt: skip
    show(told, json, lambda _: print("{folder}: {records} records, {files} files, {rows} rows, {mb} MB".format(**told)))
    return 0


def restore(folder: Path, /, *, data_dir: DataDir = None, json: Json = False) -> int:
    """Bring a backup into a running, empty system. Nothing is changed if the backup is damaged or the system is not empty.

    Settings and keys are not applied: they lie in the folder, for `infaas up --config` and for you.

    Example: `infaas restore /backups/monday --data-dir new`

    Parameters
    ----------
    folder
        What `infaas backup` has made.

    """
    manifest = _checked(folder)
    document = _restore(folder, manifest, data_dir)
    show(document, json, lambda _: print("restored: {records} records, {files} files, {rows} rows".format(**document)))
    return 0


def catalog(
    verb: str,
    /,
    *,
    missing: Annotated[
        bool,
        Parameter(negative="", help="Also into a catalogue that is not empty: only what is not there or is damaged."),
    ] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> int:
    """`restore`: write the catalogue, what was learnt, and files of models back from SQL into a NATS that has lost its disk.

    Start the system with INFAAS_BUS__ADOPT=true before. Rights: as for `infaas backup`.

    Example: `infaas catalog restore`
    """
    check_verb(verb, None, {"restore": (None, ("--missing",))}, {})
    document = _restore_catalog(missing, data_dir)
    show(document, json, lambda _: print("restored: {records} records, {files} files".format(**document)))
    gone = [f"{why}: {', '.join(document[key][:5])}" for key, why in NOT_RESTORED.items() if document[key]]
    if gone:
        raise Failure(f"not restored: {'; '.join(gone)}: register these models again")
    return 0


# -- taking a backup


def _backup(folder: Path, data_dir: Path | None, keys: bool) -> Manifest:
    with _database(data_dir) as connection:
        records = with_client(data_dir, partial(_with_files, place=folder / FILES, connection=connection))
        (folder / CATALOGUE).write_bytes(msgspec.msgpack.encode(records))
        tables = save(connection, folder / HISTORY, progress)
        schema = sorted(migrations(connection))
    place = locate(data_dir)
    (folder / SETTINGS).write_text(jsonlib.dumps({"prefix": place.prefix, "given": place.given}, indent=1))
    if keys and place.data_dir is not None:
        (folder / KEYS).mkdir(mode=0o700)
        config = [Path(place.config)] if place.config is not None and Path(place.config).exists() else []
        for secret in [*place.data_dir.glob("*.secret"), *config]:
            shutil.copy(secret, folder / KEYS / secret.name)  # with its mode
    there = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    manifest = Manifest(
        format=FORMAT, version=metadata.version("infaas"), made=time(), schema=schema, records=len(records), tables=tables,
        files={str(path.relative_to(folder)): (path.stat().st_size, digest_of(path)) for path in there},
    )  # fmt: skip
    part = folder / f".{MANIFEST}"
    part.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    os.sync()
    part.rename(folder / MANIFEST)
    return manifest


async def _with_files(client: Client, place: Path, connection: psycopg.Connection[Any]) -> list[LastingRecord]:
    """The records, and their files in this folder. A version may be deleted meanwhile: then the records are read again."""
    store = await client.bus.object_store(client.subjects.artifacts_bucket, create=False)
    for _ in range(ATTEMPTS):
        records = await _records(client)
        missing, lost = await asyncio.to_thread(_missing, place, _needed(records)), set[str]()
        for number, digest in enumerate(missing, 1):
            progress(f"file {number} of {len(missing)}")
            if not await fetch(store, digest, place / digest):
                with connection.transaction():
                    if not await asyncio.to_thread(read_copy, connection, digest, place / digest):
                        lost.add(digest)
        if not lost:
            return records
    named = sorted({record.key for record in records if files_of(record.key, record.body) & lost})
    raise Failure(
        f"files of {', '.join(named[:5])} can be read neither on NATS nor in SQL: delete these versions, or register them again"
    )


def _missing(place: Path, needed: set[str]) -> list[str]:
    """Files that are not there; what nobody needs goes."""
    place.mkdir(mode=0o700, exist_ok=True)
    for path in place.iterdir():
        if path.name not in needed or digest_of(path) != path.name:
            path.unlink()
    return sorted(needed - {path.name for path in place.iterdir()})


async def _records(client: Client) -> list[LastingRecord]:
    """The lasting records that are there now."""
    found: dict[tuple[str, str], LastingRecord] = {}
    for bucket in LASTING_BUCKETS:
        for one in await (await _bucket(client, bucket)).entries():
            if lasting(bucket, one.key) is not None:
                found[bucket, one.key] = LastingRecord(bucket, one.key, one.value or b"")
    return list(found.values())


async def _bucket(client: Client, name: str) -> KeyValue:
    try:
        return await client.bus.key_value(getattr(client.subjects, f"{name}_bucket"), create=False)
    except NotFound:
        raise Failure(
            f"NATS has no bucket {name}: the system does not run yet; `infaas doctor` says what is missing"
        ) from None


def _needed(records: Iterable[LastingRecord]) -> set[str]:
    return {digest for one in records if one.bucket == "catalog" for digest in files_of(one.key, one.body)}


# -- bringing it back


def _checked(folder: Path) -> Manifest:
    """The backup's list, of which each file is as it was. Ends the command if not."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise Failure(
            f"{folder} has no {MANIFEST}: the backup did not end, or it is none; restore another one"
        ) from None
    except (msgspec.DecodeError, OSError) as error:
        raise Failure(f"{folder / MANIFEST} is damaged ({one_line(error)}): restore another backup") from None
    if manifest.format > FORMAT:
        raise Failure(f"the backup was made by version {manifest.version}, which is newer: restore it with that one")
    damaged = []
    for name, (size, digest) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            damaged.append(f"{name} is not there")
        elif path.stat().st_size != size or digest_of(path) != digest:
            damaged.append(f"{name} is not as it was")
    if damaged:
        more = f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""
        raise Failure(
            f"the backup is damaged: {'; '.join(damaged[:5])}{more}: nothing was changed, restore another one"
        )
    return manifest


def _restore(folder: Path, manifest: Manifest, data_dir: Path | None) -> dict[str, Any]:
    records = msgspec.msgpack.decode((folder / CATALOGUE).read_bytes(), type=list[LastingRecord])
    with _database(data_dir) as connection:
        if newer := set(manifest.schema) - set(migrations(connection)):
            raise Failure(
                f"the backup was made by version {manifest.version}, whose database has change {max(newer):04}, unknown here: restore it with that one"
            )
        there = with_client(data_dir, _size)
        if there or connection.execute("SELECT FROM infaas.query_outcomes LIMIT 1").fetchone() is not None:
            has = f"its catalogue has {there} records" if there else "it has answered queries"
            raise Failure(
                f"the system is not empty: {has}; start a new one (infaas up --data-dir NEW) and restore into that (--data-dir NEW)"
            )
        with loaded(connection, folder / HISTORY, manifest.tables, progress):
            written, files, _ = with_client(
                data_dir,
                lambda client: _write_back(client, records, lambda digest: nullcontext(folder / FILES / digest)),
            )
    return {"records": written, "files": files, "rows": sum(table.rows for table in manifest.tables)}


def _restore_catalog(missing: bool, data_dir: Path | None) -> dict[str, Any]:
    with _database(data_dir) as connection, TemporaryDirectory(prefix="infaas-") as place:
        rows = connection.execute("SELECT bucket, key, body, digest FROM infaas.catalog").fetchall()
        records = [LastingRecord(*row[:3]) for row in rows if hashlib.sha256(row[2]).digest() == row[3]]
        whole = {(one.bucket, one.key) for one in records}
        damaged = [f"{row[0]} {row[1]}" for row in rows if row[:2] not in whole]

        @contextmanager
        def copy(digest: str) -> Iterator[Path | None]:
            path = Path(place) / digest
            with connection.transaction():
                intact = read_copy(connection, digest, path)
            yield path if intact else None
            path.unlink()

        there = with_client(data_dir, _size)
        if there and not missing:
            raise Failure(f"the catalogue has {there} records already: --missing writes those that are not there")
        written, files, lost = with_client(data_dir, lambda client: _write_back(client, records, copy))
        copied = {digest for (digest,) in connection.execute("SELECT DISTINCT digest FROM infaas_internal.files")}
    named = [(one.key, files_of(one.key, one.body) & lost) for one in records if one.bucket == "catalog"]
    damaged += sorted(key for key, files_ in named if files_ & copied)
    uncopied = sorted(key for key, files_ in named if files_ - copied)
    return {"records": written, "files": files, "damaged": damaged, "uncopied": uncopied}


async def _size(client: Client) -> int:
    return len(await (await _bucket(client, "catalog")).keys())


async def _write_back(
    client: Client, records: list[LastingRecord], copy: Callable[[str], AbstractContextManager[Path | None]]
) -> tuple[int, int, set[str]]:
    """Write records and files that are not there, or are damaged. If that fails, the records go again.

    Files come behind the records that name them, else the registrar's pruning might delete them, and apps last. copy: of a file, by its digest; None:
    it cannot be had. Returns how many records and files were written, and the digests of files that are in neither place.
    """
    buckets = {name: await _bucket(client, name) for name in LASTING_BUCKETS}
    store = await client.bus.object_store(client.subjects.artifacts_bucket, create=False)
    written: list[LastingRecord] = []
    wanted = sorted((one for one in records if _lasts(one)), key=lambda one: lasting(one.bucket, one.key) or 0)
    models = [one for one in wanted if (one.bucket, one.key[:4]) != LASTING[-1]]
    done, lost = 0, set[str]()

    async def write(one: LastingRecord) -> None:
        with suppress(WrongRevision):
            await buckets[one.bucket].create(one.key, one.body)
            written.append(one)

    async def write_all(some: list[LastingRecord]) -> None:
        for at in range(0, len(some), TOGETHER):
            progress(f"record {at} of {len(some)}")
            await asyncio.gather(*map(write, some[at : at + TOGETHER]))

    try:
        await write_all(models)
        needed = sorted(_needed(wanted))
        for number, digest in enumerate(needed, 1):
            progress(f"file {number} of {len(needed)}")
            with copy(digest) as path, TemporaryDirectory(prefix="infaas-") as place:
                if await store.exists(digest) and await fetch(store, digest, Path(place) / "there"):
                    continue
                if path is None:
                    lost.add(digest)
                else:
                    await store.put(digest, path)
                    done += 1
        await write_all(wanted[len(models) :])
    except BaseException:
        for one in written:
            await buckets[one.bucket].delete(one.key)
        raise
    return len(written), done, lost


def _lasts(record: LastingRecord) -> bool:
    """Not a registration that was under way: nobody would carry it on."""
    status = decode_kept(RegistrationStatus, record.body) if record.key.startswith("registration.") else None
    return lasting(record.bucket, record.key) is not None and (status is None or status.state in ENDED)


@contextmanager
def _database(data_dir: Path | None) -> Iterator[psycopg.Connection[Any]]:
    """A connection of the writing role. Ends the command if there is none."""
    place = locate(data_dir)
    try:
        connection = psycopg.connect(
            place.writer or place.sql, autocommit=True, connect_timeout=10, application_name="infaas backup"
        )
        with connection:
            if connection.execute("SELECT has_table_privilege('infaas_internal.files', 'INSERT')").fetchone() != (
                True,
            ):
                raise Failure("INFAAS_SQL_DSN names a role that only reads: give the DSN of the role infaas_writer")
            yield connection
    except psycopg.OperationalError as error:
        raise Failure(f"cannot reach the database: {one_line(error)}; is the system running? (infaas doctor)") from None
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        raise Failure(
            "the database has no table of files: its system is of an older version; start that with this one first"
        ) from None
    except HistoryError as error:
        raise Failure(str(error)) from None
    except psycopg.Error as error:
        raise Failure(f"the database refuses: {one_line(error)}") from None
