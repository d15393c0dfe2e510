"""What the bus on NATS promises beside what every bus does: the server may go and come back, and other programs share it."""

import asyncio
import shutil
import signal
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from os import kill
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from bus import natsconsumers
from bus.natsbus import LocalFirstBus, NatsBus
from bus.port import BusError, Delivery, KeyValueEntry, RequestTimeout, Status, StreamSpec
from services.core.settings import BusSettings, Settings
from services.shell.runtime.known_streams import KnownStreams
from services.shell.runtime.serve import _connect as connect_service
from services.shell.settings import login_of
from tests.support.clients.responders import until
from tests.support.servers.nats import NatsServer
from tests.support.servers.processes import certified


@pytest.fixture
def server(nats_server: NatsServer, tmp_path: Path) -> Iterator[NatsServer]:
    """A server of this test's own, to stop and start; the session's proves that there is a binary."""
    del nats_server
    own = NatsServer(tmp_path / "nats")
    own.start()
    yield own
    own.stop()


async def connected(url: str, errors: list[Exception], **options: Any) -> NatsBus:
    return await NatsBus.connect(url, name="test", on_error=errors.append, **options)


async def test_a_message_for_one_hearer_of_the_same_process_does_not_cross_the_server(
    nats_url: str, prefix: str
) -> None:
    bus, other = await LocalFirstBus.connect(nats_url, name="test"), await NatsBus.connect(nats_url, name="other")
    bus.alone = (f"{prefix}.done.",)
    here: list[bytes] = []
    there: list[bytes] = []
    await other.subscribe(f"{prefix}.>", lambda d: there.append(d.data))
    ours = await bus.subscribe(f"{prefix}.done.*", lambda d: here.append(d.data))
    await bus.subscribe(f"{prefix}.told", lambda d: here.append(d.data))
    await bus.subscribe(f"{prefix}.asked", lambda d: bus.publish(d.reply, b"answer"))
    bus.publish(f"{prefix}.done.a", b"local")
    bus.publish(f"{prefix}.told", b"broadcast")
    other.publish(f"{prefix}.done.a", b"from outside")
    await until(lambda: len(here) == 3)
    assert (await other.request(f"{prefix}.asked", b"question", 5.0)).data == b"answer"
    await ours.drain()
    bus.publish(f"{prefix}.done.a", b"nobody here")
    await until(lambda: b"nobody here" in there)
    assert sorted(here) == [b"broadcast", b"from outside", b"local"]
    assert sorted(there) == [b"broadcast", b"from outside", b"nobody here", b"question"]
    await bus.close()
    await other.close()


async def asleep(work: Callable[[], None]) -> None:
    await asyncio.to_thread(work)


async def test_everything_goes_on_after_the_server_was_killed(server: NatsServer) -> None:
    errors: list[Exception] = []
    bus, other = await connected(server.url, errors), await connected(server.url, errors)
    told: list[Status] = []
    bus.on_status(told.append)
    got: list[bytes] = []
    shared: list[bytes] = []
    await bus.subscribe("n", lambda d: got.append(d.data))
    for member in (bus, other):
        await member.subscribe("q", lambda d: shared.append(d.data), queue="group")
    await bus.ensure_stream(StreamSpec("S", ("event.>",), "work", 2**20))
    await bus.publish_durable("event.x", b"before", "1")
    consumer = await bus.consumer("S", "c")
    bucket = await bus.key_value("b")
    await bucket.put("k", b"before")
    seen: list[KeyValueEntry | None] = []
    await bucket.watch(seen.append)
    store = await bus.object_store("o")
    await store.put("o", bytes(400_000))
    await until(lambda: None in seen)
    await (await consumer.fetch(1, 60.0))[0].ack()
    fetching = asyncio.ensure_future(consumer.fetch(5, 60.0))
    await bus.flush()

    server.stop(kill=True)
    await until(lambda: told == ["disconnected"])
    for number in range(100):
        bus.publish("n", b"%d" % number)
    with pytest.raises(RequestTimeout):
        await bus.publish_durable("event.x", b"lost", "2", timeout=0.1)
    flushing = asyncio.ensure_future(bus.flush(60.0))
    await asyncio.sleep(0.3)
    assert not flushing.done()
    await asleep(server.start)
    await flushing
    await until(lambda: told == ["disconnected", "reconnected"])

    await until(lambda: len(got) == 100)
    assert got == [b"%d" % number for number in range(100)]
    await other.flush()
    for _ in range(50):
        other.publish("q", b"shared")
    await other.flush()
    await until(lambda: len(shared) >= 50)
    assert len(shared) == 50
    assert (await bucket.get("k")).value == b"before"
    await bucket.put("k", b"after")
    await until(lambda: len(seen) >= 3)
    assert [entry and entry.value for entry in seen] == [b"before", None, b"after"]
    assert await store.get("o") == bytes(400_000)
    # The request that timed out may still have been delivered from the buffer: at least once, one id.
    await bus.publish_durable("event.x", b"lost", "2")
    assert [(m.data, m.message_id) for m in await fetching] == [(b"lost", "2")]
    await bus.close()
    await other.drain()
    assert errors == []


