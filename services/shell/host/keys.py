"""The keys and certificates of a directory of `infaas auth`, as a system on one machine uses them (the setting bus.auth)."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

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

    def login(self, roles: Collection[str]) -> dict[str, str]:
        """Fields of `bus.login.Login` of the user with the fewest rights that has all these roles. Raises ServerError."""
        fit = sorted((len(has), name) for name, has in self._roles.items() if has.issuperset(roles))
        if not fit:
            words = " ".join(f"--role {role}" for role in roles)
            raise ServerError(
                f"bus.auth: no user has the roles of this process: infaas auth add NAME --dir {self.directory} {words}"
            )
        seed = self.directory / "users" / f"{fit[0][1]}.nk"
        return {"nkey_seed": str(seed), **({"tls_ca": str(self.directory / "ca.pem")} if self.tls else {})}

    def environ(self, roles: Collection[str]) -> dict[str, str]:
        """The same as variables of a process with these services."""
        return {f"INFAAS_BUS__{name.upper()}": value for name, value in self.login(roles).items()}

    def changed(self) -> bool:
        """Whether the servers have to read their users again."""
        before, self._read = self._read, self._mark()
        return self._read != before

    def _mark(self) -> tuple[float, ...]:
        files = (*self.includes, self.directory / "server.pem")
        return tuple(path.stat().st_mtime for path in files if path.exists())
