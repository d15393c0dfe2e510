"""torch-neuronx on AWS Inferentia. This file has never been executed by its authors: neither chip nor compiler were at hand.

The artifact is the .pt2 program; the compiler makes one fixed-shape program for each batch bucket at the first load on a machine, which
takes minutes, and they are kept beside the artifacts under a name made of artifact, compiler version and bucket.
"""

import hashlib
import itertools
import threading
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from services.executor.backends import pt2
from services.executor.backends.base import (
    BackendError,
    BackendUnavailable,
    InputRejected,
    LoadFailed,
    LoadSpec,
    RunFailed,
    plain,
)
from services.executor.backends.cuda import bucket_for, buckets
from services.executor.backends.torch_cpu import EXPORT_LOCK, explain, framework, tensors_of
from services.executor.backends.torch_cuda import dtypes, slots
from services.shell.host.accelerators import Accelerator, DriverError, neuron_devices

if TYPE_CHECKING:
    from services.executor.backends.base import Array

INSTALL = "install torch-neuronx and neuronx-cc from AWS' own package index (see docs/hardware.md)"
PROGRAMS = "neuron"
_next_core = itertools.count()


class NeuronBackend:
    """Runs .pt2 files, compiled for Neuron cores."""

    name = "neuron"
    hardware = "inferentia"
    formats = ("pt2",)
    executed = False

    def probe(self, device: str) -> str:
        """The compiler's version. Needs chip, compiler and framework."""
        chip(device)
        _neuron()
        return compiler_version()

    def load(self, artifact: Path, spec: LoadSpec) -> "NeuronHandle":
        """Compile for every bucket, or take the programs from the cache, and put them on the next core of the chip."""
        if spec.format not in self.formats:
            raise LoadFailed(f"Neuron runs {', '.join(self.formats)} files, not {spec.format}")
        found = chip(spec.device)
        neuron, torch = _neuron(), framework()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return NeuronHandle(torch, neuron, artifact, spec, found)
        except pt2.BadArchive as error:
            raise LoadFailed(str(error)) from error
        except BackendError:
            raise
        except Exception as error:
            raise LoadFailed(f"Neuron cannot load this model: {plain(error)}") from error


class NeuronHandle:
    """One program for each bucket, on one core. See `base.Handle`. A run cannot be cancelled: `cancel` does nothing."""

    memory_mb = 0.0
    one_at_a_time = "a Neuron core computes one batch at a time"

    def __init__(
        self, torch: ModuleType, neuron: ModuleType, artifact: Path, spec: LoadSpec, found: Accelerator
    ) -> None:
        pt2.check(artifact)
        with EXPORT_LOCK, artifact.open("rb") as file:
            program = torch.export.load(file)
        given = slots(program, spec)
        if given is None:
            raise LoadFailed("Neuron compiles fixed shapes, and an axis of this model has no fixed length")
        self._slots, self._casts = given, dtypes(program)
        self.inputs = tuple(slot.name for slot in self._slots)
        named = [one.name for one in spec.signature.outputs] if spec.signature else program.graph_signature.user_outputs
        self.outputs = tuple(map(str, named))
        self._torch = torch
        self._sizes = buckets(spec.max_batch)
        core = core_of(found)
        cache_directory = Path(spec.options.get("programs") or artifact.parent / PROGRAMS)
        cache_directory.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(artifact.read_bytes()).hexdigest()
        self._programs: dict[int, Callable[..., Any]] = {}
        for size in self._sizes:
            path = cache_directory / f"{program_key(digest, compiler_version(), size)}.pt"
            if not path.exists():
                example = tuple(
                    torch.zeros((size, *slot.shape), dtype=dtype)
                    for slot, dtype in zip(self._slots, self._casts, strict=True)
                )
                part = path.with_suffix(f".{threading.get_ident()}.part")  # several loads may compile the same
                torch.jit.save(neuron.trace(program.module(), example), str(part))
                part.rename(path)
            compiled = torch.jit.load(str(path))
            if not on_neuron(compiled):
                raise LoadFailed(f"the program for batches of {size} holds no Neuron operator: it would run on the CPU")
            neuron.move_trace_to_device(compiled, core)
            self._programs[size] = compiled
        self.proof = f"torch-neuronx {compiler_version()}, {spec.device}, core {core}, batches {self._sizes}"

    def run(self, inputs: "dict[str, Array]") -> "dict[str, Array]":
        if inputs.keys() != set(self.inputs):
            raise InputRejected(
                f"the model takes the inputs {', '.join(self.inputs)}, not {', '.join(inputs) or 'none'}"
            )
        return dict(zip(self.outputs, self._call([inputs[name] for name in self.inputs]), strict=False))

    def run_single(self, array: "Array") -> "list[Array]":
        return self._call([array])

    def _call(self, arrays: "list[Array]") -> "list[Array]":
        torch, items = self._torch, len(arrays[0])
        if not self._programs:
            raise RunFailed("this model is no longer loaded")
        try:
            bucket = bucket_for(items, self._sizes)
            with torch.inference_mode():
                tensors = [torch.from_numpy(_padded(one, bucket)) for one in arrays]
                answer = self._programs[bucket](*(t.to(d) for t, d in zip(tensors, self._casts, strict=True)))
            return [one[:items].numpy() for one in tensors_of(torch, answer)]
        except (ValueError, TypeError) as error:
            raise InputRejected(plain(error)) from error
        except BackendError:
            raise
        except Exception as error:
            raise explain(error) from error

    def cancel(self) -> None:
        return

    def shrink(self) -> None:
        return

    def close(self) -> None:
        self._programs.clear()


