"""The users of a cluster's bus: a directory with their credentials and with the configuration for NATS servers.

users.json          all users with their roles and public keys; no secrets
users/NAME.nk       credentials of one user, mode 0600, for that service or client only
nats-auth.conf      `include` it in the configuration of every nats-server, and reload the servers after each change
nats-tls.conf       likewise, if `infaas auth` made certificates
gateway-tokens      tokens for HTTP and gRPC, as SHA-256; the setting gateway.tokens names the file, and gateways read it again by themselves
infaas.toml         settings with which `infaas up` uses all of it
"""

import fcntl
import hashlib
import ipaddress
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.rights import ROLES, USUAL, VERBS, Identity, Role, Verb, rights, sharing
from bus.subjects import WITHOUT_APP, Subjects, valid_name
from infaas.errors import InfaasError
from services.shell.host.process import write_private

USERS = "users.json"
CONFIG = "nats-auth.conf"
TOKENS = "gateway-tokens"
SETTINGS = "infaas.toml"
# The users that `init` makes: one for each service. The services of one worker share a process (docs/architecture.md).
FIRST: dict[str, tuple[Role, ...]] = {
    "operator": ("operator",),
    "dispatcher": ("dispatcher",),
    "registrar": ("registrar",),
    "recorder": ("recorder",),
    "executor": ("executor",),
    "monitor": ("monitor", "model-autoscaler", "offline"),
    "vm-autoscaler": ("vm-autoscaler",),
    "jobs": ("jobs",),
    "gateway": ("gateway",),
    "dashboard": ("dashboard",),
    "supervisor": ("supervisor",),
    "backup": ("backup",),
    "control": (
        "supervisor",
        "registrar",
        "recorder",
        "vm-autoscaler",
        "jobs",
    ),  # of `infaas up` itself, and of the process that these share
    "container": ("executor", "monitor", "offline", "container"),
}


class CredentialError(InfaasError):
    """The credentials cannot be read or changed like this. The text says what to do."""


class Key(Struct, frozen=True):
    """public: the public half, which the servers know. created: Unix seconds."""

    public: str
    created: float


class User(Struct, frozen=True, kw_only=True):
    """One identity and its keys, oldest first. If there are two, both are valid."""

    name: str
    roles: tuple[Role, ...]
    app: str = ""
    worker: str = "*"
    verbs: tuple[Verb, ...] = USUAL
    buckets: tuple[str, ...] = ()
    keys: tuple[Key, ...] = ()

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.roles, self.app, self.worker, self.verbs, self.buckets)


class GatewayToken(Struct, frozen=True):
    """A token for HTTP and gRPC. app: the only one that may be asked for; "": any. digest: SHA-256 of the token. until: Unix seconds; None: for ever."""

    name: str
    app: str
    digest: str
    until: float | None = None


class _Content(Struct, kw_only=True):
    """first: the users of `FIRST` that were made once, whether or not they have been revoked; at first those of every version."""

    prefix: str
    users: list[User]
    tokens: list[GatewayToken] = []
    first: tuple[str, ...] = tuple(name for name in FIRST if name not in {"backup", "control"})


