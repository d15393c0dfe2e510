"""A process's pages: what it counts, whether it lives, whether it can do its work."""

import asyncio
import json
from collections.abc import Iterable

import pytest
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from bus.codec import encode
from bus.memory import MemoryBus
from bus.messages.events import OutcomeEvent, WorkerEvent
from bus.natsbus import NatsBus
from bus.port import Bus, StreamSpec
from bus.subjects import Subjects
from services.core.actor import Do, Effect, Envelope, Inlet, Record, Started, Watch
from services.core.metric import MetricFamily
from services.core.settings import MetricsSettings
from services.shell.http.pages import fetch
from services.shell.metrics import exporter as exporting
from services.shell.metrics.exporter import Exporter
from services.shell.runtime.runtime import Runtime
from tests.support.data.events import event
from tests.support.servers.nats import free_port

HOST = "127.0.0.1"


class Word(Struct, frozen=True):
    said: str


class Listener:
    """Records an event, gives its edge a command, and cannot stand a certain word."""

    def __init__(self, prefix: str) -> None:
        self.words = 0
        self._prefix = prefix

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        return (Inlet(subject=f"{self._prefix}.word", message=Word),)

    @property
    def watches(self) -> tuple[Watch, ...]:
        return ()

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        message = envelope.message
        if isinstance(message, Started):
            event = WorkerEvent(time=1.0, worker="w", hardware="cpu", from_state="None", to_state="Ready", reason="?")
            return (Record(event), Do("work", Word("do it"), 1.0), Do("more", 3, 1.0))
        if isinstance(message, Word):
            if message.said == "bad":
                raise ValueError(message.said)
            self.words += 1
        return ()


class Hands:
    async def perform(self, command: object) -> None:
        if not isinstance(command, Word):
            raise TypeError("only words")


class Insight:
    def families(self, actor: Listener) -> Iterable[MetricFamily]:
        words = MetricFamily("infaas_words", "gauge", "Words heard.")
        words.add(actor.words)
        return (words,)

    def missing(self, actor: Listener, now: float) -> str:
        assert now > 1e9
        return "" if actor.words else "a word"


async def page(port: int, path: str) -> tuple[int, str]:
    answer = await fetch(HOST, port, path, 10.0)
    return answer.status, answer.text


def samples(text: str) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(text)
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


async def eventually(port: int, series: tuple[str, ...], value: float) -> dict[tuple[str, ...], float]:
    for _ in range(1200):
        found = samples((await page(port, "/metrics"))[1])
        if found.get(series) == value:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError((series, value, found))


async def test_a_process_shows_what_it_does_and_lacks(nats_url: str, prefix: str) -> None:
    port = free_port()
    exporter = Exporter("listener", MetricsSettings(port=port))
    await exporter.open()
    assert await page(port, "/healthz") == (200, "ok\n")
    status, body = await page(port, "/readyz")
    assert (status, json.loads(body)) == (503, {"ready": False, "missing": ["a connection to NATS"]})

    bus: Bus = await NatsBus.connect(nats_url, name="listener")
    subjects = Subjects(prefix)
    spec = StreamSpec(subjects.event_stream, (subjects.event("worker"),), "limits", 2**20)
    await bus.ensure_stream(spec)
    failing = [""]

    async def reachable() -> str:
        return failing[0]

    runtime = Runtime(
        "listener", lambda: Listener(prefix), bus, subjects, Hands(), insight=Insight(), reachable=reachable
    )
    exporter.attach(bus, [runtime])
    assert (await page(port, "/readyz"))[0] == 503
    await runtime.start()
    exporter.running(True)
    assert json.loads((await page(port, "/readyz"))[1])["missing"] == ["listener: a word"]

    for body in (b"\x01", encode(Word("bad")), encode(Word("good")), encode(Word("fine"))):
        bus.publish(f"{prefix}.word", body)
    found = await eventually(port, ("infaas_words",), 2)
    assert (await page(port, "/readyz"))[0] == 200
    assert found["infaas_messages_total", "listener", "Word"] == 4
    assert found["infaas_undecodable_messages_total", "listener"] == 1
    assert found["infaas_handler_faults_total", "listener"] == 1
    assert found["infaas_commands_total", "listener", "Word", "done"] == 1
    assert found["infaas_commands_total", "listener", "int", "failed"] == 1
    assert found["infaas_command_seconds_count", "listener", "Word"] == 1
    assert found["infaas_process_info", "listener"] == 1
    found = await eventually(port, ("infaas_events_held", "listener"), 0)
    assert found["infaas_worker_changes_total", "Ready"] == 1

    failing[0] = "the database"
    assert json.loads((await page(port, "/readyz"))[1])["missing"] == ["the database"]
    failing[0] = ""
    exporter.running(False)
    assert (await page(port, "/readyz"))[0] == 503
    await runtime.stop(1.0)
    await bus.close()
    assert (await page(port, "/readyz"))[0] == 503
    assert (await page(port, "/healthz"))[0] == 200
    await exporter.close()


