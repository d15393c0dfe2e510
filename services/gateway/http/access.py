"""Who may do what, over HTTP and gRPC alike: one rule, and the tokens that it reads."""

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from ipaddress import ip_address
from math import inf
from pathlib import Path
from typing import NamedTuple

from services.core.settings import GatewaySettings, listed
from services.gateway.errors import RequestFailed

log = logging.getLogger(__name__)

RELOAD_S = 0.5  # shortest time between two checks of the files of tokens
_SECRET = os.urandom(32)
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="infaas"'}


class Right(Enum):
    """The right that a request needs."""

    NONE = "none"  # probes of health
    QUERY = "query"  # queries, and descriptions of apps and models
    OPERATE = "operate"  # changes of apps, models and versions


class AccessVerdict(NamedTuple):
    """status: 0 where the request may go on; 401 where it needs a (known) token; 403 where its token does not suffice. app: the only one that it may
    ask for; "": any.
    """

    status: int = 0
    message: str = ""
    app: str = ""


ALLOWED = AccessVerdict()
NO_TOKEN = AccessVerdict(401, "this needs a token: Authorization: Bearer TOKEN")
UNKNOWN_TOKEN = AccessVerdict(401, "this token is not known")
NOT_OPERATOR = AccessVerdict(403, "this needs an operator's token")
NO_OPERATORS = AccessVerdict(403, "nobody may manage this through the gateway: gateway.operator_tokens names no token")
ADMIN_OFF = AccessVerdict(403, "management through the gateway is off: gateway.admin")
TOKENS_NEEDED = AccessVerdict(
    403, "a gateway that other machines can reach needs tokens for management: set gateway.operator_tokens"
)


class Token(NamedTuple):
    """app: the only one that may be asked for; "": any. until: Unix seconds."""

    name: str
    app: str = ""
    until: float = inf


class KnownTokens(NamedTuple):
    """Tokens by their digests. None: no such tokens are set, so everybody who reaches the gateway may."""

    users: Mapping[bytes, Token] | None = None
    operators: Mapping[bytes, Token] | None = None


def allowed(
    right: Right,
    credential: str | None,
    keys: KnownTokens,
    *,
    admin: bool = True,
    loopback: bool = True,
    now: float = 0.0,
) -> AccessVerdict:
    """The rule. credential: the header Authorization. admin: the setting. loopback: only this machine can reach the gateway. now: Unix seconds.

    Where there are tokens for users, a query needs one of them or an operator's. Where there are any tokens, management needs an
    operator's.
    """
    if right is Right.NONE:
        return ALLOWED
    if right is Right.OPERATE and not admin:
        return ADMIN_OFF
    if keys.users is None and (right is Right.QUERY or keys.operators is None):
        return ALLOWED if right is Right.QUERY or loopback else TOKENS_NEEDED
    token = bearer(credential)
    if token is None:
        return NO_TOKEN
    digest = digest_of(token)
    operator = (keys.operators or {}).get(digest)
    found = operator or (keys.users or {}).get(digest)
    if found is None:
        return UNKNOWN_TOKEN
    if found.until <= now:
        ended = datetime.fromtimestamp(found.until, UTC)
        return AccessVerdict(
            401, f"this token was valid until {ended:%Y-%m-%d %H:%M} UTC: ask an operator for a new one"
        )
    if right is Right.OPERATE and operator is None:
        return NO_OPERATORS if keys.operators is None else NOT_OPERATOR
    return AccessVerdict(app=found.app)


def check_app(only: str, app: str | None) -> None:
    """Check that a token for the app `only` (""; for any) is for this app. Raises RequestFailed."""
    if only and app != only:
        raise RequestFailed(403, f"this token is for the app {only} alone", code="forbidden")


def bearer(credential: str | None) -> str | None:
    """The token of a header `Authorization: Bearer TOKEN`."""
    scheme, _, token = (credential or "").strip().partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def digest_of(token: str) -> bytes:
    """The digest by which tokens are compared.

    Its key is a secret of this process, so that the time of a comparison says nothing about a token.
    """
    return _keyed(hashlib.sha256(token.encode("utf-8", "replace")).hexdigest())


def _keyed(hashed: str) -> bytes:
    return hashlib.blake2b(hashed.encode(), key=_SECRET, digest_size=32).digest()


class BadTokens(Exception):
    """A setting of tokens cannot be used; the text names the setting."""


