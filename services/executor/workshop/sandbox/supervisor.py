"""Starts a sandbox and enforces its limits: wall time, silence, resident memory, size of its output."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
        sys.executable,
        "-I",
        "-c",
        _START,
        _ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # No credentials and no settings: only what Python and the frameworks need to start.
        env=kept_environment(_KEPT) | _ONE_THREAD | ({} if relay is None else {RELAY: str(relay)}),
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
    waiting: NextSandbox | None = None,
) -> None:
    """Run one task. Every frame goes to `on_frame` as it comes. Raises SandboxCrashed. No process of it is left afterwards.

    relay: a descriptor that the sandbox inherits, through which it asks for requests to a remote engine. waiting: gives the sandbox, where there is
    no relay, and starts the next one, unless this task measures.
    """
    process = await (waiting.take() if waiting is not None and relay is None else _started(relay))
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


async def _converse(
    process: asyncio.subprocess.Process, order: SandboxInput, on_frame: Callable[[Frame], None]
) -> None:
    if process.stdin is None or process.stdout is None:
        raise SandboxCrashed("the sandbox could not be started")
    process.stdin.write(framed(order))
    process.stdin.close()
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
    """The time and memory that a running sandbox has left."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
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
            now = time.monotonic()
            if now > self.end:
                raise SandboxCrashed(
                    f"it took longer than the time allowed ({self.limits.seconds:.0f} s left at its start; registrar.seconds):"
                    f" {self.step}"
                )
            if now > self.until:
                raise SandboxCrashed(f"the model hangs: no sign of life for too long in step {self.step!r}")
            await asyncio.sleep(WATCH_S)


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
