"""services/shell/probe.py, the health check of containers: what it asks, what it says, and that it imports next to nothing."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.shell import probe
from services.shell.http.messages import HttpReply
from services.shell.http.pages import serve_pages, state_page
from tests.support.servers.nats import run
from tests.support.servers.processes import eventually, read_line, script


def probed(*arguments: str, **environ: str) -> int:
    return probe.main(arguments, environ)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_it_asks_the_page_and_says_what_is_wrong(status: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> int:
        async def page(_: str) -> HttpReply:
            return state_page("up", ["a connection to NATS"] if status != 200 else [])

        server = await serve_pages("127.0.0.1", 0, {"/startz": page})
        try:
            return await asyncio.to_thread(probed, INFAAS_METRICS__PORT=str(server.port))
        finally:
            await server.close(0.0)

    assert run(main()) == code
    assert ("a connection to NATS" in capsys.readouterr().out) == (status != 200)


def test_nobody_there_is_not_well_and_without_a_port_there_is_nothing_to_ask(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # not listening
        port = held.getsockname()[1]
        assert probed("--port", str(port)) == 1
        assert f"no answer at port {port}" in capsys.readouterr().out
        assert probed("--listening", str(port)) == 1
        held.listen()
        assert probed("--listening", str(port)) == 0
    assert probed() == 0


def test_what_answers_in_another_language_is_not_well() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]

        async def main() -> int:
            asking = asyncio.create_task(asyncio.to_thread(probed, "--port", str(port)))
            connection, _ = await asyncio.to_thread(server.accept)
            with connection:
                await asyncio.to_thread(connection.recv, 4096)
                connection.sendall(b"-ERR 'Unknown Protocol Operation'\r\n")
            return await asking

        assert run(main()) == 1


def test_probes_refuse_wrong_words_and_load_nothing_heavy() -> None:
    assert probed("startz") == 2
    assert probed("--port") == 2
    assert probed("--port", "many") == 2
    code = "import sys, services.shell.probe; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"asyncio", "ssl", "http.client", "urllib.request", "msgspec", "nats", "logging"} & set(loaded)


def test_listening_is_read_from_the_kernels_table(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    table.write_text(
        "  sl  local_address rem_address   st\n"
        "   0: 00000000:2135 00000000:0000 0A 00000000:00000000\n"
        "   1: 0100007F:1F40 0100007F:9999 01 00000000:00000000\n"
    )
    assert probe.listens(8501, [str(table)])
    assert not probe.listens(8000, [str(table)])  # a connection, and nobody who takes others
    assert not probe.listens(8501, [str(tmp_path / "none")])


SERVES = """
import asyncio, sys
from services.shell.http.pages import serve_pages, state_page

async def page(_):
    while len(sys.argv) > 1:  # its loop is held by computing
        pass
    return state_page("up", [])

async def main():
    server = await serve_pages("127.0.0.1", 0, {"/startz": page})
    print(server.port, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_who_is_stopped_for_good_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    with script(SERVES) as process:
        port = read_line(process)
        assert probed(INFAAS_METRICS__PORT=port) == 0
        os.kill(process.pid, signal.SIGSTOP)
        assert eventually(lambda: probed(INFAAS_METRICS__PORT=port) == 1 and process.poll() is not None)
        assert process.wait() == -signal.SIGKILL
        assert "did not turn for 2 s (stopped by a signal): ended" in capsys.readouterr().out


@pytest.mark.slow
def test_who_computes_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with script(SERVES, "computes") as process:
        assert probed(INFAAS_METRICS__PORT=read_line(process)) == 1
        assert f"process {process.pid} is busy" in capsys.readouterr().out
        assert process.poll() is None
