"""Where a system's servers are: the ports that `infaas up` takes, and the file below the data directory that names them.

infaas.connecting reads that file. It holds passwords, so its mode is 0600.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from bus.login import ENDPOINTS, SystemAddress
from services.core.settings import DashboardSettings, GatewaySettings, Settings
from services.shell.host import process
from services.shell.host.process import ServerError, write_private

PARTS = "parts.json"
SCHEMA = Path(__file__).parents[2] / "recorder" / "schema"


def newest_schema(directory: Path = SCHEMA) -> int:
    """The number of the last change of the database's schema that this version knows."""
    return max((int(file.name[:4]) for file in directory.glob("[0-9][0-9][0-9][0-9]_*.sql")), default=0)


def check_version(data_dir: Path) -> None:
    """Refuse a data directory that a newer version has used, before anything is changed. Raises ServerError."""
    used = recorded(data_dir, "schema")
    if isinstance(used, int) and used > newest_schema():
        raise ServerError(
            f"{data_dir} was used by a newer version (schema {used}, and this one knows up to {newest_schema()}): start that version again, or"
            " restore a backup of this one into another --data-dir"
        )


def at(address: str, port: int) -> str:
    """host:port, as URLs have it."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def page_url(settings: GatewaySettings | DashboardSettings, port: int) -> str:
    """Where a server's pages are on this machine."""
    return f"http{'s' if settings.tls_certificate else ''}://{at(settings.address, port)}"


def write_endpoints(data_dir: Path, endpoints: SystemAddress, ports: dict[str, int]) -> None:
    """Say that the system runs, and where."""
    kept = {"ports": ports, "pid": os.getpid(), "running": True, "schema": newest_schema()}
    content = to_builtins(endpoints) | kept
    write_private(data_dir / ENDPOINTS, json.dumps(content, indent=1) + "\n")


def write_parts(data_dir: Path, pids: Mapping[str, int]) -> None:
    """Say which process each part of the system is now."""
    write_private(data_dir / PARTS, json.dumps(pids, indent=1) + "\n")


def mark_stopped(data_dir: Path) -> None:
    """Say that the system does not run any more. The ports stay in the file for the next start."""
    content = _read(data_dir)
    if content.get("running"):
        write_private(data_dir / ENDPOINTS, json.dumps({**content, "pid": None, "running": False}, indent=1) + "\n")


def recorded_ports(data_dir: Path) -> dict[str, int]:
    """The ports of the last run, as far as they can be read."""
    ports = _read(data_dir).get("ports")
    if not isinstance(ports, dict):
        return {}
    return {str(name): port for name, port in ports.items() if isinstance(port, int)}


def recorded(data_dir: Path, name: str) -> Any:
    """What the last start has written. pid: of the system that runs; None: it starts, or does not run."""
    return _read(data_dir).get(name)


def _read(data_dir: Path) -> dict[str, Any]:
    try:
        content = json.loads((data_dir / ENDPOINTS).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# ---- ports

DEFAULT_PORTS = {
    "nats": 4222, "postgres": 5433, "dashboard": 8501, "gateway": 8000, "gateway_grpc": 8001, "metrics": 9100
}  # fmt: skip
# from --port-base; contract, section 1
PORT_OFFSETS = {"nats": 0, "postgres": 1, "dashboard": 2, "gateway": 3, "gateway_grpc": 4, "metrics": 10}


def preferred_ports(settings: Settings) -> dict[str, int]:
    """The ports that the settings ask for."""
    return {
        **DEFAULT_PORTS,
        "dashboard": settings.dashboard.port,
        "gateway": settings.gateway.port,
        "gateway_grpc": settings.gateway.grpc_port,
        "metrics": settings.metrics.port or DEFAULT_PORTS["metrics"],
    }


class PortClaims:
    """Ports that are reserved although nobody listens there yet: another `infaas up` does not take them."""

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def take(self, port: int) -> bool:
        """Claim a port until `release`, or until this process ends; False when it is busy or claimed."""
        if not process.port_is_free(port):
            return False
        if sys.platform == "linux":
            # An abstract name belongs to the network namespace, as ports do, and is gone when we are.
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                claim.bind(f"\0infaas-port-{port}")
            except OSError:
                claim.close()
                return False
            self._claims.append(claim)
        return True

    def take_any(self) -> int:
        """Claim a free port."""
        while not self.take(port := process.free_port()):
            pass
        return port

    def release(self) -> None:
        """Give all claims up."""
        for claim in self._claims:
            claim.close()
        self._claims.clear()


def choose_ports(
    names: Collection[str],
    base: int | None,
    recorded: Mapping[str, int],
    take: Callable[[int], bool],
    take_any: Callable[[], int],
    preferred: Mapping[str, int] = DEFAULT_PORTS,
) -> dict[str, int]:
    """A port for each of the servers `names`: with a base, exactly base + offset; else that of the last run, the default one, or a free one.

    recorded: the ports of the last run. take: claims a port if it is free. preferred: what the settings say; one that is no default is the
    user's own. Raises ServerError naming the port when one that the user gave is busy; ten above a base, where metrics are, it is a free one.
    """
    if base is not None:
        ports = {name: base + offset for name, offset in PORT_OFFSETS.items() if name in names}
        for name, port in ports.items():
            if not 1 <= port <= 65535:
                raise ServerError(f"port {port} for {name} is not between 1 and 65535: choose another --port-base")
            if not take(port):
                if name != "metrics":
                    raise ServerError(
                        f"port {port} for {name} is busy: stop what uses it or choose another --port-base"
                    )
                ports[name] = take_any()
        return ports
    ports = {}
    for name in names:
        port = preferred[name]
        if port == DEFAULT_PORTS[name]:
            wanted = [*([recorded[name]] if name in recorded else []), port]
            ports[name] = next((port for port in wanted if take(port)), 0) or take_any()
        elif take(port):
            ports[name] = port
        else:
            setting = "gateway.grpc_port" if name == "gateway_grpc" else f"{name}.port"
            raise ServerError(f"port {port} for {name} is busy: stop what uses it, or change the setting {setting}")
    return ports


def moved_ports(
    chosen: Mapping[str, int], base: int | None, recorded: Mapping[str, int], preferred: Mapping[str, int]
) -> list[str]:
    """A sentence for each server that has another port than `choose_ports` was asked for."""
    if base is not None:
        wanted = {name: base + offset for name, offset in PORT_OFFSETS.items()}
    else:
        wanted = {
            name: recorded.get(name, port) if port == DEFAULT_PORTS[name] else port for name, port in preferred.items()
        }
    return [
        f"port {wanted[name]} is busy: {name} has port {port} instead, also at the next start"
        for name, port in sorted(chosen.items())
        if port != wanted[name]
    ]
