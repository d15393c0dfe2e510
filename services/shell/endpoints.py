"""The file below the data directory that says where the system is (read by infaas.locate); it holds passwords: mode 0600."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.shell.process import write_private

FILE = "endpoints.json"


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """URLs with credentials. sql: the read-only role; writer: the role of the recorder. What does not exist yet is None."""

    nats: str
    sql: str
    writer: str
    prefix: str = "infaas"
    dashboard: str | None = None
    gateway: str | None = None
    gateway_grpc: str | None = None
    metrics: str | None = None

    def public(self) -> dict[str, str | None]:
        """What `infaas up --json` prints."""
        shown = asdict(self)
        return {name: shown[name] for name in ("nats", "sql", "dashboard", "gateway", "gateway_grpc", "metrics")}


def write(data_dir: Path, endpoints: Endpoints, ports: dict[str, int]) -> None:
    """Say that the system runs, and where."""
    content = {**asdict(endpoints), "ports": ports, "pid": os.getpid(), "running": True}
    write_private(data_dir / FILE, json.dumps(content, indent=1) + "\n")


def mark_stopped(data_dir: Path) -> None:
    """Say that it runs no more; the ports stay noted for the next start."""
    content = _read(data_dir)
    if content.get("running"):
        write_private(data_dir / FILE, json.dumps({**content, "pid": None, "running": False}, indent=1) + "\n")


def recorded_ports(data_dir: Path) -> dict[str, int]:
    """The ports of last time, as far as they can be read."""
    ports = _read(data_dir).get("ports")
    if not isinstance(ports, dict):
        return {}
    return {str(name): port for name, port in ports.items() if isinstance(port, int)}


def _read(data_dir: Path) -> dict[str, Any]:
    try:
        content = json.loads((data_dir / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
