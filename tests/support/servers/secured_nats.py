"""A NATS server set up by `infaas auth`: TLS, nkeys, and rights by role."""

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bus.login import Login
from bus.natsbus import NatsBus
from infaas.credentials import CredentialStore, User, certify
from tests.support.servers.nats import NatsServer, skip_without_nats

CLIENTS = (
    User(name="phone", roles=("client",), app="faces"),
    User(name="tablet", roles=("client",), app="faces", verbs=("query",)),
    User(name="thief", roles=("client",), app="numbers", verbs=("query", "feedback", "explain", "job", "list")),
    User(name="worker-7", roles=("executor",), worker="w7"),
)


class Secured(NatsServer):
    """It runs once constructed; `stop` it. book: of its users, those of CLIENTS among them."""

    def __init__(self, directory: Path, prefix: str = "infaas") -> None:
        self.credentials = CredentialStore(directory / "auth")
        self.credentials.begin(prefix)
        for user in CLIENTS:
            self.credentials.add(user)
        certify(self.credentials.directory, ["localhost", "127.0.0.1"])
        super().__init__(directory / "nats")
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\nmax_payload: 8MB\n'
            f'jetstream {{ store_dir: "{directory / "nats" / "jetstream"}" }}\n'
            f'include "../auth/nats-auth.conf"\ninclude "../auth/nats-tls.conf"\n'
        )
        self.url = f"tls://localhost:{self.port}"
        self.start()

    def login(self, name: str) -> Login:
        return Login(nkey_seed=str(self.credentials.file_of(name)), tls_ca=str(self.credentials.directory / "ca.pem"))

    def environ(self, name: str) -> dict[str, str]:
        """What a service or command of this user is started with."""
        login = self.login(name)
        return {"INFAAS_NATS_URL": self.url, "INFAAS_NKEY_SEED": login.nkey_seed, "INFAAS_TLS_CA": login.tls_ca}

    async def bus(self, name: str, on_error: Callable[[Exception], None] | None = None, **options: Any) -> NatsBus:
        login = self.login(name).options()
        return await NatsBus.connect(self.url, name=name, on_error=on_error, **(login | options))

    def reload(self) -> None:
        """Read the users again, as after `infaas auth`; returns when it has."""
        assert self._process is not None
        before = self._said("Reloaded")
        self._process.send_signal(signal.SIGHUP)
        until = time.monotonic() + 60
        while self._said("Reloaded") == before:
            assert time.monotonic() < until, self.log[-1000:]
            time.sleep(0.01)

    @property
    def log(self) -> str:
        return (self.directory / "nats.log").read_text()

    @property
    def violations(self) -> list[str]:
        """What anybody tried and had no right to."""
        return re.findall(r"\[ERR\].*Violation.*", self.log)

    def _said(self, word: str) -> int:
        return self.log.count(word)


@contextmanager
def secured(directory: Path) -> Iterator[Secured]:
    """Until the end of the block; skips where there is no nats-server."""
    skip_without_nats()
    server = Secured(directory)
    try:
        yield server
    finally:
        server.stop()


def ignored(_: Exception) -> None:
    """What the connection complains of on the way."""
