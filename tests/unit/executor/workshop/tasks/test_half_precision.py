"""Half-precision and TensorRT's artifacts, made as the sandbox makes them and run on the CPU: the answers stay."""

import logging
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from services.executor.backends import backend, pt2
from services.executor.backends.base import LoadSpec
from services.executor.workshop.sandbox.protocol import Artifact, UploadRejected
from services.executor.workshop.tasks import onnx_files, quantise
from services.executor.workshop.tasks.validation import ValidationSet
from tests.support.data.events import floats
from tests.support.models import tiny_models

X, CLASSES = tiny_models.digits(300)
DATA = ValidationSet(inputs={"x": X}, labels=CLASSES)
SIGNATURE = floats({"x": [tiny_models.FEATURES]}, {"scores": [tiny_models.CLASSES]})


@pytest.fixture(autouse=True)
def logging_as_before():
    """What makes artifacts silences its process, which is a sandbox elsewhere."""
    yield
    logging.disable(logging.NOTSET)


def agreement(path, signature=SIGNATURE, x=X, right=CLASSES):
    handle = backend("ort").load(path, LoadSpec(signature=signature))
    found = handle.run_single(x)[0]
    handle.close()
    assert found.dtype == np.float32, "queries get what they got before"
    return (found.argmax(axis=1) == right).mean()


def test_fp16_is_half_as_large_and_what_has_no_floats_is_not_halved(tmp_path) -> None:
    source, target = tmp_path / "a.onnx", tmp_path / "b.onnx"
    source.write_bytes(tiny_models.convnet())
    onnx_files.to_fp16(source, target)
    assert target.stat().st_size < 0.6 * source.stat().st_size
    kinds = {tensor.data_type for tensor in onnx.load_model_from_string(target.read_bytes()).graph.initializer}
    assert kinds == {onnx.TensorProto.FLOAT16}
    small = tmp_path / "c.onnx"
    source.write_bytes(tiny_models.mlp())
    onnx_files.to_fp16(source, small)
    assert agreement(small) >= 0.98
    source = tmp_path / "a.onnx"
    source.write_bytes(tiny_models.made("(int64[n, 2] x) => (int64[n, 2] y) {y = Neg(x)}"))
    with pytest.raises(UploadRejected, match="fp16"):
        onnx_files.to_fp16(source, tmp_path / "b.onnx")


def test_tensorrt_gets_signed_symmetric_pairs(tmp_path):
    source, target = tmp_path / "a.onnx", tmp_path / "b.onnx"
    source.write_bytes(tiny_models.mlp())
    quantise.static(source, target, DATA, 8, lambda share: None, symmetric=True)
    model = onnx.load_model_from_string(target.read_bytes())
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    pairs = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert {node.op_type for node in pairs} == {"QuantizeLinear", "DequantizeLinear"}
    zeros = [constants[node.input[2]] for node in pairs]
    assert {zero.dtype for zero in zeros} == {np.dtype("int8")}
    assert not any(zero.any() for zero in zeros)
    assert agreement(target) >= 0.9


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    torch = pytest.importorskip("torch")
    directory = tmp_path_factory.mktemp("halved")
    tiny_models.exported(directory / "upload.pt2", torch)
    pt2.reduce(directory / "upload.pt2", directory / "model.pt2", 2**30)
    return directory / "model.pt2"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_halved_program_holds_its_precision_and_takes_the_same_queries(program, tmp_path, precision):
    import torch

    from services.executor.backends.torch_cuda import GraphHandle, moved
    from services.executor.workshop.tasks.torch_files import to_half
    from tests.support.models.gpu_stand_ins import CpuStream

    target = tmp_path / "half.pt2"
    to_half(program, target, precision, DATA)
    pt2.check(target)
    assert target.stat().st_size < program.stat().st_size
    spec = LoadSpec(format="pt2", precision=precision, max_batch=64, signature=SIGNATURE)
    loaded = moved(torch, target, "cpu")
    assert {str(tensor.dtype) for tensor in loaded.state_dict.values()} == {
        f"torch.{'b' * (precision[0] == 'b')}float16"
    }
    handle = GraphHandle(torch, loaded, spec, lambda: CpuStream(torch), "no GPU")
    for n in (1, 3, 64):
        found = handle.run_single(X[:n])[0]
        assert (found.dtype, found.shape) == (np.float32, (n, tiny_models.CLASSES))
    right = [handle.run_single(X[i : i + 64])[0].argmax(axis=1) for i in range(0, 256, 64)]
    assert (np.concatenate(right) == CLASSES[:256]).mean() >= 0.95


