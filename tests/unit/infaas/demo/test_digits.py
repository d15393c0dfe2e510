"""The demo's data and models are what DATA.md says they are."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from infaas.demo import digits
from infaas.demo.__main__ import write
from tools.collect_digits import split

FILES = digits.models()


def test_parts_are_balanced_and_disjoint() -> None:
    parts = [digits.load(part) for part in (digits.TRAIN, digits.VALIDATION, digits.UNSEEN)]
    assert [len(part) for part in parts] == [3500, 750, 750]
    for part in parts:
        assert np.bincount(part.y).tolist() == [len(part) // 10] * 10
        assert part.x.dtype == np.float32
        assert part.x.shape == (len(part), 784)
        assert 0.0 <= part.x.min() < part.x.max() <= 1.0
    rows = {row.tobytes() for part in parts for row in part.x}
    assert len(rows) == 5000, "the same picture in two parts would flatter the measured accuracy"


def test_splitting_is_reproducible() -> None:
    with np.load(digits.DIGITS) as stored:
        again = split(stored["x"], stored["y"])
        assert np.array_equal(again["part"], stored["part"])


def test_validation_file(tmp_path: Path) -> None:
    path = digits.save_validation(tmp_path / "validation.npz")
    expected = digits.load(digits.VALIDATION)
    with np.load(path) as stored:
        assert np.array_equal(stored["x"], expected.x)
        assert np.array_equal(stored["y"], expected.y)


def test_family_is_large_and_small_enough() -> None:
    assert len(FILES) >= 5
    assert sum(path.stat().st_size for path in FILES.values()) <= 3_000_000


@pytest.mark.parametrize("name", FILES)
def test_one_signature_for_all(name: str) -> None:
    graph = onnx.load(FILES[name]).graph
    (given,), (wanted,) = graph.input, graph.output
    assert (given.name, wanted.name) == ("x", "scores")
    assert given.type.tensor_type.elem_type == wanted.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert given.type.tensor_type.shape.dim[1].dim_value == 784
    assert wanted.type.tensor_type.shape.dim[1].dim_value == 10


@pytest.mark.parametrize("name", FILES)
def test_any_batch_gives_the_same_probabilities(name: str) -> None:
    session = onnxruntime.InferenceSession(str(FILES[name]), providers=["CPUExecutionProvider"])
    x = digits.load(digits.UNSEEN).x[:64]
    (whole,) = session.run(["scores"], {"x": x})
    np.testing.assert_allclose(whole.sum(axis=1), 1.0, atol=1e-4)
    for size in (1, 3, 8):
        (part,) = session.run(["scores"], {"x": x[:size]})
        np.testing.assert_allclose(part, whole[:size], atol=1e-4)


def test_accuracy_spreads_as_documented() -> None:
    unseen = digits.load(digits.UNSEEN)
    accuracy = {}
    for name, path in FILES.items():
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (scores,) = session.run(["scores"], {"x": unseen.x})
        accuracy[name] = float((scores.argmax(1) == unseen.y).mean())
    assert min(accuracy.values()) > 0.87
    assert max(accuracy.values()) > 0.985
    assert accuracy["logreg"] < accuracy["mlp-l"] < accuracy["cnn-s"] < accuracy["cnn-m"]


def test_a_model_its_validation_set_and_unseen_pictures(tmp_path: Path) -> None:
    model, validation, pictures = write(tmp_path / "new")
    assert model.read_bytes() == digits.models()["cnn-m"].read_bytes()
    with np.load(validation) as stored:
        assert stored["x"].shape == (750, 784)
        assert stored["y"].shape == (750,)
    x = np.load(pictures)
    assert (x.shape, x.dtype) == ((8, 784), np.float32)
    unseen = digits.load(digits.UNSEEN)
    assert len({int(unseen.y[(unseen.x == picture).all(1).argmax()]) for picture in x}) > 4
