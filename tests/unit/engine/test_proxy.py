"""services/engine: a real engine's answers through the proxy, over real sockets; what is refused never reaches the engine."""

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from services.shell.http.pages import LIMITS
from tests.support.gateways.web_application import Reply, read
from tests.support.servers.docker_engine import NODE, STALE, StandIn, fronted, stand_in
from tests.support.servers.nats import free_port, run
from tests.support.servers.processes import environ, eventually, fetched

LABELS = {"infaas.worker": "cpu", "rack": "7"}
SPEC = {"Labels": LABELS, "Role": "manager", "Availability": "active"}
UPDATE = f"/v1.41/nodes/{NODE}/update?version=14"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[StandIn]:
    with stand_in(tmp_path) as server:
        yield server


def ask(engine: StandIn, method: str, target: str, body: Any = None, token: str = "", **headers: str) -> Reply:
    """One request through the proxy. body: bytes, or what is written as JSON."""
    text = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()

    async def main() -> Reply:
        async with fronted(engine.path, token) as front:
            return await front.ask(method, target, text, **headers)

    return run(main())


async def test_what_is_let_through_is_answered(engine: StandIn) -> None:
    async with fronted(engine.path) as front:
        for path in ("/version", "/info", "/nodes", "/tasks", "/services", f"/nodes/{NODE}"):
            for prefix in ("", "/v1.41"):
                reply = await front.ask("GET", prefix + path)
                assert reply.status == 200, reply.body
                assert b"hunter2" not in reply.body
                assert json.loads(reply.body)
                assert engine.seen[-1] == ("GET", prefix + path, b"")
        filters = "?filters=%7B%22role%22%3A+%5B%22worker%22%5D%7D"
        assert (await front.ask("GET", "/v1.41/nodes" + filters)).status == 200
        assert engine.seen[-1][1] == "/v1.41/nodes" + filters


def test_clients_learn_what_to_speak(engine: StandIn) -> None:
    reply = ask(engine, "GET", "/_ping")
    assert (reply.status, reply.body) == (200, b"OK")
    assert reply.headers["api-version"] == "1.41"
    assert "set-cookie" not in reply.headers
    assert ask(engine, "HEAD", "/v1.41/_ping").headers["api-version"] == "1.41"
    assert engine.seen[-1][:2] == ("HEAD", "/v1.41/_ping")


def test_the_engines_own_refusals_are_passed_on(engine: StandIn) -> None:
    reply = ask(engine, "GET", "/v1.41/nodes/nobody")
    assert (reply.status, reply.message) == (404, "/nodes/nobody not found")


def test_a_node_may_be_named_by_its_host(engine: StandIn) -> None:
    target = "/nodes/n0/update?version=14"
    assert ask(engine, "POST", target, {**SPEC, "Labels": {**LABELS, "infaas.a": "1"}}).status == 200
    assert engine.seen[-1][1] == f"/nodes/{NODE}/update?version=14"


def test_what_goes_to_the_engine_is_not_what_came(engine: StandIn) -> None:
    body = json.dumps({**SPEC, "Name": "", "Labels": {**LABELS, "infaas.a": "1"}}, indent=3).encode()
    assert ask(engine, "POST", UPDATE, body).status == 200
    assert json.loads(engine.seen[-1][2]) == {**SPEC, "Labels": {**LABELS, "infaas.a": "1"}}


def test_another_version_is_told_as_the_engine_tells_it(engine: StandIn) -> None:
    for version in (13, 15):
        reply = ask(engine, "POST", f"/v1.41/nodes/{NODE}/update?version={version}", {**SPEC, "Role": "worker"})
        assert (reply.status, reply.message) == (500, STALE)
    assert all(method == "GET" for method, *_ in engine.seen)


# -- labels


