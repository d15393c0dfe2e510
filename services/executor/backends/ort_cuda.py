"""onnxruntime on an NVIDIA GPU by its CUDA provider, and what the TensorRT provider shares with it.

This file has never been executed on a GPU by its authors; `pytest -m gpu tests/gpu` does it. It needs the package onnxruntime-gpu
in place of onnxruntime, and CUDA and cuDNN in the versions that it was built for.

A provider that cannot start is left out with a log line, and the model runs on the CPU: that is onnxruntime's default, and a
measured variant must never do it. So the order of the providers is checked and the CPU is forbidden. Where a graph's shape
arithmetic belongs on the CPU, a profiled first run must show that nothing else is there.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from bus.datatypes import DATATYPES
from bus.messages.catalog import Signature
from bus.tensors import zeros
from services.executor.backends.base import BackendError, BackendUnavailable, InputRejected, LoadFailed, LoadSpec, plain
from services.executor.backends.cuda import gpu, growth
from services.executor.backends.ort import IDENTITY, OrtHandle, framework, one, session_options

if TYPE_CHECKING:
    from services.executor.backends.base import Array


Provider = tuple[str, Mapping[str, str]]

CPU = "CPUExecutionProvider"
NO_FALLBACK = "session.disable_cpu_ep_fallback"
SMALL = 1024  # bytes: shape arithmetic makes small integer tensors, nothing else may stay on the CPU
MOST_PLACED = 16  # shapes whose input buffers are kept on the device
_INTEGER = {"int64", "int32", "bool"}
_LENGTH = 8  # of an open axis in the first run


# -- proof of where every node runs


class Placement(Struct, frozen=True):
    """Where a run's nodes ran. nodes: how many, by provider. on_cpu: operators that computed on the CPU."""

    nodes: dict[str, int]
    on_cpu: list[str]


def placement(events: Iterable[Mapping[str, Any]]) -> Placement:
    """Read from onnxruntime's profile of one run."""
    nodes: Counter[str] = Counter()
    on_cpu: Counter[str] = Counter()
    for event in events:
        arguments = event.get("args", {})
        if event.get("cat") != "Node" or "provider" not in arguments:
            continue
        provider = arguments["provider"] or CPU
        nodes[provider] += 1
        if provider == CPU and not _shape_arithmetic(arguments):
            on_cpu[arguments.get("op_name", "?")] += 1
    return Placement(dict(nodes), [name for name, _ in on_cpu.most_common()])


def _shape_arithmetic(arguments: Mapping[str, Any]) -> bool:
    kinds = {kind for output in arguments.get("output_type_shape", [{"?": []}]) for kind in output}
    return kinds <= _INTEGER and int(arguments.get("output_size", SMALL + 1)) <= SMALL


def strict_options(ort: ModuleType, threads: int, *, strict: bool = True, profile: str = "") -> Any:
    """Session options that forbid the CPU (`strict`), or write a profile of what runs where below this path."""
    options = session_options(ort, threads)
    if strict:
        options.add_session_config_entry(NO_FALLBACK, "1")
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    return options


def opened(
    ort: ModuleType, artifact: Path, spec: LoadSpec, providers: Sequence[Provider], *, must_profile: bool = False
) -> tuple[Any, str]:
    """A session on the first of these providers, and the proof in words. Raises LoadFailed if it would run elsewhere.

    must_profile: count the first provider's nodes even if the CPU is forbidden, since other providers of the list may have taken all.
    """
    wanted = providers[0][0]
    names: list[Any] = [(name, dict(options)) for name, options in providers]
    if not must_profile:
        try:
            session = _session(ort, artifact, strict_options(ort, spec.threads), names, wanted)
        except LoadFailed:
            raise
        except Exception as error:
            if "fallback" not in str(error).lower():
                raise LoadFailed(f"onnxruntime cannot load this model on {wanted}: {plain(error)}") from error
        else:
            return session, "all nodes there"
    with tempfile.TemporaryDirectory() as directory:
        options = strict_options(ort, spec.threads, strict=False, profile=f"{directory}/run")
        try:
            session = _session(ort, artifact, options, names, wanted)
            session.run(None, first_inputs(session, spec.signature))
            events = json.loads(Path(session.end_profiling()).read_text())
        except LoadFailed:
            raise
        except Exception as error:
            raise LoadFailed(f"onnxruntime cannot load this model on {wanted}: {plain(error)}") from error
    return session, accept(placement(events), wanted)


