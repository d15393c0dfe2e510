"""The credentials of a NATS connection: the key that `infaas auth` created, the connection's own inboxes, and TLS."""

import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from bus.port import BadLogin

_SEED = re.compile(r"^\s*(SU[A-Z2-7]{56})\s*$", re.MULTILINE)
_INBOX = re.compile(r"^#\s*inbox:\s*(\S+)\s*$", re.MULTILINE)
ENDPOINTS = "endpoints.json"  # the file that `infaas up` writes into its data directory
# The short names of environment variables, for the client library and the commands. Services also read INFAAS_BUS__... (docs/settings.md).
VARIABLES = {
    "nkey_seed": "INFAAS_NKEY_SEED",
    "tls_ca": "INFAAS_TLS_CA",
    "tls_certificate": "INFAAS_TLS_CERTIFICATE",
    "tls_key": "INFAAS_TLS_KEY",
}


class Login(Struct, frozen=True, kw_only=True):
    """The credentials of one connection.

    nkey_seed: the content of a file that `infaas auth` wrote, or its path. inbox: the prefix of the connection's inboxes; empty = the
    prefix in that file. tls_ca: a PEM file, or its content, with the certificate authority of the servers. If it is set, servers
    without TLS are refused. tls_certificate, tls_key: files with the client certificate and its key, for servers that ask for one.
    """

    nkey_seed: str = ""
    inbox: str = ""
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""

    def options(self) -> dict[str, Any]:
        """The options for `NatsBus.connect`. Raises BadLogin; its text says what is wrong with a file."""
        found: dict[str, Any] = {}
        inbox = self.inbox
        if self.nkey_seed:
            text = _text(self.nkey_seed)
            seed = _SEED.search(text)
            if seed is None:
                raise BadLogin("the nkey seed is none: it is the line SU… of a file that `infaas auth add` wrote")
            found["nkeys_seed_str"] = seed[1]
            said = _INBOX.search(text)
            inbox = inbox or (said[1] if said else "")
        if inbox:
            found["inbox_prefix"] = inbox
        if self.tls_ca or self.tls_certificate:
            found["tls"] = self._context()
        return found

    def _context(self) -> ssl.SSLContext:
        try:
            given = {"cadata": self.tls_ca} if "-----BEGIN" in self.tls_ca else {"cafile": self.tls_ca or None}
            context = ssl.create_default_context(**given)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.tls_certificate:
                context.load_cert_chain(self.tls_certificate, self.tls_key or None)
        except OSError as error:  # the base class of ssl.SSLError
            raise BadLogin(
                f"TLS cannot be set up from tls_ca {self.tls_ca[:200]!r}, tls_certificate {self.tls_certificate!r} and tls_key: {error.strerror or error}"
            ) from error
        return context


class SystemAddress(Struct, frozen=True):
    """Where a system is, as `infaas up` writes it into its data directory: URLs with credentials.

    sql: of the read-only role. writer: of the recorder's role. dashboard to metrics: of these pages; None: there are none. settings: those that
    decide what is scaled, as a tree, so that `infaas shadow` starts from them. given: value and origin of all that were set, by key;
    config: the file that did. login: an operator's, for commands. data_dir: the directory that they were read from, if any.
    """

    nats: str
    sql: str
    prefix: str = "infaas"
    data_dir: Path | None = None
    writer: str = ""
    dashboard: str | None = None
    gateway: str | None = None
    gateway_grpc: str | None = None
    metrics: str | None = None
    settings: dict[str, Any] = {}
    given: dict[str, tuple[Any, str]] = {}
    config: str | None = None
    login: Login = Login()

    @property
    def monitoring(self) -> str:
        """Where its NATS servers show their settings, as `bus.durability.weaknesses` takes it."""
        return str(self.given.get("bus.monitoring", ("",))[0] or os.environ.get("INFAAS_BUS__MONITORING", ""))


def login_from(environ: Mapping[str, str]) -> Login:
    """The credentials from environment variables. Each comes from INFAAS_NKEY_SEED and the like, else from INFAAS_BUS__NKEY_SEED and the
    like, else from the file that INFAAS_BUS__..._FILE names.
    """
    found: dict[str, str] = {}
    for field in Login.__struct_fields__:
        long = f"INFAAS_BUS__{field.upper()}"
        value = environ.get(VARIABLES.get(field, "")) or environ.get(long) or environ.get(f"{long}_FILE")
        if value:
            found[field] = value
    return Login(**found)


def _text(seed: str) -> str:
    """The text that holds the seed: `seed` itself, or the content of the file with this path."""
    if _SEED.search(seed):
        return seed
    try:
        return Path(seed).expanduser().read_text()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        # a text that is no path may be a seed with a typo, and logs must not show secrets
        place = f" from {seed[:200]!r}" if "/" in seed or "." in seed else ""
        raise BadLogin(f"the nkey seed cannot be read{place}: {reason}") from None


def merged(first: Login, second: Login) -> Login:
    """The values of `second`, and those of `first` where `second` has none."""
    return replace(first, **{name: value for name, value in asdict(second).items() if value})
