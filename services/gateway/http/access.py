"""Who may do what, for HTTP and gRPC alike: one rule, and the tokens that it looks at."""

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from services.core.settings import GatewaySettings, listed

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
_SECRET = os.urandom(32)


class Right(Enum):
    """What a request needs."""

    NONE = "none"  # whether the gateway lives
    QUERY = "query"  # queries, and what describes them
    OPERATE = "operate"  # apps, models, versions: what changes for others


class AccessVerdict(NamedTuple):
    """status: 0 where it may, else HTTP's: 401, who are you; 403, not you."""

    status: int = 0
    message: str = ""


FINE = AccessVerdict()
WHO = AccessVerdict(401, "this needs a token: Authorization: Bearer TOKEN")
WRONG = AccessVerdict(401, "this token is not known")
NOT_YOU = AccessVerdict(403, "this needs an operator's token")
NO_OPERATORS = AccessVerdict(403, "nobody may manage this through the gateway: gateway.operator_tokens names no token")
OFF = AccessVerdict(403, "management through the gateway is off: gateway.admin")
OPEN = AccessVerdict(
    403, "a gateway that other machines can reach takes no management without tokens: set gateway.operator_tokens"
)


class KnownTokens(NamedTuple):
    """Tokens by digest, and whose they are. None: no such tokens are set, whoever reaches the gateway may."""

    users: Mapping[bytes, str] | None = None
    operators: Mapping[bytes, str] | None = None


def allowed(
    right: Right, credential: str | None, keys: KnownTokens, *, admin: bool = True, loopback: bool = True
) -> AccessVerdict:
    """The one rule. credential: the header Authorization. admin: the setting. loopback: only this machine can reach the gateway.

    With tokens for users, asking needs one of them or an operator's. Managing needs an operator's as soon as there are any tokens.
    """
    if right is Right.NONE:
        return FINE
    if right is Right.OPERATE and not admin:
        return OFF
    if keys.users is None and (right is Right.QUERY or keys.operators is None):
        return FINE if right is Right.QUERY or loopback else OPEN
    token = bearer(credential)
    if token is None:
        return WHO
    digest = digest_of(token)
    operator = keys.operators is not None and digest in keys.operators
    if not operator and (keys.users is None or digest not in keys.users):
        return WRONG
    if right is Right.OPERATE and not operator:
        return NO_OPERATORS if keys.operators is None else NOT_YOU
    return FINE


def bearer(credential: str | None) -> str | None:
    """The token of a header `Authorization: Bearer TOKEN`."""
    scheme, _, token = (credential or "").strip().partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def digest_of(token: str) -> bytes:
    """What tokens are compared by. Keyed with a secret of this process: how long a look-up takes tells nothing about a token."""
    return hashlib.blake2b(token.encode("utf-8", "replace"), key=_SECRET, digest_size=32).digest()


class BadTokens(Exception):
    """A setting of tokens cannot be used; the text names it."""


class Tokens:
    """The tokens of one setting: written there, or in files that it names, which are read again when they change."""

    def __init__(self, setting: str, items: tuple[str, ...]) -> None:
        """setting: its name, for messages. items: tokens, `name:token`, or paths (they begin with /, ./ or ../). Raises BadTokens."""
        self._setting = setting
        self._files = {Path(item): (0, 0, 0) for item in items if item.startswith(("/", "./", "../"))}
        self._written = _read([item for item in items if not item.startswith(("/", "./", "../"))])
        self._found: dict[Path, dict[bytes, str]] = {}
        self._looked = float("-inf")
        for path in self._files:
            try:
                self._look(path)
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is no text"
                raise BadTokens(f"{setting}: cannot read {path}: {reason}") from error
        self._all = self._together()
        if items and not self._all:
            raise BadTokens(f"{setting}: there is no token in it")

    def current(self) -> Mapping[bytes, str] | None:
        """Names by digest of token; None where the setting is empty. Files that cannot be read any more: as they were."""
        if not self._files:
            return self._all or None
        moment = time.monotonic()
        if moment - self._looked > LOOK_AGAIN_S:
            self._looked = moment
            changed = [path for path in self._files if self._changed(path)]
            if changed:
                self._all = self._together()
                log.info("tokens were read again", extra={"setting": self._setting, "tokens": len(self._all)})
        return self._all

    def _changed(self, path: Path) -> bool:
        try:
            return self._look(path)
        except (OSError, UnicodeDecodeError):
            log.warning("a file of tokens cannot be read: they stay as they were", extra={"path": str(path)})
            return False

    def _look(self, path: Path) -> bool:
        there = path.stat()
        mark = (there.st_mtime_ns, there.st_size, there.st_ino)
        if mark == self._files[path]:
            return False
        lines = [line.strip() for line in path.read_text().splitlines()]
        self._found[path] = _read([line for line in lines if line and not line.startswith("#")])
        self._files[path] = mark
        return True

    def _together(self) -> dict[bytes, str]:
        whole = dict(self._written)
        for found in self._found.values():
            whole.update(found)
        return whole


def _read(items: list[str]) -> dict[bytes, str]:
    """Names by digest: `name:token`, or a token, whose name is its place."""
    pairs = [item.rpartition(":") for item in items]
    return {digest_of(token): name or f"token-{number}" for number, (name, _, token) in enumerate(pairs, 1) if token}


class AccessControl:
    """The rule with a gateway's settings, for all its protocols. Raises BadTokens."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._users = Tokens("gateway.tokens", listed(settings.tokens))
        self._operators = Tokens("gateway.operator_tokens", listed(settings.operator_tokens))
        self._admin = settings.admin
        self._loopback = is_loopback(settings.address)

    @property
    def open(self) -> bool:
        """Whether anybody may ask."""
        return self._users.current() is None

    @property
    def operators(self) -> bool:
        """Whether there are operators' tokens."""
        return self._operators.current() is not None

    def verdict(self, right: Right, credential: str | None) -> AccessVerdict:
        """credential: the header Authorization, if any."""
        keys = KnownTokens(self._users.current(), self._operators.current())
        return allowed(right, credential, keys, admin=self._admin, loopback=self._loopback)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
