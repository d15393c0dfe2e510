"""torch: programs saved with torch.export (.pt2), and TorchScript on the CPU if the operator allows it.

Shared here: the framework, a backend whose device decides how a program runs, and what all handles do that compute in torch's memory.
Programs on a GPU are a file of their own (torch_cuda.py).
"""

import os
import threading
import warnings
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bus.messages.catalog import Signature
from services.executor.backends import pt2
from services.executor.backends.base import (
    BackendError,
    BackendUnavailable,
    InputRejected,
    LoadFailed,
    LoadSpec,
    RunFailed,
    bare_outputs,
    in_order,
    plain,
    trim_memory,
    with_items,
)
from services.executor.backends.cuda import placed

if TYPE_CHECKING:
    from bus.tensors import Array


class TorchBackend:
    """Runs .pt2 files, and TorchScript if the spec's options say `allow_torchscript`."""

    name = "torch"
    hardware = "cpu"
    formats: tuple[str, ...] = ("pt2", "torchscript")
    executed = True

    def probe(self, device: str) -> str:
        """Imports torch and adds two numbers there."""
        torch = framework() if placed(self.hardware, device, "torch") is None else with_cuda()
        try:
            added = int((torch.ones(1, device=device) + 1).item())
        except RuntimeError as error:
            raise BackendUnavailable(f"torch does not run on {device}: {plain(error)}") from error
        if added != 2:
            raise BackendUnavailable(f"torch cannot add on {device}")
        return str(torch.__version__)

    def load(self, artifact: Path, spec: LoadSpec) -> "TorchHandle":
        """Load the program and name its inputs and outputs as the signature does."""
        if spec.format not in self.formats:
            raise LoadFailed(f"torch runs {', '.join(self.formats)} files on this device, not {spec.format}")
        placed(self.hardware, spec.device, "torch")
        torch = framework()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._open(torch, artifact, spec)
        except pt2.BadArchive as error:
            raise LoadFailed(str(error)) from error
        except (LoadFailed, BackendUnavailable):
            raise
        except Exception as error:
            raise LoadFailed(f"torch cannot load this model on {spec.device}: {plain(error)}") from error

    def _open(self, torch: ModuleType, artifact: Path, spec: LoadSpec) -> "TorchHandle":
        if spec.format == "pt2":
            program = program_of(torch, artifact)
            named = program.graph_signature
            return ProgramHandle(torch, module_of(program, guards=True), spec, named.user_inputs, named.user_outputs)
        if spec.options.get("allow_torchscript") != "true":
            raise LoadFailed("TorchScript is not allowed here: set registrar.allow_torchscript, or upload ONNX or .pt2")
        module = torch.jit.load(str(artifact), map_location="cpu").eval()
        names = [value.debugName() for value in list(module.graph.inputs())[1:]]
        return ProgramHandle(torch, module, spec, names, ["output"])


class TorchHandle:
    """What handles share that compute in torch's memory. See `base.Handle`. No run can be cancelled: `cancel` does nothing.

    signature: names inputs and outputs, else the other two do. most: items of the largest batch; 0: any number.
    """

    memory_mb = 0.0
    one_at_a_time = ""
    proof = ""

    def __init__(
        self,
        torch: ModuleType,
        signature: Signature | None,
        inputs: Iterable[Any],
        outputs: Iterable[Any],
        most: int = 0,
    ) -> None:
        if signature is not None:
            inputs, outputs = [one.name for one in signature.inputs], [one.name for one in signature.outputs]
        self.inputs = tuple(map(str, inputs))
        self.outputs = tuple(map(str, outputs))
        self._torch = torch
        self._most = most
        self._bare = bare_outputs(signature)
        self._closed = False

    def run(self, inputs: "dict[str, Array]") -> "dict[str, Array]":
        return dict(zip(self.outputs, self._call(in_order(inputs, self.inputs)), strict=False))

    def run_single(self, array: "Array") -> "list[Array]":
        return self._call([array])

    def _call(self, arrays: "list[Array]") -> "list[Array]":
        if self._closed:
            raise RunFailed("this model is no longer loaded")
        if self._most and len(arrays[0]) > self._most:
            raise InputRejected(f"a batch of {len(arrays[0])} is larger than the {self._most} that this was loaded for")
        try:
            outputs = self._answers(arrays)
            return with_items(outputs, self._bare) if self._bare else outputs
        except BackendError:
            raise
        except Exception as error:
            raise explain(error) from error

    def _answers(self, arrays: "list[Array]") -> "list[Array]":
        """The outputs in order. Raises BackendError, or whatever the framework raises."""
        raise NotImplementedError

    def cancel(self) -> None:
        return

    def close(self) -> None:
        self._closed = True


