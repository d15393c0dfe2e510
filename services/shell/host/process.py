"""Child processes that never outlive us, and what those of a system share: locks, secrets, free ports, logs."""

import ctypes
import fcntl
import gc
import json
import os
import secrets
import shutil
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Self

from msgspec import Struct

from services.shell.host import launch
from services.shell.host.running import RUNNING, Running

Steps = Sequence[tuple[signal.Signals, float]]
_QUIET_PORTS = range(20_000, 32_000)  # below the range of outgoing connections on Linux and macOS
PLAIN = ("plain", 0, 0)
RUN = "infaas.cli.run"  # the module that runs services
AT_ONCE: Steps = ((signal.SIGKILL, 5.0),)
POLITE: Steps = ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))


class ServerError(Exception):
    """A server of ours cannot start or continue. The text is one sentence for people and says what to do."""


def dies_with_parent(
    command: Sequence[str | Path], signum: signal.Signals, identity: tuple[str, int, int] = PLAIN
) -> list[str]:
    """The command that runs `command` and gets `signum` from the kernel when our process dies (Linux only).

    The kernel ties this to the *thread* that starts the child: start children from the main thread. identity: the user that it becomes
    first (see `postgres.ProcessIdentity`).
    """
    return launched(command, identity, signum)


def launched(command: Sequence[str | Path], identity: tuple[str, int, int], signum: int = 0) -> list[str]:
    """The command that runs `command` as another user (see `launch`)."""
    words = [sys.executable, "-I", "-S", launch.__file__, os.getpid(), int(signum), *identity, *command]
    return [str(word) for word in words]


