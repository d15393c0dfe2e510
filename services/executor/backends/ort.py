"""onnxruntime. The device picks the provider: the CPU's own, or CUDA's on an NVIDIA GPU.

What is for GPUs needs the package onnxruntime-gpu in place of onnxruntime, and CUDA and cuDNN in the versions that it was built for.

Session options after measurements on shared cores: one thread unless asked, no spinning (it costs three times the CPU
between requests and collapses when a neighbour takes a core), arena on, providers named and checked.

A provider that cannot start is left out with a log line, and the model runs on the CPU: that is onnxruntime's default, and a
measured variant must never do it. So the provider is checked, and on a GPU the CPU is forbidden. Where a graph's shape
arithmetic belongs on the CPU, a profiled first run must show that nothing else is there.
"""

import json
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from bus.datatypes import DATATYPES
from bus.messages.catalog import Signature
from bus.tensors import zeros
from services.executor.backends.base import (
    BackendError,
    BackendUnavailable,
    Cancelled,
    InputRejected,
    LoadFailed,
    LoadSpec,
    RunFailed,
    bare_outputs,
    plain,
    trim_memory,
    with_items,
)
from services.executor.backends.cuda import growth, placed, quiet

if TYPE_CHECKING:
    from bus.tensors import Array

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
INSTALL = "pip uninstall onnxruntime, then pip install onnxruntime-gpu (see docs/hardware.md)"
NO_FALLBACK = "session.disable_cpu_ep_fallback"
SMALL = 1024  # bytes: shape arithmetic makes small integer tensors, nothing else may stay on the CPU
MOST_PLACED = 16  # shapes whose input buffers are kept on the device
_INTEGER = {"int64", "int32", "bool"}
_LENGTH = 8  # of an open axis in the first run
_DTYPES = {f"tensor({row.onnx})": row.array for row in DATATYPES.values()}
_CALLERS_FAULT = ("Got invalid dimensions for input", "Invalid rank for input", "Unexpected input data type")


class OrtBackend:
    """Runs .onnx files."""

    name = "ort"
    hardware = "cpu"
    formats = ("onnx",)
    executed = True

    def probe(self, device: str) -> str:
        """Builds and runs a one-node model there: the list of compiled-in providers proves nothing."""
        strict = placed(self.hardware, device, "onnxruntime") is not None
        ort = build(provider_of(device)[0])
        try:
            session = session_on(device, ort, IDENTITY, session_options(ort, 1, strict=strict))
            session.run(None, {"x": _one()})
        except Exception as error:
            raise BackendUnavailable(f"onnxruntime does not run on {device}: {plain(error)}") from error
        return str(ort.__version__)

    def load(self, artifact: Path, spec: LoadSpec) -> "OrtHandle":
        """A session of its own on exactly the device asked for, nothing of it elsewhere."""
        if spec.format not in self.formats:
            raise LoadFailed(f"onnxruntime runs {', '.join(self.formats)} files, not {spec.format}")
        gpu = placed(self.hardware, spec.device, "onnxruntime")
        provider, _ = provider_of(spec.device)
        ort = build(provider)
        proof = f"onnxruntime {ort.__version__} {provider}"
        if gpu is None:
            session = session_on(spec.device, ort, str(artifact), session_options(ort, spec.threads))
            return OrtHandle(ort, session, spec, f"{proof}, {spec.threads} thread{'s' * (spec.threads > 1)}")
        with quiet(spec.device):
            _begin(spec.device)
            with growth(spec.device) as grown:
                session, where = opened(ort, artifact, spec)
                handle = BoundHandle(ort, session, spec, f"{proof}, {spec.device} ({gpu.name}), {where}")
                handle.warm(first_inputs(session, spec.signature, spec.max_batch))
        handle.memory_mb = grown.mb
        return handle


class OrtCudaBackend(OrtBackend):
    """Runs them on a GPU, in fp32 and fp16."""

    name = "ort-cuda"
    hardware = "gpu"
    executed = True


