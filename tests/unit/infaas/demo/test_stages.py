"""What the demo's pipeline is made of: the threshold, the check, the file."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from infaas.demo.digits import TRAIN, UNSEEN, VALIDATION, Digits, load, models, scores_of
from infaas.demo.stages import (
    ACCURATE,
    ALIKE,
    APPS,
    CHEAP,
    THRESHOLDS,
    DemoStages,
    accuracy,
    make_stages,
    merged,
    pipeline_file,
    save_nearest,
    unsure_below,
)
from services.core.pipelines.checks import pipeline_errors
from services.simulation.scenario.pipelines import read_pipeline


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> DemoStages:
    return make_stages(tmp_path_factory.mktemp("stages"))


def verdicts(path: Path, x: np.ndarray, scores: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x, "scores": scores})[0]


def test_the_threshold_is_the_least_with_which_both_models_are_as_accurate_as_the_accurate_one() -> None:
    labels = np.zeros(200, np.int64)
    quick = np.zeros((200, 2), np.float32)
    quick[:, 0] = 0.96
    quick[:20] = [0.25, 0.75]  # wrong, and less sure than 0.8
    exact = np.tile(np.array([1.0, 0.0], np.float32), (200, 1))
    assert unsure_below(quick, exact, labels) == (0.8, pytest.approx(0.1))
    assert unsure_below(exact, exact, labels) == (THRESHOLDS[0], 0.0)


def test_the_models_together_are_nearly_as_accurate_as_the_accurate_one_alone(stages: DemoStages) -> None:
    seen = load(VALIDATION)
    quick = scores_of(models()[CHEAP], seen.x)
    asked = quick.max(axis=1) < stages.threshold
    assert stages.share == pytest.approx(asked.mean())
    assert 0.0 < stages.share < 0.5
    exact = scores_of(models()[ACCURATE], seen.x)
    assert accuracy(merged(quick, exact, asked), seen.y) >= accuracy(exact, seen.y) - ALIKE > accuracy(quick, seen.y)


def test_the_check_says_whether_the_nearest_picture_of_all_shows_that_digit(tmp_path: Path) -> None:
    known = Digits(np.eye(20, 784, dtype=np.float32) * 9, np.repeat(np.arange(10), 2))
    path = save_nearest(tmp_path / "n.onnx", known)
    said = np.eye(10, dtype=np.float32)
    right = verdicts(path, known.x, said[known.y])
    np.testing.assert_allclose(right.sum(axis=1), 1.0, rtol=1e-5)
    assert (right[:, 1] > 0.9).all()
    wrong = verdicts(path, known.x, said[(known.y + 1) % 10])
    assert (wrong[:, 1] < 0.1).all()


def test_the_check_doubts_most_wrong_digits_and_few_right_ones(tmp_path: Path) -> None:
    unseen = load(UNSEEN)
    quick = scores_of(models()[CHEAP], unseen.x)
    right = quick.argmax(axis=1) == unseen.y
    doubted = verdicts(save_nearest(tmp_path / "n.onnx", load(TRAIN)), unseen.x, quick)[:, 1] < 0.5
    assert doubted[~right].mean() > 0.7
    assert doubted[right].mean() < 0.1


def test_the_validation_set_of_the_check_has_right_and_wrong_digits(stages: DemoStages) -> None:
    with np.load(stages.validation[APPS["check"]]) as stored:
        assert set(stored) == {"x", "scores", "y"}
        assert 0.9 < stored["y"].mean() < 1.0


def test_the_file_is_a_pipeline_without_errors(stages: DemoStages, tmp_path: Path) -> None:
    path = tmp_path / "digits.toml"
    path.write_text(pipeline_file(stages, 42.5))
    found = read_pipeline(path)
    assert not pipeline_errors(found.name, found.latency_ms, found.pipeline, None)
    assert {vertex.app for vertex in found.pipeline.vertices} == set(stages.files)
    assert found.loads[0].rate == ((0.0, 42.5),)
    (edge,) = [edge for edge in found.pipeline.edges if edge.when is not None]
    assert edge.when is not None
    assert (edge.when.op, edge.when.value) == ("<", stages.threshold)
    assert edge.probability == pytest.approx(stages.share, abs=1e-3)
