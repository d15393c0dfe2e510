"""torch on the CPU: programs saved with torch.export (.pt2), and TorchScript if the operator allows it."""

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
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
    in_order,
    plain,
    trim_memory,
)

if TYPE_CHECKING:
    from services.executor.backends.base import Array


class TorchBackend:
    """Runs .pt2 files, and TorchScript if the spec's options say `allow_torchscript`."""

    name = "torch"
    hardware = "cpu"
    formats = ("pt2", "torchscript")
    executed = True

    def probe(self, device: str) -> str:
        """Imports torch and adds two numbers there."""
        _only_cpu(device)
        torch = framework()
        try:
            if int((torch.ones(1, device=device) + 1).item()) != 2:
                raise BackendUnavailable("torch cannot add on this device")
        except RuntimeError as error:
            raise BackendUnavailable(f"torch does not run here: {plain(error)}") from error
        return str(torch.__version__)

    def load(self, artifact: Path, spec: LoadSpec) -> "TorchHandle":
        """Load the program and name its inputs and outputs as the signature does."""
        _only_cpu(spec.device)
        if spec.format not in self.formats:
            raise LoadFailed(f"torch runs {', '.join(self.formats)} files, not {spec.format}")
        torch = framework()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if spec.format == "pt2":
                    module, taken, given = _exported(torch, artifact)
                else:
                    module, taken, given = _scripted(torch, artifact, spec)
        except pt2.BadArchive as error:
            raise LoadFailed(str(error)) from error
        except BackendError:
            raise
        except Exception as error:
            raise LoadFailed(f"torch cannot load this model: {plain(error)}") from error
        if spec.signature is not None:
            taken = tuple(one.name for one in spec.signature.inputs)
            given = tuple(one.name for one in spec.signature.outputs)
        return TorchHandle(torch, module, taken, given, spec.threads)


class TorchHandle:
    """One program. See `base.Handle`. torch cannot cancel a run: `cancel` does nothing."""

    memory_mb = 0.0
    one_at_a_time = ""

    def __init__(
        self, torch: ModuleType, module: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str], threads: int
    ) -> None:
        self.proof = f"torch {torch.__version__} cpu, {threads} thread{'s' * (threads > 1)}"
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._torch = torch
        self._module: Callable[..., Any] = module
        self._threads = threads

    def run(self, inputs: "dict[str, Array]") -> "dict[str, Array]":
        return dict(zip(self.outputs, self._call(in_order(inputs, self.inputs)), strict=False))

    def run_single(self, array: "Array") -> "list[Array]":
        return self._call([array])

    def cancel(self) -> None:
        return

    def shrink(self) -> None:
        return

    def close(self) -> None:
        self._module = _closed
        trim_memory()

    def _call(self, arrays: "list[Array]") -> "list[Array]":
        torch = self._torch
        # The number of threads belongs to the calling thread, which other models share.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        try:
            tensors = [torch.from_numpy(one if one.flags.writeable else one.copy()) for one in arrays]
        except TypeError as error:
            raise InputRejected(plain(error)) from error
        try:
            with torch.inference_mode():
                answer = self._module(*tensors)
        except Exception as error:
            raise explain(error) from error
        return [one.numpy() for one in tensors_of(torch, answer)]


def tensors_of(torch: ModuleType, answer: Any) -> list[Any]:
    if isinstance(answer, torch.Tensor):
        return [answer]
    if isinstance(answer, dict):
        return [one for one in answer.values() if isinstance(one, torch.Tensor)]
    if isinstance(answer, (tuple, list)):
        return [one for one in answer if isinstance(one, torch.Tensor)]
    raise RunFailed(f"the model returned a {type(answer).__name__}, not tensors")


def explain(error: Exception) -> BackendError:
    text = str(error)
    # The exported program's own checks of its inputs: AssertionError of guards, or the shapes it was specialised for.
    if (
        isinstance(error, AssertionError)
        or "Guard failed" in text
        or "Expected input" in text
        or "size mismatch" in text
    ):
        return InputRejected(plain(error))
    return RunFailed(plain(error))


def _exported(torch: ModuleType, artifact: Path) -> tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...]]:
    pt2.check(artifact)
    with EXPORT_LOCK:
        with artifact.open("rb") as file:
            program = torch.export.load(file)
        signature, module = program.graph_signature, program.module()
    return module, tuple(map(str, signature.user_inputs)), tuple(map(str, signature.user_outputs))


def _scripted(
    torch: ModuleType, artifact: Path, spec: LoadSpec
) -> tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...]]:
    if spec.options.get("allow_torchscript") != "true":
        raise LoadFailed("TorchScript is not allowed here: set registrar.allow_torchscript, or upload ONNX or .pt2")
    module = torch.jit.load(str(artifact), map_location="cpu").eval()
    names = tuple(value.debugName() for value in list(module.graph.inputs())[1:])
    return module, names, ("output",)


def _only_cpu(device: str) -> None:
    if device.partition(":")[0] != "cpu":
        raise BackendUnavailable(f"torch is set up here for cpu, not {device!r}")


EXPORT_LOCK = threading.Lock()  # torch.export.load has state that all threads share
_loading = threading.Lock()


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


def _closed(*_: object) -> Any:
    raise RunFailed("this model is no longer loaded")
