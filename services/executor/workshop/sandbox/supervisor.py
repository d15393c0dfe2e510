"""Starts a sandbox and enforces its limits: wall time, silence, resident memory, size of its output."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

import services
from bus.codec import BadMessage, decode
from services.executor.backends.remote import RELAY
from services.executor.workshop.sandbox.protocol import (
    Frame,
    MeasureTask,
    SandboxInput,
    SandboxLimits,
    SandboxTask,
    Step,
    TaskRefused,
)
from services.shell.child import framed, kept_environment, kill_group, read_frame

LARGEST_FRAME = 2**20
MOST_OUTPUT = 16 * 2**20
START_S = 60.0  # to import what it needs
WATCH_S = 0.1
_ROOT = str(Path(next(iter(services.__path__))).parent)
_START = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
    "runpy.run_module('services.executor.workshop.sandbox.child', run_name='__main__', alter_sys=True)"
)
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # a process with several gets no namespaces
_KEPT = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


class SandboxCrashed(Exception):
    """The sandbox ended without a result. The text says how, for the model's owner."""


async def _started(relay: int | None = None) -> asyncio.subprocess.Process:
    """A sandbox that waits for its task."""
    return await asyncio.create_subprocess_exec(
        *_command(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment() | ({} if relay is None else {RELAY: str(relay)}),
        pass_fds=() if relay is None else (relay,),
        start_new_session=True,
        limit=LARGEST_FRAME + 4,
    )


class NextSandbox:
    """A sandbox that starts before its task is there. It ends by itself when this process ends."""

    def __init__(self) -> None:
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None

    def prepare(self) -> None:
        """Start it, if none waits."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(_started())

    async def take(self) -> asyncio.subprocess.Process:
        """The one that waits, or another one if it has ended, or there is none."""
        starting, self._starting = self._starting, None
        process = None if starting is None else await starting
        return process if process is not None and process.returncode is None else await _started()

    async def close(self) -> None:
        """End the one that waits."""
        starting, self._starting = self._starting, None
        if starting is not None:
            process = await starting
            kill_group(process.pid)
            await process.wait()


async def run(
    task: SandboxTask,
    limits: SandboxLimits,
    on_frame: Callable[[Frame], None],
    relay: int | None = None,
    forks: "TorchForks | None" = None,
    waiting: NextSandbox | None = None,
) -> None:
    """Run one task. Every frame goes to `on_frame` as it comes. Raises SandboxCrashed. No process of it is left afterwards.

    relay: a descriptor that the sandbox inherits, through which it asks for requests to a remote engine. Without it: forks: of which it may be a
    copy; waiting: gives the sandbox, and starts the next one, unless this task measures.
    """
    copy = None if forks is None or relay is not None else await forks.copy()
    process = copy or await (waiting.take() if waiting is not None and relay is None else _started(relay))
    if waiting is not None and not isinstance(task, MeasureTask):
        waiting.prepare()
    said: list[bytes] = []
    listening = asyncio.ensure_future(_last_words(process.stderr, said))
    try:
        await _converse(process, SandboxInput(task=task, limits=limits), on_frame)
    finally:
        kill_group(process.pid)
        await process.wait()
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening


class SandboxCopy(Struct, eq=False):
    """A copy of the process of `TorchForks`: what `run` needs of a process."""

    stderr = None

    pid: int
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    orders: socket.socket
    _code: int | None = None

    async def wait(self) -> int:
        if self._code is None:
            said = await asyncio.get_running_loop().sock_recv(self.orders, 32)
            self._code = int(said or -signal.SIGKILL)  # it ends with the process that it is a copy of
            self.stdin.close()
        return self._code


class TorchForks:
    """A process that imports torch once, of which sandboxes are copies, one at a time. It is trusted: it reads no upload, each copy locks itself
    down before it does.
    """

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [*_command(), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=_environment() | {"OMP_WAIT_POLICY": "PASSIVE"},
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip

    async def copy(self) -> SandboxCopy | None:
        """None: there is none, and there will be none."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._orders, [b"copy"], [theirs.fileno()])
            pid = int(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._orders, 32), START_S))
        except (OSError, ValueError, TimeoutError):
            ours.close()
            self.close()
            return None
        reader, writer = await asyncio.open_connection(sock=ours, limit=LARGEST_FRAME + 4)
        return SandboxCopy(pid, writer, reader, self._orders)

    def close(self) -> None:
        """It ends, and so does its copy. May be called twice."""
        self._orders.close()
        self._process.kill()
        self._process.wait()


