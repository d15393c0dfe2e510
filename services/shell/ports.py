"""Which ports `infaas up` uses."""

import socket
import sys
from collections.abc import Callable, Collection, Mapping

from services.shell import process
from services.shell.process import ServerError

DEFAULTS = {"nats": 4222, "postgres": 5433, "dashboard": 8501, "gateway": 8000, "gateway_grpc": 8001}
OFFSETS = {
    "nats": 0,
    "postgres": 1,
    "dashboard": 2,
    "gateway": 3,
    "gateway_grpc": 4,
}  # from --port-base; contract, section 1


class Claims:
    """Ports that are ours although nobody listens there yet, or not for the moment: other `infaas up` keep off them."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self, port: int) -> bool:
        """Claim a port until `release`, or until this process ends; False when it is busy or claimed."""
        if not process.port_is_free(port):
            return False
        if sys.platform == "linux":
            # An abstract name lives in the network namespace, just as ports do, and vanishes with us.
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                claim.bind(f"\0infaas-port-{port}")
            except OSError:
                claim.close()
                return False
            self._held.append(claim)
        return True

    def take_any(self) -> int:
        """Claim a free port."""
        while not self.take(port := process.free_port()):
            pass
        return port

    def release(self) -> None:
        """Give all claims up."""
        for claim in self._held:
            claim.close()
        self._held.clear()


def choose(
    names: Collection[str],
    base: int | None,
    recorded: Mapping[str, int],
    take: Callable[[int], bool],
    take_any: Callable[[], int],
    preferred: Mapping[str, int] = DEFAULTS,
) -> dict[str, int]:
    """A port for each of the servers `names`; with a base exactly base + offset, else the preferred, the one of last time, or a free one.

    take: claims a port if it is free. Raises ServerError naming the port when a base is given and one of its ports is busy.
    """
    if base is not None:
        ports = {name: base + offset for name, offset in OFFSETS.items() if name in names}
        for name, port in ports.items():
            if not 1 <= port <= 65535:
                raise ServerError(f"port {port} for {name} is not between 1 and 65535: choose another --port-base")
            if not take(port):
                raise ServerError(f"port {port} for {name} is busy: stop what uses it or choose another --port-base")
        return ports
    ports = {}
    for name in names:
        wanted = [preferred[name], *([recorded[name]] if name in recorded else [])]
        ports[name] = next((port for port in wanted if take(port)), 0) or take_any()
    return ports
