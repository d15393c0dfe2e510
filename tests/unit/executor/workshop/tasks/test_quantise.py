"""int8 artifacts: fixed scales from samples, so that no answer depends on its neighbours, on processors with VNNI and without."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from services.executor.workshop.sandbox.protocol import UploadRejected
from services.executor.workshop.tasks import quantise
from services.executor.workshop.tasks.validation import ValidationSet
from tests.support.models import tiny_models

X, Y = tiny_models.digits(200)
NAN = np.where(np.arange(len(X))[:, None] % 2, X, np.float32(np.nan))


def made(directory: Path, *, x: np.ndarray = X, exact: bool = True) -> Path:
    source, target = directory / "source.onnx", directory / "int8.onnx"
    source.write_bytes(tiny_models.mlp())
    quantise.static(source, target, ValidationSet({"x": x}, Y), 8, lambda _: None, exact=exact)
    return target


def scores(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x})
    return np.asarray(found)


@pytest.mark.parametrize("exact", [True, False])
def test_an_extreme_neighbour_changes_no_answer(tmp_path: Path, exact: bool) -> None:
    path = made(tmp_path, exact=exact)
    alone = np.concatenate([scores(path, X[i : i + 1]) for i in range(6)])
    beside = scores(path, np.concatenate([X[:3], np.full_like(X[:1], 1e6), X[3:6]]))
    assert np.array_equal(alone, np.delete(beside, 3, axis=0))
    assert (scores(path, X).argmax(1) == Y).mean() >= 0.9


@pytest.mark.parametrize(("exact", "wanted"), [(True, onnx.TensorProto.INT8), (False, onnx.TensorProto.UINT8)])
def test_where_sums_saturate_weights_are_unsigned(tmp_path: Path, exact: bool, wanted: int) -> None:
    model = onnx.load_model_from_string(made(tmp_path, exact=exact).read_bytes())
    assert {one.data_type for one in model.graph.initializer if len(one.dims) == 2} == {wanted}


def test_samples_with_nan_calibrate_nothing(tmp_path: Path) -> None:
    assert np.array_equal(scores(made(tmp_path, x=NAN), X[:1]).argmax(1), Y[:1])
    with pytest.raises(UploadRejected, match="each sample that would calibrate it holds NaN"):
        made(tmp_path, x=np.full_like(X, np.nan))
