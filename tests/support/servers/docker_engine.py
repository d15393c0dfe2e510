"""A server in a Docker engine's place, on a real unix socket with answers that a real one gave, and the engine proxy before it."""

import json
import socketserver
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from services.core.settings import GatewaySettings
from services.engine.proxy import EngineClient, Proxy
from services.shell.http.pages import LIMITS
from tests.support.gateways.web_application import Reply, Served, served

# of engine 20.10, a one-node swarm with one service
ANSWERS = Path(__file__).parents[2] / "unit" / "engine" / "answers.json"
NODE = "qbi4c8284dgwj4dr3r7e2mbr0"
STALE = "rpc error: code = Unknown desc = update out of sequence"


class StandIn(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """An engine as far as the proxy knows one. seen: every request that reached it. odd: answers that are not as they should be."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.answers: dict[str, Any] = json.loads(ANSWERS.read_text())
        self.seen: list[tuple[str, str, bytes]] = []
        self.odd: dict[str, bytes] = {}
        super().__init__(self.path, _Handler)

    @property
    def node(self) -> dict[str, Any]:
        found: dict[str, Any] = self.answers["/nodes"][0]
        return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body leave at once: the proxy goes when it has read them
    server: StandIn

    def do_GET(self) -> None:
        path = self._path()
        if path == "/_ping":
            self._say(200, b"OK", "text/plain")
        elif path in self.server.odd:
            self.wfile.write(self.server.odd[path])
            self.close_connection = True
        elif path in self.server.answers:
            self._tell(200, self.server.answers[path])
        elif path in (f"/nodes/{NODE}", "/nodes/n0"):
            self._tell(200, self.server.node)
        else:
            self._tell(404, {"message": f"{path} not found"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self._path(body)
        node = self.server.node
        version = int(self.path.rpartition("version=")[2])
        if path != f"/nodes/{NODE}/update":
            self._tell(404, {"message": f"{path} not found"})
        elif version != node["Version"]["Index"]:
            self._tell(500, {"message": STALE})
        else:  # as Go reads it: keys in any case, the last of several
            for key, value in json.loads(body, object_pairs_hook=list):
                node["Spec"][key.title()] = dict(value) if isinstance(value, list) else value
            node["Version"]["Index"] += 1
            self._say(200, b"")

    def _path(self, body: bytes = b"") -> str:
        self.server.seen.append((self.command, self.path, body))
        path = self.path.partition("?")[0]
        return path.removeprefix("/v1.41") if path.startswith("/v1.41/") else path

    def _tell(self, status: int, found: Any) -> None:
        self._say(status, json.dumps(found).encode())

    def _say(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Api-Version", "1.41")
        self.send_header("Ostype", "linux")
        self.send_header("Set-Cookie", "a=b")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def stand_in(directory: Path) -> Iterator[StandIn]:
    """One that runs."""
    with StandIn(directory / "engine.sock") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Front(Served):
    """The proxy, as its clients reach it."""

    @property
    def proxy(self) -> Proxy:
        found: Proxy = self.connections.app
        return found

    async def ask(self, method: str, target: str, body: bytes | None = None, **headers: str) -> Reply:
        """One request, written as it should be."""
        lines = {"Host": "engine:2375", **{name.replace("_", "-"): value for name, value in headers.items()}}
        if body is not None:
            lines = {"Content-Type": "application/json", "Content-Length": str(len(body)), **lines}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        (reply,) = await self.say(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + (body or b""))
        return reply


@asynccontextmanager
async def fronted(
    socket: str, token: str = "", limits: GatewaySettings = LIMITS, patience: float = 10
) -> AsyncIterator[Front]:
    """The proxy before the engine at this socket."""
    async with served(Proxy(EngineClient(socket, patience), token, limits), limits) as found:
        yield Front(found.server)