class CredentialStore(Struct, eq=False):
    """The users in one directory. A method that changes them writes users.json and nats-auth.conf before it returns."""

    directory: Path

    # ---- reading

    @property
    def prefix(self) -> str:
        return self._read().prefix

    def users(self) -> list[User]:
        """All users, sorted by name."""
        return sorted(self._read().users, key=lambda user: user.name)

    def tokens(self) -> list[GatewayToken]:
        """All tokens of the gateway, sorted by name."""
        return sorted(self._read().tokens, key=lambda token: token.name)

    def file_of(self, name: str) -> Path:
        """The file with a user's credentials."""
        return self.directory / "users" / f"{name}.nk"

    # ---- changing

    def begin(self, prefix: str) -> list[User]:
        """Make the directory with a user for each service. Raises CredentialError if it has users already."""
        if not valid_name(prefix):
            raise CredentialError(f"prefix {prefix!r} must be 1 to 64 letters, digits, - or _, a letter or digit first")
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._changing(_Content(prefix=prefix, users=[])) as content:
            if content.users:
                raise CredentialError(f"{self.directory} has users already: `infaas auth list` shows them")
            for name, roles in FIRST.items():
                content.users.append(self._with_new_key(User(name=name, roles=roles)))
            content.first = tuple(FIRST)
        return self.users()

    def renew(self) -> bool:
        """Bring what an older version has made up to this one: all rights, and users of services that are new. Whether anything was not.

        Raises CredentialError.
        """
        config = self.directory / CONFIG
        try:
            with self._changing() as content:
                before = config.read_bytes() if config.exists() else b""
                there = _names(content)
                for name in [name for name in FIRST if name not in content.first]:
                    content.first += (name,)
                    if name not in there:
                        content.users.append(self._with_new_key(User(name=name, roles=FIRST[name])))
                content.users = [
                    replace(user, roles=(*user.roles, "offline"))  # beside a class runs its runner of offline jobs
                    if "container" in user.roles and "offline" not in user.roles
                    else user
                    for user in content.users
                ]
        except OSError as error:
            raise CredentialError(
                f"the rights in {self.directory} are of an older version and cannot be written: {error.strerror}; as their owner, run"
                f" `infaas auth renew --dir {self.directory}`"
            ) from error
        return config.read_bytes() != before

    def add(self, user: User) -> User:
        """Add a user and make its credentials. Raises CredentialError."""
        _check(user)
        with self._changing() as content:
            for bucket in user.buckets:
                if f"{bucket}-".startswith(f"{content.prefix}-"):
                    raise CredentialError(
                        f"bucket {bucket!r} is the system's own: choose a name that does not begin with {content.prefix}-"
                    )
            if user.name in _names(content):
                raise CredentialError(f"there is a user {user.name!r} already: choose another name, or rotate its key")
            user = self._with_new_key(user)
            content.users.append(user)
        return user

    def rotate(self, name: str) -> User:
        """Give a user a new key. The old key stays valid until `revoke`. Raises CredentialError."""
        with self._changing() as content:
            at = _index_of(content, name)
            user = content.users[at]
            if len(user.keys) > 1:
                raise CredentialError(
                    f"{name} has an older key that is still valid: revoke it first (infaas auth revoke {name})"
                )
            user = content.users[at] = self._with_new_key(user)
        return user

    def revoke(self, name: str, *, wholly: bool = False) -> User:
        """Remove the older of two keys. With the only key, or with `wholly`, the user itself is removed. Raises CredentialError."""
        with self._changing() as content:
            at = _index_of(content, name)
            user = content.users[at]
            user = replace(user, keys=() if wholly else user.keys[1:])
            if user.keys:
                content.users[at] = user
            else:
                del content.users[at]
                self.file_of(name).unlink(missing_ok=True)
        return user

    def add_token(self, name: str, app: str, until: float | None) -> str:
        """Make a token of the gateway and return it: only its digest is kept. Raises CredentialError."""
        for field, value in (("name", name), ("app", app or "any")):
            if not valid_name(value):
                raise CredentialError(
                    f"{field} {value!r} must be 1 to 64 letters, digits, - or _, a letter or digit first"
                )
        secret = secrets.token_urlsafe(32)
        with self._changing() as content:
            if name in _names(content):
                raise CredentialError(
                    f"there is {name!r} already: choose another name, or revoke it (infaas auth revoke {name})"
                )
            content.tokens.append(GatewayToken(name, app, hashlib.sha256(secret.encode()).hexdigest(), until))
        return secret

    def revoke_token(self, name: str) -> bool:
        """Remove a token of the gateway; whether there was one."""
        with self._changing() as content:
            kept = [token for token in content.tokens if token.name != name]
            found, content.tokens = len(kept) < len(content.tokens), kept
        return found

    # ---- internals

    def _with_new_key(self, user: User) -> User:
        pair = new_pair()
        what = f"{'+'.join(user.roles)}{f' of the app {user.app}' if user.app else ''}"
        text = f"# {user.name}: {what}. Keep it secret.\n# inbox: {user.identity.inbox}\n{pair.seed}\n"
        write_private(self.file_of(user.name), text)
        return replace(user, keys=(*user.keys, Key(pair.public, time.time())))

    def _read(self) -> _Content:
        path = self.directory / USERS
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Content)
        except FileNotFoundError:
            raise CredentialError(
                f"there are no users in {self.directory}: make them with `infaas auth init`"
            ) from None
        except OSError as error:
            raise CredentialError(f"cannot read {path}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise CredentialError(f"{path} is damaged: {error}") from error

    @contextmanager
    def _changing(self, first: _Content | None = None) -> Iterator[_Content]:
        """The content to change, locked against other processes. It is written if the block ends without an error."""
        try:
            fd = os.open(self.directory, os.O_RDONLY)
        except OSError as error:
            raise CredentialError(
                f"cannot open {self.directory}: {error.strerror}; make it with `infaas auth init`"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            content = first if first is not None and not (self.directory / USERS).exists() else self._read()
            yield content
            identities = [(user.identity, [key.public for key in user.keys]) for user in content.users]
            for name, text in (
                (USERS, msgspec.json.format(msgspec.json.encode(content)).decode() + "\n"),
                (CONFIG, authorization(identities, Subjects(content.prefix))),
                (TOKENS, "".join([_TOKENS_HEAD, *map(_token_line, content.tokens)])),
            ):
                if not (self.directory / name).exists() or (self.directory / name).read_text() != text:
                    write_private(self.directory / name, text)
        finally:
            os.close(fd)


_TOKENS_HEAD = "# Written by `infaas auth`: do not edit. The setting gateway.tokens names this file.\n"


def _token_line(token: GatewayToken) -> str:
    """As services/gateway/http/access.py reads it."""
    app = f" app={token.app}" if token.app else ""
    until = "" if token.until is None else f" until={datetime.fromtimestamp(token.until, UTC).isoformat()}"
    return f"{token.name}{app}{until} sha256={token.digest}\n"


def _names(content: _Content) -> set[str]:
    return {user.name for user in content.users} | {token.name for token in content.tokens}


def _index_of(content: _Content, name: str) -> int:
    for at, user in enumerate(content.users):
        if user.name == name:
            return at
    raise CredentialError(
        f"there is no user {name!r}: {', '.join(sorted(user.name for user in content.users)) or 'no users yet'}"
    )


def _check(user: User) -> None:
    for field, value, free in (("name", user.name, False), ("app", user.app, True), ("worker", user.worker, False)):
        good = valid_name(value) or (free and not value) or (field, value) in (("app", WITHOUT_APP), ("worker", "*"))
        if not good:
            raise CredentialError(f"{field} {value!r} must be 1 to 64 letters, digits, - or _, a letter or digit first")
    if not user.roles or set(user.roles) - set(ROLES):
        raise CredentialError(
            f"role must be one or several of {', '.join(ROLES)}, not {', '.join(user.roles) or 'none'}"
        )
    if ("client" in user.roles) != bool(user.app) or (user.app and len(user.roles) > 1):
        raise CredentialError("a client belongs to one app: --role client with --app, and no other role")
    if user.app and user.worker != "*":
        raise CredentialError("worker: is of a worker's processes, and this user is a client; leave --worker out")
    if not user.app and user.verbs != USUAL:
        raise CredentialError("may: is of clients, and other roles have their own rights; leave --may out")
    if set(user.verbs) - set(VERBS):
        raise CredentialError(f"may: {', '.join(sorted(set(user.verbs) - set(VERBS)))} is none of {', '.join(VERBS)}")
    for bucket in user.buckets:
        if not valid_name(bucket):
            raise CredentialError(f"bucket {bucket!r} must be 1 to 64 letters, digits, - or _, a letter or digit first")


class KeyPair(NamedTuple):
    """An ed25519 key in the format of NATS (nkey). seed: SU…, a secret. public: U…, which the servers know."""

    seed: str
    public: str


def new_pair() -> KeyPair:
    """A new key of a user."""
    import nkeys  # noqa: PLC0415  (it loads libsodium)

    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    return KeyPair(seed.decode(), nkeys.from_seed(bytearray(seed)).public_key.decode())


_HEAD = """\
# Written by `infaas auth`: do not edit. Include it in the configuration of every nats-server, and reload the servers after each
# change: nats-server --signal reload=PID.
"""


def authorization(users: Iterable[tuple[Identity, Sequence[str]]], subjects: Subjects) -> str:
    """The block `authorization` of the servers' configuration: every valid public key with the rights of its user."""
    lines = [_HEAD, "authorization {", "  timeout: 5", "  users: ["]
    given = list(users)
    for identity, (_, keys) in zip(sharing(identity for identity, _ in given), given, strict=True):
        allowed = rights(identity, subjects)
        of = f" of the app {identity.app}" if identity.app else ""
        lines.append(f"    # {identity.name}: {'+'.join(identity.roles)}{of}")
        for key in keys:
            lines += [
                f"    {{ nkey: {key}, permissions: {{",
                f"        publish: {{ allow: {json.dumps(allowed.publish)} }}",
                f"        subscribe: {{ allow: {json.dumps(allowed.subscribe)} }}",
                "    } }",
            ]
    return "\n".join([*lines, "  ]", "}", ""])


def tls(certificate: str, key: str) -> str:
    """The block `tls` of the servers' configuration. The paths are those on the servers' machines."""
    return f"{_HEAD}tls {{\n  cert_file: {json.dumps(certificate)}\n  key_file: {json.dumps(key)}\n  timeout: 5\n}}\n"


# -- a certificate authority of the cluster's own, for servers without a public certificate

CA_DAYS, DAYS = 3650, 825
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-sha256")


class CertificateError(InfaasError):
    """A certificate could not be made. The text says what to do."""


def certify(directory: Path, hosts: Sequence[str]) -> list[Path]:
    """Make server.pem and server.key for these names and addresses, signed by ca.pem. Makes ca.pem and ca.key if they are missing.

    Returns the files. The keys are secret (mode 0600). Raises CertificateError.
    """
    program = shutil.which("openssl")
    if program is None:
        raise CertificateError(
            "certificates need the program openssl: install it, or give the servers other certificates"
        )
    hosts = [*hosts, *(own for own in ("localhost", "127.0.0.1") if own not in hosts)]  # for services beside the server
    ca, ca_key = directory / "ca.pem", directory / "ca.key"
    with TemporaryDirectory(dir=directory) as name:
        work = Path(name)
        if not ca.exists():
            _run(
                *(program, "req", "-x509", *_CURVE, "-days", str(CA_DAYS), "-subj", "/CN=infaas certificate authority"),
                *("-keyout", str(work / "ca.key"), "-out", str(work / "ca.pem")),
                *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
            )
            write_private(ca_key, (work / "ca.key").read_text())
            ca.write_text((work / "ca.pem").read_text())
        _run(
            *(program, "req", *_CURVE, "-subj", f"/CN={hosts[0][:64]}"),
            *("-keyout", str(work / "server.key"), "-out", str(work / "server.csr")),
        )
        (work / "extensions").write_text(
            "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"
            "extendedKeyUsage=serverAuth,clientAuth\nauthorityKeyIdentifier=keyid\n"
            f"subjectAltName={','.join(map(_alternative, hosts))}\n"
        )
        _run(
            *(program, "x509", "-req", "-sha256", "-days", str(DAYS), "-in", str(work / "server.csr")),
            *("-CA", str(ca), "-CAkey", str(ca_key), "-CAcreateserial", "-CAserial", str(work / "serial")),
            *("-extfile", str(work / "extensions"), "-out", str(work / "server.pem")),
        )
        write_private(directory / "server.key", (work / "server.key").read_text())
        (directory / "server.pem").write_text((work / "server.pem").read_text())
    config = directory / "nats-tls.conf"
    here = directory.absolute()
    config.write_text(tls(str(here / "server.pem"), str(here / "server.key")))
    return [ca, directory / "server.pem", directory / "server.key", config]


def settings_for(directory: Path) -> Path:
    """Write the settings with which `infaas up` uses these keys and certificates for all its servers; returns the file."""
    here = directory.absolute()
    pair = (
        f"tls_certificate = {json.dumps(str(here / 'server.pem'))}\ntls_key = {json.dumps(str(here / 'server.key'))}\n"
    )
    path = directory / SETTINGS
    path.write_text(
        f"[bus]\nauth = {json.dumps(str(here))}\n\n[gateway]\n{pair}tokens = [{json.dumps(str(here / TOKENS))}]\n\n[dashboard]\n{pair}"
    )
    return path


def _alternative(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        if not host or set(host) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._*"):
            raise CertificateError(f"{host!r} is no name or address of a host: correct --tls-host") from None
        return f"DNS:{host}"


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CertificateError(f"openssl failed: {error}") from error
    if done.returncode != 0:
        last = " ".join(done.stderr.split())[-300:]
        raise CertificateError(f"openssl failed: {last or f'exit code {done.returncode}'}")
