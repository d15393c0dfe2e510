"""A list of the streams and buckets that a system has, kept outside of NATS: a lost stream is noticed, not silently made again.

A NATS server that has lost its disk starts like a new one. If its streams were simply made again, the catalogue and what was not in
the database yet would be lost, and nobody would know. So their names and times of creation are noted in a file (bus.known), in the
database (store.dsn), or both. A service that finds something else refuses to start and says what to do.
"""

import asyncio
import fcntl
import json
import logging
import os
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from bus.durability import weaknesses
from bus.natsjet import LostStream, Streams
from bus.port import BusError, Forbidden, NotFound
from bus.subjects import Subjects
from services.core.settings import BusSettings, Settings
from services.shell.host.process import ServerError, write_private

log = logging.getLogger(__name__)
LOOKED = "INFAAS_SERVERS_LOOKED_AT"  # the variable by which a supervisor tells its services that it has
PATIENCE = 30.0  # s for a cluster to elect its leader, and for a database to come back
REMEDY = (
    "restore NATS's store from a backup or its volume; or set bus.adopt (INFAAS_BUS__ADOPT=true) for one start to go on with what is "
    "there, then `infaas catalog restore` brings the catalogue back from SQL"
)


async def look_at_servers(settings: BusSettings) -> list[str]:
    """What NATS servers of one's own may lose, where that is certain. Raises ServerError where bus.require_durable forbids it."""
    found = await asyncio.to_thread(weaknesses, settings.url, settings.monitoring)
    if found and settings.require_durable:
        raise ServerError(f"bus.require_durable forbids to start: {'; '.join(weak.text for weak in found)}")
    return [weak.text for weak in found if weak.certain]


class StreamList(Protocol):
    """One list of streams: name to time of creation. All methods raise OSError, and ConnectionError if a retry may help."""

    def read(self) -> dict[str, str]: ...
    def write(self, name: str, created: str) -> None: ...
    def forget(self, name: str) -> None: ...


