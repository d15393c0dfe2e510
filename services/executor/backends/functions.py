"""Functions of a model's owner beside the model: the handle that has items go through them, and the sandboxed process in which they run.

    python -m services.executor.backends.functions

The two talk as services/shell/child.py says. The process locks itself before it reads the functions' files: no network, no files but its own and
Python's, no programs. What a function does wrong costs the batch, whose queries are then computed one by one, and so its own query alone.
"""

import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from bus.functions import Alike, Function, FunctionFailed, applied, in_place, made
from bus.messages.catalog import Functions, Signature, TensorSpec
from bus.messages.public import Tensor
from bus.tensors import BadTensor, fit, from_array, to_array
from services.executor.backends.base import (
    Handle,
    InputRejected,
    ItemRefused,
    LoadFailed,
    RunFailed,
    checked_outputs,
    in_order,
    plain,
)
from services.executor.backends.container import ChildProcess, ChildReply
from services.executor.workshop.sandbox.lockdown import hide, lock_down
from services.executor.workshop.sandbox.protocol import SandboxLimits
from services.shell.child import Channel, kept_environment
from services.shell.host.process import with_our_source

if TYPE_CHECKING:
    from bus.tensors import Array

LIMITS = SandboxLimits(memory_bytes=2**31, seconds=0.0, file_bytes=2**26)  # calls' seconds are the executor's to limit
MOST_BYTES = 2**28  # of what a function makes of a batch
NO_LANDLOCK = "this worker's kernel has no Landlock, without which it runs no function of a user"
When = Literal["before", "after"]


class _Call(Struct, frozen=True):
    """Items for one of the functions. binary: whose elements are bytes."""

    when: When
    arrays: dict[str, Tensor]
    binary: list[str]


class _Group(Struct, frozen=True):
    places: list[int]
    arrays: dict[str, Tensor]


class _Done(Struct, frozen=True):
    """What a function made of the items, together where their shapes are. error: empty if it succeeded. refused: it refused an item."""

    groups: list[_Group] = []
    error: str = ""
    refused: bool = False


class FunctionProcess(ChildProcess):
    """The process in which a model's functions run. Threads may call it: it computes one call at a time."""

    def __init__(self, functions: Functions) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="infaas-functions-", ignore_cleanup_errors=True)
        both = " and ".join(filter(None, (functions.before, functions.after)))
        super().__init__([sys.executable, "-P", "-m", __spec__.name], Path(self._scratch.name), both, both)
        self.stderr = subprocess.DEVNULL  # what a function prints is no line of ours
        self.most_bytes = MOST_BYTES
        self.functions = functions
        self.busy = False
        self.took: dict[When, float] = {"before": 0.0, "after": 0.0}  # s since somebody asked
        self._one = threading.Lock()

    def apply(self, when: When, inputs: "dict[str, Array]") -> list[Alike]:
        """What this function makes of each item. Raises ItemRefused, RunFailed, Cancelled."""
        binary = [name for name, one in inputs.items() if one.dtype.kind == "O" and isinstance(one.flat[0], bytes)]
        call = _Call(when, {name: from_array(one) for name, one in inputs.items()}, binary)
        with self._one:
            self.busy, started = True, time.perf_counter()
            try:
                done = self.exchange(call, _Done)
            finally:
                self.busy = False
                self.took[when] += time.perf_counter() - started
        if done.error:
            raise (ItemRefused if done.refused else RunFailed)(plain(done.error))
        n = len(next(iter(inputs.values())))
        try:
            found = [
                Alike(one.places, {name: to_array(tensor, name) for name, tensor in one.arrays.items()})
                for one in done.groups
            ]
        except BadTensor as error:
            raise RunFailed(f"{self._code}: {error}") from error
        right = all(len(array) == len(one.places) for one in found for array in one.arrays.values())
        if not right or sorted(place for one in found for place in one.places) != list(range(n)):
            raise RunFailed(f"the process of {self._code} has not answered as it must")
        return found

    def close(self) -> None:
        super().close()
        self._scratch.cleanup()

    def _environment(self) -> dict[str, str]:
        return with_our_source(kept_environment()) | dict.fromkeys(("HOME", "TMPDIR"), self._scratch.name)

    def _greet(self, channel: Channel) -> None:
        channel.send(self.functions)