def test_each_framework_gets_the_file_it_runs(program, tmp_path):
    from services.executor.workshop.tasks.build import _make
    from services.executor.workshop.tasks.inspection import RunnableUpload

    base = tmp_path / "base.onnx"
    base.write_bytes(tiny_models.mlp())
    candidate = RunnableUpload(framework="torch", path=program, format="pt2", signature=SIGNATURE)

    def made(framework, precision, format):
        artifact = Artifact(framework=framework, precision=precision, format=format, path=str(tmp_path / "made"))
        _make(artifact, candidate, base, DATA, False, lambda frame: None)
        return (tmp_path / "made").read_bytes()

    assert made("tensorrt", "fp32", "onnx") == made("ort-cuda", "fp32", "onnx") == base.read_bytes()
    assert made("torch-cuda", "fp32", "pt2") == program.read_bytes()
    assert made("tensorrt", "fp16", "onnx") == made("ort-cuda", "fp16", "onnx") != base.read_bytes()
    assert made("tensorrt", "int8", "onnx") != made("ort", "int8", "onnx")
    for wrong in (
        ("torch-cuda", "int8", "pt2"),
        ("torch-cuda", "fp16", "onnx"),
        ("torch", "fp16", "pt2"),
        ("x", "fp32", "onnx"),
    ):
        with pytest.raises(UploadRejected):
            made(*wrong)


# -- int8 artifacts: fixed scales from samples, so that no answer depends on its neighbours, on processors with VNNI and without.
IMAGES, LABELS = tiny_models.digits(200)
NAN = np.where(np.arange(len(IMAGES))[:, None] % 2, IMAGES, np.float32(np.nan))


def made(directory: Path, *, x: np.ndarray = IMAGES, exact: bool = True) -> Path:
    source, target = directory / "source.onnx", directory / "int8.onnx"
    source.write_bytes(tiny_models.mlp())
    quantise.static(source, target, ValidationSet({"x": x}, LABELS), 8, lambda _: None, exact=exact)
    return target


def scores(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x})
    return np.asarray(found)


@pytest.mark.parametrize("exact", [True, False])
def test_an_extreme_neighbour_changes_no_answer(tmp_path: Path, exact: bool) -> None:
    path = made(tmp_path, exact=exact)
    alone = np.concatenate([scores(path, IMAGES[i : i + 1]) for i in range(6)])
    beside = scores(path, np.concatenate([IMAGES[:3], np.full_like(IMAGES[:1], 1e6), IMAGES[3:6]]))
    assert np.array_equal(alone, np.delete(beside, 3, axis=0))
    assert (scores(path, IMAGES).argmax(1) == LABELS).mean() >= 0.9


@pytest.mark.parametrize(("exact", "wanted"), [(True, onnx.TensorProto.INT8), (False, onnx.TensorProto.UINT8)])
def test_where_sums_saturate_weights_are_unsigned(tmp_path: Path, exact: bool, wanted: int) -> None:
    model = onnx.load_model_from_string(made(tmp_path, exact=exact).read_bytes())
    assert {one.data_type for one in model.graph.initializer if len(one.dims) == 2} == {wanted}


def test_samples_with_nan_calibrate_nothing(tmp_path: Path) -> None:
    assert np.array_equal(scores(made(tmp_path, x=NAN), IMAGES[:1]).argmax(1), LABELS[:1])
    with pytest.raises(UploadRejected, match="each sample that would calibrate it holds NaN"):
        made(tmp_path, x=np.full_like(IMAGES, np.nan))
