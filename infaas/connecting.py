"""Find a running system and connect to it."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from bus.login import Login, login_from, merged
from bus.port import BusError
from infaas.client import Client
from infaas.errors import NotConnected
from infaas.locate import Endpoints, locate


class Connecting:
    """A connection to be made: `client = await infaas.connect()`, or `async with infaas.connect() as client`."""

    def __init__(
        self, url: str | None, data_dir: str | Path | None, prefix: str | None, timeout: float, login: Login
    ) -> None:
        self._login = login
        self._url = url
        self._data_dir = data_dir
        self._prefix = prefix
        self._timeout = timeout

    async def open(self) -> Client:
        """Connect; raises NotConnected."""
        from bus.natsbus import NatsBus  # noqa: PLC0415  (nats-py takes a tenth of a second to import)

        place = Endpoints(self._url, "") if self._url else locate(self._data_dir)
        try:
            from_environment = Login() if place.data_dir is not None else login_from(os.environ)
            options = merged(from_environment, self._login).options()
            bus = await NatsBus.connect(place.nats, name="infaas client", timeout=self._timeout, **options)
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
    url: str | None = None,
    *,
    data_dir: str | Path | None = None,
    prefix: str | None = None,
    timeout: float = 5.0,
    nkey_seed: str | None = None,
    tls_ca: str | None = None,
    tls_certificate: str | None = None,
    tls_key: str | None = None,
) -> Connecting:
    """Connect to the system at `url` (nats://…), else as the commands find it.

    Without a url: what `infaas up` wrote below data_dir (or INFAAS_DATA_DIR), else INFAAS_NATS_URL, else ./.infaas, else the
    default port. prefix: the cluster's name on a shared NATS, "infaas" unless that system has another. timeout: seconds for the connection.
    nkey_seed: credentials of `infaas auth`, or the path of their file, else INFAAS_NKEY_SEED. tls_ca: PEM file that vouches for the
    servers, else INFAAS_TLS_CA; tls_certificate, tls_key: our own where they ask for one.
    """
    login = Login(
        nkey_seed=nkey_seed or "",
        tls_ca=tls_ca or "",
        tls_certificate=tls_certificate or "",
        tls_key=tls_key or "",
    )
    return Connecting(url, data_dir, prefix, timeout, login)