class WithFunctions:
    """A `Handle`: a model between its owner's functions. inside: what the model takes and gives. signature: of queries.

    own: whether the process is this handle's, and ends with it.
    """

    def __init__(
        self, model: Handle, process: FunctionProcess, inside: Signature, signature: Signature, *, own: bool = True
    ) -> None:
        self._model, self._process, self._own = model, process, own
        self._inside, self.signature = inside, signature
        self._after = process.functions.after
        self.proof, self.memory_mb = model.proof, model.memory_mb
        self.one_at_a_time = "its functions are called for one batch at a time"
        self.inputs = tuple(spec.name for spec in signature.inputs)
        self.outputs = tuple(spec.name for spec in signature.outputs)

    @property
    def beside_mb(self) -> float:
        """Host memory of the functions' process."""
        return self._process.measure_memory()

    @property
    def beside_cpu_s(self) -> float:
        """CPU seconds of that process since it began."""
        return self._process.measure_cpu()

    def run(self, inputs: "dict[str, Array]") -> "dict[str, Array]":
        """Raises ItemRefused, InputRejected, RunFailed, Cancelled."""
        in_order(inputs, self.inputs)
        n = len(next(iter(inputs.values())))
        parts = prepared(self._process, self._inside, inputs)
        parts = [Alike(part.places, self._model.run(part.arrays)) for part in parts]
        if self._after:
            parts = [
                Alike([part.places[place] for place in one.places], one.arrays)
                for part in parts
                for one in self._process.apply("after", _counted(part))
            ]
        found = in_place(parts)
        if found is None:
            raise ItemRefused("its items have outputs of different shapes: ask one item a query")
        return checked_outputs(found, self.signature, n, self._after or "the model") if self.outputs else found

    def run_single(self, array: "Array") -> "list[Array]":
        return in_order(self.run({self.inputs[0]: array}), self.outputs)

    def took(self) -> tuple[float, float]:
        """Seconds that the functions before and after the model took since this was asked last."""
        told = self._process.took["before"], self._process.took["after"]
        self._process.took = {"before": 0.0, "after": 0.0}
        return told

    def cancel(self) -> None:
        """End what computes: a function, whose process is started again, or the model's run."""
        (self._process if self._process.busy else self._model).cancel()

    def close(self) -> None:
        self._model.close()
        if self._own:
            self._process.close()


def prepared(process: FunctionProcess, inside: Signature, inputs: "dict[str, Array]") -> list[Alike]:
    """What a model gets of these items: what `before` makes of them. Raises ItemRefused, InputRejected, RunFailed, Cancelled."""
    before, names, found = process.functions.before, [spec.name for spec in inside.inputs], []
    if not before:
        return [Alike(list(range(len(next(iter(inputs.values()))))), inputs)]
    for part in process.apply("before", inputs):
        arrays = part.arrays
        if len(names) == len(arrays) == 1:
            arrays = {names[0]: next(iter(arrays.values()))}
        if arrays.keys() != set(names):
            raise InputRejected(f"{before} gives {', '.join(arrays)}; the model takes {', '.join(names)}")
        try:
            found.append(Alike(part.places, {spec.name: _fitting(arrays[spec.name], spec) for spec in inside.inputs}))
        except BadTensor as error:
            raise InputRejected(f"what {before} gives: {error}") from error
    return found


def _fitting(array: "Array", spec: TensorSpec) -> "Array":
    """One value an item is a column of one value, too. Raises BadTensor."""
    return fit(array.reshape(-1, 1) if spec.shape == [1] and array.ndim == 1 else array, spec, spec.name)


def _counted(part: Alike) -> "dict[str, Array]":
    """The model's outputs. Raises RunFailed where one counts no items."""
    n = len(part.places)
    for name, one in part.arrays.items():
        if one.ndim == 0 or len(one) != n:
            raise RunFailed(
                f"output {name!r} has shape {list(one.shape)} for {n} items: its first axis must count items"
            )
    return part.arrays


def with_functions(model: Handle, functions: Functions, signature: Signature) -> WithFunctions:
    """The model between functions in a process of their own. Raises LoadFailed."""
    process = FunctionProcess(functions)
    try:
        process.open()
    except LoadFailed:
        process.close()
        raise
    return WithFunctions(model, process, functions.model or signature, signature)


# -- the process


def _load(functions: Functions, missing: list[str]) -> dict[str, tuple[str, Function]]:
    """missing: of the sandbox. Raises FunctionFailed."""
    if "landlock" in missing:
        raise FunctionFailed(NO_LANDLOCK)
    found = {}
    for when, name in (("before", functions.before), ("after", functions.after)):
        if name:
            file, _, function = name.rpartition(":")
            found[when] = name, made(function, functions.sources.get(file, ""), name)
    return found


def _answer(loaded: dict[str, tuple[str, Function]], call: _Call) -> _Done:
    try:
        name, function = loaded[call.when]
        inputs = {key: to_array(one, key, binary=key in call.binary) for key, one in call.arrays.items()}
        found = applied(function, name, inputs)
        return _Done(
            [_Group(one.places, {key: from_array(array) for key, array in one.arrays.items()}) for one in found]
        )
    except FunctionFailed as error:
        return _Done(error=str(error), refused=error.refused)
    except BadTensor as error:
        return _Done(error=f"{name}: {error}")


def _main() -> int:
    channel = Channel.of_child()
    functions = channel.received(Functions)
    missing = lock_down(LIMITS, Path.cwd(), ())
    hide()
    try:
        loaded = _load(functions, missing)
    except FunctionFailed as error:
        channel.send(ChildReply(error=str(error)))
        return 1
    channel.send(ChildReply())
    channel.serve(_Call, partial(_answer, loaded))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
