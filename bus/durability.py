"""Whether NATS servers keep what they have acknowledged: by their version, and by how often they write to disk."""

import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

LEAST_VERSION = (2, 12, 3)  # older ones lost acknowledged JetStream messages even with sync_interval: always
MONITORING_PORT = 8222
PATIENCE = 2.0  # s for one server to say who it is


class Weakness(NamedTuple):
    """text: a sentence, with the line to set. certain: the server itself says so; else it could not be asked."""

    text: str
    certain: bool


def weaknesses(urls: str, monitoring: str = "") -> list[Weakness]:
    """What these servers may lose; empty: nothing. Servers that do not answer are left out. Blocks for seconds.

    urls: of the servers, separated by commas. monitoring: the same of their monitoring; "": port 8222 of each.
    """
    found: list[Weakness] = []
    for url in urls.split(","):
        host, port = address_of(url)
        try:
            said = greeting((host, port))
        except (OSError, ValueError):
            continue
        where = f"nats-server {said['version']} at {host}:{port}"
        version = tuple(int(part) for part in said["version"].partition("-")[0].split("."))
        if version < LEAST_VERSION:
            least = ".".join(map(str, LEAST_VERSION))
            found.append(Weakness(f"{where} can lose what it has acknowledged: install {least} or newer", certain=True))
        pages = monitoring.split(",") if monitoring else [f"http://{_shown(host)}:{MONITORING_PORT}"]
        config = _jetstream(pages, said["server_id"])
        if config is None:
            text = f"{where} does not show how often it writes to disk: set `http: {MONITORING_PORT}` in its configuration, or bus.monitoring"
            found.append(Weakness(text, certain=False))
        elif not config.get("sync_always"):
            every = config.get("sync_interval", 0) / 1e9
            text = f"{where} writes to disk every {every:g} s, and a power cut loses what it has acknowledged since: set `sync_interval: always` in its block jetstream"
            found.append(Weakness(text, certain=True))
    return found


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url.strip() if "://" in url else f"nats://{url.strip()}")
    return parts.hostname or "127.0.0.1", parts.port or 4222


def greeting(address: tuple[str, int]) -> dict[str, Any]:
    """The server's first words, for which it wants no password. Raises OSError, ValueError."""
    with socket.create_connection(address, timeout=PATIENCE) as connection, connection.makefile("rb") as lines:
        first = lines.readline(65536)
    if not first.startswith(b"INFO "):
        raise ValueError("another program than NATS listens there")
    said: dict[str, Any] = json.loads(first[5:])
    return said


def _jetstream(pages: Sequence[str], server: str) -> dict[str, Any] | None:
    """The server's settings of JetStream, by the page of its monitoring; None: no page is its own."""
    from urllib.request import urlopen  # noqa: PLC0415  (services need it for a moment, and it is large)

    for page in pages:
        with suppress(OSError, ValueError, KeyError, AttributeError):
            with urlopen(f"{page.strip().rstrip('/')}/varz", timeout=PATIENCE) as reply:  # noqa: S310  (an operator's own address)
                said = json.load(reply)
            if said["server_id"] == server:
                config: dict[str, Any] = said["jetstream"]["config"]
                return config
    return None


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