def accept(found: Placement, wanted: str) -> str:
    """The proof in words. Raises LoadFailed if the CPU would compute, or nothing runs on the provider that was asked for."""
    if found.on_cpu:
        names = ", ".join(found.on_cpu[:5])
        raise LoadFailed(f"{wanted} leaves operators of this model to the CPU ({names}): it must not run half there")
    if not found.nodes.get(wanted):
        raise LoadFailed(f"{wanted} takes no operator of this model: they ran on {', '.join(found.nodes) or 'nothing'}")
    return ", ".join(f"{count} node{'s' * (count > 1)} on {name}" for name, count in found.nodes.items())


def _session(ort: ModuleType, artifact: Path, options: Any, providers: list[Any], wanted: str) -> Any:
    said = StringIO()
    with redirect_stdout(said):  # it prints what it falls back to
        session = ort.InferenceSession(str(artifact), options, providers=providers, enable_fallback=0)
    session.disable_fallback()
    there = session.get_providers()
    if there[0] != wanted:
        raise LoadFailed(
            f"asked for {wanted}, but onnxruntime chose {there[0]}: its libraries do not load (CUDA and cuDNN in the versions "
            "that this onnxruntime was built for)"
        )
    return session


def first_inputs(session: Any, signature: Signature | None) -> "dict[str, Array]":
    """One item of zeros for every input."""
    import numpy as np  # noqa: PLC0415

    if signature is not None:
        return {spec.name: zeros(spec) for spec in signature.inputs}
    return {
        one.name: np.zeros(
            [1, *(n if isinstance(n, int) else _LENGTH for n in one.shape[1:])], _DTYPES.get(one.type, "<f4")
        )
        for one in session.get_inputs()
    }


_CALLERS_FAULT = ("Got invalid dimensions for input", "Invalid rank for input", "Unexpected input data type")
_DTYPES = {f"tensor({row.onnx})": row.array for row in DATATYPES.values()}


class BoundHandle(OrtHandle):
    """A session whose inputs and outputs live on the device: IO binding, buffers for inputs kept by shape.

    place: onnxruntime's device type and number.
    """

    one_at_a_time = "its buffers on the device hold one batch"

    def __init__(
        self, ort: ModuleType, session: Any, spec: LoadSpec, place: tuple[str, int], proof: str, memory_mb: float
    ) -> None:
        super().__init__(ort, session, spec, session.get_providers()[0])
        self.proof = proof
        self.memory_mb = memory_mb
        self._place = place
        self._binding = session.io_binding()
        self._run_bound = session.run_with_iobinding
        self._placed: dict[tuple[Any, ...], Any] = {}

    def _call(self, feed: "dict[str, Array]") -> "list[Array]":
        if feed.keys() != set(self.inputs):
            raise InputRejected(f"the model takes the inputs {', '.join(self.inputs)}, not {', '.join(feed) or 'none'}")
        binding = self._binding
        if binding is None:
            return super()._call(feed)
        self._begin()
        try:
            for name, array in feed.items():
                binding.bind_ortvalue_input(name, self._on_device(name, array))
            binding.clear_binding_outputs()  # a bound output keeps the shape of the run before
            for name in self._wanted:
                binding.bind_output(name, *self._place)
            self._run_bound(binding, self._options)
            outputs: list[Array] = binding.copy_outputs_to_cpu()
        except BackendError:
            raise
        except Exception as error:
            raise self._explain(error) from error
        finally:
            self._end()
        return outputs

    def _explain(self, error: Exception) -> BackendError:
        """An error of a bound run names wrong inputs in its text only."""
        if any(words in str(error) for words in _CALLERS_FAULT):
            return InputRejected(plain(error))
        return super()._explain(error)

    def _on_device(self, name: str, array: "Array") -> Any:
        import numpy as np  # noqa: PLC0415

        key = (name, array.shape, array.dtype.str)
        value = self._placed.get(key)
        if value is None:
            if len(self._placed) >= MOST_PLACED:
                self._placed.clear()
            make = self._ort.OrtValue.ortvalue_from_shape_and_type
            value = self._placed[key] = make(list(array.shape), array.dtype, *self._place)
        value.update_inplace(np.ascontiguousarray(array))
        return value

    def shrink(self) -> None:
        """Forget the buffers of inputs. The device's arena holds only what was asked for."""
        self._placed.clear()

    def close(self) -> None:
        self._binding = None
        self._placed.clear()
        self._run_bound = None
        super().close()


