"""The parts of the demo of several models that need no system: the wrong version, the pictures, the figures."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from infaas.demo import digits
from infaas.demo.ensemble import PHASES, EnsembleDemo, disagreed, draw, permuted, results, series
from infaas.demo.program import DemoTable

SMALL = digits.models()["logreg"]
MODELS = ["a", "b"]
ANSWERS = [(n + 0.5, n in (3, 4), 0, 0.5) for n in range(9)]
ROWS = [[(0.0, 0.9), (1.0, 0.01), (0.0, 0.8)], [(0.2, 0.1), (0.1, 0.99), (0.3, 0.2)]]
PARTS = {
    (phase, model): {"error": error, "weight": weight, "n": 3, "member": model, "part": phase + 1}
    for model, row in zip(MODELS, ROWS, strict=True)
    for phase, (error, weight) in enumerate(row)
}


def scores(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


@pytest.mark.parametrize("model", list(digits.models()))
def test_the_wrong_version_says_the_next_class(model: str, tmp_path: Path) -> None:
    unseen = digits.load(digits.UNSEEN)
    path = digits.models()[model]
    right = scores(path, unseen.x)
    wrong = scores(permuted(path, tmp_path / "wrong.onnx"), unseen.x)
    np.testing.assert_array_equal(wrong, np.roll(right, 1, axis=1))


def test_pictures_are_those_of_which_not_all_models_say_the_same() -> None:
    unseen = digits.load(digits.UNSEEN)
    two = {model: digits.models()[model] for model in ("logreg", "cnn-l")}
    said = [scores(path, unseen.x).argmax(axis=1) for path in two.values()]
    found = disagreed(two, unseen)
    assert len(found) == (said[0] != said[1]).sum() > 0
    np.testing.assert_array_equal(found.y, unseen.y[said[0] != said[1]])
    assert len(disagreed({"logreg": SMALL}, unseen)) == 0


def test_figures_of_the_thirds_and_of_the_whole() -> None:
    found = results(ANSWERS, [0.0, 3.0, 6.0, 9.0], PARTS, MODELS)
    assert [phase["name"] for phase in found["phases"]] == list(PHASES)
    assert [phase["error"] for phase in found["phases"]] == [0.0, pytest.approx(2 / 3), 0.0]
    assert [phase["best"]["model"] for phase in found["phases"]] == ["a", "b", "a"]
    assert found["best"] == {"model": "b", "error": pytest.approx(0.2)}
    assert found["error"] == pytest.approx(2 / 9)
    assert found["phases"][1]["members"]["a"] == {"error": 1.0, "weight": 0.01, "n": 3}


def test_a_series_keeps_the_last_weight_and_has_no_error_without_answers() -> None:
    shown = series(
        ANSWERS[:4], np.linspace(0.0, 9.0, 4), {(0, "a"): {"weight": 0.9}, (2, "a"): {"weight": 0.8}}, MODELS
    )
    assert shown["error"] == [0.0, 1.0, None]
    assert shown["weights"] == {"a": [0.9, 0.9, 0.8], "b": [None, None, None]}


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plot (matplotlib)")
    found = results(ANSWERS, [0.0, 3.0, 6.0, 9.0], PARTS, MODELS)
    shown = series(ANSWERS, np.linspace(0.0, 9.0, 4), PARTS, MODELS)
    names = {"switched": "a", "policy": "exp4", "eta": 0.5, "answered": 9, "series": shown}
    draw({**found, **names}, tmp_path / "e.svg")
    assert (tmp_path / "e.svg").stat().st_size > 5000


def test_what_is_printed_marks_the_one_that_is_switched() -> None:
    found = results(ANSWERS, [0.0, 3.0, 6.0, 9.0], PARTS, MODELS)
    names = {
        "app": "digits",
        "switched": "a",
        "policy": "exp4",
        "eta": 0.5,
        "queries": 9,
        "feedbacks": 9,
        "refused": {},
        "pictures": 5,
    }
    table, whole, *rest = EnsembleDemo().shown({**found, **names, "picture": None})
    assert isinstance(table, DemoTable)
    assert [row["model"] for row in table.rows][:2] == ["[bold]a[/]", "b"]
    assert list(table.rows[0].values())[2] == "100.0%, weight 0.010"
    assert "the best single one in hindsight, b, 20.0%" in str(whole)
    assert "refused: none" in str(rest[0]) and "plot" in str(rest[1])
