"""curl against a gateway of its own beside a running system, and a web server with files that the gateway may fetch."""

import base64
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import pytest

from tests.support.gateways.gateway_process import Gate, gateway
from tests.support.models import tiny_models
from tests.support.servers.system import Whole

LABELS = ("north", "east", "south", "west")


class Files(http.server.SimpleHTTPRequestHandler):
    """A directory; /moved leads to another place."""

    def do_GET(self) -> None:
        if self.path == "/moved.onnx":
            self.send_response(302)
            self.send_header("Location", "/mlp.onnx")
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Place(NamedTuple):
    """gate: a gateway that may fetch from `files`, the URL of a directory with mlp.onnx, validation.npz and labels.txt."""

    gate: Gate
    files: str
    system: Whole


class Said(NamedTuple):
    status: int
    body: Any
    seconds: float


@pytest.fixture(scope="module")
def place(system: Whole, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if shutil.which("curl") is None:
        pytest.skip("no curl on the path")
    directory = tmp_path_factory.mktemp("files")
    x, y = tiny_models.digits()
    (directory / "mlp.onnx").write_bytes(tiny_models.exact(tiny_models.mlp()))
    (directory / "validation.npz").write_bytes(tiny_models.npz(x=x, y=y))
    (directory / "labels.txt").write_text("\n".join(LABELS))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        port = server.server_address[1]
        with gateway(system, tmp_path_factory.mktemp("gateway"), register_hosts=f"127.0.0.1:{port}") as gate:
            yield Place(gate, f"http://127.0.0.1:{port}", system)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def curl(place: Place, path: str, body: Any = None) -> Said:
    """What curl gets; a body that is not bytes is sent as JSON."""
    command = ["curl", "-sS", "-w", "\n%{http_code} %{time_total}", place.gate.url + path]
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    if body is not None:
        command[1:1] = ["--data-binary", "@-"]
    done = subprocess.run(command, input=data, capture_output=True, check=True, timeout=300)
    text, _, told = done.stdout.decode().rpartition("\n")
    status, seconds = told.split()
    found: Any = text
    with suppress(ValueError):
        found = json.loads(text)
    return Said(int(status), found, float(seconds))


def fine(place: Place, path: str, body: Any = None) -> Any:
    said = curl(place, path, body)
    assert said.status == 200, said
    return said.body


def blob(data: bytes) -> dict[str, str]:
    return {"blob": base64.b64encode(data).decode()}
