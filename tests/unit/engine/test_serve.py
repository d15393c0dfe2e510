"""`infaas run engine-proxy`: the process as operators start it."""

import json
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

from tests.support.servers.docker_engine import NODE, stand_in
from tests.support.servers.nats import free_port
from tests.support.servers.processes import environ, eventually


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
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


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
        assert [get(pages, path)[0] for path in ("/healthz", "/readyz", "/startz")] == [
            200,
            503,
            200,
        ]  # the engine has gone
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
        assert found.stderr is not None
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
