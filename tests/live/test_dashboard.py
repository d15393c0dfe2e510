"""The dashboard's process: beside a system and alone, found, kept running, ended, and what it may not do."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from tests.support.servers.nats import free_port
from tests.support.servers.processes import environ, eventually, fetched, infaas, program, read_line, script
from tests.support.servers.system import Whole


@contextmanager
def alone(*options: str, **more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`infaas run dashboard` and where it is."""
    port = free_port()
    more |= {"INFAAS_DASHBOARD__PORT": str(port)}
    with program("infaas.cli", "run", "dashboard", *options, patience=0.0, **more) as process:
        said = read_line(process)
        assert said.startswith("the dashboard is at "), said
        yield process, f"127.0.0.1:{port}"


def test_a_system_has_one_and_says_where(system: Whole) -> None:
    for page in ("", "/_stcore/health"):  # another test may have had it killed
        assert eventually(lambda page=page: fetched(f"{system.dashboard}{page}")[0] == 200)
    assert len(system.pids("dashboard")) == 1


def test_it_knows_no_password_that_writes(system: Whole) -> None:
    secret = (system.directory / "writer.secret").read_text().strip()
    assert eventually(lambda: fetched(system.dashboard)[0] == 200)  # it runs while there are visitors
    for pid in system.pids("dashboard"):
        assert secret not in Path(f"/proc/{pid}/environ").read_text()
    assert secret not in (system.directory / "logs" / "dashboard.log").read_text()


def test_it_is_started_again(system: Whole) -> None:
    assert eventually(lambda: fetched(system.dashboard)[0] == 200)
    (before,) = system.pids("dashboard")
    os.kill(before, signal.SIGKILL)
    assert eventually(lambda: before not in system.pids("dashboard") and fetched(system.dashboard)[0] == 200)


def test_its_log_is_json_lines_on_a_pipe_streamlits_too() -> None:
    code = """
import logging
from services.shell.runtime import telemetry
telemetry.set_up("INFO", "dashboard")
import streamlit.starlette
from dashboard.serve import _unify_logging
_unify_logging()
for name in ("streamlit.runtime.caching", "psycopg.pool"):
    logging.getLogger(name).warning("something is odd")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ(), capture_output=True, text=True, timeout=120, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["message"], line["service"]) for line in lines] == [("something is odd", "dashboard")] * 2


def test_alone_it_ends_at_once_with_visitors_and_without(tmp_path: Path) -> None:
    with alone("--data-dir", str(tmp_path)) as (process, _):
        process.terminate()
        process.wait(60)
    visited = alone("--data-dir", str(tmp_path))
    with visited as (process, where), connect(f"ws://{where}/_stcore/stream", open_timeout=60):
        process.terminate()
        process.wait(60)


def test_behind_a_proxy_it_has_the_path_and_the_origin_that_visitors_see(tmp_path: Path) -> None:
    seen = "https://infaas.example.org/board"
    with alone("--data-dir", str(tmp_path), INFAAS_DASHBOARD__PUBLIC_URL=seen) as (_, where):
        assert eventually(lambda: fetched(f"http://{where}/board/_stcore/health")[0] == 200)
        with connect(
            f"ws://{where}/board/_stcore/stream", origin=Origin("https://infaas.example.org"), open_timeout=60
        ):
            pass


# The dashboard's process, as the supervisor starts it for a visitor. Half a second without any is enough for it.
RESTS = """
import socket, sys
from dashboard.serve import ServeOptions, serve
from services.shell.http.server import listen
entrance = listen("127.0.0.1", 0)
entrance.listen()
host, port = entrance.getsockname()
for _ in range(int(sys.argv[1])):
    socket.create_connection((host, port)).close()
options = ServeOptions(address=host, port=port, public_url="", login="", allow=(), rests_s=0.5)
print("ended", serve(options, None, lambda: entrance), "streamlit" in sys.modules)
"""


@pytest.mark.parametrize("visitors", [0, 1])
def test_started_for_a_visitor_it_ends_when_there_has_been_none_for_a_while(visitors: int) -> None:
    with script(RESTS, str(visitors)) as process:
        assert read_line(process).startswith("the dashboard is at")
        assert read_line(process) == f"ended 0 {visitors > 0}"


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
def test_pages_of_others_get_nothing(served: str, origin: str) -> None:
    with pytest.raises(InvalidStatus), connect(f"ws://{served}/_stcore/stream", origin=Origin(origin), open_timeout=60):
        pass


def test_a_name_that_others_point_to_this_machine_gets_nothing(served: str) -> None:
    """DNS rebinding: the page's own origin, at our address."""
    evil = f"evil.example:{served.rpartition(':')[2]}"
    with socket.create_connection(served.split(":")) as plain, pytest.raises(InvalidStatus):
        connect(f"ws://{evil}/_stcore/stream", sock=plain, origin=Origin(f"http://{evil}"), open_timeout=60)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with alone("--data-dir", str(tmp_path_factory.mktemp("nothing"))) as (_, where):
        assert eventually(lambda: fetched(f"http://{where}/")[0] == 200)
        yield where


def test_what_it_cannot_do_is_said_in_one_line(tmp_path: Path, served: str) -> None:
    busy = infaas("run", "dashboard", INFAAS_DASHBOARD__PORT=served.rpartition(":")[2])
    assert (busy.returncode, busy.stderr.count("\n")) == (1, 1)
    assert "dashboard.port" in busy.stderr
    login = tmp_path / "login.toml"
    login.write_text('[auth]\ncookie_secret = "x"\n')
    lacking = infaas("run", "dashboard", INFAAS_DASHBOARD__LOGIN=str(login))
    assert lacking.returncode == 1
    assert "client_id" in lacking.stderr
    together = infaas("run", "dashboard", "recorder")
    assert together.returncode == 2