def chip(device: str) -> Accelerator:
    """The chip "neuron:0", ... Raises BackendUnavailable with the reason."""
    if device.partition(":")[0] != "neuron":
        raise BackendUnavailable(f"Neuron runs on a Neuron device (neuron:0, ...), not on {device!r}")
    try:
        found = neuron_devices()
    except DriverError as error:
        raise BackendUnavailable(str(error)) from error
    for one in found:
        if one.address == device:
            return one
    raise BackendUnavailable(
        f"there is no {device}: neuron-ls shows {', '.join(one.address for one in found) or 'none'}"
    )


def core_of(found: Accelerator) -> int:
    """The next Neuron core of the chip, in turn. Cores are numbered across all chips."""
    number = int(found.address.partition(":")[2])
    return number * found.cores + next(_next_core) % found.cores


def program_key(digest: str, compiler: str, size: int) -> str:
    """The name of one compiled program. Equal names mean equal programs."""
    exact = "\0".join((digest, compiler, str(size)))
    return f"{digest[:12]}-b{size}-{hashlib.sha256(exact.encode()).hexdigest()[:12]}"


def on_neuron(compiled: Any) -> bool:
    """Whether a compiled program has an operator that runs on the chip."""
    return any(node.kind().startswith("neuron::") for node in compiled.inlined_graph.nodes())


def _padded(array: "Array", size: int) -> "Array":
    import numpy as np  # noqa: PLC0415

    if len(array) == size and array.flags.writeable:
        return array
    whole = np.zeros((size, *array.shape[1:]), array.dtype)
    whole[: len(array)] = array
    return whole


def compiler_version() -> str:
    """The version of neuronx-cc. Raises BackendUnavailable."""
    try:
        return version("neuronx-cc")
    except PackageNotFoundError:
        raise BackendUnavailable(f"the Neuron compiler is not installed: {INSTALL}") from None


@cache
def _neuron() -> ModuleType:
    framework()
    if find_spec("torch_neuronx") is None:
        raise BackendUnavailable(f"torch-neuronx is not installed: {INSTALL}")
    try:
        import torch_neuronx  # noqa: PLC0415
    except (ImportError, OSError) as error:
        raise BackendUnavailable(f"torch-neuronx cannot be imported: {plain(error)}") from error
    module: ModuleType = torch_neuronx
    if not hasattr(module, "trace"):
        raise BackendUnavailable(f"the torch-neuronx installed is a placeholder: {INSTALL}")
    return module