class OrtHandle:
    """One session. See `base.Handle`."""

    memory_mb = 0.0
    one_at_a_time = ""

    def __init__(self, ort: ModuleType, session: Any, spec: LoadSpec, proof: str) -> None:
        self.proof = proof
        taken = [one.name for one in session.get_inputs()]
        given = [one.name for one in session.get_outputs() if one.type.startswith("tensor(")]
        if spec.signature is not None:
            taken = _in_order([one.name for one in spec.signature.inputs], taken, "input")
            given = _in_order([one.name for one in spec.signature.outputs], given, "output")
        self.inputs = tuple(taken)
        self.outputs = tuple(given)
        self._first = self.inputs[0] if self.inputs else ""
        self._wanted = given
        self._bare = bare_outputs(spec.signature)
        self._session = session
        self._run = session.run
        self._ort = ort
        self._options = ort.RunOptions()
        self._options.log_severity_level = 4
        self._running = 0
        self._cancelled = False
        self._lock = threading.Lock()

    def run(self, inputs: "dict[str, Array]") -> "dict[str, Array]":
        return dict(zip(self._wanted, self._call(inputs), strict=True))

    def run_single(self, array: "Array") -> "list[Array]":
        return self._call({self._first: array})

    def _call(self, feed: "dict[str, Array]") -> "list[Array]":
        self._begin()
        try:
            outputs: list[Array] = self._run(self._wanted, feed, self._options)
        except BackendError:
            raise
        except Exception as error:
            raise self._explain(error) from error
        finally:
            self._end()
        return with_items(outputs, self._bare) if self._bare else outputs

    def _begin(self) -> None:
        with self._lock:
            self._running += 1

    def _end(self) -> None:
        """A cancel ends all runs of the handle, as they share their options. It is forgotten once they have ended."""
        with self._lock:
            self._running -= 1
            if self._cancelled and not self._running:
                self._cancelled = self._options.terminate = False

    def cancel(self) -> None:
        with self._lock:
            if self._running:
                self._cancelled = True
                self._options.terminate = True

    def close(self) -> None:
        self._session = None
        self._run = _closed
        trim_memory()

    def _explain(self, error: Exception) -> BackendError:
        """A bound run that gets wrong inputs says so in its text only."""
        if self._cancelled:
            return Cancelled("the run was ended because it took too long")
        kind, text = type(error).__name__, str(error)
        if (
            kind == "InvalidArgument"
            or (isinstance(error, ValueError) and "input" in text.lower())
            or any(words in text for words in _CALLERS_FAULT)
        ):
            return InputRejected(plain(error))
        return RunFailed(plain(error))


class BoundHandle(OrtHandle):
    """A session whose inputs and outputs live on the spec's device: IO binding, buffers for inputs kept by shape."""

    one_at_a_time = "its buffers on the device hold one batch"

    def __init__(self, ort: ModuleType, session: Any, spec: LoadSpec, proof: str) -> None:
        super().__init__(ort, session, spec, proof)
        self._place = place(spec.device)
        self._binding = session.io_binding()
        self._placed: dict[tuple[Any, ...], Any] = {}
        self._run = self._run_bound

    def warm(self, inputs: "dict[str, Array]") -> None:
        """Run these once, if the model can: libraries and arenas take their memory of the device at their first batch."""
        with suppress(BackendError):
            self.run(inputs)

    def _run_bound(self, wanted: list[str], feed: "dict[str, Array]", options: Any) -> "list[Array]":
        if feed.keys() != set(self.inputs):
            raise InputRejected(f"the model takes the inputs {', '.join(self.inputs)}, not {', '.join(feed) or 'none'}")
        binding = self._binding
        for name, array in feed.items():
            binding.bind_ortvalue_input(name, self._on_device(name, array))
        binding.clear_binding_outputs()  # a bound output keeps the shape of the run before
        for name in wanted:
            binding.bind_output(name, *self._place)
        self._session.run_with_iobinding(binding, options)
        outputs: list[Array] = binding.copy_outputs_to_cpu()
        return outputs

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

    def close(self) -> None:
        self._binding = None
        self._placed.clear()
        super().close()


def _closed(*_: object) -> Any:
    raise RunFailed("this model is no longer loaded")


def _in_order(wanted: list[str], there: list[str], what: str) -> list[str]:
    missing = [name for name in wanted if name not in there]
    if missing:
        raise LoadFailed(f"the model has no {what} {missing[0]!r}: it has {', '.join(there)}")
    return wanted


# -- sessions


def place(device: str) -> tuple[str, int]:
    """Onnxruntime's device type and number of "cpu", "cuda:1"."""
    kind, _, number = device.partition(":")
    return kind, int(number or 0)


def provider_of(device: str) -> tuple[str, dict[str, str]]:
    """The provider that runs models on this device, and its options.

    CUDA's memory grows by what is asked for; fp32 is really fp32 (TF32 has 10 bits of mantissa).
    """
    kind, number = place(device)
    if kind == "cpu":
        return CPU, {}
    return CUDA, {
        "device_id": str(number),
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
    }


