"""A gateway process of a test's own, beside a running system, and clients that send it exactly these bytes."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.gateways.web_application import RawClients, Reply
from tests.support.servers.nats import free_port
from tests.support.servers.processes import alive, eventually, fetched, program
from tests.support.servers.system import Whole


@dataclass(frozen=True)
class Gate(RawClients):
    """port, grpc_port: on 127.0.0.1. process: the gateway's. log: what it wrote to stderr."""

    port: int
    grpc_port: int
    process: "subprocess.Popen[str]"
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return alive(self.pid)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def resident_mb(self) -> float:
        """Memory of the process, in MB."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    async def ask(self, method: str, path: str, body: Any = b"", **headers: str) -> Reply:
        """One request; what is not bytes is sent as JSON. Headers: _ stands for -."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {"Host": f"127.0.0.1:{self.port}", **{name.replace("_", "-"): text for name, text in headers.items()}}
        if data or method not in ("GET", "HEAD"):
            lines["Content-Length"] = str(len(data))
        head = "".join(f"{name}: {text}\r\n" for name, text in lines.items())
        found = await self.say(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        assert found, f"{method} {path} got no reply"
        return found[0]


@contextmanager
def gateway(system: Whole, directory: Path, **settings: str) -> Iterator[Gate]:
    """A gateway beside the system; settings of its section, as variables have them."""
    port, grpc_port = int(settings.get("port", 0)) or free_port(), free_port()
    own = {"PORT": str(port), "GRPC_PORT": str(grpc_port), **{name.upper(): text for name, text in settings.items()}}
    variables = {f"INFAAS_GATEWAY__{name}": text for name, text in own.items()}
    variables |= {"INFAAS_NATS_URL": system.nats, "INFAAS_METRICS__ENABLED": "false"}
    log = directory / f"gateway-{port}.err"
    with program("infaas.cli", "run", "gateway", errors=log, **variables) as process:
        gate = Gate(port, grpc_port, process, log)
        assert eventually(lambda: _ready(gate)), gate.log.read_text()
        yield gate


def _ready(gate: Gate) -> bool:
    assert gate.alive, gate.log.read_text()
    return fetched(f"{gate.url}/v2/health/ready")[0] == 200
