"""Validation sets: read as plain numbers or refused with the array's name."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.catalog import Signature, TensorSpec
from services.executor.workshop import validation
from services.executor.workshop.jobs import Data, Refusal
from tests.support.models.tiny_models import npz

X, Y = np.zeros((30, 16), "f4"), np.arange(30) % 4
ONE = Signature(inputs=[TensorSpec(name="pixels", datatype="FP32", shape=[16])], outputs=[])
TWO = Signature(
    inputs=[TensorSpec(name=name, datatype="FP32", shape=[16]) for name in ("a", "b")],
    outputs=[],
)


def read(path: Path, content: bytes, signature=ONE, metric="top1", most=2**20):
    (path / "v.npz").write_bytes(content)
    return validation.read(
        Data(path=str(path / "v.npz"), inputs_key="x", labels_key="y", metric=metric, most_bytes=most), signature
    )


def npy(array: np.ndarray, shape: str = "") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=True)
    content = buffer.getvalue()
    return content.replace(b"(30, 16)", shape.encode().ljust(8)) if shape else content


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def test_inputs_are_named_by_the_key_or_by_the_model(tmp_path):
    for key in ("x", "pixels"):
        data = read(tmp_path, npz(y=Y, **{key: X.astype("f8")}))
        assert data.inputs["pixels"].dtype == np.float32
        assert len(data) == 30
    both = read(tmp_path, npz(a=X, y=Y, **{"x.b": X + 1}), TWO)
    assert float(both.inputs["b"][0, 0]) == 1.0


def test_labels_may_be_a_column_or_whole_floats(tmp_path):
    assert read(tmp_path, npz(x=X, y=Y.reshape(-1, 1).astype("f8"))).labels.tolist() == Y.tolist()
    assert read(tmp_path, npz(x=X, y=Y / 3), metric="mae").labels.dtype == np.float64


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not an .npz"),
        (b"hello", "not an .npz"),
        (npy(X), "not an .npz"),
        (npz(y=Y), "no array `x`"),
        (npz(x=X), "no labels `y`"),
        (npz(x=X[:, :3], y=Y), r"`x` has shape \[30, 3\]"),
        (npz(x=X[:10], y=Y), "10 samples of `pixels` but 30 labels"),
        (npz(x=X[:5], y=Y[:5]), "too few"),
        (npz(x=np.array([["a"] * 16] * 30), y=Y), "datatype"),
        (npz(x=X.astype("c8"), y=Y), "x"),
        (npz(x=X, y=Y.astype(str)), "must be numbers"),
        (npz(x=X, y=Y + 0.5), "integers"),
        (npz(x=X, y=np.where(Y > 1, np.nan, 1.0)), "NaN"),
        (npz(x=X, y=np.float32(3)), "not an array"),
        (zipped(x=npy(np.array([{}] * 30, dtype=object)), y=npy(Y)), "`x` holds Python objects"),
        (zipped(x=npy(X)[:-100], y=npy(Y)), "damaged"),
        (zipped(x=b"\x93NUMPY garbage", y=npy(Y)), "damaged"),
        (zipped(x=npy(X, "(3, 9**9)"), y=npy(Y)), "damaged|too large"),
        (zipped(x=npy(X, "(99999,)"), y=npy(Y)), "damaged|too large"),
        (npz(x=X, y=Y)[:-30], "not an .npz"),
        (npz(x=np.zeros((30, 20_000)), y=Y), "unpacks to"),
    ],
)
def test_what_is_no_validation_set_is_refused(tmp_path, content, why):
    with pytest.raises(Refusal, match=why):
        read(tmp_path, content)


def test_a_missing_second_input_is_named(tmp_path):
    with pytest.raises(Refusal, match="no array `b`"):
        read(tmp_path, npz(a=X, y=Y), TWO)


@given(st.integers(1, 3000))
def test_samples_that_calibrate_do_not_measure_where_there_are_enough(n):
    calibrate, measure = validation.split(n)
    assert len(calibrate) <= validation.CALIBRATION
    if n >= validation.LEAST_TO_SPLIT:
        assert not set(calibrate) & set(measure)
        assert sorted([*calibrate, *measure]) == list(range(n))
    else:
        assert sorted(measure) == list(range(n))
    assert [part.tolist() for part in validation.split(n)] == [calibrate.tolist(), measure.tolist()]