class StreamFile:
    """A JSON file: name to time of creation."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise OSError(f"{self._path} is damaged: {error}") from error
        return {str(name): str(created) for name, created in found.items()} if isinstance(found, dict) else {}

    def write(self, name: str, created: str) -> None:
        self._change({name: created}, "")

    def forget(self, name: str) -> None:
        self._change({}, name)

    def _change(self, new: dict[str, str], gone: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            known = self.read() | new
            known.pop(gone, None)
            write_private(self._path, json.dumps(known, indent=1, sort_keys=True) + "\n")
        finally:
            os.close(fd)


class StreamTable(Struct, eq=False):
    """The table infaas_internal.streams; an older schema without it knows nothing."""

    dsn: str

    def read(self) -> dict[str, str]:
        from psycopg import errors  # noqa: PLC0415  (few services have a database)

        try:
            return dict(self._do("SELECT name, created FROM infaas_internal.streams"))
        except errors.UndefinedTable:
            return {}

    def write(self, name: str, created: str) -> None:
        from psycopg import errors  # noqa: PLC0415

        try:
            self._do(
                "INSERT INTO infaas_internal.streams (name, created) VALUES (%s, %s)"
                " ON CONFLICT (name) DO UPDATE SET created = excluded.created, noted = now() RETURNING name, created",
                name,
                created,
            )
        except errors.UndefinedTable:
            return

    def forget(self, name: str) -> None:
        self._do("DELETE FROM infaas_internal.streams WHERE name = %s RETURNING name", name)

    def _do(self, query: str, *values: str) -> list[Any]:
        import psycopg  # noqa: PLC0415
        from psycopg import errors  # noqa: PLC0415

        try:
            opened = psycopg.connect(self.dsn, autocommit=True, connect_timeout=5, application_name="infaas streams")
            with closing(opened) as connection:
                return connection.execute(query.encode(), values).fetchall()
        except psycopg.OperationalError as error:
            raise ConnectionError(f"the database does not answer: {error}") from error
        except errors.UndefinedTable:
            raise
        except psycopg.Error as error:  # no rights to the table, a DSN that is none
            raise OSError(f"the database refuses: {error}") from error


class KnownStreams(Struct, eq=False):
    """The lists of one service. adopt: what is found replaces what was known.

    patience: s to wait for a database or a leader that does not answer. passing: streams whose content is on its way to the
    database. A service that is `serving` makes these again if they are lost, and logs that as critical: the events that it holds must
    go somewhere.
    """

    places: list[StreamList]
    adopt: bool = False
    passing: Collection[str] = ()
    patience: float = PATIENCE
    serving: bool = False
    _noted: dict[str, str] = {}  # what every list has

    @classmethod
    def of(cls, settings: Settings, *, patience: float = PATIENCE) -> "KnownStreams":
        places: list[StreamList] = [StreamFile(Path(settings.bus.known))] if settings.bus.known else []
        if settings.store.dsn:
            places.append(StreamTable(settings.store.dsn))
        names = Subjects(settings.prefix)
        passing = (names.outcome_stream, names.event_stream)
        return cls(places, adopt=settings.bus.adopt, passing=passing, patience=patience)

    def attach_to(self, streams: Streams) -> None:
        """From now on no lost stream is made again, and those that are found or made are noted."""
        streams.before, streams.seen = self.before, self.seen

    async def check(self, streams: Streams) -> None:
        """Look for every known stream. Raises LostStream. A list that cannot be read is skipped."""
        for place in self.places:
            try:
                known = await asyncio.to_thread(place.read)
            except OSError as error:
                log.warning("cannot read which streams there should be: %s", error)
                continue
            for name in sorted(known):
                await self._check(streams, place, name, known[name])

    async def _check(self, streams: Streams, place: StreamList, name: str, created: str) -> None:
        until = asyncio.get_running_loop().time() + self.patience
        while True:
            try:
                found = await streams.created(name)
            except NotFound:
                found = ""
            except Forbidden:
                return  # it belongs to another service
            except BusError:
                if asyncio.get_running_loop().time() > until:
                    raise
                await asyncio.sleep(0.2)
                continue
            self._compare(name, created, found)
            if not found:
                await asyncio.to_thread(place.forget, name)
            return

    def _compare(self, name: str, created: str, found: str) -> None:
        if self.adopt or created == found:
            return
        what = f"was made anew at {found}" if found else "is not there any more"
        text = f"NATS has lost data: {name}, which this system has had since {created}, {what}"
        if not self.serving or name not in self.passing:
            raise LostStream(f"{text}. {REMEDY}")
        log.critical("%s: what was in it and not in the database yet is lost; new events are kept", text)

    async def before(self, name: str) -> None:
        """Called before a missing stream is made. Raises LostStream if it existed, BusError if no list can be read."""
        for place in self.places:
            created = (await self._read(place, name)).get(name)
            if created is not None:
                self._compare(name, created, "")

    async def _read(self, place: StreamList, name: str) -> dict[str, str]:
        """The content of a list. Waits for a database that does not answer."""
        until = asyncio.get_running_loop().time() + self.patience
        logged = False
        while True:
            try:
                return await asyncio.to_thread(place.read)
            except OSError as error:
                text = f"{name} is not there, and whether it was cannot be looked up: {error}"
                if not isinstance(error, ConnectionError) or asyncio.get_running_loop().time() > until:
                    raise BusError(text) from error
                if not logged:
                    log.warning("%s; trying again", text)
                    logged = True
                await asyncio.sleep(0.2)

    async def seen(self, name: str, created: str) -> None:
        """Called when a stream was found or made: note it."""
        if self._noted.get(name) == created:
            return
        try:
            for place in self.places:
                noted = (await asyncio.to_thread(place.read)).get(name)
                if noted is not None:
                    self._compare(name, noted, created)
                if noted != created:
                    await asyncio.to_thread(place.write, name, created)
        except OSError as error:
            log.warning("cannot note that there is %s: %s", name, error)
            return
        self._noted[name] = created
