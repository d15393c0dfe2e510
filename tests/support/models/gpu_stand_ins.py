"""Stand-ins for a GPU: the same steps on the CPU's own memory, for the logic around IO binding, CUDA graphs and TensorRT's engines."""

import ctypes
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime

from services.executor.backends import pt2, tensorrt
from services.executor.backends.base import LoadSpec
from services.executor.backends.ort import BoundHandle
from tests.support.data.events import floats
from tests.support.models import tiny_models

LARGEST = 12  # items of a batch: no power of two
SIGNATURE = floats({"x": [tiny_models.FEATURES]}, {"scores": [tiny_models.CLASSES]})
_STREAM = 7


def program(directory: Path, torch) -> Path:
    """`tiny_models.mlp` as a torch program that came through registration."""
    tiny_models.exported(directory / "upload.pt2", torch)
    pt2.reduce(directory / "upload.pt2", directory / "model.pt2", 2**30)
    return directory / "model.pt2"


# -- onnxruntime


def bound(artifact: Path) -> BoundHandle:
    """IO binding, on the CPU: the same calls."""
    session = onnxruntime.InferenceSession(str(artifact), providers=["CPUExecutionProvider"])
    return BoundHandle(onnxruntime, session, LoadSpec(max_batch=LARGEST, signature=SIGNATURE), "proof")


# -- torch


class CpuStream:
    """What it records computes anew into the same outputs. refuse: nothing can be recorded."""

    pinned = False
    pointer = _STREAM

    def __init__(self, torch, refuse=False):
        self.torch, self.device, self.refuse = torch, torch.device("cpu"), refuse
        self.recorded = self.replayed = 0

    @contextmanager
    def on(self):
        with self.torch.inference_mode():
            yield

    def capture(self, compute):
        if self.refuse:
            raise RuntimeError("operation not permitted when stream is capturing")
        outputs = compute()
        self.recorded += 1

        def replay():
            self.replayed += 1
            for old, new in zip(outputs, compute(), strict=True):
                old.copy_(new)

        return replay, outputs

    def wait(self):
        return

    def forget(self):
        return

    def trim(self):
        return


def graphs(torch, artifact: Path, stream=None, *, signature=SIGNATURE, max_batch=LARGEST):
    """The handle of a program on a GPU. stream: makes one; by default each is a CpuStream."""
    from services.executor.backends.torch_cuda import GraphHandle, moved

    spec = LoadSpec(max_batch=max_batch, format="pt2", signature=signature)
    return GraphHandle(torch, moved(torch, artifact, "cpu"), spec, stream or (lambda: CpuStream(torch)), "no GPU")


# -- TensorRT: the package `tensorrt` needs NVIDIA's libraries


class Engine:
    """A plan is the ONNX file itself. It is its own execution context."""

    num_io_tensors = 2

    def __init__(self, plan: bytes) -> None:
        self._session = onnxruntime.InferenceSession(plan, providers=["CPUExecutionProvider"])
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, int] = {}

    def get_tensor_name(self, n: int) -> str:
        return ("x", "scores")[n]

    def create_execution_context(self) -> "Engine":
        return self

    def set_tensor_address(self, name: str, place: int) -> None:
        self._places[name] = place

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = shape
        return shape[0] <= LARGEST

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == _STREAM
        shape = self._shapes["x"]
        data = (ctypes.c_float * int(np.prod(shape))).from_address(self._places["x"])
        scores = self._session.run(None, {"x": np.frombuffer(data, np.float32).reshape(shape)})[0]
        ctypes.memmove(self._places["scores"], scores.ctypes.data, scores.nbytes)
        return True


class FakeTensorrt:
    """The names of TensorRT 10 and 11; it computes with onnxruntime. built: profiles of the engines that were compiled."""

    __version__ = "11.4.0"
    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
    MemoryPoolType = SimpleNamespace(WORKSPACE="workspace")
    BuilderFlag = SimpleNamespace(TF32="tf32")

    def __init__(self) -> None:
        self.built: list[dict[str, tuple[tuple[int, ...], ...]]] = []
        self.cleared: list[str] = []
        outer = self

        class Logger:
            ERROR = 1

            def __init__(self, level: int) -> None:
                pass

        class Builder:
            def __init__(self, log: object) -> None:
                self.network = SimpleNamespace(plan=b"")

            def create_network(self, flags: int) -> SimpleNamespace:
                assert flags == 2  # strongly typed
                return self.network

            def create_builder_config(self) -> SimpleNamespace:
                return SimpleNamespace(
                    set_memory_pool_limit=lambda pool, size: None,
                    clear_flag=outer.cleared.append,
                    add_optimization_profile=lambda profile: outer.built.append(profile.shapes),
                )

            def create_optimization_profile(self) -> SimpleNamespace:
                shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
                return SimpleNamespace(shapes=shapes, set_shape=lambda name, *of: shapes.update({name: of}))

            def build_serialized_network(self, network: SimpleNamespace, config: object) -> bytes | None:
                return network.plan or None

        class OnnxParser:
            num_errors = 1

            def __init__(self, network: SimpleNamespace, log: object) -> None:
                self.network = network

            def parse_from_file(self, path: str) -> bool:
                self.network.plan = Path(path).read_bytes()
                return b"scores" in self.network.plan

            def get_error(self, n: int) -> str:
                return "no importer registered for op"

        class Runtime:
            def __init__(self, log: object) -> None:
                pass

            def deserialize_cuda_engine(self, plan: bytes) -> Engine | None:
                return None if plan == b"damaged" else Engine(plan)

        self.Logger, self.Builder, self.OnnxParser, self.Runtime = Logger, Builder, OnnxParser, Runtime


def engine(torch, artifact: Path) -> tensorrt.EngineHandle:
    """The handle of an engine that is compiled beside the artifact."""
    place = artifact.parent / "key" / "model.engine"
    made, _ = tensorrt.engine_of(FakeTensorrt(), artifact, SIGNATURE, LARGEST, place)
    return tensorrt.EngineHandle(torch, made, SIGNATURE, LARGEST, CpuStream(torch))
