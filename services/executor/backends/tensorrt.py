"""TensorRT through its own Python interface. This file has never been executed on a GPU by its authors.

The artifact is an ONNX file. The network is strongly typed: precision is what the file says (fp32, fp16 tensors, QDQ int8), in TensorRT 10 and
11 alike. The first load on a machine builds the engine, which takes minutes. It is kept beside the artifacts, under a name made of the file,
the GPU model, TensorRT's version, the precision and the largest batch. torch holds the memory of inputs and outputs.
"""

import hashlib
import os
import re
from functools import cache
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bus.datatypes import DATATYPES
from bus.messages.catalog import Signature, TensorSpec
from services.executor.backends.base import (
    BackendError,
    BackendUnavailable,
    InputRejected,
    LoadFailed,
    LoadSpec,
    RunFailed,
    plain,
)
from services.executor.backends.cuda import CudaStream, Slot, Staging, gpu, growth
from services.executor.backends.torch import TorchHandle, with_cuda

if TYPE_CHECKING:
    from bus.tensors import Array

LEAST = (10, 0)  # before it, networks had no types of their own
PRECISIONS = ("fp32", "fp16", "int8")
WORKSPACE = 2 * 2**30  # bytes that the builder may try kernels in
ENGINES = "engines"
INSTALL = "install TensorRT 10 or 11 from NVIDIA's own package index (pip install tensorrt-cu12 or -cu13; see docs/hardware.md)"
_building: dict[str, Lock] = {}  # by the engine's key


class TensorrtBackend:
    """Runs .onnx files as TensorRT engines."""

    name = "tensorrt"
    hardware = "gpu"
    formats = ("onnx",)
    executed = False

    def probe(self, device: str) -> str:
        """Makes a builder, which needs the library, the driver and the device."""
        gpu(device, "TensorRT")
        trt = library()
        with_cuda()  # it holds the memory
        if trt.Builder(_log(trt)) is None:
            raise BackendUnavailable(f"TensorRT {trt.__version__} cannot make a builder on {device}; {INSTALL}")
        return str(trt.__version__)

    def load(self, artifact: Path, spec: LoadSpec) -> "EngineHandle":
        """Build the engine, or take it from the cache (options["engines"], else beside the artifact)."""
        if spec.format not in self.formats:
            raise LoadFailed(f"TensorRT runs {', '.join(self.formats)} files, not {spec.format}")
        if spec.precision not in PRECISIONS:
            raise LoadFailed(f"TensorRT runs {', '.join(PRECISIONS)}, not {spec.precision}")
        signature = bounded(spec.signature)
        found = gpu(spec.device, "TensorRT")
        trt, torch = library(), with_cuda()
        digest = hashlib.sha256(artifact.read_bytes()).hexdigest()
        key = engine_key(digest, found.name, str(trt.__version__), spec.precision, spec.max_batch)
        place = Path(spec.options.get("engines") or artifact.parent / ENGINES) / key / "model.engine"
        try:
            # Of two loads at once, the second finds the engine that the first has built.
            with _building.setdefault(key, Lock()), torch.cuda.device(spec.device), growth(spec.device) as grown:
                engine, how = engine_of(trt, artifact, signature, spec.max_batch, place)
                handle = EngineHandle(torch, engine, signature, spec.max_batch, CudaStream(torch, spec.device))
        except BackendError:
            raise
        except Exception as error:
            raise LoadFailed(f"TensorRT cannot load this model on {spec.device}: {plain(error)}") from error
        handle.memory_mb = grown.mb
        handle.proof = f"TensorRT {trt.__version__}, {spec.device} ({found.name}), {how}"
        return handle


@cache
def library() -> ModuleType:
    """The package `tensorrt`. Raises BackendUnavailable."""
    try:
        import tensorrt as trt  # noqa: PLC0415  # NVIDIA's, not this file
    except Exception as error:  # a library that it needs is missing
        raise BackendUnavailable(f"the package tensorrt cannot be imported ({plain(error)}): {INSTALL}") from error
    version = str(getattr(trt, "__version__", "0"))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < LEAST:
        raise BackendUnavailable(f"TensorRT {version} is too old, 10 or newer is needed: {INSTALL}")
    found: ModuleType = trt
    return found


def _log(trt: ModuleType) -> Any:
    return trt.Logger(trt.Logger.ERROR)


# -- the engine


def bounded(signature: Signature | None) -> Signature:
    """The signature, of which every shape is part of the engine. Raises LoadFailed if there is none, or a length is open."""
    if signature is None:
        raise LoadFailed("TensorRT needs the model's signature: shapes are part of the engine")
    for spec in (*signature.inputs, *signature.outputs):
        if -1 in spec.shape:
            raise LoadFailed(f"TensorRT needs bounded shapes, and an axis of {spec.name!r} has no fixed length")
    return signature


