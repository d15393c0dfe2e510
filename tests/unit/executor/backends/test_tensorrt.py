"""TensorRT's own interface without a GPU: what is built, cached, bound and refused.

The package `tensorrt` needs NVIDIA's libraries. `FakeTensorrt` has its names (those of 10 and 11) and computes with onnxruntime.
"""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.catalog import Signature, TensorSpec
from services.executor.backends import tensorrt
from services.executor.backends.base import BackendUnavailable, InputRejected, LoadFailed, LoadSpec, RunFailed
from tests.support.models import tiny_models
from tests.support.models.torch_stream import CpuStream

SIGNATURE = Signature(
    inputs=[TensorSpec(name="x", datatype="FP32", shape=[tiny_models.FEATURES])],
    outputs=[TensorSpec(name="scores", datatype="FP32", shape=[tiny_models.CLASSES])],
)
LARGEST = 8


class Engine:
    """A plan is the ONNX file itself. It is its own execution context."""

    num_io_tensors = 2

    def __init__(self, plan: bytes) -> None:
        import onnxruntime

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
        return shape[0] <= 8

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == 7
        shape = self._shapes["x"]
        data = (ctypes.c_float * int(np.prod(shape))).from_address(self._places["x"])
        scores = self._session.run(None, {"x": np.frombuffer(data, np.float32).reshape(shape)})[0]
        ctypes.memmove(self._places["scores"], scores.ctypes.data, scores.nbytes)
        return True


class FakeTensorrt:
    """built: profiles of the engines that were compiled."""

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


@pytest.fixture
def trt():
    return FakeTensorrt()


@pytest.fixture
def artifact(tmp_path):
    (tmp_path / "model.onnx").write_bytes(tiny_models.mlp())
    return tmp_path / "model.onnx"


def handle(trt, artifact):
    torch = pytest.importorskip("torch")
    stream = CpuStream(torch)
    stream.pointer = 7
    engine, _ = tensorrt.engine_of(trt, artifact, SIGNATURE, LARGEST, artifact.parent / "key" / "model.engine")
    return tensorrt.EngineHandle(torch, engine, SIGNATURE, LARGEST, stream)


def test_every_batch_up_to_the_largest_gets_its_own_answers(trt, artifact):
    loaded = handle(trt, artifact)
    x, classes = tiny_models.digits(40)
    kept = [(loaded.run({"x": x[n : 2 * n]})["scores"], classes[n : 2 * n]) for n in (1, 3, 8, 2)]
    assert all(scores.argmax(axis=1).tolist() == right.tolist() for scores, right in kept)
    assert loaded.run_single(x[:2])[0].shape == (2, tiny_models.CLASSES)


def test_an_engine_is_compiled_once_for_all_its_batches(trt, artifact):
    place = artifact.parent / "key" / "model.engine"
    said = [tensorrt.engine_of(trt, artifact, SIGNATURE, LARGEST, place)[1] for _ in range(3)]
    assert said == ["engine built", "engine from the cache", "engine from the cache"]
    assert trt.built == [{"x": ((1, tiny_models.FEATURES), (8, tiny_models.FEATURES), (8, tiny_models.FEATURES))}]
    assert trt.cleared == ["tf32"]
    place.write_bytes(b"damaged")
    assert tensorrt.engine_of(trt, artifact, SIGNATURE, LARGEST, place)[1] == "engine built"
    assert [one.name for one in place.parent.iterdir()] == ["model.engine"]


def test_a_file_that_tensorrt_does_not_take_says_why(trt, tmp_path):
    (tmp_path / "other.onnx").write_bytes(b"other")
    with pytest.raises(LoadFailed, match="no importer registered"):
        tensorrt.build(trt, tmp_path / "other.onnx", SIGNATURE, LARGEST)


def test_what_the_model_does_not_take_is_the_callers_fault(trt, artifact):
    loaded = handle(trt, artifact)
    x = tiny_models.digits(9)[0]
    for wrong in ({"x": x[:2, :3]}, {"z": x[:2]}, {}, {"x": x[:2].astype("f8")}, {"x": x}):
        with pytest.raises(InputRejected):
            loaded.run(wrong)


def test_a_closed_model_answers_no_more(trt, artifact):
    loaded = handle(trt, artifact)
    loaded.close()
    with pytest.raises(RunFailed, match="no longer loaded"):
        loaded.run_single(tiny_models.digits(1)[0])


def test_open_lengths_are_refused_by_name():
    tokens = [TensorSpec(name="tokens", datatype="INT64", shape=[-1])]
    for wrong in (Signature(inputs=tokens, outputs=[]), Signature(inputs=SIGNATURE.inputs, outputs=tokens)):
        with pytest.raises(LoadFailed, match="'tokens'"):
            tensorrt.bounded(wrong)
    with pytest.raises(LoadFailed, match="signature"):
        tensorrt.bounded(None)


def test_a_precision_without_a_recipe_is_refused_before_anything_else(tmp_path):
    with pytest.raises(LoadFailed, match="bf16"):
        tensorrt.TensorrtBackend().load(tmp_path / "x", LoadSpec(device="cuda:0", precision="bf16"))


_KEYS = st.tuples(
    st.sampled_from(["a" * 64, "a" * 63 + "b", "c" * 64]),
    st.sampled_from(["NVIDIA H100 80GB HBM3", "NVIDIA H100-80GB-HBM3", "Tesla T4"]),
    st.sampled_from(["10.9.0", "10.9.1"]),
    st.sampled_from(["fp32", "fp16", "int8"]),
    st.sampled_from([1, 8, 64]),
)


@given(_KEYS, _KEYS)
def test_engines_are_shared_only_where_the_same_would_be_built(one, other):
    assert (tensorrt.engine_key(*one) == tensorrt.engine_key(*other)) == (one == other)


def test_an_engine_directory_is_readable_and_a_plain_name():
    key = tensorrt.engine_key("abcdef0123456789" * 4, "NVIDIA H100 80GB HBM3 / ../x", "10.9.0", "fp16", 64)
    assert key.startswith("abcdef012345-nvidia-h100-80gb-hbm3-x-fp16-b64-")
    assert "/" not in key
    assert "." not in key


def test_without_the_package_the_reason_says_how_to_get_it():
    try:
        tensorrt.library()
    except BackendUnavailable as error:
        assert "pip install tensorrt" in str(error)
    else:
        pytest.skip("the package tensorrt is installed here")