async def test_other_requests_are_turned_away() -> None:
    port = free_port()
    exporter = Exporter("listener", MetricsSettings(port=port))
    await exporter.open()
    assert (await page(port, "/nothing"))[0] == 404
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\naccept: application/openmetrics-text; version=1.0.0\r\n\r\n")
    reply = await reader.read()
    assert b"\r\ncontent-type: application/openmetrics-text" in reply
    assert reply.endswith(b"\n# EOF\n")
    writer.close()
    for request, status in (
        (b"POST /metrics HTTP/1.1\r\nHost: h\r\n\r\n", b"405"),
        (b"HEAD /healthz HTTP/1.1\r\nHost: h\r\n\r\n", b"200"),
        (b"nonsense\r\n\r\n", b"400"),
    ):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(request)
        reply = await reader.read()
        assert reply.split(b" ")[1] == status
        assert reply.endswith(b"\r\n\r\n") == request.startswith(b"HEAD")
        writer.close()
    await exporter.close()


async def test_a_busy_port_is_no_reason_not_to_serve() -> None:
    taken = await asyncio.start_server(lambda reader, writer: writer.close(), HOST, port := free_port())
    exporter = Exporter("listener", MetricsSettings(port=port))
    await exporter.open()
    await exporter.close()
    taken.close()


async def test_without_a_port_nothing_listens_and_nothing_is_counted() -> None:
    for settings in (MetricsSettings(), MetricsSettings(enabled=False, port=free_port())):
        exporter = Exporter("listener", settings)
        await exporter.open()
        assert exporter.totals is None
        if settings.port:
            try:
                await asyncio.open_connection(HOST, settings.port)
            except ConnectionRefusedError:
                continue
            raise AssertionError("it listens")
        await exporter.close()


async def test_it_listens_where_the_settings_say_and_shows_no_more_series() -> None:
    asked = [event(OutcomeEvent, app=f"a{n}", outcome="ok", variant="v") for n in range(9)]
    for series in (3, 1000):
        exporter = Exporter("listener", MetricsSettings(host="127.0.0.2", port=free_port(), series=series))
        await exporter.open()
        exporter.totals.fold("outcome", asked)
        port = exporter._settings.port
        shown = await fetch("127.0.0.2", port, "/metrics", 10.0)
        assert shown.status == 200
        assert ('app="a8"' in shown.text) is (series == 1000)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, port)
        await exporter.close()


# -- /startz: up from the first readiness on, whatever goes away later.


class Idle:
    inlets: tuple[Inlet, ...] = ()
    watches: tuple[Watch, ...] = ()

    def handle(self, envelope: Envelope) -> tuple[()]:
        del envelope
        return ()


async def test_it_is_up_once_it_has_been_ready_and_stays_so() -> None:
    lacking = ["a database"]

    async def reachable() -> str:
        return lacking[0]

    bus = MemoryBus()
    exporter = Exporter("recorder", MetricsSettings(port=0))
    assert (await exporter.startup()).status == 503  # no connection yet
    runtime = Runtime("idle", Idle, bus, Subjects(), reachable=reachable)
    exporter.attach(bus, [runtime])
    assert (await exporter.startup()).status == 503  # not running yet
    await runtime.start()
    exporter.running(True)
    page = await exporter.startup()
    assert page.status == 503
    assert json.loads(page.text)["missing"] == ["a database"]
    lacking[0] = ""
    assert (await exporter.startup()).status == 200
    lacking[0] = "a database"
    assert (await exporter.readiness()).status == 503
    assert (await exporter.startup()).status == 200  # an orchestrator is not to start it again for that
    exporter.running(False)
    assert (await exporter.startup()).status == 200  # it drains
    await runtime.stop()


async def test_what_others_fail_to_bring_does_not_keep_it_down_for_ever() -> None:
    async def reachable() -> str:
        return "workers"

    bus = MemoryBus()
    exporter = Exporter("dispatcher", MetricsSettings(port=0))
    runtime = Runtime("idle", Idle, bus, Subjects(), reachable=reachable)
    exporter.attach(bus, [runtime])
    await runtime.start()
    exporter.running(True)
    assert (await exporter.startup()).status == 503
    exporter._since -= exporting.UNREADY
    assert (await exporter.startup()).status == 200
    await runtime.stop()