def test_our_labels_are_set_and_removed(engine: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    labels = {"rack": "7", "infaas.order": "gpu"}
    assert ask(engine, "POST", UPDATE, {**SPEC, "Labels": labels}).status == 200
    assert engine.node["Spec"] == {**SPEC, "Labels": labels}
    (line,) = [record.__dict__ for record in caplog.records if record.name.startswith("services")]
    assert (line["client"], line["node"], line["hostname"]) == ("127.0.0.1", NODE, "n0")
    assert (line["set"], line["removed"]) == ({"infaas.order": "gpu"}, ["infaas.worker"])


async def test_of_writers_at_once_one_wins(engine: StandIn) -> None:
    async with fronted(engine.path) as front:
        bodies = [json.dumps({**SPEC, "Labels": {**LABELS, "infaas.a": str(i)}}).encode() for i in range(8)]
        found = await asyncio.gather(*(front.ask("POST", UPDATE, body) for body in bodies))
        (won,) = [i for i, reply in enumerate(found) if reply.status == 200]
        assert all(reply.message == STALE for i, reply in enumerate(found) if i != won)
        assert engine.node["Spec"]["Labels"]["infaas.a"] == str(won)


BODIES = {
    "the role": {**SPEC, "Role": "worker"},
    "the availability": {**SPEC, "Availability": "drain"},
    "the name": {**SPEC, "Name": "other"},
    "another's label": {**SPEC, "Labels": {**LABELS, "rack": "8"}},
    "a label of the operator's": {**SPEC, "Labels": {**LABELS, "infaas.nats": "true"}},
    "no labels": {"Role": "manager", "Availability": "active"},
    "the role twice": json.dumps(SPEC).encode()[:-1] + b', "Role": "manager"}',
    "the role in small letters": {**SPEC, "role": "worker"},
    "nothing": b"",
    "no JSON": b"Role=worker",
    "a list": [SPEC],
    "two specs": json.dumps(SPEC).encode() * 2,
    "a deep one": b'{"Labels":' * 5000,
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_other_changes_do_not_reach_the_engine(body: Any, engine: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    before = json.dumps(engine.node)
    reply = ask(engine, "POST", UPDATE, body)
    assert reply.status == 403
    assert json.dumps(engine.node) == before
    assert all(method == "GET" for method, *_ in engine.seen)
    (line,) = [record.__dict__ for record in caplog.records if record.name.startswith("services")]
    assert (line["client"], line["method"], line["target"]) == ("127.0.0.1", "POST", UPDATE)
    assert line["reason"] == reply.message


# -- refusals

REFUSED = [
    ("GET", "/v1.41/containers/json"),
    ("POST", "/v1.41/containers/create"),
    ("POST", "/v1.41/containers/x/exec"),
    ("POST", "/v1.41/services/create"),
    ("POST", "/v1.41/services/x/update?version=1"),
    ("GET", "/v1.41/secrets"),
    ("GET", "/v1.41/swarm"),
    ("POST", "/v1.41/swarm/leave?force=1"),
    ("DELETE", f"/v1.41/nodes/{NODE}"),
    ("PUT", UPDATE),
    ("GET", "//nodes"),
    ("GET", "/v1.41/../containers/json"),
    ("GET", "/v1.41/nodes/%2e%2e/containers/json"),
    ("GET", "http://docker/v1.41/nodes"),
    ("OPTIONS", "*"),
    ("CONNECT", "docker:80"),
]


@pytest.mark.parametrize(("method", "target"), REFUSED, ids=lambda found: found[:50])
def test_what_is_refused_does_not_reach_the_engine(
    method: str, target: str, engine: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    reply = ask(engine, method, target)
    assert reply.status == 403
    assert reply.headers["content-type"] == "application/json"
    assert engine.seen == []
    (line,) = [record.__dict__ for record in caplog.records if record.name.startswith("services")]
    assert (line["levelname"], line["client"], line["target"]) == ("WARNING", "127.0.0.1", target)


HEADERS = {
    "an upgrade": ("GET", "/_ping", {"Connection": "Upgrade", "Upgrade": "h2c"}),
    "an upgrade that is not offered": ("GET", "/_ping", {"Connection": "Upgrade"}),
    "a web socket": (
        "GET",
        "/v1.41/nodes",
        {"Connection": "upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"},
    ),
    "attach": ("POST", "/v1.41/containers/x/attach?stream=1", {"Connection": "Upgrade", "Upgrade": "tcp"}),
    "a web page": ("GET", "/v1.41/nodes", {"Origin": "http://evil.example"}),
    "a web page of ours": ("GET", "/v1.41/nodes", {"Sec-Fetch-Site": "same-origin"}),
    "a form": ("POST", UPDATE, {"Content-Type": "text/plain"}),
    "a compressed body": ("POST", UPDATE, {"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize(("method", "target", "headers"), HEADERS.values(), ids=HEADERS.keys())
def test_headers_that_are_refused(method: str, target: str, headers: dict[str, str], engine: StandIn) -> None:
    assert ask(engine, method, target, SPEC if method == "POST" else None, **headers).status == 403
    assert engine.seen == []


def test_errors_without_a_message_and_bodies_of_what_reads(engine: StandIn) -> None:
    assert ask(engine, "GET", "/v1.41/nodes", {}).status == 403
    assert ask(engine, "GET", "/v1.41/nodes", b"").status == 200
    engine.odd["/nodes"] = b"HTTP/1.1 503 Busy\r\nContent-Length: 6\r\n\r\n<html>"
    assert (reply := ask(engine, "GET", "/v1.41/nodes")).status == 503
    assert reply.message == "the engine did not say why"


async def test_with_a_token_only_who_shows_it_may_ask(engine: StandIn) -> None:
    async with fronted(engine.path, token="s3cret") as front:
        for shown in (
            {},
            {"Authorization": "Bearer other"},
            {"Authorization": "Basic s3cret"},
            {"Authorization": "Bearer"},
        ):
            reply = await front.ask("GET", "/v1.41/nodes", **shown)
            assert reply.status == 401
            assert "token" in reply.message
        assert (await front.ask("GET", "/v1.41/containers/json")).status == 403
        assert engine.seen == []
        for path in ("/_ping", "/version"):
            assert (await front.ask("GET", path)).status == 200
        assert (await front.ask("GET", "/v1.41/nodes", Authorization="Bearer s3cret")).status == 200
        body = json.dumps(SPEC).encode()
        assert (await front.ask("POST", UPDATE, body)).status == 401
        assert (await front.ask("POST", UPDATE, body, Authorization="bearer s3cret")).status == 200


# -- what a connection may do: services/shell/http, whose other limits are tested at tests/unit/shell/http/test_protocol.py

GET = b"GET /nodes HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST " + UPDATE.encode() + b" HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"


async def test_one_request_a_connection(engine: StandIn) -> None:
    async with fronted(engine.path) as front:
        (reply,) = await front.say(GET + GET.replace(b"/nodes", b"/tasks"), replies=2)
        assert (reply.status, reply.headers["connection"], json.loads(reply.body)[0]["ID"]) == (200, "close", NODE)
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(text := json.dumps(SPEC).encode()), text)
        (reply,) = await front.say(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
        assert reply.status == 200
        assert [target for _, target, _ in engine.seen] == ["/nodes", f"/v1.41/nodes/{NODE}", UPDATE]


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (POST + b"Content-Length: 65537\r\n\r\n", 413, "is to have 65537: send less"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n11000\r\n" + bytes(0x11000), 413, "65536 bytes: send less"),
        (GET[:-2] + b"A: " + b"a" * 17_000, 431, "16384 bytes"),
        (b"hello\r\n\r\n", 400, "not a request"),
        (b"BREW /coffee HTTP/1.1\r\nHost: h\r\n\r\n", 405, "no path takes this method"),
    ],
    ids=["told", "in a chunk", "a long head", "no HTTP", "a method nobody knows"],
)
async def test_what_is_no_request_is_told_so_and_counted(
    data: bytes, status: int, message: str, engine: StandIn
) -> None:
    async with fronted(engine.path) as front:
        (reply,) = await front.say(data)
        assert reply.status == status
        assert message in reply.message
        assert front.proxy.refused == 1
        assert engine.seen == []


async def test_it_stops_although_somebody_holds_on(tmp_path: Path) -> None:
    async with fronted(str(tmp_path / "none"), limits=replace(LIMITS, head_timeout_s=600.0)) as front:
        reader, writer = await front.connect()
        writer.write(b"GET")
        await writer.drain()
        await asyncio.wait_for(front.server.close(1.0), 300.0)  # not as long as its head may take
        assert await read(reader) is None
        writer.close()


# -- the engine


async def test_an_engine_that_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with fronted(str(tmp_path / "none.sock")) as front:
        reply = await front.ask("GET", "/v1.41/nodes")
        assert reply.status == 502
        assert "cannot be reached" in reply.message
        assert "No such file" in await front.proxy.missing()
        with stand_in(tmp_path) as engine:
            engine.server_close()
        (tmp_path / "engine.sock").rename(tmp_path / "none.sock")  # a socket that nobody listens on
        assert (await front.ask("GET", "/_ping")).status == 502
        assert "refused" in await front.proxy.missing()
    assert [record.levelname for record in caplog.records if record.name.startswith("services")] == ["ERROR", "ERROR"]


ODD = {
    "nothing": b"",
    "no HTTP": b"hello\r\n\r\n",
    "a part": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n[",
    "no JSON": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    "no list": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "elsewhere": b"HTTP/1.1 301 Moved\r\nLocation: /containers/json\r\nContent-Length: 0\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: tcp\r\nConnection: Upgrade\r\n\r\nx",
    "a long head": b"HTTP/1.1 200 OK\r\nA: " + b"a" * 100_000,
}


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD.keys())
def test_an_engine_that_answers_something_else(answer: bytes, engine: StandIn) -> None:
    engine.odd["/nodes"] = answer
    reply = ask(engine, "GET", "/v1.41/nodes")
    assert reply.status == 502
    assert "engine" in reply.message


@pytest.mark.parametrize(
    "answer",
    [b"Transfer-Encoding: chunked\r\n\r\n1\r\n[\r\n1\r\n]\r\n0\r\n\r\n", b"\r\n[]"],
    ids=["in chunks", "until the end of its connection"],
)
def test_an_engine_may_answer_in_parts(answer: bytes, engine: StandIn) -> None:
    engine.odd["/nodes"] = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n" + answer
    reply = ask(engine, "GET", "/v1.41/nodes")
    assert (reply.status, json.loads(reply.body)) == (200, [])


async def test_an_engine_that_does_not_answer(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "engine.sock"))
        silent.listen()
        async with fronted(str(tmp_path / "engine.sock"), patience=0.2) as front:
            reply = await front.ask("GET", "/v1.41/nodes")
            assert (reply.status, reply.message) == (502, "engine proxy: the engine did not answer within 0.2 s")
            assert "0.2 s" in await front.proxy.missing()


async def test_it_is_ready_before_a_manager_only(engine: StandIn) -> None:
    async with fronted(engine.path) as front:
        assert await front.proxy.missing() == ""
        engine.answers["/info"]["Swarm"]["ControlAvailable"] = False
        assert "manages no swarm" in await front.proxy.missing()
        del engine.answers["/info"]["Swarm"]
        assert "manages no swarm" in await front.proxy.missing()
        engine.answers["/info"] = []
        assert await front.proxy.missing()


# -- `infaas run engine-proxy`: the process as operators start it.


@contextmanager
def process(socket_: Path, *options: str, **more: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """The process, its port and that of its pages."""
    port, pages = free_port(), free_port()
    said = environ(
        INFAAS_ENGINE__PORT=str(port), INFAAS_ENGINE__SOCKET=str(socket_), INFAAS_METRICS__PORT=str(pages), **more
    )
    command = [sys.executable, "-P", "-m", "infaas.cli", "run", "engine-proxy", *options]
    with subprocess.Popen(command, env=said, stderr=subprocess.PIPE, text=True) as found:
        try:
            yield found, port, pages
        finally:
            found.kill()


def get(port: int, path: str, **headers: str) -> tuple[int, str]:
    return fetched(f"http://127.0.0.1:{port}{path}", **headers)


def test_it_runs_without_a_bus_and_logs_json_lines(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    with process(tmp_path / "engine.sock", INFAAS_ENGINE__TOKEN_FILE=str(token)) as (found, port, pages):
        assert eventually(lambda: get(pages, "/healthz")[0] == 200)
        assert get(pages, "/readyz")[0] == get(pages, "/startz")[0] == 503
        with stand_in(tmp_path):
            assert json.loads(get(pages, "/readyz")[1]) == {"ready": True, "missing": []}
            assert get(port, "/v1.41/containers/json")[0] == 403
            assert get(port, "/v1.41/nodes")[0] == 401
            status, body = get(port, f"/v1.41/nodes/{NODE}", Authorization="Bearer s3cret")
            assert (status, json.loads(body)["ID"]) == (200, NODE)
        # the engine has gone
        assert [get(pages, path)[0] for path in ("/healthz", "/readyz", "/startz")] == [200, 503, 200]
        metrics = get(pages, "/metrics")[1]
        assert 'infaas_engine_requests_total{outcome="refused"} 2.0' in metrics
        assert "infaas_engine_label_changes_total 0.0" in metrics
        found.send_signal(signal.SIGTERM)
        assert found.stderr is not None
        lines: list[dict[str, Any]] = [json.loads(line) for line in found.stderr]
        assert found.wait(10) == 0
    assert {line["service"] for line in lines} == {"engine-proxy"}
    (refused, unknown) = [line for line in lines if line["message"] == "refused"]
    assert (refused["client"], refused["target"], refused["status"]) == ("127.0.0.1", "/v1.41/containers/json", 403)
    assert unknown["status"] == 401
    assert "s3cret" not in json.dumps(lines)


def test_it_listens_and_logs_as_the_settings_of_its_config_say(tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text('log_level = "ERROR"\n[engine]\naddress = "127.0.0.2"\n')
    options = ("--config", str(config))
    with stand_in(tmp_path), process(tmp_path / "engine.sock", *options) as (found, port, pages):
        assert eventually(lambda: get(pages, "/readyz")[0] == 200)
        with urllib.request.urlopen(f"http://127.0.0.2:{port}/v1.41/nodes/{NODE}", timeout=120) as reply:
            assert reply.status == 200
        assert get(port, f"/v1.41/nodes/{NODE}")[0] == 0, "not where it listens by default"
        found.send_signal(signal.SIGTERM)
        assert found.stderr.read() == "", "that it runs and what it refuses is only INFO"


def test_what_is_wrong_with_its_settings_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "infaas.cli", "run"]

    def told(*services: str, **more: str) -> str:
        done = subprocess.run(
            [*command, *services], env=environ(**more), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode != 0
        return done.stderr

    assert "needs a process of its own" in told("engine-proxy", "gateway")
    assert "engine.token" in told("engine-proxy", INFAAS_ENGINE__TOKEN="two words")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = told("engine-proxy", INFAAS_ENGINE__PORT=str(taken.getsockname()[1]))
    assert "engine.port" in said
    assert "Traceback" not in said
