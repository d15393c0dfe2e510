"""docker-py before scripted HTTP servers in the managers' place: which failures another host is asked for, and which are answers."""

import asyncio
import gc
import json
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bus.messages.scaling import StartMachine
from services.autoscaler.vms.providers.base import ProviderError
from services.autoscaler.vms.providers.swarm import Managers, NoManager, OutOfSequence, Swarm
from services.core.settings import SwarmSettings
from tests.support.clients.responders import until
from tests.support.servers.docker_engine import stand_in
from tests.support.servers.nats import free_port, run

docker = pytest.importorskip("docker", reason="docker-py is missing: the extra swarm")
NODES = "/v1.41/nodes"


class Manager(ThreadingHTTPServer):
    """status, text: what it answers to everything but /version. seen: requests, with who asked."""

    daemon_threads = True

    def __init__(self, status: int = 200, text: str = "[]") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.text = status, text
        self.seen: list[tuple[str, str, str]] = []
        self.slow = threading.Event()  # set: it does not answer
        self.host = f"tcp://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Manager

    def do_GET(self) -> None:
        self.server.seen.append(("GET", self.path, self.headers.get("Authorization", "")))
        if self.path == "/version":
            self._say(200, json.dumps({"ApiVersion": "1.41"}))
            return
        while self.server.slow.is_set():
            self.server.slow.wait(0.01)
            if self.server.seen[-1][1] == "end":
                return
        self._say(self.server.status, self.server.text)

    def _say(self, status: int, text: str) -> None:
        body = (text if status == 200 else json.dumps({"message": text})).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def managers(*servers: Manager) -> Iterator[None]:
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.seen.append(("", "end", ""))
            server.slow.clear()
            server.shutdown()
            thread.join()
            server.server_close()


async def nodes(asked: Managers) -> object:
    return await asked.ask(lambda client: client.nodes())


@asynccontextmanager
async def asking(
    *servers: Manager, hosts: Sequence[str] = (), token: str = "", seconds: float = 5.0
) -> AsyncIterator[Managers]:
    """Who asks these managers, which run meanwhile. hosts: others before them."""
    with managers(*servers):
        asked = Managers([*hosts, *(one.host for one in servers)], token, seconds)
        yield asked
        await asked.close()


def times(server: Manager) -> int:
    """How often it was asked for the nodes."""
    return [path for _, path, _ in server.seen].count(NODES)


async def test_the_host_that_answers_is_asked_on_whoever_is_not_there() -> None:
    one, two = Manager(), Manager()
    async with asking(one, two, token="secret") as asked:
        assert await nodes(asked) == await nodes(asked) == []
        assert one.seen[1:] == [("GET", NODES, "Bearer secret")] * 2
        assert two.seen == []
    one, two = Manager(), Manager()
    one.slow.set()
    async with asking(one, two, hosts=[f"tcp://127.0.0.1:{free_port()}"], seconds=0.5) as asked:
        assert await nodes(asked) == []


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (503, "This node is not a swarm manager."),
        (500, "rpc error: code = Unknown desc = The swarm does not have a leader."),
        (502, "engine proxy: the engine does not answer"),
    ],
)
async def test_a_manager_that_cannot_is_left_for_the_next_one(status: int, text: str) -> None:
    one, two = Manager(status, text), Manager()
    async with asking(one, two) as asked:
        assert await nodes(asked) == await nodes(asked) == []
        assert (times(one), times(two)) == (1, 2)


async def test_of_a_name_that_stands_for_several_each_is_asked() -> None:
    """`localhost` for 127.0.0.1, and on most machines for ::1, where nobody listens."""
    one = Manager()
    with managers(one):
        asked = Managers([f"tcp://localhost:{one.server_port}"], "", 5.0)
        assert await nodes(asked) == []
        assert asked._host == one.host
        await asked.close()


async def test_a_connection_that_was_kept_and_has_ended_meanwhile_is_made_anew() -> None:
    one = Manager()
    async with asking(one) as asked:
        assert await nodes(asked) == []
        one.status, one.text = 503, "it is being started again"
        with pytest.raises(NoManager):
            await nodes(asked)
        assert times(one) == 3, "by the old connection and by a new one"
        one.status, one.text = 200, "[]"
        assert await nodes(asked) == []


