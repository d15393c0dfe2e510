"""TensorRT through onnxruntime's TensorRT provider. This file has never been executed on a GPU by its authors.

The artifact is an ONNX file; precision is what the file says (fp32, fp16 tensors, QDQ int8). The engine is built for one GPU model,
TensorRT version, precision and range of batches (1 to the largest) at the first load on a machine, which takes minutes, and kept
beside the artifacts under a name made of all of them. Operators that TensorRT does not take run on CUDA; the CPU gets none.
"""

import ctypes
import hashlib
import re
import threading
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from bus.messages.catalog import Signature
from services.executor.backends.base import BackendUnavailable, LoadFailed, LoadSpec, plain
from services.executor.backends.cuda import gpu, growth
from services.executor.backends.ort import IDENTITY, framework, one
from services.executor.backends.ort_cuda import PROVIDER as CUDA
from services.executor.backends.ort_cuda import BoundHandle, Provider, build, cuda_options, opened, place

PROVIDER = "TensorrtExecutionProvider"
LIBRARY = "libnvinfer.so.10"  # what onnxruntime 1.23 to 1.31 links against
WORKSPACE = 2 * 2**30  # bytes that the builder may try kernels in
PRECISIONS = ("fp32", "fp16", "int8")
ENGINES = "engines"
INSTALL = (
    "install TensorRT 10 from NVIDIA's own package index (pip install tensorrt-cu12 or -cu13; see docs/hardware.md)"
)


class OrtTensorrtBackend:
    """Runs .onnx files as TensorRT engines."""

    name = "trt"
    hardware = "gpu"
    formats = ("onnx",)
    executed = False

    def probe(self, device: str) -> str:
        """Looks for the library and starts a session with the provider first."""
        gpu(device, "TensorRT")
        ort = build(PROVIDER)
        version = tensorrt_version()
        providers: list[Provider] = [(PROVIDER, {"device_id": str(place(device)[1])}), (CUDA, cuda_options(device))]
        try:
            session = ort.InferenceSession(IDENTITY, providers=providers, enable_fallback=0)
            session.run(None, {"x": one()})
        except Exception as error:
            raise BackendUnavailable(f"TensorRT does not run on {device}: {plain(error)}") from error
        if session.get_providers()[0] != PROVIDER:
            raise BackendUnavailable(f"onnxruntime {ort.__version__} cannot load TensorRT {version}; {INSTALL}")
        return version

    def load(self, artifact: Path, spec: LoadSpec) -> BoundHandle:
        """Build the engine, or take it from the cache (options["engines"], else beside the artifact)."""
        if spec.format not in self.formats:
            raise LoadFailed(f"TensorRT runs {', '.join(self.formats)} files, not {spec.format}")
        if spec.precision not in PRECISIONS:
            raise LoadFailed(f"TensorRT runs {', '.join(PRECISIONS)}, not {spec.precision}")
        low, high = profile_shapes(spec.signature, spec.max_batch)
        found = gpu(spec.device, "TensorRT")
        ort = build(PROVIDER)
        version = tensorrt_version()
        digest = hashlib.sha256(artifact.read_bytes()).hexdigest()
        key = engine_key(digest, found.name, f"{version}-ort{ort.__version__}", spec.precision, spec.max_batch)
        engines = Path(spec.options.get("engines") or artifact.parent / ENGINES) / key
        engines.mkdir(parents=True, exist_ok=True)
        cached = any(engines.glob("*.engine"))
        trt = (PROVIDER, tensorrt_options(spec.device, spec.precision, str(engines), low, high))
        # Of two loads at once, the second finds the engine that the first has built.
        with building.setdefault(key, threading.Lock()), growth(spec.device) as grown:
            session, where = opened(ort, artifact, spec, [trt, (CUDA, cuda_options(spec.device))], must_profile=True)
        engine = "engine from the cache" if cached else "engine built"
        proof = f"TensorRT {version}, {spec.device} ({found.name}), {engine}, {where}"
        return BoundHandle(ort, session, spec, place(spec.device), proof, grown.mb)


building: dict[str, threading.Lock] = {}  # by the engine's key


def engine_key(digest: str, gpu_name: str, version: str, precision: str, max_batch: int) -> str:
    """The name of an engine's directory. Equal names mean equal engines. digest: of the artifact, hex."""
    exact = "\0".join((digest, gpu_name, version, precision, str(max_batch)))
    readable = re.sub(r"[^A-Za-z0-9]+", "-", gpu_name).strip("-").lower()[:32]
    return f"{digest[:12]}-{readable}-{precision}-b{max_batch}-{hashlib.sha256(exact.encode()).hexdigest()[:12]}"


def profile_shapes(signature: Signature | None, max_batch: int) -> tuple[str, str]:
    """The smallest and largest shapes of the optimisation profile, in onnxruntime's notation. Raises LoadFailed."""
    if signature is None:
        raise LoadFailed("TensorRT needs the model's signature: shapes are part of the engine")
    for spec in signature.inputs:
        if -1 in spec.shape:
            raise LoadFailed(f"TensorRT needs bounded shapes, and an axis of input {spec.name!r} has no fixed length")

    def written(batch: int) -> str:
        return ",".join(f"{spec.name}:{'x'.join(map(str, (batch, *spec.shape)))}" for spec in signature.inputs)

    return written(1), written(max_batch)


def tensorrt_options(device: str, precision: str, engines: str, low: str, high: str) -> dict[str, str]:
    """Provider options: one profile from batch 1 to the largest, tuned for the largest; engines and timings are kept.

    fp16 and int8 only allow what the file itself says: TensorRT chooses no precision of its own.
    """
    return {
        "device_id": str(place(device)[1]),
        "trt_max_workspace_size": str(WORKSPACE),
        "trt_fp16_enable": "1" if precision == "fp16" else "0",
        "trt_int8_enable": "1" if precision == "int8" else "0",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": engines,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": engines,
        "trt_profile_min_shapes": low,
        "trt_profile_opt_shapes": high,
        "trt_profile_max_shapes": high,
    }


@cache
def tensorrt_version() -> str:
    """The version of the library that would be used, "10.9.0". Raises BackendUnavailable."""
    framework()
    library = None
    for path in _candidates():
        try:
            library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            break
        except OSError:
            continue
    if library is None:
        raise BackendUnavailable(f"{LIBRARY} cannot be loaded: {INSTALL}")
    return version_text(int(library.getInferLibVersion()))


def version_text(number: int) -> str:
    """TensorRT 10 reports major * 10000 + minor * 100 + patch."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _candidates() -> list[str]:
    """The system's library, then the one that pip installed."""
    found = [LIBRARY]
    spec = find_spec("tensorrt_libs")
    if spec is not None and spec.submodule_search_locations:
        found += [str(Path(where) / LIBRARY) for where in spec.submodule_search_locations]
    return found