def start(
    command: Sequence[str | Path],
    *,
    log: Path | None,
    on_our_death: signal.Signals,
    identity: tuple[str, int, int] = PLAIN,
    environ: Mapping[str, str] | None = None,
    cwd: Path | str = "/",
    keep_open: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own. Raises ServerError.

    log: file that its output is appended to; None: our own output. keep_open: descriptors that it inherits. Call this from the main thread (see
    `dies_with_parent`).
    """
    if shutil.which(command[0], path=None if environ is None else environ.get("PATH")) is None:
        raise ServerError(f"cannot start {command[0]}: no such program")
    try:
        with nullcontext() if log is None else _appended(log) as output:
            return subprocess.Popen(
                dies_with_parent(command, on_our_death, identity),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd,
                env=None if environ is None else dict(environ),
                # Ctrl-C reaches only us; we end it in our order. Not a session of its own: Linux schedules by session
                # (sched_autogroup), and servers that pass each other small messages then cost twice the CPU.
                process_group=0,
                pass_fds=keep_open,
            )
    except OSError as error:
        raise ServerError(f"cannot start {command[0]}: {error}") from error


def start_service(
    command: Sequence[str | Path],
    *,
    log: Path | None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | str = "/",
    keep_open: Sequence[int] = (),
    running: Running | None = None,
    forks: "ForkServer | None" = None,
) -> "subprocess.Popen[bytes] | Taken":
    """Start a service, which is killed when we die, as `start` does. Raises ServerError.

    running: where it writes what it does at each moment. forks: of which it may be a copy, if `command` is a `service_command`, or one like it of another module with a `main`.
    """
    environ = dict(os.environ if environ is None else environ)
    if running is not None:
        fds = [one.fd for one in (running, running.before) if one is not None]
        environ[RUNNING] = ",".join(map(str, fds))
        keep_open = (*keep_open, *fds)
    copied = None if forks is None else forks.start(command, log, environ, cwd, keep_open)
    return copied or start(command, log=log, on_our_death=signal.SIGKILL, environ=environ, cwd=cwd, keep_open=keep_open)


def end(process: subprocess.Popen[bytes], steps: Steps = POLITE) -> None:
    """Send each signal in turn, waiting so many seconds after each, until the process has ended."""
    for signum, seconds in steps:
        if process.poll() is not None:
            return
        process.send_signal(signum)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def _die_with(supervisor: int) -> None:
    """Be killed when this parent of ours ends, which may be so already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(0)


class Taken(Struct, eq=False):
    """A copy of a fork server: a child of ours since the process that made it has ended."""

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        """Its exit code, as `subprocess.Popen` says it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


FORKS = "INFAAS_FORKS"  # the variable that tells a fork server where its orders come from
ROOM = 8192  # bytes behind it, where copies show what else their environment has
READY_S, ORDER_S = 120.0, 10.0  # s that its imports and one copy may take


class ForkServer:
    """A process with the modules of these services, of which each service becomes a copy: what they share is imported and held once (Linux).

    It has one thread, and none of our settings and secrets. A copy is a child of ours before it begins: its parent ends first, and we adopt
    orphans. Where the fork server has ended, another one is started, and until that can make copies services are programs of their own.
    """

    def __init__(
        self, services: Sequence[str], config: Path | None, environ: Mapping[str, str], log: Path | None
    ) -> None:
        ours = {name: value for name, value in environ.items() if name.startswith("INFAAS_")}
        others = {name: value for name, value in environ.items() if name not in ours}
        command, room = service_command(["fork-server", *services], config), " " * (ROOM + len(str(ours)))

        def launch(orders: int) -> subprocess.Popen[bytes]:
            more = {FORKS: f"{orders} {room}", "OPENBLAS_NUM_THREADS": "1"}
            return start(
                command, log=log, on_our_death=signal.SIGKILL, cwd=Path.cwd(), keep_open=[orders],
                environ=with_our_source(others | more),
            )  # fmt: skip

        self._launch = launch
        self._begin()

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready = False
        with theirs:
            self._process = self._launch(theirs.fileno())

    def wait_ready(self, patience: float = READY_S) -> bool:
        """Return once it can make copies, or will never. False: it cannot (yet)."""
        with suppress(OSError):
            self._socket.settimeout(patience)
            self._ready = self._ready or self._socket.recv(1) == b"!"
            self._socket.settimeout(ORDER_S)
        return self._ready

    def start(
        self,
        command: Sequence[str | Path],
        log: Path | None,
        environ: Mapping[str, str],
        cwd: Path | str,
        keep_open: Sequence[int],
    ) -> "Taken | None":
        """A copy that runs this command of `service_command`. None: there is none now."""
        if self._process.poll() is None and not self.wait_ready(0.0):
            return None
        order = {"words": list(map(str, command)), "environ": dict(environ), "cwd": str(cwd), "fds": list(keep_open)}
        line, go = os.pipe()
        try:
            with nullcontext() if log is None else _appended(log) as output:
                outputs = (1, 2) if output is None else (output.fileno(), output.fileno())
                socket.send_fds(self._socket, [json.dumps(order).encode()], [line, *outputs, *keep_open])
                copy = Taken(int(self._socket.recv(32)))
            os.write(go, b"!")
        except (OSError, ValueError):  # a copy that was made meanwhile is never told to begin, and ends
            if self._socket.fileno() >= 0:
                self.close()
                self._begin()
            return None
        finally:
            os.close(line)
            os.close(go)
        return copy

    def close(self) -> None:
        """It ends, its copies do not. May be called twice."""
        self._socket.close()
        end(self._process, AT_ONCE)


def copied(words: list[str], modules: Callable[[list[str]], object]) -> list[str]:
    """The arguments of this process. Of a fork server only copies return from here, each with its own; `modules` imports what all of these need."""
    if (found := os.environ.pop(FORKS, None)) is None:
        return words
    supervisor, orders = os.getppid(), socket.socket(fileno=int(found))
    modules(words[1:])
    gc.collect()
    gc.freeze()
    orders.send(b"!")
    while True:
        message, fds, _, _ = socket.recv_fds(orders, 2**20, 250)
        if not message:
            os._exit(0)
        told, tell = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                for fd in (told, tell, orders.detach()):
                    os.close(fd)
                return _become(json.loads(message), fds, supervisor)
            os.setpgid(pid, pid)
            os.write(tell, b"%d" % pid)
            os._exit(0)
        os.waitpid(between, 0)  # from now on the copy is the supervisor's child
        orders.send(os.read(told, 32))
        for fd in (told, tell, *fds):
            os.close(fd)


def _become(order: dict[str, Any], fds: Sequence[int], supervisor: int) -> list[str]:
    """Be the service of this order, once the supervisor knows of us; returns its arguments."""
    if not os.read(fds[0], 1):
        os._exit(0)
    _die_with(supervisor)
    wanted = [fds[0], 1, 2, *order["fds"]]
    apart = max(wanted) + 1
    for fd, number in [(fcntl.fcntl(fd, fcntl.F_DUPFD, apart), number) for fd, number in zip(fds, wanted, strict=True)]:
        os.dup2(fd, number)
        os.close(fd)
    for fd in {*fds} - {*wanted[1:]}:
        os.close(fd)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environ"])
    words: list[str] = order["words"]
    # For `ps` and whoever else looks, as far as there is room: where the fork server's command line and environment were.
    places = [int(each) for each in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]]
    for at, shown in ((0, words), (2, ["=".join(each) for each in os.environ.items()])):
        size = places[at + 1] - places[at]
        ctypes.memmove(places[at], b"\0".join(map(os.fsencode, shown))[: size - 1].ljust(size, b"\0"), size)
    sys.argv = [sys.argv[0], *words[4:]]
    if words[3] != RUN:
        sys.exit(import_module(words[3]).main(words[4:]))
    return words[4:]


def service_command(services: Sequence[str], config: Path | None) -> list[str | Path]:
    """The command that runs these services in one process."""
    command: list[str | Path] = [sys.executable, "-P", "-m", RUN, *services]
    return command if config is None else [*command, "--config", config.absolute()]


def with_our_source(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a Python process that must find these packages, also when we run from a source tree."""
    root = str(Path(__file__).resolve().parents[3])
    if root in site.getsitepackages():
        return dict(environ)
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))}