class ProgramHandle(TorchHandle):
    """One program on the CPU."""

    def __init__(
        self, torch: ModuleType, module: Any, spec: LoadSpec, inputs: Iterable[Any], outputs: Iterable[Any]
    ) -> None:
        super().__init__(torch, spec.signature, inputs, outputs)
        self.proof = f"torch {torch.__version__} cpu, {spec.threads} thread{'s' * (spec.threads > 1)}"
        self._module = module
        self._threads = spec.threads

    def _answers(self, arrays: "list[Array]") -> "list[Array]":
        torch = self._torch
        # The number of threads belongs to the calling thread, which other models share.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        tensors = as_tensors(torch, arrays)
        with torch.inference_mode():
            answer = self._module(*tensors)
        return [one.numpy() for one in tensors_of(torch, answer)]

    def close(self) -> None:
        super().close()
        self._module = None
        trim_memory()


def as_tensors(torch: ModuleType, arrays: "list[Array]") -> list[Any]:
    """The same memory where it may be written, else a copy. Raises InputRejected for a datatype that torch has not."""
    try:
        return [torch.from_numpy(one if one.flags.writeable else one.copy()) for one in arrays]
    except TypeError as error:
        raise InputRejected(plain(error)) from error


def tensors_of(torch: ModuleType, answer: Any) -> list[Any]:
    if isinstance(answer, torch.Tensor):
        return [answer]
    if isinstance(answer, dict):
        return [one for one in answer.values() if isinstance(one, torch.Tensor)]
    if isinstance(answer, (tuple, list)):
        return [one for one in answer if isinstance(one, torch.Tensor)]
    raise RunFailed(f"the model returned a {type(answer).__name__}, not tensors")


# The exported program's own checks of its inputs, besides the AssertionError of guards: the shapes it was specialised for.
_CALLERS_FAULT = ("Guard failed", "Expected input", "size mismatch", "Unexpected number of dimensions in input")


def explain(error: Exception) -> BackendError:
    if isinstance(error, AssertionError) or any(words in str(error) for words in _CALLERS_FAULT):
        return InputRejected(plain(error))
    return RunFailed(plain(error))


# -- the framework

EXPORT_LOCK = threading.Lock()  # torch.export.load has state that all threads share
_loading = threading.Lock()


def program_of(torch: ModuleType, artifact: Path) -> Any:
    """The exported program in a reduced archive. Raises BadArchive."""
    pt2.check(artifact)
    with EXPORT_LOCK, artifact.open("rb") as file:
        return torch.export.load(file)


def module_of(program: Any, *, guards: bool = False) -> Any:
    """The module that runs. guards: it checks its inputs' shapes itself."""
    with EXPORT_LOCK:
        try:
            return program.module(check_guards=guards)
        except TypeError:  # before torch 2.9
            return program.module()


@cache
def framework() -> ModuleType:
    if find_spec("torch") is None:
        raise BackendUnavailable("torch is not installed: install infaas[torch]")
    # Threads that spin at barriers turn 0.02 ms into 16 ms as soon as a neighbour takes a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with _loading, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch  # noqa: PLC0415  # hundreds of MB: only where models run
            import torch.export  # noqa: PLC0415
    except (ImportError, OSError) as error:
        raise BackendUnavailable(f"torch cannot be imported: {plain(error)}") from error
    module: ModuleType = torch
    return module


def with_cuda() -> ModuleType:
    """torch, built for a CUDA that this driver runs. Raises BackendUnavailable."""
    torch = framework()
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"built for CUDA {built}, which this driver does not run" if built else "built without CUDA"
        raise BackendUnavailable(
            f"torch {torch.__version__} was {why}: install another torch wheel (see docs/hardware.md)"
        )
    return torch
