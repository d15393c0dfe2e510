"""A NATS that has lost its disk is noticed by what is noted elsewhere: nothing is made anew in silence."""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bus.natsbus import NatsBus
from bus.natsclient import DirectClient
from bus.natsjet import LostStream
from bus.port import ECHO, BusError, Delivery, NotFound
from bus.subjects import Subjects
from services.core.settings import BusSettings, Settings, StoreSettings
from services.shell.runtime.known_streams import KnownStreams, StreamFile, StreamTable
from tests.support.clients.responders import until
from tests.support.servers.nats import NatsServer, skip_without_nats
from tests.support.servers.nats_cluster import Cluster, cluster
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
    skip_without_nats()
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

    spec = streams(NAMES, in_file(tmp_path).bus)["outcomes"]

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


# -- What a connection says to itself comes behind all that any server of a real cluster had got before, however slow the
# way between servers is.
__all__ = ["cluster"]
LONG_S = 1e9


class Heard:
    """A connection to the first server, and what it has heard: notices, and of its own echoes their numbers, with how they came."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.notices: list[bytes] = []
        self.echoes: list[tuple[bytes, str]] = []
        self.before: dict[bytes, list[bytes]] = {}  # by echo that came behind everything: the notices until then
        self.sent = 0

    @classmethod
    async def of(cls, cluster: Cluster) -> "Heard":
        """It knows all servers."""
        heard = cls(await NatsBus.connect(cluster.servers["n1"].url, name="dispatcher"))
        await heard.bus.subscribe("notice", lambda delivery: heard.notices.append(delivery.data))
        await heard.bus.subscribe("echo", heard._echoed)

        def all_known() -> bool:
            heard.echo()
            return heard.bus._behind._servers.keys() == cluster.servers.keys()

        await until(all_known)
        await until(lambda: heard.whole(heard.sent))
        return heard

    def _echoed(self, delivery: Delivery) -> None:
        how = (delivery.headers or {}).get(ECHO, "")
        self.echoes.append((delivery.data, how))
        if not how:
            self.before[delivery.data] = list(self.notices)

    def echo(self) -> int:
        self.sent += 1
        self.bus.publish_behind("echo", b"%d" % self.sent)
        return self.sent

    def came(self, number: int, how: str) -> bool:
        return (b"%d" % number, how) in self.echoes

    def whole(self, number: int) -> bool:
        return self.came(number, "")


@asynccontextmanager
async def with_two(cluster: Cluster) -> AsyncIterator[tuple[Heard, NatsBus]]:
    """One that hears, at the first server, and one that speaks, at the second."""
    heard, speaker = await Heard.of(cluster), await NatsBus.connect(cluster.servers["n2"].url, name="executor")
    try:
        yield heard, speaker
    finally:
        await heard.bus.close()
        await speaker.close()


async def test_it_comes_behind_what_is_on_its_way_from_another_server(cluster: Cluster) -> None:
    async with with_two(cluster) as (heard, speaker):
        heard.bus._behind.patience = LONG_S
        cluster.network.cut("n2")
        speaker.publish("notice", b"answered")
        await speaker.flush()  # it has reached its server
        numbers = [heard.echo() for _ in range(5)]
        await until(lambda: all(heard.came(number, "early") for number in numbers))
        await heard.bus.flush()
        assert heard.notices == []
        assert not any(heard.whole(number) for number in numbers)
        cluster.network.heal()
        await until(lambda: all(heard.whole(number) for number in numbers))
        assert heard.before[b"%d" % numbers[0]] == [b"answered"]


async def test_of_a_server_that_does_not_answer_for_long_what_it_had_counts_as_lost_and_the_others_are_enough(
    cluster: Cluster,
) -> None:
    async with with_two(cluster) as (heard, _):
        heard.bus._behind.patience = 0.5
        cluster.network.cut("n2")
        first = heard.echo()

        def goes_on() -> bool:
            return any(heard.whole(number) for number in range(first, heard.echo()))

        await until(goes_on)
        assert not heard.whole(first)
        assert any(how == "lost" for _, how in heard.echoes)
        cluster.network.heal()
        await until(lambda: bool(heard.echo()) and "n2" in heard.bus._behind._servers)  # it is asked again


async def test_a_server_that_was_restarted_has_lost_what_it_had(cluster: Cluster) -> None:
    async with with_two(cluster) as (heard, _):
        heard.bus._behind.patience = LONG_S
        cluster.servers["n3"].stop(kill=True)
        first = heard.echo()
        await until(lambda: heard.came(first, "early"))
        cluster.servers["n3"].start()
        await until(lambda: bool(heard.echo()) and any(how == "lost" for _, how in heard.echoes))
        assert not heard.whole(first)
        last = heard.echo()
        await until(lambda: heard.whole(last))


@pytest.mark.parametrize("user", ["limited", "tester"])
async def test_without_the_right_to_ask_servers_ours_is_heard_alone_and_the_log_says_so_once(
    user: str, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "infaas.bus")
    errors: list[Exception] = []
    url = cluster.servers["n1"].url.replace("tester", user)
    bus = await NatsBus.connect(url, name="dispatcher", on_error=errors.append)
    heard = Heard(bus)
    await bus.subscribe("echo", heard._echoed)
    try:
        for _ in range(3):
            number = heard.echo()
            await until(lambda number=number: heard.whole(number))
        assert errors == []
        assert caplog.text.count("cannot be asked") == (user == "limited")
        if user == "limited":
            assert heard.echoes[-1] == (b"3", "")
            assert not heard.came(3, "early")
    finally:
        await bus.close()


async def test_one_server_is_not_asked(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    post = DirectClient.post

    def noted(client: DirectClient, subject: str, *rest: Any, **more: Any) -> None:
        sent.append(subject)
        post(client, subject, *rest, **more)

    monkeypatch.setattr(DirectClient, "post", noted)
    bus = await NatsBus.connect(nats_server.url, name="dispatcher")
    heard = Heard(bus)
    await bus.subscribe("echo", heard._echoed)
    try:
        number = heard.echo()
        await until(lambda: heard.whole(number))
        assert heard.echoes == [(b"1", "")]
        assert sent == ["echo"]
    finally:
        await bus.close()


async def test_the_first_echo_of_a_connection_made_anew_says_that_what_came_before_may_be_lost(server: Lossy) -> None:
    """However short the connection was away: an executor's word then is lost, and an echo in time would hide it."""
    heard = Heard(await NatsBus.connect(server.url, name="dispatcher"))
    await heard.bus.subscribe("echo", heard._echoed)
    told: list[str] = []
    heard.bus.on_status(told.append)
    first = heard.echo()
    await until(lambda: heard.whole(first))

    server.stop(kill=True)
    await until(lambda: told == ["disconnected"])
    heard.echoes.clear()
    away = heard.echo()
    server.start()
    await until(lambda: heard.came(away, "lost"))
    assert heard.echoes == [(b"%d" % away, "lost")]
    await until(lambda: heard.echo() > 0 and heard.echoes[-1][1] == "")
    await heard.bus.close()
