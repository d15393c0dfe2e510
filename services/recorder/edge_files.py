"""Copies of models' files in the database, beside those in NATS' object store. What is damaged or lost on one side is mended from the other."""

import asyncio
import hashlib
import logging
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg

from bus.port import Bus, BusError, ObjectStore
from bus.subjects import Subjects
from services.core.catalog import files_of
from services.shell.store import Store

log = logging.getLogger(__name__)

PART = 2**20  # bytes of a row
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
            connection.execute("DELETE FROM infaas_internal.files WHERE digest <> ALL (%s)", (list(needed),))
            return {digest for (digest,) in connection.execute("SELECT DISTINCT digest FROM infaas_internal.files")}

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
