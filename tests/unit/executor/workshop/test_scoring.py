"""Accuracy and agreement by metric, and which output counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bus.messages.catalog import Signature, TensorSpec
from services.executor.workshop.jobs import Refusal
from services.executor.workshop.scoring import Scorer


def scorer(metric: str, *outputs: tuple[str, str, list[int]]) -> Scorer:
    specs = [TensorSpec(name=name, datatype=datatype, shape=shape) for name, datatype, shape in outputs]
    return Scorer(metric, Signature(inputs=[], outputs=specs))


SCORES = ("scores", "FP32", [4])
LABEL = ("label", "INT64", [])


def test_the_largest_score_is_the_class():
    top1 = scorer("top1", SCORES)
    found = top1.predictions(np.array([[0, 3, 1, 2], [9, 1, 1, 1]], "f4"))
    assert found.tolist() == [1, 0]
    assert top1.accuracy(found, np.array([1, 2])) == 0.5


def test_a_label_output_is_taken_by_name_not_by_its_scores():
    top1 = scorer("top1", LABEL, SCORES)
    assert top1.output == "label"
    assert top1.predictions(np.array([7, 9])).tolist() == [7, 9]
    top1.check(np.array([7, 9, 11, 13]))  # a classifier's classes may be any numbers
    with pytest.raises(Refusal, match="5 different labels"):
        top1.check(np.arange(5))


def test_one_score_alone_is_a_probability():
    for shape in ([1], []):
        top1 = scorer("top1", ("p", "FP32", shape))
        column = np.array([0.2, 0.7], "f4").reshape(2, *shape)
        assert top1.predictions(column).tolist() == [0, 1]
        top1.check(np.array([0, 1]))
        with pytest.raises(Refusal, match="label 2"):
            top1.check(np.array([0, 2]))


@pytest.mark.parametrize("wrong", [-1, 4, 2**40])
def test_labels_of_other_classes_are_refused(wrong):
    with pytest.raises(Refusal, match="outside the model's 4 classes"):
        scorer("top1", SCORES).check(np.array([0, wrong]))


def test_top5_takes_the_label_among_the_five_best():
    top5 = scorer("top5", ("scores", "FP32", [7]))
    found = top5.predictions(np.arange(14, dtype="f4").reshape(2, 7))
    assert top5.accuracy(found, np.array([2, 1])) == 0.5
    assert top5.agreement(found, found[:, ::-1]) == 0.0
    with pytest.raises(Refusal, match="more than five"):
        scorer("top5", SCORES)


@given(hnp.arrays(np.float64, st.integers(1, 20), elements=st.floats(-1e6, 1e6)), st.sampled_from(["mae", "rmse"]))
def test_errors_become_a_share_that_is_one_without_error(values, metric):
    numbers = scorer(metric, ("y", "FP32", [1]))
    found = numbers.predictions(values.reshape(-1, 1))
    assert numbers.accuracy(found, values) == 1.0
    assert numbers.agreement(found, found) == 1.0
    assert 0.0 <= numbers.accuracy(found + 1.0, values) < 1.0


def test_mae_and_rmse_are_what_they_are_called():
    values, labels = np.array([[1.0], [2.0]]), np.array([1.0, 5.0])
    assert scorer("mae", ("y", "FP32", [1])).accuracy(values, labels) == 1 / (1 + 1.5)
    assert scorer("rmse", ("y", "FP32", [1])).accuracy(values, labels) == 1 / (1 + np.sqrt(4.5))


@given(hnp.arrays(np.float32, (8, 4), elements=st.floats(-5, 5, width=32)), st.data())
def test_scores_are_shares(scores, data):
    labels = np.array(data.draw(st.lists(st.integers(0, 3), min_size=8, max_size=8)))
    top1 = scorer("top1", SCORES)
    found = top1.predictions(scores)
    share = top1.accuracy(found, labels)
    assert share == sum(int(a == b) for a, b in zip(found, labels, strict=True)) / 8
    assert top1.agreement(found, found) == 1.0


def test_labels_of_another_shape_are_refused():
    top1 = scorer("top1", SCORES)
    with pytest.raises(Refusal, match="shape"):
        top1.accuracy(np.zeros(3, int), np.zeros((3, 2), int))
    assert top1.agreement(np.zeros(3), np.zeros(4)) == 0.0


@pytest.mark.parametrize(
    ("metric", "outputs"), [("bleu", [SCORES]), ("top1", [("s", "BYTES", [])]), ("mae", [("s", "BYTES", [1])])]
)
def test_what_cannot_be_scored_is_refused(metric, outputs):
    with pytest.raises(Refusal):
        scorer(metric, *outputs)
