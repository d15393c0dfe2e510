"""Our own nats-server: starts, keeps, refuses strangers, and dies with whoever started it."""

import signal
import socket
import stat
from pathlib import Path

import pytest
from nats.aio.client import Client

from services.shell.host.nats import EmbeddedNats
from services.shell.host.process import ServerError
from tests.support.servers.nats import run
from tests.support.servers.processes import alive, eventually, read_line, script

SCRIPT = """
import sys, time
from pathlib import Path
from services.shell.host.nats import EmbeddedNats
server = EmbeddedNats(Path(sys.argv[1])).start()
print(server.process.pid, flush=True)
time.sleep(600)
"""


async def connect(url: str) -> Client:
    client = Client()
    await client.connect(url, allow_reconnect=False, connect_timeout=60)
    return client


def test_it_has_jetstream_and_takes_8_mb(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        client = await connect(url)
        assert client.max_payload == 8 * 2**20
        assert (await client.jetstream().account_info()).streams == 0
        await client.close()

    with EmbeddedNats(tmp_path) as server:
        run(main(server.url))
        config = (tmp_path / "nats.conf").read_text()
    assert "sync_interval: always" in config
    assert f'"127.0.0.1:{server.port}"' in config


@pytest.mark.parametrize("credentials", ["", '"user": "infaas", "pass": "wrong"'])
def test_without_the_password_nobody_gets_in(tmp_path: Path, credentials: str) -> None:
    with EmbeddedNats(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(f'CONNECT {{"verbose": true{"," if credentials else ""}{credentials}}}\r\n'.encode())
        lines = connection.makefile("rb")
        assert lines.readline().startswith(b"INFO")
        assert b"Authorization Violation" in lines.readline()
        lines.close()


def test_files_with_the_password_are_private(tmp_path: Path) -> None:
    with EmbeddedNats(tmp_path) as server:
        password = server.password
    holding = [path for path in tmp_path.rglob("*") if path.is_file() and password.encode() in path.read_bytes()]
    assert holding
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in holding)


def test_what_was_acknowledged_survives_kill_9_and_the_url_stays(tmp_path: Path) -> None:
    async def put(url: str) -> None:
        client = await connect(url)
        stream = client.jetstream()
        await stream.add_stream(name="S", subjects=["s.>"])
        for number in range(20):
            await stream.publish("s.x", str(number).encode())
        await client.close()

    async def count(url: str) -> int:
        client = await connect(url)
        messages = (await client.jetstream().stream_info("S")).state.messages
        await client.close()
        return messages

    server = EmbeddedNats(tmp_path).start()
    url, process = server.url, server.process
    try:
        run(put(url))
        process.kill()
        process.wait()
        server.launch()
        server.wait_ready()
        assert server.url == url
        assert run(count(url)) == 20
    finally:
        server.stop()
    again = EmbeddedNats(tmp_path)
    assert again.password == server.password


def test_stopping_leaves_nothing_and_may_be_repeated(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path).start()
    pid = server.process.pid
    server.stop()
    server.stop()
    assert not alive(pid)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent_and_the_directory_is_free_again(ending: signal.Signals, tmp_path: Path) -> None:
    with script(SCRIPT, str(tmp_path)) as parent:
        pid = int(read_line(parent))
        assert alive(pid)
        parent.send_signal(ending)
        parent.wait()
    assert eventually(lambda: not alive(pid))
    EmbeddedNats(tmp_path).start().stop()


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    with EmbeddedNats(tmp_path), pytest.raises(ServerError, match="in use"):
        EmbeddedNats(tmp_path, lock_wait=0.1).start()


def test_another_server_on_the_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    with EmbeddedNats(tmp_path / "one") as one, pytest.raises(ServerError, match=str(one.port)):
        EmbeddedNats(tmp_path / "two", one.port).start()
