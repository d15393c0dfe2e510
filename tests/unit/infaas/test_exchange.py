"""Requests against a peer that is silent, absent, late or answers twice. No test asserts how fast anything is."""

import asyncio
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from bus.codec import encode
from bus.memory import Broker
from bus.messages.public import RESENT
from bus.port import BadLogin, Delivery
from bus.subjects import Subjects
from infaas.connecting import DEFAULT_NATS, DEFAULT_SQL, connect, locate, why_not
from infaas.errors import BadInput, NotConnected, Timeout
from infaas.exchange import Exchange
from tests.support.clients.responders import Responder, until
from tests.support.servers.nats import free_port

QUICK = 0.03  # s of silence before sending again


async def open_exchange(broker: Broker, silence: float = QUICK) -> Exchange:
    exchange = Exchange(broker.connect("client"), silence=silence)
    await exchange.open()
    return exchange


async def test_a_reply_settles_its_own_request():
    broker = Broker()
    await Responder(broker.connect(), lambda body, n: {"got": body["n"]}).listen("t.q")
    exchange = await open_exchange(broker)
    replies = await asyncio.gather(*(exchange.ask("t.q", b"\x81\xa1n" + bytes([n]), 600.0) for n in range(100)))
    assert [reply[-1] for reply in replies] == list(range(100))
    assert len(exchange) == 0


async def test_silence_is_met_by_the_same_bytes_on_the_same_reply_subject():
    broker = Broker()
    peer = await Responder(broker.connect(), lambda body, n: {"n": n} if n == 3 else None).listen("t.q")
    exchange = await open_exchange(broker)
    await exchange.ask("t.q", b"\x81\xa1a\x01", 600.0)
    assert peer.heard == [{"a": 1}] * 3
    assert list(peer.replies_to.values()) == [3]
    assert exchange.resent == 2


async def test_what_is_sent_again_is_marked_with_its_age_unless_nobody_had_listened():
    broker = Broker()
    exchange = await open_exchange(broker)
    asked = asyncio.create_task(exchange.ask("t.q", b"\x80", 600.0, headers={"traceparent": "t"}))
    await until(lambda: exchange.resent >= 1)  # nobody listens
    bus, came = broker.connect(), list[dict[str, str]]()

    def heard(delivery: Delivery) -> None:
        came.append(dict(delivery.headers or {}))
        if len(came) == 3:
            bus.publish(delivery.reply, b"\x80")

    await bus.subscribe("t.q", heard)
    await asked
    assert came[0] == {"traceparent": "t"}
    assert [set(one) for one in came[1:]] == [{"traceparent", RESENT}] * 2
    assert int(came[1][RESENT]) <= int(came[2][RESENT])


async def test_the_first_reply_counts_and_others_are_ignored():
    broker = Broker()
    await Responder(broker.connect(), lambda body, n: [{"reply": 1}, {"reply": 2}]).listen("t.q")
    exchange = await open_exchange(broker)
    settled = []
    exchange.send("t.q", b"\x80", 600.0, settled.append)
    await until(lambda: settled)
    await asyncio.sleep(0.05)
    assert settled == [b"\x81\xa5reply\x01"]


async def test_nobody_listening_is_tried_again_until_somebody_does():
    broker = Broker()
    exchange = await open_exchange(broker, silence=60.0)
    waiting = asyncio.create_task(exchange.ask("t.q", b"\x80", 600.0))
    await until(lambda: exchange.resent)
    peer = await Responder(broker.connect(), lambda body, n: {"n": n}).listen("t.q")
    assert await waiting == b"\x81\xa1n\x01"
    assert len(peer.heard) == 1


async def test_nobody_listening_and_too_large_bodies_say_so() -> None:
    exchange = await open_exchange(Broker())
    with pytest.raises(Timeout, match=r"no service listens on t\.q"):
        await exchange.ask("t.q", b"\x80", 0.15)
    exchange = await open_exchange(Broker(max_payload=1000))
    with pytest.raises(BadInput, match="2,000 bytes"):
        await exchange.ask("t.q", bytes(2000), 1.0)
    assert len(exchange) == 0


async def test_no_reply_says_how_often_it_was_sent():
    broker = Broker()
    await Responder(broker.connect(), lambda body, n: None).listen("t.q")
    exchange = await open_exchange(broker)
    asked = asyncio.create_task(exchange.ask("t.q", b"\x80", 600.0))
    await until(lambda: exchange.resent >= 2)
    for waiting in exchange._waiting.values():
        waiting.expires = 0.0
    with pytest.raises(Timeout, match=r"no reply on t\.q in time, sent ([3-9]|\d\d) times"):
        await asked
    assert len(exchange) == 0


async def test_a_request_given_up_is_not_sent_again():
    broker = Broker()
    peer = await Responder(broker.connect(), lambda body, n: None).listen("t.q")
    exchange = await open_exchange(broker)
    task = asyncio.create_task(exchange.ask("t.q", b"\x80", 600.0))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = len(peer.heard)
    await asyncio.sleep(0.15)
    assert len(peer.heard) == before
    assert len(exchange) == 0


