"""The interface of an inference framework: probe, load, run. Precision is a property of the artifact.

A backend imports its framework at first use, never when its own module is imported, so that listing backends costs nothing.
"""

import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct, field

from bus.fields import filled
from bus.messages.catalog import Signature, VariantRecord
from bus.tensors import BadTensor, datatype_of, fit, shown

if TYPE_CHECKING:
    from bus.tensors import Array

LONGEST_TEXT = 300


class BackendError(RuntimeError):
    """Base of all errors of a backend. The text is one sentence for people, without paths."""


class BackendUnavailable(BackendError):
    """This framework or device cannot be used here. The text says why."""


class LoadFailed(BackendError):
    """This artifact could not be loaded, or does not run on the device that was asked for."""


class InputRejected(BackendError):
    """The model does not take these inputs: wrong name, shape or datatype. Nothing was run."""


class ItemRefused(InputRejected):
    """An item is wrong, as a function of the model's owner says by a ValueError, or it needs a query of its own: the query's mistake, not the model's."""


class RunFailed(BackendError):
    """The model itself failed on these inputs."""


class Cancelled(RunFailed):
    """`Handle.cancel` ended the run."""


class LoadSpec(Struct, frozen=True, kw_only=True):
    """How to load an artifact. device: "cpu", "cuda:0", or hosts of engines; format: "onnx", "pt2", "torchscript", "remote".

    signature: fixes names and order of inputs and outputs; without it they are the file's own. options: of the framework.
    """

    device: str = "cpu"
    threads: int = 1
    max_batch: int = 1
    format: str = "onnx"
    precision: str = "fp32"
    signature: Signature | None = None
    options: dict[str, str] = {}


def spec_of(record: VariantRecord, device: str) -> LoadSpec:
    """How to load this variant on this device."""
    # A variant of this format exists only where registration was allowed to make one.
    options = {"allow_torchscript": "true"} if record.format == "torchscript" else {}
    inside = None if record.functions is None else record.functions.model
    return filled(LoadSpec, record, device=device, options=options, signature=inside or record.signature)


class Handle(Protocol):
    """One loaded model. `run` blocks and releases the GIL.

    one_at_a_time: why only one thread at a time may call `run`; empty: several may, all with the same weights.
    proof: where it runs, as the framework reports it. inputs, outputs: names in the order that `run_single` uses.
    memory_mb: what it takes of an accelerator's memory; 0.0 if that is not known (`Grown`), and on the CPU, where the process's growth
    is measured.
    """

    one_at_a_time: str
    proof: str
    memory_mb: float
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def run(self, inputs: "dict[str, Array]") -> "dict[str, Array]":
        """Named arrays, each [n, ...], to named arrays [n, ...]. Raises InputRejected, RunFailed, Cancelled."""

    def run_single(self, array: "Array") -> "list[Array]":
        """The same for a model with one input, without dictionaries: outputs in the order of `outputs`."""

    def cancel(self) -> None:
        """Called by another thread: end the current run soon, if the framework can. The handle stays usable."""

    def close(self) -> None:
        """Unload the model and give its memory back to the system."""


@runtime_checkable
class Demotable(Protocol):
    """What a handle has, besides, if its model can be kept in host memory: Warm. Nothing runs meanwhile.

    host_mb: host memory that it takes there. memory_mb is 0.0 then.
    """

    proof: str
    memory_mb: float
    host_mb: float

    def demote(self) -> None:
        """Move the weights to host memory and give all memory of the device back; where a copy is there, nothing is moved. Raises BackendError."""

    def promote(self) -> None:
        """Copy them to the device; nothing is read or built again. Raises BackendError; the handle can only be closed then."""

    def drop_copy(self) -> None:
        """Let go of what `promote` left in host memory."""