class Lock:
    """An exclusive lock on a file. A server that gets `fd` holds the lock until it has ended, too."""

    def __init__(self, path: Path, wait: float = 0.0) -> None:
        """Take the lock within `wait` seconds; raises ServerError."""
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_up = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    os.close(self.fd)
                    raise ServerError(f"{path.parent} is in use by another process; stop that one first") from None
                time.sleep(0.05)
            else:
                return

    def release(self) -> None:
        """Give our share of the lock up; may be called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class EmbeddedServer:
    """One server with its store and password below `data_dir`. It ends when this process ends, however that happens."""

    title: str  # for people
    name: str  # of its files
    patience_s: float  # until it accepts clients
    steps: Steps = POLITE  # to its end

    def __init__(self, data_dir: Path, port: int, lock_wait: float) -> None:
        """Port 0: a free one. lock_wait: seconds for a predecessor to end."""
        self.data_dir = data_dir.absolute()
        self.port = port or free_port()
        self.log = self.data_dir / "logs" / f"{self.name}.log"
        self._lock_wait = lock_wait
        self._lock: Lock | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @cached_property
    def password(self) -> str:
        """Of its first user, made once and kept."""
        return kept_secret(self.data_dir / f"{self.name}.secret")

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The running server; None before `launch`."""
        return self._process

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process and return at once (from the main thread, see dies_with_parent); raises ServerError."""
        raise NotImplementedError

    def accepts(self) -> bool:
        """Whether the server on our port is ours, and accepts clients."""
        raise NotImplementedError

    def start(self) -> Self:
        """Launch, and return once it accepts clients; raises ServerError."""
        try:
            self.launch()
            self.wait_ready()
        except ServerError:
            self.stop()
            raise
        return self

    def wait_ready(self) -> None:
        """Return once it accepts clients; raises ServerError with the end of its log."""
        assert self._process is not None, "launch first"
        give_up = time.monotonic() + self.patience_s
        while not self.accepts():
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise ServerError(f"{self.title} did not start on port {self.port}: {tail(self.log, 600)}")
            time.sleep(0.01)

    def stop(self) -> None:
        """End the server and wait for it; may be called twice."""
        if self._process is not None:
            end(self._process, self.steps)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _locked(self) -> Lock:
        """The lock of its files, taken now if it is not ours; raises ServerError."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock = Lock(self.data_dir / f"{self.name}.lock", self._lock_wait)
        return self._lock

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def kept_secret(path: Path) -> str:
    """The password kept in `path` (mode 0600), made at the first call. Not for concurrent first calls."""
    with suppress(FileNotFoundError):
        if kept := path.read_text().strip():
            return kept
    secret = secrets.token_urlsafe(24)
    write_private(path, secret + "\n")
    return secret


def write_private(path: Path, text: str) -> None:
    """Write a file that only we may read (0600). It is written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def port_is_free(port: int) -> bool:
    """Whether a server could listen on 127.0.0.1:port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now.

    Where possible it is none that the kernel gives to outgoing connections: such a connection could take the port before the server
    does, or connect to itself there while the server is down.
    """
    for _ in range(100):
        port = secrets.choice(_QUIET_PORTS)
        if port_is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _appended(log: Path) -> BinaryIO:
    """A log file, open."""
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")


def rotate(logs: Path, limit: int = 10 * 2**20) -> None:
    """Empty each log file that has grown beyond `limit` bytes, whoever writes to it; what it held is `NAME.1`, one generation."""
    for log in logs.glob("*.log"):
        with suppress(OSError):
            if log.stat().st_size > limit:
                shutil.copyfile(log, f"{log}.1")
                os.truncate(log, 0)


def tail(path: Path, size: int = 2000) -> str:
    """The end of a log file, for an error text."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace").strip()
    return ""


def last_line(path: Path) -> str:
    """The last line of a log file, for an error text."""
    return tail(path).rpartition("\n")[2]


# ---- orphans: what our children leave behind comes to us instead of init (Linux), so that a stop can be complete

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1


def adopt_orphans() -> None:
    """From now on orphans among our descendants become our children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def child_pids() -> set[int]:
    """Ids of our child processes, adopted and ended ones included; empty where the system does not say."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found.update(int(pid) for pid in task.read_text().split())
    return found


def end_orphans(before: frozenset[int], patience: float = 5.0) -> None:
    """Kill and reap every child that is not among `before`, and the orphans that this makes, for at most `patience` seconds."""
    give_up = time.monotonic() + patience
    while (left := child_pids() - before) and time.monotonic() < give_up:
        for pid in left:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