async def test_a_query_that_nobody_waits_for_any_more_is_taken_back() -> None:
    broker, subjects, key = Broker(), Subjects("t"), b"k" * 16
    system = await Responder(broker.connect(), lambda body, n: None).listen(subjects.query())
    gone = list[tuple[str, bytes]]()
    await broker.connect().subscribe(subjects.cancel(), lambda one: gone.append((one.subject, bytes(one.data))))
    exchange = Exchange(broker.connect("client"), subjects)
    await exchange.open()
    body = encode({"inputs": [1], "retry_key": key})
    tasks = [asyncio.create_task(exchange.ask(subject, body, 600.0)) for subject in ("t.query.a", "t.explain.a")]
    await until(lambda: len(system.heard) == 1)
    for task in tasks:
        task.cancel()
    with pytest.raises(Timeout):
        await exchange.ask("t.query.b", body, 0.01)
    settled: list[object] = []
    exchange.send("t.query.c", body, 600.0, settled.append)
    await exchange.stop()
    await until(lambda: len(gone) == 3)
    assert gone == [(f"t.cancel.{app}", encode({"retry_key": key})) for app in "abc"]
    assert len(settled) == 1


async def test_what_was_answered_is_not_taken_back() -> None:
    broker, subjects = Broker(), Subjects("t")
    await Responder(broker.connect(), lambda body, n: {"got": n}).listen(subjects.query())
    gone = await Responder(broker.connect(), lambda body, n: None).listen(subjects.cancel())
    exchange = Exchange(broker.connect("client"), subjects)
    await exchange.open()
    await exchange.ask("t.query.a", encode({"retry_key": b"k" * 16}), 600.0)
    await exchange.stop()
    assert gone.heard == []


async def test_closing_settles_what_waits_and_refuses_what_comes():
    broker = Broker()
    await Responder(broker.connect(), lambda body, n: None).listen("t.q")
    exchange = await open_exchange(broker)
    waiting = asyncio.create_task(exchange.ask("t.q", b"\x80", 600.0))
    await asyncio.sleep(0.01)
    await exchange.stop()
    with pytest.raises(NotConnected, match="closed before"):
        await waiting
    with pytest.raises(NotConnected, match="closed"):
        await exchange.ask("t.q", b"\x80", 1.0)


def test_another_event_loop_is_told_what_to_do() -> None:
    exchange = asyncio.run(open_exchange(Broker()))
    with pytest.raises(NotConnected, match="belongs to the event loop in which it was connected"):
        asyncio.run(exchange.ask("t.q", b"\x80", 1.0))


async def test_a_connection_that_ends_settles_what_waits():
    broker = Broker()
    await Responder(broker.connect(), lambda body, n: None).listen("t.q")
    bus = broker.connect()
    exchange = Exchange(bus, silence=60.0)
    await exchange.open()
    waiting = asyncio.create_task(exchange.ask("t.q", b"\x80", 600.0))
    await asyncio.sleep(0.01)
    await bus.close()
    with pytest.raises(NotConnected):
        await waiting


async def test_a_settler_that_fails_stops_nobody_else():
    broker = Broker()
    await Responder(broker.connect(), lambda body, n: None).listen("t.q")
    exchange = await open_exchange(broker)
    caught = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: caught.append(context["exception"]))

    def fail(reply):
        raise RuntimeError("mine")

    exchange.send("t.q", b"\x80", 0.01, fail)
    with pytest.raises(Timeout):
        await exchange.ask("t.q", b"\x80", 0.1)
    assert [str(error) for error in caught] == ["mine"]


def system(directory: Path, name: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "endpoints.json").write_text(
        f'{{"nats": "nats://{name}", "sql": "postgresql://{name}", "running": true}}'
    )
    return directory


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path) -> Iterator[None]:
    with chdir(tmp_path):
        yield


def test_directories_urls_and_ports_in_their_order(tmp_path: Path) -> None:
    one, two = system(tmp_path / "one", "one"), system(tmp_path / "two", "two")
    system(tmp_path / ".infaas", "here")
    environ = {"INFAAS_DATA_DIR": str(two), "INFAAS_NATS_URL": "nats://env"}
    assert locate(one, environ).nats == "nats://one"
    assert locate(None, environ).nats == "nats://two"
    system(tmp_path / ".infaas", "here")
    found = locate(None, {"INFAAS_NATS_URL": "nats://env"})
    assert (found.nats, found.sql) == ("nats://env", DEFAULT_SQL)
    assert locate(None, {"INFAAS_SQL_DSN": "postgresql://env"}).nats == DEFAULT_NATS


def test_the_directory_here_unless_it_is_stopped(tmp_path: Path) -> None:
    system(tmp_path / ".infaas", "here")
    assert locate(None, {}).sql == "postgresql://here"
    file = system(tmp_path / ".infaas", "here") / "endpoints.json"
    file.write_text(file.read_text().replace("true", "false"))
    assert locate(None, {}).nats == DEFAULT_NATS


def test_named_directories_need_a_system_else_the_default_ports(tmp_path: Path) -> None:
    assert locate(None, {}).nats == DEFAULT_NATS
    with pytest.raises(NotConnected, match="infaas up --data-dir"):
        locate(tmp_path / "nothing", {"INFAAS_NATS_URL": "nats://env"})


async def test_where_no_system_runs_is_said_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFAAS_NATS_URL", "INFAAS_SQL_DSN", "INFAAS_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("infaas.connecting.DEFAULT_NATS", f"nats://127.0.0.1:{free_port()}")
    with pytest.raises(NotConnected, match=f"no system runs in {tmp_path}: pass --data-dir .* or INFAAS_NATS_URL"):
        await connect(timeout=0.2)
    refused = BadLogin("NATS at 127.0.0.1:4222 refuses the user or password in its URL")
    assert why_not(refused, named=False).startswith(f"no system runs in {tmp_path}: pass --data-dir"), "it is another's"
    assert "in its URL; use the URL that `infaas up` printed" in why_not(refused, named=True)