class Backend(Protocol):
    """One framework on one kind of device. executed: whether its authors have ever run it; otherwise users must be told."""

    name: str
    hardware: str
    formats: tuple[str, ...]
    executed: bool

    def probe(self, device: str) -> str:
        """The framework's version, after a check that it works on this device. Raises BackendUnavailable with the reason."""

    def load(self, artifact: Path, spec: LoadSpec) -> Handle:
        """Load and prove where it runs: never silently somewhere else. Raises BackendUnavailable, LoadFailed."""


def bare_outputs(signature: Signature | None) -> tuple[bool, ...]:
    """Of each output, whether it comes without the axis that counts items; empty if none does."""
    found = () if signature is None else tuple(spec.bare for spec in signature.outputs)
    return found if any(found) else ()


def with_items(outputs: "list[Array]", bare: tuple[bool, ...]) -> "list[Array]":
    """The outputs of one item, all with the axis that counts items."""
    return [output[None] if alone else output for output, alone in zip(outputs, bare, strict=True)]


def in_order(inputs: "dict[str, Array]", names: tuple[str, ...]) -> "list[Array]":
    """The arrays in the order of the model's inputs. Raises InputRejected if one is missing, or if there are too many."""
    try:
        arrays = [inputs[name] for name in names]
    except KeyError as error:
        raise InputRejected(f"input {error.args[0]!r} is missing: the model takes {', '.join(names)}") from error
    if len(inputs) != len(arrays):
        raise InputRejected(f"there are inputs that the model does not take: it takes {', '.join(names)}")
    return arrays


def checked_outputs(arrays: "dict[str, Array]", signature: Signature, n: int, whose: str) -> "dict[str, Array]":
    """The outputs of n items, as the signature has them; numbers are converted where nothing but precision is lost. Raises RunFailed.

    whose: who returned them, for the error's text.
    """
    names = [spec.name for spec in signature.outputs]
    if arrays.keys() != set(names):
        raise RunFailed(f"{whose} returned {', '.join(arrays) or 'nothing'}; the outputs are {', '.join(names)}")
    found = {}
    for spec in signature.outputs:
        array = arrays[spec.name]
        if len(array) != n:
            raise RunFailed(f"{whose} returned {len(array)} rows of output {spec.name!r} for {n} items")
        try:
            found[spec.name] = fit(array, spec, spec.name)
        except BadTensor:
            was = f"{datatype_of(array)}{list(array.shape)}"
            wanted = f"{spec.datatype}{shown(spec.shape, 'n')}"
            raise RunFailed(f"{whose} returned output {spec.name!r} as {was}, not as {wanted}") from None
    return found


_PATH = re.compile(r"(?<![\w.])/[\w.+-]+(?:/[\w.+-]*)+(?::\d+)?")
_ORT = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : |(?<=Status Message: )[^()]*::\w+\([^()]*\) (?=\w)")


def plain(error: BaseException | str) -> str:
    """An error's text for users: one line, no paths of this machine, not endless."""
    text = str(error) or repr(error)
    text = " ".join(_PATH.sub("…", _ORT.sub("", text)).split())
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


class Grown(Struct, eq=False):
    """MB that a memory grew by while a block ran; 0.0 if other blocks overlapped, since nobody knows then whose the growth is."""

    mb: float = 0.0
    alone: bool = True


class Growth(Struct, eq=False):
    """Measures what blocks of code, in any threads, take of one memory. used_mb: what is taken of it now."""

    used_mb: Callable[[], float]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: set[Grown] = set()

    @contextmanager
    def measure(self) -> Iterator[Grown]:
        """Measure one block. Its figure is there when the block ends without an error."""
        grown = Grown()
        with self._lock:
            grown.alone = not self._open
            for other in self._open:
                other.alone = False
            self._open.add(grown)
        try:
            before = self.used_mb()
            yield grown
            after = self.used_mb()
        finally:
            with self._lock:
                self._open.remove(grown)
        if grown.alone:
            grown.mb = max(0.0, after - before)


def trim_memory() -> None:
    """Return freed memory to the system, which glibc keeps otherwise. Does nothing with other C libraries."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