async def test_a_fetch_may_begin_while_the_server_is_away(server: NatsServer) -> None:
    bus = await connected(server.url, [])
    await bus.ensure_stream(StreamSpec("S", ("event.>",), "work", 2**20))
    consumer = await bus.consumer("S", "c")
    await bus.publish_durable("event.x", b"kept", "1")
    server.stop(kill=True)
    assert await consumer.fetch(5, 0.1) == []
    fetching = asyncio.ensure_future(consumer.fetch(5, 60.0))
    await asyncio.sleep(0.1)
    await asleep(server.start)
    assert [m.data for m in await fetching] == [b"kept"]
    await bus.close()


async def test_a_watch_begins_again_when_the_server_lost_everything(server: NatsServer) -> None:
    bus = await connected(server.url, [])
    bucket = await bus.key_value("b")
    for number in range(10):
        await bucket.put(f"k{number}", b"old")
    seen: list[KeyValueEntry | None] = []
    await bucket.watch(seen.append)
    await until(lambda: len(seen) == 11)
    server.stop()
    await asleep(lambda: shutil.rmtree(server.directory / "jetstream"))
    await asleep(server.start)
    await bus.flush(60.0)
    bucket = await bus.key_value("b")
    await bucket.put("k", b"new")
    await until(lambda: len(seen) == 12)
    assert seen[11] == KeyValueEntry("k", b"new", 1)
    await bus.close()