def session_options(ort: ModuleType, threads: int, *, strict: bool = False, profile: str = "") -> Any:
    """The options of all sessions, explained in the module's docstring.

    strict: the CPU is forbidden. profile: a profile of what runs where is written below this path.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = True
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if strict:
        options.add_session_config_entry(NO_FALLBACK, "1")
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    return options


def session_on(device: str, ort: ModuleType, model: str | bytes, options: Any) -> Any:
    """A session of this file, or of its contents, with this device's provider. Raises LoadFailed."""
    wanted = provider_of(device)
    try:
        session = ort.InferenceSession(model, options, providers=[wanted], enable_fallback=0)
    except Exception as error:
        raise LoadFailed(f"onnxruntime cannot load this model: {plain(error)}") from error
    session.disable_fallback()  # of its runs
    there = session.get_providers()
    if there[0] != wanted[0]:
        raise LoadFailed(
            f"asked for {wanted[0]}, but onnxruntime chose {there[0]}: its libraries do not load (CUDA and cuDNN in the versions "
            "that this onnxruntime was built for)"
        )
    return session


@cache
def framework() -> ModuleType:
    try:
        import onnxruntime  # noqa: PLC0415  # only where models run
    except ImportError as error:
        raise BackendUnavailable(
            f"onnxruntime cannot be imported: {plain(error)} (pip install 'infaas[up]')"
        ) from error
    onnxruntime.set_default_logger_severity(4)  # errors raise; cuDNN tells each plan that it cannot use
    module: ModuleType = onnxruntime
    return module


@cache
def _begin(device: str) -> None:
    """Take what CUDA keeps for all models, which is not the first one's. Only once: the next session would have what a probe leaves behind."""
    OrtCudaBackend().probe(device)


@cache
def build(provider: str) -> ModuleType:
    """Onnxruntime with this provider compiled in, CUDA and cuDNN loaded from pip's packages if it can. Raises BackendUnavailable."""
    ort = framework()
    if provider not in ort.get_available_providers():
        raise BackendUnavailable(f"this onnxruntime {ort.__version__} was built without {provider}: {INSTALL}")
    if provider != CPU:
        with suppress(Exception), redirect_stdout(StringIO()):
            ort.preload_dlls()
    return ort


# -- proof of where every node runs on a GPU


def opened(ort: ModuleType, artifact: Path, spec: LoadSpec) -> tuple[Any, str]:
    """A session on the spec's GPU, and the proof in words. Raises LoadFailed if it would run elsewhere."""
    try:
        options = session_options(ort, spec.threads, strict=True)
        return session_on(spec.device, ort, str(artifact), options), "all nodes there"
    except LoadFailed as error:
        if "fallback" not in str(error.__cause__).lower():
            raise
    return profiled(ort, artifact, spec)


def profiled(ort: ModuleType, artifact: Path, spec: LoadSpec) -> tuple[Any, str]:
    """The same with the CPU allowed: the profile of a first run shows what it takes."""
    with tempfile.TemporaryDirectory() as directory:
        options = session_options(ort, spec.threads, profile=f"{directory}/run")
        session = session_on(spec.device, ort, str(artifact), options)
        try:
            session.run(None, first_inputs(session, spec.signature))
            events = json.loads(Path(session.end_profiling()).read_text())
        except Exception as error:
            raise LoadFailed(f"onnxruntime cannot run this model on {spec.device}: {plain(error)}") from error
    return session, accept(placement(events), provider_of(spec.device)[0])


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


def accept(found: Placement, wanted: str) -> str:
    """The proof in words. Raises LoadFailed if the CPU would compute, or nothing runs on the provider that was asked for."""
    if found.on_cpu:
        names = ", ".join(found.on_cpu[:5])
        raise LoadFailed(f"{wanted} leaves operators of this model to the CPU ({names}): it must not run half there")
    if not found.nodes.get(wanted):
        raise LoadFailed(f"{wanted} takes no operator of this model: they ran on {', '.join(found.nodes) or 'nothing'}")
    return ", ".join(f"{count} node{'s' * (count > 1)} on {name}" for name, count in found.nodes.items())


def first_inputs(session: Any, signature: Signature | None, items: int = 1) -> "dict[str, Array]":
    """So many items of zeros for every input."""
    import numpy as np  # noqa: PLC0415

    if signature is not None:
        return {spec.name: np.repeat(zeros(spec), items, axis=0) for spec in signature.inputs}
    return {
        one.name: np.zeros(
            [items, *(n if isinstance(n, int) else _LENGTH for n in one.shape[1:])], _DTYPES.get(one.type, "<f4")
        )
        for one in session.get_inputs()
    }


def _one() -> "Array":
    import numpy as np  # noqa: PLC0415

    return np.ones((1, 1), np.float32)


# A model of one Identity node, float [n, 1] to float [n, 1], opset 17: the protobuf, so that probing needs no onnx package.
IDENTITY = bytes.fromhex(
    "080812003a410a100a017812017922084964656e746974791201675a140a0178120f0a0d080112090a0312016e0a02080162"
    "140a0179120f0a0d080112090a0312016e0a02080142040a001011"
)
