"""A user's own Python class in a process of its own: the handle that runs batches there, and that process's main.

    python -m services.executor.backends.container MODULE:CLASS

The two talk as services/shell/child.py says. A class that crashes, hangs or ends its process costs the batch that it computes; the process
is started again. Source of the interface: Clipper's model containers (paper 002, section 4.4).
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
from msgspec import Struct

from bus.codec import BadMessage
from bus.messages.catalog import Signature
from bus.messages.public import Tensor
from bus.tensors import BadTensor, from_array, to_array
from services.executor.backends.base import Cancelled, LoadFailed, RunFailed, checked_outputs, in_order, plain
from services.shell.child import Channel, NoSuchCode, how_ended, kill_group, named
from services.shell.host.process import dies_with_parent, with_our_source

if TYPE_CHECKING:
    from bus.tensors import Array

METHOD = "predict_batch"
R = TypeVar("R")
AGAIN_S = 0.02  # s between looks whether the process has been started again


class _Call(Struct, frozen=True):
    """One batch."""

    inputs: dict[str, Tensor]


class ChildReply(Struct, frozen=True):
    """What became of a batch, or of the start. error: empty if it succeeded."""

    outputs: dict[str, Tensor] = {}
    error: str = ""


class ChildProcess:
    """A process that runs code of somebody else: started, ended, and started again where it has ended. Call `open` before everything else.

    command: of it. directory: where it runs. code: that it loads; what: that is called of it, for errors. One call is made at a time.
    """

    def __init__(self, command: list[str], directory: Path, code: str, what: str) -> None:
        self.memory_mb = self.start_ms = 0.0
        self._code = code
        self._command = dies_with_parent(command, signal.SIGKILL)
        self._directory = directory
        self._what = what
        self.stderr: int | None = None  # ours
        self.most_bytes = 2**32  # of a reply
        # One thread for all starts: the kernel ends a child when the thread that started it ends.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="container")
        self._starting: Future[None] | None = None
        self._changing = threading.Lock()  # held while the process becomes another one, or is ended for good
        self._closed = False
        self._up = threading.Event()
        self._given_up = threading.Event()
        self._cancelled = False

    def open(self, *, here: bool = False) -> None:
        """Start the process; returns when the code is loaded. here: in this thread. Raises LoadFailed with the error of the code."""
        if here:
            self._start()
        else:
            self._starter.submit(self._start).result()

    def measure_memory(self) -> float:
        """Resident memory of the process, in MB, as `memory_mb` has it from now on."""
        with suppress(psutil.Error):  # it is being started again
            self.memory_mb = psutil.Process(self._process.pid).memory_info().rss / 2**20
        return self.memory_mb

    def measure_cpu(self) -> float:
        """CPU seconds of the process since it began."""
        with suppress(psutil.Error):  # it is being started again
            used = psutil.Process(self._process.pid).cpu_times()
            return float(used.user + used.system)
        return 0.0

    def exchange(self, call: Any, kind: type[R]) -> R:
        """The reply to a call. Raises RunFailed, Cancelled."""
        self._given_up.clear()
        self._await_process()
        try:
            self._channel.send(call)
            return self._channel.received(kind)
        except (EOFError, OSError):
            raise self._ended() from None
        except BadMessage as error:
            raise RunFailed(f"what {self._what} returned cannot be read: {error}") from error

    def cancel(self) -> None:
        """End the process: the only way to end code of somebody else."""
        if self._up.is_set():
            self._cancelled = True
            kill_group(self._process.pid)
            with suppress(OSError):  # what it has started, and has left its group, may hold the channel open
                self._ours.shutdown(socket.SHUT_RDWR)
        else:
            self._given_up.set()

    def close(self) -> None:
        """End the process for good, also one that is just being started again."""
        self._up.clear()
        with self._changing, suppress(AttributeError):  # it has never been started
            self._closed = True
            kill_group(self._process.pid)
            self._process.wait()
        self._starter.shutdown()
        with suppress(AttributeError):
            self._channel.close()

    # -- inside

    def _environment(self) -> dict[str, str]:
        return with_our_source(os.environ)

    def _greet(self, channel: Channel) -> None:
        """What the process must hear before it says that it is ready."""

    def _start(self) -> None:
        started = time.perf_counter()
        with self._changing:
            if self._closed:
                raise LoadFailed("the container has been closed")
            self._ours, theirs = socket.socketpair()  # no pipes: who waits for one cannot be woken
            with theirs:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self.stderr,
                    cwd=self._directory,
                    env=self._environment(),
                    process_group=0,  # Ctrl-C reaches only us
                )
            with self._ours:  # the files keep it open
                self._channel = Channel(self._ours.makefile("rb"), self._ours.makefile("wb"), self.most_bytes)
        try:
            self._greet(self._channel)
            error = self._channel.received(ChildReply).error
        except (EOFError, OSError):
            error = f"the process {self._how_it_ended()} before {self._code} was made"
        if error:
            self._process.kill()
            self._process.wait()
            raise LoadFailed(plain(error))
        self.measure_memory()
        self.start_ms = (time.perf_counter() - started) * 1000.0
        self._up.set()

    def _await_process(self) -> None:
        """Wait while the process is being started again, also where it has ended between two calls. Raises RunFailed, Cancelled."""
        if self._up.is_set() and self._process.poll() is not None:
            ended = self._ended()
            if isinstance(ended, Cancelled):
                raise ended
        while not self._up.wait(AGAIN_S):
            if self._given_up.is_set():
                raise Cancelled("the process has ended, and it takes long to start again")
            starting = self._starting
            if starting is None or starting.done():
                if self._up.is_set():
                    return  # it has just started: a second one would be nobody's
                error = None if starting is None else starting.exception()
                self._start_again()
                if error is not None:
                    raise RunFailed(f"the process has ended and does not start again: {error}")

    def _start_again(self) -> None:
        self._starting = self._starter.submit(self._start)

    def _ended(self) -> RunFailed:
        """The error of the batch that was computed when the process ended. It is started again."""
        how, cancelled = self._how_it_ended(), self._cancelled
        self._cancelled = False
        kill_group(self._process.pid)  # what it has started, which nobody asks any more
        self._up.clear()
        self._channel.close()
        self._start_again()
        if cancelled:
            return Cancelled(f"{self._what} took too long, and its process was ended")
        return RunFailed(f"the process {how} in {self._what}")

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            return how_ended(self._process.wait(1.0))
        self._process.kill()
        self._process.wait()
        return "closed its channel"


class UserProcess(ChildProcess):
    """A `Handle`. target: "module:Class", looked up in `directory` first.

    Once `signature` is set, outputs are checked against it, and converted to its datatypes where nothing but precision is lost.
    """

    def __init__(self, target: str, directory: Path) -> None:
        super().__init__([sys.executable, "-P", "-m", __spec__.name, target], directory, target, METHOD)
        self.proof = f"{target} in a process of its own"
        self.inputs: tuple[str, ...] = ()
        self.outputs: tuple[str, ...] = ()
        self.one_at_a_time = f"{METHOD} is called for one batch at a time"
        self._signature: Signature | None = None

    @property
    def signature(self) -> Signature | None:
        return self._signature

    @signature.setter
    def signature(self, signature: Signature) -> None:
        self._signature = signature
        self.inputs = tuple(spec.name for spec in signature.inputs)
        self.outputs = tuple(spec.name for spec in signature.outputs)

    # -- Handle

    def run(self, inputs: "dict[str, Array]") -> "dict[str, Array]":
        """Raises RunFailed, Cancelled."""
        reply = self.exchange(_Call({name: from_array(array) for name, array in inputs.items()}), ChildReply)
        if reply.error:
            raise RunFailed(plain(reply.error))
        try:
            arrays = {name: to_array(tensor, f"outputs.{name}") for name, tensor in reply.outputs.items()}
        except BadTensor as error:
            raise RunFailed(f"{METHOD}: {error}") from error
        n = len(next(iter(inputs.values())))
        return arrays if self._signature is None else checked_outputs(arrays, self._signature, n, METHOD)

    def run_single(self, array: "Array") -> "list[Array]":
        return in_order(self.run({self.inputs[0]: array}), self.outputs)


# -- the user's process

Predict = Callable[[dict[str, Any]], Any]


def _predict_of(target: str) -> Predict:
    """The function that computes a batch: `predict_batch` of an object or of an instance of the class, or the function itself."""
    found = named(target)
    made: Any = found() if isinstance(found, type) else found
    predict = getattr(made, METHOD, made)
    if not callable(predict):
        raise NoSuchCode(f"it has no method {METHOD}, and is no function")
    return predict  # type: ignore[no-any-return]


def _answer(predict: Predict, call: _Call) -> ChildReply:
    import numpy as np  # noqa: PLC0415

    # Copies: the class may write into its inputs.
    inputs = {name: np.array(to_array(tensor, name)) for name, tensor in call.inputs.items()}
    try:
        outputs = predict(inputs)
    except Exception as error:
        traceback.print_exc()
        return ChildReply(error=f"{METHOD} raised {type(error).__name__}: {error}")
    if not isinstance(outputs, Mapping) or not outputs:
        return ChildReply(error=f"{METHOD} must return a dictionary of arrays by name, not {type(outputs).__name__}")
    try:
        return ChildReply({str(name): from_array(np.asarray(array)) for name, array in outputs.items()})
    except (ValueError, TypeError) as error:  # BadTensor, and what numpy makes no array of
        return ChildReply(error=f"{METHOD} returned something that is no array: {error}")


def _main(target: str) -> int:
    channel = Channel.of_child()
    sys.path.insert(0, os.getcwd())
    try:
        predict = _predict_of(target)
    except NoSuchCode as error:
        channel.send(ChildReply(error=str(error)))
        return 1
    except Exception as error:
        traceback.print_exc()
        channel.send(ChildReply(error=f"{type(error).__name__}: {error}"))
        return 1
    channel.send(ChildReply())
    channel.serve(_Call, partial(_answer, predict))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