async def test_keys_that_are_deleted_while_they_are_read_are_waited_for_in_vain_only_once(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connected(server.url, [])
    bucket = await bus.key_value("b")
    await bucket.put("k", b"1")
    made = natsconsumers.passing_consumer

    async def then_deleted(jet: Any, stream: str, *given: Any) -> tuple[str, int]:
        found = await made(jet, stream, *given)
        await jet.call(f"STREAM.PURGE.{stream}", timeout=10.0)
        return found

    monkeypatch.setattr(natsconsumers, "passing_consumer", then_deleted)
    monkeypatch.setattr(natsconsumers, "WAIT_S", 0.2)
    assert await bucket.keys() == []
    await bus.close()


async def test_what_waits_for_an_absent_server_is_bounded(server: NatsServer) -> None:
    bus = await connected(server.url, [], max_pending_bytes=100_000)
    told: list[Status] = []
    bus.on_status(told.append)
    got: list[int] = []
    await bus.subscribe("n", lambda d: got.append(int(d.data[:3])))
    server.stop()
    await until(lambda: bool(told))
    sent = 0
    with pytest.raises(BusError, match="wait to be sent"):
        for sent in range(200):
            bus.publish("n", b"%03d" % sent + bytes(1000))
    assert 80 <= sent < 100
    await asleep(server.start)
    await bus.flush(60.0)
    await until(lambda: len(got) == sent)
    assert got == list(range(sent))
    await bus.close()


async def test_what_waits_for_a_server_that_does_not_read_is_bounded(server: NatsServer) -> None:
    bus = await connected(server.url, [], max_pending_bytes=1_000_000)
    got: list[int] = []
    await bus.subscribe("n", lambda d: got.append(int(d.data[:5])))
    kill(server.pid, signal.SIGSTOP)
    sent = 0
    try:
        with pytest.raises(BusError, match="wait to be sent"):
            for sent in range(10_000):
                bus.publish("n", b"%05d" % sent + bytes(100_000))
                await asyncio.sleep(0)
    finally:
        kill(server.pid, signal.SIGCONT)
    assert sent > 10
    await bus.flush(60.0)
    await until(lambda: len(got) == sent)
    assert got == list(range(sent))
    await bus.close()


async def test_closing_does_not_wait_for_a_server_that_does_not_read(server: NatsServer) -> None:
    bus = await connected(server.url, [])
    kill(server.pid, signal.SIGSTOP)
    for _ in range(300):
        bus.publish("n", bytes(100_000))
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await bus.close()


async def test_a_server_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    port = NatsServer(tmp_path).port
    with pytest.raises(BusError, match=f"127.0.0.1:{port}") as error:
        await NatsBus.connect(f"nats://tester:secret@127.0.0.1:{port}", name="test", timeout=0.3)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("url", ["nats://host:port", "nats://", "http://127.0.0.1:4222", "nats://127.0.0.1:99999", ""])
async def test_what_is_no_address(url: str) -> None:
    with pytest.raises(BusError, match="NATS"):
        await NatsBus.connect(url, name="test", timeout=0.3)


async def test_a_server_that_comes_late_is_waited_for(tmp_path: Path, nats_server: NatsServer) -> None:
    del nats_server

    server = NatsServer(tmp_path)
    connecting = asyncio.ensure_future(NatsBus.connect(server.url, name="test"))
    await asyncio.sleep(0.3)
    await asleep(server.start)
    try:
        bus = await connecting
        await bus.flush()
        await bus.close()
    finally:
        server.stop()


@pytest.mark.parametrize("userinfo", ["tester:wrong@", "wrong:secret@", ""])
async def test_wrong_credentials_are_told_at_once(nats_url: str, userinfo: str) -> None:
    url = nats_url.replace("tester:secret@", userinfo)
    async with asyncio.timeout(30):
        with pytest.raises(BusError, match="user or password") as error:
            await NatsBus.connect(url, name="test", timeout=60.0)
    assert "secret" not in str(error.value)


async def test_a_forbidden_subject_is_reported_and_nothing_else_stops(nats_url: str) -> None:
    errors: list[Exception] = []
    bus = await connected(nats_url.replace("tester:", "limited:"), errors)
    told: list[Status] = []
    bus.on_status(told.append)
    bus.publish("forbidden.x", b"")
    await bus.flush()
    await until(lambda: len(errors) == 1)
    assert "forbidden.x" in str(errors[0])
    await bus.flush()
    assert told == []
    await bus.close()


async def test_closing_while_the_server_is_away_is_quick(server: NatsServer) -> None:
    bus = await connected(server.url, [])
    told: list[Status] = []
    bus.on_status(told.append)
    await bus.subscribe("n", lambda d: None)
    asked = asyncio.ensure_future(bus.request("n", b"", 60.0))
    await (await bus.key_value("b")).watch(lambda entry: None)
    await bus.ensure_stream(StreamSpec("S", ("event.>",), "work", 2**20))
    fetching = asyncio.ensure_future((await bus.consumer("S", "c")).fetch(1, 60.0))
    await bus.flush()
    server.stop()
    await until(lambda: bool(told))
    bus.publish("n", b"never sent")
    async with asyncio.timeout(30):
        await bus.drain()
    for waiting in (asked, fetching):
        with pytest.raises(BusError):
            await waiting
    assert told == ["disconnected", "closed"]
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


@pytest.fixture
def certificate(tmp_path: Path, nats_server: NatsServer) -> tuple[str, str]:
    """A certificate and its key, as files."""
    del nats_server
    return certified(tmp_path, who="IP:127.0.0.1")


@contextmanager
def over_tls(place: Path, certificate: tuple[str, str], more: str = "") -> Iterator[str]:
    """A server with this certificate; its address."""
    server = NatsServer(
        place / "nats", extra=f'tls {{ cert_file: "{certificate[0]}", key_file: "{certificate[1]}"{more} }}\n'
    )
    server.start()
    try:
        yield server.url.replace("nats://", "tls://")
    finally:
        server.stop()


async def test_over_tls(tmp_path: Path, certificate: tuple[str, str]) -> None:
    with over_tls(tmp_path, certificate) as url:
        bus = await NatsBus.connect(url, name="test", tls=ssl.create_default_context(cafile=certificate[0]))
        got: list[Delivery] = []
        await bus.subscribe("n", got.append)
        bus.publish("n", bytes(3_000_000))
        bus.publish("n", b"small")
        await until(lambda: len(got) == 2)
        assert [len(d.data) for d in got] == [3_000_000, 5]
        await bus.close()


async def test_a_server_that_wants_a_certificate_gets_the_one_of_the_settings(
    tmp_path: Path, certificate: tuple[str, str]
) -> None:
    own, key = certificate
    with over_tls(tmp_path, certificate, f', ca_file: "{own}", verify: true') as url:
        ours = BusSettings(tls_ca=own, tls_certificate=own, tls_key=key)
        bus = await NatsBus.connect(url, name="t", **login_of(ours).options())
        await bus.flush()
        await bus.close()
        with pytest.raises((BusError, OSError)):
            await NatsBus.connect(url, name="t", timeout=1.0, **login_of(BusSettings(tls_ca=own)).options())


@pytest.mark.parametrize(("replicas", "made"), [(0, True), (1, True), (3, False)])
async def test_streams_have_as_many_copies_as_the_settings_say(
    nats_url: str, prefix: str, replicas: int, made: bool
) -> None:
    """A server alone keeps one copy."""
    settings = Settings(prefix=prefix, bus=BusSettings(url=nats_url, replicas=replicas))
    bus = await connect_service("t", settings, KnownStreams.of(settings))
    try:
        spec = StreamSpec(f"{prefix}_S", (f"{prefix}.event.x",), "limits", 2**20)
        if made:
            await bus.ensure_stream(spec)
        else:
            with pytest.raises(BusError, match="replicas"):
                await bus.ensure_stream(spec)
    finally:
        await bus.close()


@pytest.mark.parametrize(
    "name",
    ["_connect_to_server", "_process_err", "_process_info", "_process_op_err", "_read_loop", "_send_ping"],
)
def test_nats_py_still_has_what_we_build_on(name: str) -> None:
    method: Awaitable[None] = getattr(Client, name)
    assert asyncio.iscoroutinefunction(method)


# -- Programs with stock nats-py share messages, buckets and objects with the bus.


async def joined(url: str) -> NatsBus:
    return await NatsBus.connect(url, name="test")


async def test_a_program_with_stock_nats_py_asks_and_answers(nats_url: str, prefix: str) -> None:
    bus, stock = await joined(nats_url), await nats.connect(nats_url)
    await bus.subscribe(f"{prefix}.ours", lambda d: bus.publish(d.reply, d.data[::-1], headers=d.headers))
    await bus.flush()
    answer = await stock.request(f"{prefix}.ours", b"abc", headers={"Ask": "é"})
    assert (answer.data, answer.headers) == (b"cba", {"Ask": "é"})

    async def reply(message: nats.aio.msg.Msg) -> None:
        await message.respond(message.data * 2)

    await stock.subscribe(f"{prefix}.theirs", cb=reply)
    # its flush does not wait for a subscription just made (the PING overtakes it); a request of its own comes after it
    assert (await stock.request(f"{prefix}.theirs", b"a")).data == b"aa"
    assert (await bus.request(f"{prefix}.theirs", b"abc", 5.0)).data == b"abcabc"
    await stock.close()
    await bus.close()


async def test_buckets_are_shared_with_stock_nats_py(nats_url: str, prefix: str) -> None:
    bus, stock = await joined(nats_url), await nats.connect(nats_url)
    jet = stock.jetstream()
    ours = await bus.key_value(f"{prefix}-b")
    theirs = await jet.key_value(f"{prefix}-b")
    revision = await ours.put("a.b", b"1")
    entry = await theirs.get("a.b")
    assert (entry.value, entry.revision) == (b"1", revision)
    await theirs.put("c", b"2")
    await theirs.delete("a.b")
    await theirs.purge("d")
    assert await ours.keys() == ["c"]
    await (await jet.create_key_value(bucket=f"{prefix}-history", history=5)).put("x", b"1")
    assert (await (await bus.key_value(f"{prefix}-history")).get("x")).value == b"1"

    content = bytes(range(256)) * 2000
    store = await bus.object_store(f"{prefix}-o", max_age_s=600)
    same = await jet.object_store(f"{prefix}-o")
    await store.put("ours", content)
    assert (await same.get("ours")).data == content
    await same.put("theirs", content)
    assert await store.get("theirs") == content
    assert sorted(info.name for info in await same.list()) == sorted(await store.keys()) == ["ours", "theirs"]
    await same.delete("ours")
    assert await store.keys() == ["theirs"]
    await stock.close()
    await bus.close()


async def test_a_watch_whose_consumer_is_deleted_goes_on(nats_url: str, prefix: str) -> None:
    bus, stock = await joined(nats_url), await nats.connect(nats_url)
    jet = stock.jetstream()
    bucket = await bus.key_value(f"{prefix}-b")
    seen: list[KeyValueEntry | None] = []
    await bucket.watch(seen.append)
    await bucket.put("k", b"1")
    await until(lambda: len(seen) == 2)
    for consumer in await jet.consumers_info(f"KV_{prefix}-b"):
        await jet.delete_consumer(f"KV_{prefix}-b", consumer.name)
    await bucket.put("k", b"2")
    await until(lambda: len(seen) == 3)
    assert [entry and entry.value for entry in seen] == [None, b"1", b"2"]
    await stock.close()
    await bus.close()


async def test_a_deleted_object_leaves_nothing_in_the_stream(nats_url: str, prefix: str) -> None:
    async with await nats.connect(nats_url) as client:
        bus = await connected(nats_url, [])
        store = await bus.object_store(f"{prefix}-o")
        for key in ("kept", "1", "2"):
            await store.put(key, b"x")
        kept = (await client.jetstream().stream_info(f"OBJ_{prefix}-o")).state.messages // 3
        await store.delete("1")
        await store.delete("2")
        assert (await client.jetstream().stream_info(f"OBJ_{prefix}-o")).state.messages == kept
        assert await store.get("kept") == b"x"
        await bus.close()


async def test_the_mark_of_a_deleted_key_goes(nats_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.natsbuckets.MARK_S", 1)
    async with await nats.connect(nats_url) as stock:
        kept = await (bus := await joined(nats_url)).key_value(f"{prefix}-k")
        await kept.put("a", b"1")
        await kept.delete("a")
        while (await stock.jetstream().stream_info(f"KV_{prefix}-k")).state.messages:  # noqa: ASYNC110  (no event of the server says it)
            await asyncio.sleep(0.1)
        await bus.close()


async def test_an_object_with_wrong_bytes_is_not_handed_out(nats_url: str, prefix: str, tmp_path: Path) -> None:
    bus, stock = await joined(nats_url), await nats.connect(nats_url)
    store = await bus.object_store(f"{prefix}-o")
    await store.put("k", bytes(300_000))
    jet = stock.jetstream()
    info = await (await jet.object_store(f"{prefix}-o")).get_info("k")
    chunks = f"$O.{prefix}-o.C.{info.nuid}"
    await jet.purge_stream(f"OBJ_{prefix}-o", subject=chunks)
    for chunk in (bytes(128 * 1024), b"\x01" * 128 * 1024, bytes(300_000 - 256 * 1024)):
        await jet.publish(chunks, chunk)
    with pytest.raises(BusError, match="digest"):
        await store.get("k")
    with pytest.raises(BusError, match="digest"):
        await store.get_to("k", tmp_path / "k")
    assert not (tmp_path / "k").exists()
    await stock.close()
    await bus.close()
