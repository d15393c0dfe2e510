"""A NATS that has lost its disk is noticed by what is noted elsewhere: nothing is made anew in silence."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.natsbus import NatsBus
from bus.natsjet import LostStream
from bus.port import BusError, NotFound
from bus.subjects import Subjects
from services.core.settings import BusSettings, Settings, StoreSettings
from services.shell.host.nats import find_nats_server
from services.shell.host.process import ServerError
from services.shell.runtime.known_streams import KnownStreams, StreamFile, StreamTable
from tests.support.servers.nats import NatsServer
from tests.support.servers.processes import environ, eventually

NAMES = Subjects("t")
CATALOG = f"KV_{NAMES.catalog_bucket}"


class Lossy(NatsServer):
    """It can lose all that it had."""

    def lose(self) -> None:
        self.stop(kill=True)
        shutil.rmtree(self.directory / "jetstream")
        self.start()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Lossy]:
    try:
        find_nats_server()
    except ServerError as error:
        pytest.skip(str(error))
    server = Lossy(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


async def opened(server: NatsServer, settings: Settings, *, check: bool = True, patience: float = 10.0) -> None:
    """What a service does at its start."""
    bus = await NatsBus.connect(server.url, name="test")
    try:
        known = KnownStreams.of(settings, patience=patience)
        known.attach_to(bus.streams)
        if check:
            await known.check(bus.streams)
        await bus.key_value(NAMES.catalog_bucket)
        await bus.object_store(NAMES.artifacts_bucket)
    finally:
        await bus.close()


def in_file(tmp_path: Path, *, adopt: bool = False) -> Settings:
    return Settings(bus=BusSettings(known=str(tmp_path / "known.json"), adopt=adopt))


@pytest.fixture(params=["file", "database"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    if request.param == "file":
        return in_file(tmp_path)
    return Settings(store=StoreSettings(dsn=request.getfixturevalue("database_dsn")))


async def test_streams_that_were_there_are_not_made_anew(server: Lossy, settings: Settings) -> None:
    await opened(server, settings)
    server.stop()
    server.start()
    await opened(server, settings)  # all is there, as it was
    server.lose()
    with pytest.raises(LostStream, match=f"{CATALOG}.*is not there any more.*backup.*bus.adopt"):
        await opened(server, settings, check=False)
    with pytest.raises(LostStream, match="is not there any more"):
        await opened(server, settings)
    bus = await NatsBus.connect(server.url, name="test")
    with pytest.raises(NotFound):
        await bus.streams.created(CATALOG)
    await bus.close()


async def test_streams_that_somebody_has_made_anew_are_not_taken_for_the_old_ones(
    server: Lossy, settings: Settings
) -> None:
    await opened(server, settings)
    server.lose()
    await opened(server, Settings())  # a service that knows nothing
    with pytest.raises(LostStream, match="was made anew at"):
        await opened(server, settings)
    with pytest.raises(LostStream, match="was made anew at"):
        await opened(server, settings, check=False)


async def test_an_operator_may_go_on_with_what_is_there(server: Lossy, tmp_path: Path) -> None:
    await opened(server, in_file(tmp_path))
    before = json.loads((tmp_path / "known.json").read_text())
    server.lose()
    await opened(server, in_file(tmp_path, adopt=True))
    after = json.loads((tmp_path / "known.json").read_text())
    assert set(before) == set(after) == {CATALOG, f"OBJ_{NAMES.artifacts_bucket}"}
    assert before[CATALOG] != after[CATALOG]
    await opened(server, in_file(tmp_path))  # once is enough


async def test_streams_of_events_on_their_way_are_made_again_while_their_service_runs(
    server: Lossy, tmp_path: Path
) -> None:
    from services.recorder.__main__ import streams

    settings = in_file(tmp_path)
    spec = streams(NAMES, settings.bus)["outcomes"]

    bus = await NatsBus.connect(server.url, name="test")
    try:
        known = KnownStreams([StreamFile(tmp_path / "known.json")], passing=(spec.name,))
        known.attach_to(bus.streams)
        await bus.ensure_stream(spec)
        await bus.key_value(NAMES.catalog_bucket)
        server.lose()
        await bus.flush()
        with pytest.raises(LostStream):
            await bus.ensure_stream(spec)
        known.serving = True
        await bus.ensure_stream(spec)
        with pytest.raises(LostStream):
            await bus.key_value(NAMES.catalog_bucket)
    finally:
        await bus.close()


async def test_nothing_is_made_while_nobody_can_tell_whether_it_was_there(server: Lossy, tmp_path: Path) -> None:
    unreachable = Settings(store=StoreSettings(dsn="postgresql://nobody@127.0.0.1:1/none"))
    with pytest.raises(BusError, match="cannot be looked up"):
        await opened(server, unreachable, patience=0.5)
    (tmp_path / "known.json").write_text("{")
    with pytest.raises(BusError, match="damaged"):
        await opened(server, in_file(tmp_path))


class Returning(StreamFile):
    """A place that is away for its first three readings."""

    away = 3

    def read(self) -> dict[str, str]:
        if self.away:
            self.away -= 1
            raise ConnectionError("away")
        return super().read()


async def test_a_database_that_is_away_for_a_moment_is_waited_for(server: Lossy, tmp_path: Path) -> None:
    bus = await NatsBus.connect(server.url, name="test")
    place = Returning(tmp_path / "known.json")
    try:
        KnownStreams([place]).attach_to(bus.streams)
        await bus.key_value(NAMES.catalog_bucket)
    finally:
        await bus.close()
    assert CATALOG in place.read()


def test_a_service_says_what_was_lost_and_ends(server: Lossy, tmp_path: Path) -> None:
    more = {"INFAAS_BUS__URL": server.url, "INFAAS_BUS__KNOWN": str(tmp_path / "known.json"), "INFAAS_PREFIX": "t"}
    start = [sys.executable, "-P", "-m", "infaas.cli.run", "registrar"]
    with subprocess.Popen(start, env=environ(**more), stderr=subprocess.DEVNULL) as first:
        assert eventually(
            lambda: (tmp_path / "known.json").exists() and CATALOG in (tmp_path / "known.json").read_text()
        )
        first.terminate()
    server.lose()
    second = subprocess.run(start, env=environ(**more), capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert second.stderr.strip().splitlines()[-1].startswith("NATS has lost data: KV_t-c"), second.stderr
    assert "Traceback" not in second.stderr


@pytest.mark.parametrize("dsn", ["reader", "none"])
def test_a_database_that_refuses_is_no_crash(request: pytest.FixtureRequest, dsn: str) -> None:
    place = StreamTable(request.getfixturevalue("reader_dsn") if dsn == "reader" else "no dsn at all")
    for ask in (place.read, lambda: place.write("S", "now"), lambda: place.forget("S")):
        with pytest.raises(OSError) as caught:
            ask()
        assert not isinstance(caught.value, ConnectionError)
        assert "refuses" in str(caught.value)
