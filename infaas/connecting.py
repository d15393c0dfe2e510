"""Find a running system and connect to it."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

from bus.port import BusError
from infaas.client import Client
from infaas.errors import NotConnected
from infaas.locate import Endpoints, locate


class Connecting:
    """A connection to be made: `client = await infaas.connect()`, or `async with infaas.connect() as client`."""

    def __init__(self, url: str | None, data_dir: str | Path | None, prefix: str | None, timeout: float) -> None:
        self._url = url
        self._data_dir = data_dir
        self._prefix = prefix
        self._timeout = timeout

    async def open(self) -> Client:
        """Connect; raises NotConnected."""
        from bus.natsbus import NatsBus  # noqa: PLC0415  (nats-py takes a tenth of a second to import)

        place = Endpoints(self._url, "") if self._url else locate(self._data_dir)
        try:
            bus = await NatsBus.connect(place.nats, name="infaas client", timeout=self._timeout)
        except (BusError, OSError) as error:
            raise NotConnected(f"{error}; start a system with `infaas up`, or name a running one") from error
        return await Client(bus, prefix=self._prefix or place.prefix, owns_bus=True).open()

    def __await__(self) -> Generator[Any, None, Client]:
        return self.open().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self.open()
        return self._client

    async def __aexit__(self, *exc: object) -> None:
        await self._client.close()


def connect(
    url: str | None = None, *, data_dir: str | Path | None = None, prefix: str | None = None, timeout: float = 5.0
) -> Connecting:
    """Connect to the system at `url` (nats://…), else as the commands find it.

    Without a url: what `infaas up` wrote below data_dir (or INFAAS_DATA_DIR), else INFAAS_NATS_URL, else ./.infaas, else the
    default port. prefix: the cluster's name on a shared NATS, "infaas" unless that system has another. timeout: seconds for the connection.
    """
    return Connecting(url, data_dir, prefix, timeout)
