"""Which ports `infaas up` uses."""

from collections.abc import Callable, Mapping

from services.shell import process
from services.shell.process import ServerError

DEFAULTS = {"nats": 4222, "postgres": 5433}
OFFSETS = {"nats": 0, "postgres": 1}  # from --port-base; contract, section 1


def choose(
    base: int | None,
    recorded: Mapping[str, int],
    *,
    is_free: Callable[[int], bool] = process.port_is_free,
    any_free: Callable[[], int] = process.free_port,
) -> dict[str, int]:
    """A port for each server; with a base exactly base + offset, else the default, the one of last time, or a free one.

    Raises ServerError naming the port when a base is given and one of its ports is busy.
    """
    if base is not None:
        ports = {name: base + offset for name, offset in OFFSETS.items()}
        for name, port in ports.items():
            if not 1 <= port <= 65535:
                raise ServerError(f"port {port} for {name} is not between 1 and 65535: choose another --port-base")
            if not is_free(port):
                raise ServerError(f"port {port} for {name} is busy: stop what uses it or choose another --port-base")
        return ports
    ports = {}
    for name, default in DEFAULTS.items():
        wanted = [default, *([recorded[name]] if name in recorded else [])]
        ports[name] = next((port for port in wanted if is_free(port)), 0) or any_free()
    return ports
