"""Find a running system, and connect to it."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import ValidationError, convert
from msgspec.structs import replace

from bus.login import ENDPOINTS, Login, SystemAddress, login_from, merged
from bus.port import BadLogin, BusError
from infaas.errors import NotConnected

if TYPE_CHECKING:
    from infaas.client import Client


T = TypeVar("T")
DEFAULT_DATA_DIR = ".infaas"
DEFAULT_NATS = "nats://127.0.0.1:4222"
DEFAULT_SQL = "postgresql://infaas_reader@127.0.0.1:5433/infaas"


def data_place(data_dir: str | Path | None = None) -> Path:
    """The data directory of the system on this machine: this one, that of INFAAS_DATA_DIR, or ./.infaas."""
    return Path(data_dir or os.environ.get("INFAAS_DATA_DIR") or DEFAULT_DATA_DIR)


def locate(data_dir: str | Path | None = None, environ: Mapping[str, str] | None = None) -> SystemAddress:
    """Find the system (docs/contract.md, section 1). Raises NotConnected if a data directory is named and nothing runs there.

    Looks at data_dir or INFAAS_DATA_DIR; then at INFAAS_NATS_URL and INFAAS_SQL_DSN; then at ./.infaas; then at the default ports.
    """
    environ = os.environ if environ is None else environ
    named = data_dir or environ.get("INFAAS_DATA_DIR")
    if named:
        return read_endpoints(Path(named))
    nats, sql = environ.get("INFAAS_NATS_URL"), environ.get("INFAAS_SQL_DSN")
    prefix = environ.get("INFAAS_PREFIX") or "infaas"
    if nats or sql:
        # If only one is set, the other gets its default port. A data directory may belong to another system.
        return SystemAddress(nats or DEFAULT_NATS, sql or DEFAULT_SQL, prefix)
    try:
        return read_endpoints(Path(DEFAULT_DATA_DIR))
    except NotConnected:
        return SystemAddress(DEFAULT_NATS, DEFAULT_SQL, prefix)


def find_sql(data_dir: str | Path | None = None) -> str:
    """The DSN of the read-only role of the system that `locate` finds."""
    return locate(data_dir).sql


def read_endpoints(data_dir: Path) -> SystemAddress:
    """The addresses that `infaas up` wrote into `data_dir`. Raises NotConnected if no system runs there."""
    path = data_dir / ENDPOINTS
    start = f"start one with `infaas up --data-dir {data_dir}`"
    try:
        content = json.loads(path.read_text())
        found = convert(content, SystemAddress)
    except FileNotFoundError:
        raise NotConnected(f"no system runs in {data_dir}: {start}") from None
    except OSError as error:
        raise NotConnected(f"cannot read {path}: {error.strerror}; does it belong to another user?") from error
    except (ValueError, ValidationError) as error:
        raise NotConnected(f"{path} is damaged ({error}); {start}") from error
    if not content.get("running"):
        raise NotConnected(f"the system in {data_dir} is stopped: {start}")
    return replace(found, data_dir=data_dir)


def why_not(error: Exception, *, named: bool) -> str:
    """What is told of a connection that failed. named: the system; else the usual port was tried, which may be another system's."""
    refused = "user or password" in str(error)
    if not named and (refused or not isinstance(error, BadLogin)):
        return f"no system runs in {Path.cwd()}: pass --data-dir (data_dir=) or INFAAS_NATS_URL, or start one with `infaas up`"
    if refused:
        return (
            f"{error}; use the URL that `infaas up` printed, or a key of `infaas auth` (INFAAS_NKEY_SEED, nkey_seed=)"
        )
    if isinstance(error, BadLogin):
        return (
            f"{error}; ask an operator for a key and the servers' authority (infaas auth), and name their files by INFAAS_NKEY_SEED "
            "(nkey_seed=) and INFAAS_TLS_CA (tls_ca=)"
        )
    return f"{error}; start a system with `infaas up`, or name a running one"


@dataclass(eq=False)
class Connecting:
    """A connection that is not made yet: `client = await infaas.connect()`, or `async with infaas.connect() as client`."""

    url: str | None
    data_dir: str | Path | None
    prefix: str | None
    timeout: float
    login: Login

    async def open(self) -> "Client":
        """Connect; raises NotConnected."""
        from bus.natsbus import NatsBus  # noqa: PLC0415  (nats-py takes a tenth of a second to import)
        from infaas.client import Client  # noqa: PLC0415  (to find a system takes no client)

        place = SystemAddress(self.url, "") if self.url else locate(self.data_dir)
        try:
            known = place.login if place.data_dir is not None else login_from(os.environ)
            options = merged(known, self.login).options()
            bus = await NatsBus.connect(place.nats, name="infaas client", timeout=self.timeout, **options)
        except (BusError, OSError) as error:
            named = self.url or place.data_dir is not None or os.environ.get("INFAAS_NATS_URL")
            raise NotConnected(why_not(error, named=bool(named))) from error
        files = None if place.data_dir is None else place.data_dir / "jobs"
        return await Client(bus, prefix=self.prefix or place.prefix, owns_bus=True, files=files).open()

    def __await__(self) -> "Generator[Any, None, Client]":
        return self.open().__await__()

    def __enter__(self) -> None:
        raise TypeError("infaas.connect() is for asyncio: write `async with`, or use infaas.connect_blocking()")

    def __exit__(self, *exc: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"not connected yet, so there is no {name}: write `client = await infaas.connect()`, or use infaas.connect_blocking()"
        )

    async def __aenter__(self) -> "Client":
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
    """Connect to the system at `url` (nats://…). Without a url, find it as the commands do.

    The commands look at data_dir (or INFAAS_DATA_DIR), where `infaas up` wrote its addresses; then at INFAAS_NATS_URL; then at
    ./.infaas; then at the default port. prefix: the cluster's prefix on NATS; default: the prefix of the found system, or "infaas".
    timeout: seconds for the connection. nkey_seed: credentials of `infaas auth`, or the path of their file; default: INFAAS_NKEY_SEED.
    tls_ca: PEM file of the authority that signed the servers' certificates; default: INFAAS_TLS_CA. tls_certificate, tls_key: the
    client's own certificate, if the servers ask for one.
    """
    login = Login(
        nkey_seed=nkey_seed or "", tls_ca=tls_ca or "", tls_certificate=tls_certificate or "", tls_key=tls_key or ""
    )
    return Connecting(url, data_dir, prefix, timeout, login)


def with_client(data_dir: str | Path | None, work: Callable[["Client"], Awaitable[T]]) -> T:
    """What this work with a client of the system there returns, for commands: an event loop and a connection of its own."""

    async def connected() -> T:
        async with connect(data_dir=data_dir) as client:
            return await work(client)

    return asyncio.run(connected())