def engine_key(digest: str, gpu_name: str, version: str, precision: str, max_batch: int) -> str:
    """The name of an engine's directory. Equal names mean equal engines. digest: of the artifact, hex."""
    exact = "\0".join((digest, gpu_name, version, precision, str(max_batch)))
    readable = re.sub(r"[^A-Za-z0-9]+", "-", gpu_name).strip("-").lower()[:32]
    return f"{digest[:12]}-{readable}-{precision}-b{max_batch}-{hashlib.sha256(exact.encode()).hexdigest()[:12]}"


def engine_of(trt: ModuleType, artifact: Path, signature: Signature, largest: int, place: Path) -> tuple[Any, str]:
    """The engine kept at `place`, or a new one that is kept there; and which of both. A file that TensorRT refuses is built anew."""
    runtime = trt.Runtime(_log(trt))
    if place.exists():
        engine = runtime.deserialize_cuda_engine(place.read_bytes())
        if engine is not None:
            return engine, "engine from the cache"
        place.unlink(missing_ok=True)
    plan = build(trt, artifact, signature, largest)
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_name(f"{place.name}.{os.getpid()}.new")  # another process may build the same
    new.write_bytes(plan)
    new.replace(place)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise LoadFailed("TensorRT cannot load the engine that it has just built")
    return engine, "engine built"


def build(trt: ModuleType, artifact: Path, signature: Signature, largest: int) -> bytes:
    """Compile the file for this GPU: one profile from batch 1 to the largest, tuned for the largest. Raises LoadFailed."""
    log = _log(trt)
    builder = trt.Builder(log)
    flags = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if flags is None else 1 << int(flags))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(artifact)):
        said = "; ".join(str(parser.get_error(n)) for n in range(parser.num_errors))
        raise LoadFailed(f"TensorRT does not take this model: {plain(said)}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE)
    config.clear_flag(trt.BuilderFlag.TF32)  # fp32 is really fp32
    profile = builder.create_optimization_profile()
    for one in signature.inputs:
        low, high = (1, *one.shape), (largest, *one.shape)
        profile.set_shape(one.name, low, high, high)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise LoadFailed("TensorRT cannot build an engine of this model: its log on stderr says why")
    return bytes(plan)


class EngineHandle(TorchHandle):
    """One engine on one stream. Its memory has the size of the largest batch from the start."""

    one_at_a_time = "its buffers on the device hold one batch"

    def __init__(self, torch: ModuleType, engine: Any, signature: Signature, largest: int, stream: Any) -> None:
        super().__init__(torch, signature, (), (), largest)
        self._stream = stream
        self._engine = engine
        self._context = engine.create_execution_context()
        if self._context is None:
            raise LoadFailed("TensorRT has no memory for the engine's execution context")
        there = {engine.get_tensor_name(n) for n in range(engine.num_io_tensors)}
        if missing := {*self.inputs, *self.outputs} - there:
            raise LoadFailed(f"the engine has no tensor {', '.join(sorted(missing))}")
        with stream.on():
            self._in = [self._staging(one) for one in signature.inputs]
            self._out = [self._staging(one) for one in signature.outputs]
        for staged in (*self._in, *self._out):
            self._context.set_tensor_address(staged.slot.name, staged.device.data_ptr())

    def _staging(self, one: TensorSpec) -> Staging:
        slot = Slot(one.name, tuple(one.shape), DATATYPES[one.datatype].array)
        return Staging(self._torch, slot, self._most, self._stream.device, pinned=self._stream.pinned)

    def _answers(self, arrays: "list[Array]") -> "list[Array]":
        with self._stream.on():
            return self._queued(arrays, len(arrays[0]))

    def _queued(self, arrays: "list[Array]", items: int) -> "list[Array]":
        for staged, array in zip(self._in, arrays, strict=True):
            staged.put(array, items)
            if not self._context.set_input_shape(staged.slot.name, (items, *staged.slot.shape)):
                raise InputRejected(f"the engine does not take {items} items of input {staged.slot.name!r}")
        if not self._context.execute_async_v3(self._stream.pointer):
            raise RunFailed("TensorRT could not queue the batch")
        for staged in self._out:
            staged.fetch(staged.device, items)
        self._stream.wait()
        return [staged.taken(items) for staged in self._out]

    def close(self) -> None:
        super().close()
        self._context = self._engine = None
        self._in, self._out = [], []
        self._stream.trim()