class Tokens:
    """The tokens of one setting: given there, or in files that it names. Changed files are read again."""

    def __init__(self, setting: str, items: tuple[str, ...]) -> None:
        """setting: its name, for messages. items: tokens, `name:token`, or paths (they begin with /, ./ or ../). Raises BadTokens."""
        self._setting = setting
        self._files = {Path(item): (0, 0, 0) for item in items if item.startswith(("/", "./", "../"))}
        self._given = _read([item for item in items if not item.startswith(("/", "./", "../"))])
        self._found: dict[Path, dict[bytes, Token]] = {}
        self._read_at = float("-inf")
        for path in self._files:
            try:
                self._reload(path)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not a text of tokens"
                raise BadTokens(f"{setting}: cannot read {path}: {reason}") from error
        self._all = self._merged()
        if items and not self._all and not any(map(_of_auth, self._files)):
            raise BadTokens(f"{setting}: there is no token in it")

    def current(self) -> Mapping[bytes, Token] | None:
        """Tokens by digest; None where the setting is empty. The tokens of a file that can no longer be read stay valid."""
        if not self._files:
            return self._all or None
        moment = time.monotonic()
        if moment - self._read_at > RELOAD_S:
            self._read_at = moment
            changed = [path for path in self._files if self._changed(path)]
            if changed:
                self._all = self._merged()
                log.info("tokens were read again", extra={"setting": self._setting, "tokens": len(self._all)})
        return self._all

    def _changed(self, path: Path) -> bool:
        try:
            return self._reload(path)
        except (OSError, ValueError):
            log.warning("a file of tokens cannot be read: its last tokens stay valid", extra={"path": str(path)})
            return False

    def _reload(self, path: Path) -> bool:
        """Read a file that has changed; whether it has. Raises OSError, ValueError."""
        there = path.stat()
        mark = (there.st_mtime_ns, there.st_size, there.st_ino)
        if mark == self._files[path]:
            return False
        lines = [line.strip() for line in path.read_text().splitlines()]
        self._found[path] = _read([line for line in lines if line and not line.startswith("#")])
        self._files[path] = mark
        return True

    def _merged(self) -> dict[bytes, Token]:
        whole = dict(self._given)
        for found in self._found.values():
            whole.update(found)
        return whole


def _of_auth(path: Path) -> bool:
    """Whether `infaas auth` writes this file: there it may have no token yet, or no longer."""
    return path.read_text().startswith("# Written by `infaas auth`")


def _read(items: list[str]) -> dict[bytes, Token]:
    """Tokens by digest, of items `name:token`, `token`, which are named by their position, or lines of `infaas auth token`. Raises ValueError."""
    found: dict[bytes, Token] = {}
    for number, item in enumerate(items, 1):
        name, _, token = item.rpartition(":")
        if " sha256=" in item:
            name, *words = item.split()
            said = dict(word.split("=", 1) for word in words)
            until = datetime.fromisoformat(said["until"]).timestamp() if "until" in said else inf
            found[_keyed(said["sha256"])] = Token(name, said.get("app", ""), until)
        elif token:
            found[digest_of(token)] = Token(name or f"token-{number}")
    return found


class AccessControl:
    """The rule with a gateway's settings and tokens, for all its protocols. Raises BadTokens."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._users = Tokens("gateway.tokens", listed(settings.tokens))
        self._operators = Tokens("gateway.operator_tokens", listed(settings.operator_tokens))
        self._admin = settings.admin
        self._loopback = is_loopback(settings.address)

    def free(self, right: Right) -> bool:
        """Whether a request that needs this right needs no token."""
        return right is Right.NONE or (right is Right.QUERY and self._users.current() is None)

    @property
    def operators(self) -> bool:
        """Whether there are tokens of operators."""
        return self._operators.current() is not None

    def check(self, right: Right, credential: str | None) -> str:
        """Check that a request may go on: the only app that it may ask for; "": any. credential: its header Authorization, if any. Raises RequestFailed."""
        status, message, app = self.verdict(right, credential)
        if status:
            code, headers = ("unauthenticated", _CHALLENGE) if status == 401 else ("forbidden", None)
            raise RequestFailed(status, message, code=code, headers=headers)
        return app

    def verdict(self, right: Right, credential: str | None) -> AccessVerdict:
        """Whether a request may go on. credential: its header Authorization, if any."""
        keys = KnownTokens(self._users.current(), self._operators.current())
        return allowed(right, credential, keys, admin=self._admin, loopback=self._loopback, now=time.time())


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