def preload(ort: ModuleType) -> None:
    """Load CUDA and cuDNN from the packages that pip installed, if this onnxruntime can."""
    with suppress(Exception), redirect_stdout(StringIO()):
        ort.preload_dlls()


# -- the backend

PROVIDER = "CUDAExecutionProvider"
INSTALL = "pip uninstall onnxruntime, then pip install onnxruntime-gpu (see docs/hardware.md)"


class OrtCudaBackend:
    """Runs .onnx files, fp32 and fp16, on a GPU."""

    name = "ort-cuda"
    hardware = "gpu"
    formats = ("onnx",)
    executed = False

    def probe(self, device: str) -> str:
        """Runs a one-node model there with the CPU forbidden."""
        gpu(device, "onnxruntime")
        ort = build(PROVIDER)
        providers = [(PROVIDER, cuda_options(device))]
        try:
            session = ort.InferenceSession(IDENTITY, strict_options(ort, 1), providers=providers, enable_fallback=0)
            session.run(None, {"x": one()})
        except Exception as error:
            raise BackendUnavailable(f"onnxruntime does not run on {device}: {plain(error)}") from error
        if session.get_providers()[0] != PROVIDER:
            raise BackendUnavailable(
                f"onnxruntime cannot load CUDA or cuDNN in the versions that it was built for; {INSTALL}"
            )
        return str(ort.__version__)

    def load(self, artifact: Path, spec: LoadSpec) -> BoundHandle:
        """A session on exactly this GPU, nothing of it on the CPU."""
        if spec.format not in self.formats:
            raise LoadFailed(f"onnxruntime runs {', '.join(self.formats)} files, not {spec.format}")
        found = gpu(spec.device, "onnxruntime")
        ort = build(PROVIDER)
        with growth(spec.device) as grown:
            session, where = opened(ort, artifact, spec, [(PROVIDER, cuda_options(spec.device))])
        proof = f"onnxruntime {ort.__version__} {PROVIDER}, {spec.device} ({found.name}), {where}"
        return BoundHandle(ort, session, spec, place(spec.device), proof, grown.mb)


def place(device: str) -> tuple[str, int]:
    """Onnxruntime's device type and number of "cuda:1"."""
    kind, _, number = device.partition(":")
    return kind, int(number)


def cuda_options(device: str) -> dict[str, str]:
    """Provider options. Memory grows by what is asked for; fp32 is really fp32 (TF32 has 10 bits of mantissa)."""
    return {
        "device_id": str(place(device)[1]),
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
    }


def build(provider: str) -> ModuleType:
    """Onnxruntime with this provider compiled in. Raises BackendUnavailable."""
    ort = framework()
    if provider not in ort.get_available_providers():
        raise BackendUnavailable(f"this onnxruntime {ort.__version__} was built without {provider}: {INSTALL}")
    preload(ort)
    return ort
