"""The demo's data and models are what DATA.md says they are."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from infaas.demo import digits
from infaas.demo.__main__ import write
from infaas.demo.digits import scores_of
from infaas.demo.ensemble import PHASES, disagreed, draw, intervals, permuted, shown
from infaas.demo.load import DemoReply
from infaas.demo.program import DemoTable
from tests.unit.infaas.demo.test_results import answer
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


def test_splitting_is_reproducible_and_the_family_is_large_and_small_enough() -> None:
    with np.load(digits.DIGITS) as stored:
        assert np.array_equal(split(stored["x"], stored["y"])["part"], stored["part"])
    assert len(FILES) >= 5
    assert sum(path.stat().st_size for path in FILES.values()) <= 3_000_000


def test_validation_file(tmp_path: Path) -> None:
    path = digits.save_validation(tmp_path / "validation.npz")
    expected = digits.load(digits.VALIDATION)
    with np.load(path) as stored:
        assert np.array_equal(stored["x"], expected.x)
        assert np.array_equal(stored["y"], expected.y)


@pytest.mark.parametrize("name", FILES)
def test_all_have_one_signature_and_any_batch_gives_the_same_probabilities(name: str) -> None:
    session = onnxruntime.InferenceSession(str(FILES[name]), providers=["CPUExecutionProvider"])
    (given,), (wanted,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape[1]) == ("x", "tensor(float)", 784)
    assert (wanted.name, wanted.type, wanted.shape[1]) == ("scores", "tensor(float)", 10)
    x = digits.load(digits.UNSEEN).x[:64]
    (whole,) = session.run(["scores"], {"x": x})
    np.testing.assert_allclose(whole.sum(axis=1), 1.0, atol=1e-4)
    for size in (1, 3, 8):
        (part,) = session.run(["scores"], {"x": x[:size]})
        np.testing.assert_allclose(part, whole[:size], atol=1e-4)


def test_accuracy_spreads_as_documented() -> None:
    unseen = digits.load(digits.UNSEEN)
    accuracy = {name: (scores_of(path, unseen.x).argmax(1) == unseen.y).mean() for name, path in FILES.items()}
    assert min(accuracy.values()) > 0.87
    assert max(accuracy.values()) > 0.985
    assert accuracy["logreg"] < accuracy["mlp-l"] < accuracy["cnn-s"] < accuracy["cnn-m"]


def test_a_model_its_validation_set_and_unseen_pictures(tmp_path: Path) -> None:
    model, validation, pictures = write(tmp_path / "new")
    assert model.read_bytes() == FILES["cnn-m"].read_bytes()
    with np.load(validation) as stored:
        assert stored["x"].shape == (750, 784)
        assert stored["y"].shape == (750,)
    x = np.load(pictures)
    assert (x.shape, x.dtype) == ((8, 784), np.float32)
    unseen = digits.load(digits.UNSEEN)
    assert len({int(unseen.y[(unseen.x == picture).all(1).argmax()]) for picture in x}) > 4


# -- The parts of the demo of several models that need no system: the wrong version, the pictures, the figures.
MODELS = ["a", "b"]
ROWS = [[(0.0, 0.9), (1.0, 0.01), (0.0, 0.8)], [(0.2, 0.1), (0.1, 0.99), (0.3, 0.2)]]
PARTS: list[dict[str, Any]] = [
    {"error": error, "weight": weight, "n": 3, "member": model, "part": part}
    for model, row in zip(MODELS, ROWS, strict=True)
    for part, (error, weight) in enumerate(row, 1)
]
THIRDS = [0.0, 3.0, 6.0, 9.0]


def reply(at: float, *, wrong: bool) -> DemoReply:
    said = answer(confidence=0.5, tensors={"scores": np.eye(10)[[int(wrong)]].tolist()})
    return DemoReply("a digit", np.array([0]), np.array([0]), said, at, 1.0, at)


ANSWERS = [reply(n + 0.5, wrong=n in (3, 4)) for n in range(9)]


def result() -> dict[str, Any]:
    phases = [{"name": name, **one} for name, one in zip(PHASES, intervals(ANSWERS, PARTS, THIRDS), strict=True)]
    (whole,) = intervals(ANSWERS, [{**PARTS[3], "error": 0.2, "n": 9}], [0.0, 9.0])
    numbers = {"eta": 0.5, "pictures": 5, "queries": 9, "feedbacks": 9, "answered": 9, "refused": {}}
    found = {"error": whole["error"], "best": whole["best"], "phases": phases, "series": phases, "picture": None}
    return {"app": "digits", "switched": "a", "policy": "exp4", **numbers, **found}


@pytest.mark.parametrize("model", FILES)
def test_the_wrong_version_says_the_next_class(model: str, tmp_path: Path) -> None:
    unseen = digits.load(digits.UNSEEN)
    wrong = scores_of(permuted(FILES[model], tmp_path / "wrong.onnx"), unseen.x)
    np.testing.assert_array_equal(wrong, np.roll(scores_of(FILES[model], unseen.x), 1, axis=1))


def test_pictures_are_those_of_which_not_all_models_say_the_same() -> None:
    unseen = digits.load(digits.UNSEEN)
    two = {model: FILES[model] for model in ("logreg", "cnn-l")}
    said = [scores_of(path, unseen.x).argmax(axis=1) for path in two.values()]
    found = disagreed(two, unseen)
    assert len(found) == (said[0] != said[1]).sum() > 0
    np.testing.assert_array_equal(found.y, unseen.y[said[0] != said[1]])
    assert len(disagreed({"logreg": FILES["logreg"]}, unseen)) == 0


def test_figures_are_of_the_thirds_and_of_the_whole() -> None:
    found = result()
    assert [phase["error"] for phase in found["phases"]] == [0.0, pytest.approx(2 / 3), 0.0]
    assert [phase["answers"] for phase in found["phases"]] == [3, 3, 3]
    assert [phase["confidence"] for phase in found["phases"]] == [0.5, 0.5, 0.5]
    assert [phase["best"]["model"] for phase in found["phases"]] == ["a", "b", "a"]
    assert found["best"] == {"model": "b", "error": 0.2}
    assert found["error"] == pytest.approx(2 / 9)
    assert found["phases"][1]["members"]["a"] == {"error": 1.0, "weight": 0.01, "n": 3}
    (empty,) = intervals([], [], [0.0, 1.0])
    assert (empty["answers"], empty["error"], empty["best"], empty["members"]) == (0, None, None, {})


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plot (matplotlib)")
    draw({**result(), "series": intervals(ANSWERS, PARTS[:2], THIRDS)}, tmp_path / "e.svg")
    assert (tmp_path / "e.svg").stat().st_size > 5000


def test_what_is_printed_marks_the_one_that_is_switched() -> None:
    table, whole, *rest = shown(result())
    assert isinstance(table, DemoTable)
    assert [row["model"] for row in table.rows][:2] == ["[bold]a[/]", "b"]
    assert list(table.rows[0].values())[2] == "100.0%, weight 0.010"
    assert "the best single one in hindsight, b, 20.0%" in str(whole)
    assert "refused: none" in str(rest[0]) and "plot" in str(rest[1])
