"""onnxruntime on the CPU; CUDA is a file of its own (ort_cuda.py).

Session options after measurements on shared cores: one thread unless asked, no spinning (it costs three times the CPU
between requests and collapses when a neighbour takes a core), arena on, providers named and checked.
"""

import threading
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from services.executor.backends.base import (
    BackendError,
    BackendUnavailable,
    Cancelled,
    InputRejected,
    LoadFailed,
    LoadSpec,
    RunFailed,
    plain,
    trim_memory,
)

if TYPE_CHECKING:
    from services.executor.backends.base import Array

PROVIDERS = {"cpu": "CPUExecutionProvider"}


class OrtBackend:
    """Runs .onnx files."""

    name = "ort"
    hardware = "cpu"
    formats = ("onnx",)
    executed = True

    def probe(self, device: str) -> str:
        """Builds and runs a one-node model there: the list of compiled-in providers proves nothing."""
        _provider(device)
        ort = framework()
        try:
            session = ort.InferenceSession(IDENTITY, session_options(ort, 1), providers=[_provider(device)])
            session.run(None, {"x": one()})
        except Exception as error:
            raise BackendUnavailable(f"onnxruntime does not run here: {plain(error)}") from error
        return str(ort.__version__)

    def load(self, artifact: Path, spec: LoadSpec) -> "OrtHandle":
        """A session of its own on exactly the provider asked for."""
        if spec.format not in self.formats:
            raise LoadFailed(f"onnxruntime runs {', '.join(self.formats)} files, not {spec.format}")
        provider = _provider(spec.device)
        ort = framework()
        try:
            session = ort.InferenceSession(str(artifact), session_options(ort, spec.threads), providers=[provider])
        except Exception as error:
            raise LoadFailed(f"onnxruntime cannot load this model: {plain(error)}") from error
        session.disable_fallback()
        if session.get_providers()[0] != provider:
            raise LoadFailed(f"asked for {provider}, but onnxruntime chose {session.get_providers()[0]}")
        return OrtHandle(ort, session, spec, provider)


class OrtHandle:
    """One session. See `base.Handle`."""

    memory_mb = 0.0
    one_at_a_time = ""

    def __init__(self, ort: ModuleType, session: Any, spec: LoadSpec, provider: str) -> None:
        self.proof = f"onnxruntime {ort.__version__} {provider}, {spec.threads} thread{'s' * (spec.threads > 1)}"
        taken = [one.name for one in session.get_inputs()]
        given = [one.name for one in session.get_outputs() if one.type.startswith("tensor(")]
        if spec.signature is not None:
            taken = _in_order([one.name for one in spec.signature.inputs], taken, "input")
            given = _in_order([one.name for one in spec.signature.outputs], given, "output")
        self.inputs = tuple(taken)
        self.outputs = tuple(given)
        self._first = self.inputs[0] if self.inputs else ""
        self._wanted = given
        self._session = session
        self._run = session.run
        self._ort = ort
        self._options = ort.RunOptions()
        self._options.log_severity_level = 4
        self._shrinking: Any = None
        self._running = 0
        self._cancelled = False
        self._lock = threading.Lock()

    def run(self, inputs: "dict[str, Array]") -> "dict[str, Array]":
        return dict(zip(self._wanted, self._call(inputs), strict=True))

    def run_single(self, array: "Array") -> "list[Array]":
        return self._call({self._first: array})

    def _call(self, feed: "dict[str, Array]") -> "list[Array]":
        options = self._options
        if self._shrinking is not None:
            options, self._shrinking = self._shrinking, None
        self._begin()
        try:
            outputs: list[Array] = self._run(self._wanted, feed, options)
        except Exception as error:
            raise self._explain(error) from error
        finally:
            self._end()
        return outputs

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

    def shrink(self) -> None:
        if not self.proof.split()[2].startswith("CPU"):
            return
        options = self._ort.RunOptions()
        options.log_severity_level = 4
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self._shrinking = options

    def close(self) -> None:
        self._session = None
        self._run = _closed
        trim_memory()

    def _explain(self, error: Exception) -> BackendError:
        if self._cancelled:
            return Cancelled("the run was ended because it took too long")
        kind = type(error).__name__
        if kind == "InvalidArgument" or (isinstance(error, ValueError) and "input" in str(error).lower()):
            return InputRejected(plain(error))
        return RunFailed(plain(error))


def _closed(*_: object) -> Any:
    raise RunFailed("this model is no longer loaded")


def _in_order(wanted: list[str], there: list[str], what: str) -> list[str]:
    missing = [name for name in wanted if name not in there]
    if missing:
        raise LoadFailed(f"the model has no {what} {missing[0]!r}: it has {', '.join(there)}")
    return wanted


def _provider(device: str) -> str:
    kind = device.partition(":")[0]
    try:
        return PROVIDERS[kind]
    except KeyError:
        raise BackendUnavailable(f"onnxruntime is set up here for {', '.join(PROVIDERS)}, not {device!r}") from None


def session_options(ort: ModuleType, threads: int) -> Any:
    """The options of all sessions, explained in the module's docstring."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = True
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return options


@cache
def framework() -> ModuleType:
    try:
        import onnxruntime  # noqa: PLC0415  # only where models run
    except ImportError as error:
        raise BackendUnavailable(f"onnxruntime cannot be imported: {plain(error)}") from error
    onnxruntime.set_default_logger_severity(3)
    module: ModuleType = onnxruntime
    return module


def one() -> "Array":
    import numpy as np  # noqa: PLC0415

    return np.ones((1, 1), np.float32)


# A model of one Identity node, float [n, 1] to float [n, 1], opset 17: the protobuf, so that probing needs no onnx package.
IDENTITY = bytes.fromhex(
    "080812003a410a100a017812017922084964656e746974791201675a140a0178120f0a0d080112090a0312016e0a02080162"
    "140a0179120f0a0d080112090a0312016e0a02080142040a001011"
)