async def test_what_a_manager_refuses_is_an_answer_told_by_its_text() -> None:
    one, two = Manager(403, "the engine proxy lets nothing through to this path"), Manager()
    async with asking(one, two) as asked:
        with pytest.raises(ProviderError, match="refuses with status 403: the engine proxy lets nothing through"):
            await nodes(asked)
        assert two.seen == []
    one = Manager(500, "rpc error: code = Unknown desc = update out of sequence")
    async with asking(one) as asked:
        with pytest.raises(OutOfSequence):
            await nodes(asked)
        one.status, one.text = 200, "[]"
        assert await nodes(asked) == []


async def test_when_none_answers_all_reasons_are_told_and_nobody_says_no() -> None:
    one = Manager(503, "This node is not a swarm manager.")
    async with asking(one, hosts=[f"tcp://127.0.0.1:{free_port()}"]) as asked:
        with pytest.raises(NoManager, match=r"no manager answers: .*Connection refused.*not a swarm manager"):
            await nodes(asked)
        one.status, one.text = 200, "[]"
        assert await nodes(asked) == []


async def test_one_that_was_given_up_while_it_waited_leaves_the_rest_in_order() -> None:
    one = Manager()
    async with asking(one, seconds=60.0) as asked:
        one.slow.set()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await nodes(asked)
        one.slow.clear()
        assert await nodes(asked) == []


@pytest.mark.parametrize("kept", [False, True])
async def test_the_connection_of_one_that_was_given_up_is_closed_once_its_answer_is_there(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a slow machine leaves one open for each command whose time is up."""
    one = Manager()
    closed = threading.Event()
    close = docker.APIClient.close

    def noted(client: docker.APIClient) -> None:
        close(client)
        closed.set()

    monkeypatch.setattr(docker.APIClient, "close", noted)
    async with asking(one, seconds=30.0) as asked:
        if kept:
            await nodes(asked)
        one.slow.set()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await nodes(asked)
        one.slow.clear()
        assert await asyncio.to_thread(closed.wait, 30.0)


def test_an_engine_that_is_not_there_leaves_no_socket_open(tmp_path: Path) -> None:
    """A warning of it would come whenever its memory is collected, in the midst of anything else."""
    with stand_in(tmp_path) as engine:
        host = f"unix://{engine.path}"

    async def main() -> None:
        asked = Managers([host], "", 5.0)
        with pytest.raises(NoManager, match="Connection refused"):
            await nodes(asked)
        await asked.close()

    with warnings.catch_warnings(record=True) as left_open:
        warnings.simplefilter("always", ResourceWarning)
        run(main())
        gc.collect()
    assert [str(warning.message) for warning in left_open] == []


async def test_one_that_does_not_say_its_version_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Manager()
    closed: list[str] = []
    monkeypatch.setattr(docker.APIClient, "close", lambda client: closed.append(client.base_url))
    monkeypatch.setattr(_Handler, "do_GET", lambda handler: handler._say(500, "odd"))

    async with asking(one) as asked:
        with pytest.raises(NoManager):
            await nodes(asked)
        assert closed == [one.host.replace("tcp", "http")]


async def test_whom_it_asks_and_for_how_long_are_the_settings() -> None:
    one, two = Manager(), Manager()
    one.slow.set()
    with managers(one, two):
        alone = Swarm(SwarmSettings(hosts=(one.host,), token="secret", timeout_s=0.3))
        assert "read timeout=0.3" in (await alone.inventory()).error
        await alone.close()
        both = Swarm(SwarmSettings(hosts=(one.host, two.host), token="secret", timeout_s=0.3))

        async def answered() -> bool:
            """A busy machine may need longer than 0.3 s for the other one's answer, too."""
            return (await both.inventory()).error == ""

        await until(answered)
        await both.close()
        assert {who for _, _, who in two.seen[1:]} == {"Bearer secret"}


async def test_the_command_that_makes_a_machine_has_the_time_of_the_settings() -> None:
    manager = Manager()
    sleeps = ("sh", "-c", "exec sleep 1000")
    swarm = Swarm(SwarmSettings(hosts=(manager.host,), add=sleeps, remove=sleeps, command_s=0.5))
    with managers(manager):
        with pytest.raises(ProviderError, match=r"sh did not end within 0\.5 s"):
            await swarm.start(StartMachine(worker="n1", kind="cpu", epoch=1, bought=True))
        await swarm.close()


def test_without_docker_py_the_remedy_is_said() -> None:
    code = (
        "import sys; sys.modules['docker'] = None\n"
        "from services.autoscaler.vms.providers.swarm import Managers\n"
        "try: Managers(['tcp://a:1'], '', 1.0)\n"
        "except OSError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'infaas[swarm]'" in done.stdout