async def _converse(
    process: asyncio.subprocess.Process | SandboxCopy, order: SandboxInput, on_frame: Callable[[Frame], None]
) -> None:
    if process.stdin is None or process.stdout is None:
        raise SandboxCrashed("the sandbox could not be started")
    process.stdin.write(framed(order))
    process.stdin.write_eof()
    budget = _Budget(order.limits)
    watching = asyncio.ensure_future(budget.memory(process.pid))
    reading = asyncio.ensure_future(_read(process.stdout, budget, on_frame))
    try:
        await asyncio.wait({watching, reading}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        await reading
    finally:
        watching.cancel()
        reading.cancel()
    code = await process.wait()
    if code != 0:
        raise SandboxCrashed(_how(code, order.limits))


class _Budget:
    """The time and memory that a running sandbox has left. Silence while it waits for a core, which others have, does not count."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        self._waited = 0.0  # s for a core, in all
        self.step = "starting"
        now = time.monotonic()
        self.end = now + limits.seconds
        self.until = min(now + START_S, self.end)

    def received(self, frame: Frame) -> None:
        if isinstance(frame, Step):
            self.step = frame.step
            self.until = min(time.monotonic() + frame.within, self.end)

    async def memory(self, pid: int) -> None:
        """Returns when the process has ended. Raises SandboxCrashed if it is too large, or silent for too long."""
        while True:
            try:
                resident = _resident_bytes(pid)
            except (OSError, IndexError, ValueError):
                return  # it has ended; its last output is still being read
            if resident > self.limits.memory_bytes:
                raise SandboxCrashed(f"it needs more than the {self.limits.memory_bytes >> 20} MB of memory allowed")
            before, self._waited = self._waited, _waited_s(pid)
            self.until = min(self.until + max(0.0, self._waited - before), self.end)
            now = time.monotonic()
            if now > self.end:
                raise SandboxCrashed(
                    f"it took longer than the time allowed ({self.limits.seconds:.0f} s left at its start; registrar.seconds):"
                    f" {self.step}"
                )
            if now > self.until:
                raise SandboxCrashed(f"the model hangs: no sign of life for too long in step {self.step!r}")
            await asyncio.sleep(WATCH_S)


def _waited_s(pid: int) -> float:
    """For a core, that is, while it could have run. 0 where the kernel does not count it."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _read(stream: asyncio.StreamReader, budget: _Budget, on_frame: Callable[[Frame], None]) -> None:
    total = 0
    while True:
        try:
            body = await read_frame(stream, min(LARGEST_FRAME, MOST_OUTPUT - total))
        except asyncio.IncompleteReadError:
            return
        except OverflowError:
            raise SandboxCrashed("the sandbox sent more than it may") from None
        total += len(body)
        try:
            frame: Frame = decode(Frame, body)  # type: ignore[arg-type]
        except BadMessage as error:
            raise SandboxCrashed("the sandbox sent something that is no frame") from error
        budget.received(frame)
        on_frame(frame)
        if isinstance(frame, TaskRefused):
            return


async def _last_words(stream: asyncio.StreamReader | None, said: list[bytes]) -> None:
    """Read standard error, so that the sandbox never blocks on it. Only the newest piece is kept."""
    while stream is not None and (piece := await stream.read(4096)):
        said[:] = [piece]


def _how(code: int, limits: SandboxLimits) -> str:
    if code == -signal.SIGXFSZ:
        return f"it wrote more than {limits.file_bytes >> 20} MB to a file"
    if code < 0:
        return f"the model crashed the process that ran it ({signal.Signals(-code).name})"
    return "the process that ran the model ended without a result"


def _command() -> list[str]:
    return [sys.executable, "-I", "-c", _START, _ROOT, str(os.getpid())]


def _environment() -> dict[str, str]:
    """No credentials and no settings: only what Python and the frameworks need to start."""
    return kept_environment(_KEPT) | _ONE_THREAD
