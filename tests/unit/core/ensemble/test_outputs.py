"""Outputs of several models become one; agreement; losses from labels, and labels that fit none."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages.catalog import ModelRecord, Signature, TensorSpec
from services.core.ensemble.base import Member
from services.core.ensemble.outputs import BadLabel, BadOutputs, combined, label_error, losses

EQUAL = {"a": 1.0, "b": 1.0, "c": 1.0}


def of(metric: str = "top1", labels: tuple[str, ...] = (), accuracy: float | None = None) -> list[Member]:
    return [Member(model=m, version="1", metric=metric, labels=list(labels), accuracy=accuracy) for m in "abc"]


def outputs(name: str, *arrays) -> dict[str, dict[str, np.ndarray]]:
    return {model: {name: np.asarray(array)} for model, array in zip("abc", arrays, strict=False)}


# -- combining


def test_votes_go_by_weight_and_equal_ones_to_the_first() -> None:
    said = outputs("label", [1, 2], [3, 2], [3, 4])
    one = combined({"a": 3.0, "b": 1.0, "c": 1.0}, of(), said)
    assert (one.outputs["label"].tolist(), one.agree.tolist()) == ([1, 2], [1, 2])
    assert combined(EQUAL, of(), said).outputs["label"].tolist() == [3, 2]
    said = outputs("word", *(np.array([text], dtype=object) for text in ("cat", "dog", "dog")))
    one = combined(EQUAL, of(), said)
    assert (one.outputs["word"].tolist(), one.agree.tolist()) == (["dog"], [2])
    said = outputs("label", [2], [1])
    shares = {"a": 0.1 + 0.2, "b": 0.3}
    assert combined(shares, of(), said).outputs["label"].tolist() == [2]
    assert combined(shares, of(), dict(reversed(said.items()))).outputs["label"].tolist() == [2]


def test_labels_count_before_scores_where_a_model_gives_both() -> None:
    both = {
        "a": {"label": np.array([0]), "scores": np.array([[0.6, 0.4]])},
        "b": {"label": np.array([1]), "scores": np.array([[0.1, 0.9]])},
        "c": {"label": np.array([0]), "scores": np.array([[0.6, 0.4]])},
    }
    one = combined(EQUAL, of(), both)
    assert one.outputs["label"].tolist() == [0]
    np.testing.assert_allclose(one.outputs["scores"], [[1.3 / 3, 1.7 / 3]])
    assert one.agree.tolist() == [2]
    assert losses(0, of(), both) == {"a": 0.0, "b": 1.0, "c": 0.0}


def test_agreement_of_scores_is_a_number_of_members_by_their_largest() -> None:
    said = outputs("scores", [[0.9, 0.1], [0.2, 0.8]], [[0.6, 0.4], [0.7, 0.3]], [[0.3, 0.7], [0.1, 0.9]])
    one = combined(EQUAL, of(), said)
    assert (one.outputs["scores"].argmax(axis=1).tolist(), one.agree.tolist()) == ([0, 1], [2, 2])
    assert one.agree.dtype == np.int64
    # Trap 10: who asks for a share divides by all members, not by those that are there. a and b of three agree; c is missing.
    one = combined(EQUAL, of(), outputs("scores", [[0.9, 0.1]], [[0.6, 0.4]]))
    assert one.agree.tolist() == [2]
    assert combined(EQUAL, of(), outputs("scores", [[0.9, 0.1]])).agree.tolist() == [1]
    assert combined(EQUAL, of(), outputs("p", [[0.9]], [[0.55]], [[0.4]])).agree.tolist() == [2]
    assert losses(1, of(), outputs("p", [[0.9]], [[0.4]])) == {"a": 0.0, "b": 1.0}
    assert losses(False, of(), outputs("p", [0.9], [0.4])) == {"a": 1.0, "b": 0.0}


def test_values_are_averaged_and_whole_numbers_stay_whole() -> None:
    members = of("mae", accuracy=0.5)  # an error of 1
    one = combined({"a": 2.0, "b": 1.0, "c": 1.0}, members, outputs("y", [10.0], [10.8], [14.0]))
    assert (one.outputs["y"].tolist(), one.agree.tolist()) == (pytest.approx([11.2]), [1])
    unmeasured = combined(EQUAL, of("rmse"), outputs("y", [100.0], [104.0], [80.0]))  # within 5 % of 94.67
    assert unmeasured.agree.tolist() == [0]
    assert combined(EQUAL, of("rmse"), outputs("y", [100.0], [104.0], [96.0])).agree.tolist() == [3]
    one = combined(EQUAL, of("mae"), outputs("count", [3], [4], [4]))
    assert (one.outputs["count"].tolist(), one.outputs["count"].dtype.kind) == ([4], "i")


def test_one_member_alone_answers_as_it_is_and_members_that_find_nothing_agree() -> None:
    said = outputs("scores", np.eye(3, dtype=np.float16)[[1, 2]])
    one = combined({}, of(), said)
    assert one.outputs["scores"] is said["a"]["scores"]
    assert one.agree.tolist() == [1, 1]
    nothing = {"y": np.zeros((2, 0), np.float32)}
    models = [Member(model=one, version="1") for one in "mk"]
    assert combined({"m": 0.5, "k": 0.5}, models, {"m": nothing, "k": nothing}).agree.tolist() == [2, 2]


@given(
    st.lists(st.floats(1e-3, 1.0), min_size=3, max_size=3),
    st.integers(1, 4),
    st.integers(2, 5),
    st.integers(0, 2**32 - 1),
)
def test_means_lie_between_and_agreement_counts_members(weights, items: int, classes: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    arrays = [random.random((items, classes)).astype(np.float32) for _ in range(3)]
    one = combined(dict(zip("abc", weights, strict=True)), of(), outputs("s", *arrays))
    mean = one.outputs["s"]
    assert mean.shape == (items, classes)
    assert (mean >= np.min(arrays, axis=0) - 1e-6).all()
    assert (mean <= np.max(arrays, axis=0) + 1e-6).all()
    by_hand = [sum(a[i].argmax() == mean[i].argmax() for a in arrays) for i in range(items)]
    assert one.agree.tolist() == by_hand


def test_outputs_that_differ_are_refused_by_name() -> None:
    with pytest.raises(BadOutputs, match=r"output 's' of b has shape \[1, 3\], but that of a \[1, 2\]"):
        combined(EQUAL, of(), outputs("s", [[0.1, 0.9]], [[0.1, 0.2, 0.7]]))
    with pytest.raises(BadOutputs, match="output 's' is missing from b"):
        combined(EQUAL, of(), {"a": {"s": np.ones((1, 2))}, "b": {"t": np.ones((1, 2))}})
    with pytest.raises(BadOutputs, match="no outputs of the members a, b, c"):
        combined(EQUAL, of(), {"z": {"s": np.ones((1, 2))}})
    with pytest.raises(BadOutputs, match="none of the outputs s has numbers, which mae needs"):
        combined(EQUAL, of("mae"), outputs("s", np.array(["x"], dtype=object)))


# -- losses

SCORES = outputs("scores", [[0.1, 0.7, 0.2]], [[0.8, 0.1, 0.1]])


@pytest.mark.parametrize("label", [1, 1.0, "dog", [1]])
def test_a_class_is_named_by_its_index_or_its_name(label) -> None:
    assert losses(label, of(labels=("cat", "dog", "owl")), SCORES) == {"a": 0.0, "b": 1.0}


def test_the_loss_of_labels_texts_and_values() -> None:
    scores = outputs("s", [[6.0, 5, 4, 3, 2, 1]], [[1.0, 2, 3, 4, 5, 6]])
    assert losses(5, of("top5"), scores) == {"a": 1.0, "b": 0.0}
    assert losses(4, of("top5"), scores) == {"a": 0.0, "b": 0.0}
    words = outputs("s", np.eye(3)[[[0, 1, 2, 0]]])
    assert losses([0, 1, 1, 1], of(), words) == {"a": 0.5}
    members = of("mae", accuracy=1 / 3)  # an error of 2
    assert losses(10, members, outputs("y", [12.0], [[10.0]], [100.0])) == {"a": 0.25, "b": 0.0, "c": 1.0}
    assert losses(10, of("mae"), outputs("y", [12.0], [30.0])) == {"a": pytest.approx(0.2), "b": 1.0}
    assert losses(0, of("rmse"), outputs("y", [0.5])) == {"a": 0.5}
    said = outputs("word", np.array(["cat"], dtype=object), np.array(["dog"], dtype=object))
    assert losses("dog", of(), said) == {"a": 1.0, "b": 0.0}
    assert losses(0, of(labels=("cat", "dog")), said) == {"a": 0.0, "b": 1.0}


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_infinity=False, width=32))
def test_losses_of_values_are_between_0_and_1(label: float, said: float) -> None:
    found = losses(label, of("rmse", accuracy=0.9), outputs("y", np.array([said])))
    assert 0.0 <= found["a"] <= 1.0


@pytest.mark.parametrize(
    ("label", "metric", "names", "text"),
    [
        (3, "top1", (), "label 3 is no class of the models: give an index from 0 to 2"),
        (-1, "top1", (), "label -1 is no class"),
        (1.5, "top1", (), "label 1.5 is no class"),
        (math.nan, "top1", (), "label nan is no class"),
        (math.inf, "top5", (), "label inf is no class"),
        ("owl", "top1", ("cat", "dog", "emu"), "label 'owl' is no class of the models: .* or one of cat, dog, emu$"),
        ("x" * 500, "top1", (), "label 'x{58}… is no class"),
        (None, "top1", (), "label None is no class"),
        ({"a": 1}, "top1", (), "label {'a': 1} is no class"),
        ([1, 2], "top1", (), r"label \[1, 2\] has 2 values, but an item's answer has 1"),
        ([], "top1", (), r"label \[\] has 0 values"),
        (10**400, "top1", (), "is no class"),
        ("3", "mae", (), "label '3' is no number, which the models' answers are"),
        (True, "mae", (), "label True is no number"),
        (math.nan, "mae", (), "label nan is not a finite number"),
        (10**400, "rmse", (), "is not a finite number"),
        ([1, 2, 3, 4], "mae", (), "has 4 values, but an item's answer has 3"),
    ],
)
def test_a_label_that_fits_no_answer_is_refused_by_name(label, metric: str, names, text: str) -> None:
    said = outputs("y", [1.0]) if metric in {"mae", "rmse"} and not isinstance(label, list) else SCORES
    with pytest.raises(BadLabel, match=text):
        losses(label, of(metric, names), said)


def test_labels_must_be_known_or_possible_for_one_model() -> None:
    said = outputs("word", np.array(["cat"], dtype=object))
    with pytest.raises(BadLabel, match=r"label 'owl' is no class of the models: .* one of cat, dog"):
        losses("owl", of(labels=("cat", "dog")), said)
    with pytest.raises(BadLabel, match="label 3 is no class of the models: give one of the same type as the answers'"):
        losses(3, of(), said)
    with pytest.raises(BadLabel, match="label 'dog'"):
        losses("dog", of(), outputs("label", [3]))
    assert label_error(7, [NAMED, TEN]) is None
    assert "from 0 to 1" in (label_error(17, [NAMED, TEN]) or "")
    assert label_error(math.nan, []) is not None


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
LABELS = st.recursive(LEAVES, lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(), part, max_size=2))
ARRAYS = (
    *(np.full(shape, value, np.float32) for shape in ((1, 4), (1,), (1, 1), (1, 2, 3)) for value in (0.3, np.nan, np.inf)),
    *(np.zeros(shape, kind) for shape in ((1, 0), (1, 2, 0)) for kind in (np.float32, np.int64)),
    np.ones(1, np.int64), np.ones((1, 1), np.int64), np.ones(1, bool),
    np.array([b"x"], object), np.array(["x"], object),
)  # fmt: skip


@settings(deadline=None)
@given(
    LABELS,
    st.sampled_from(ARRAYS),
    st.sampled_from(ARRAYS),
    st.sampled_from(["top1", "top5", "mae", "rmse"]),
    st.sampled_from([[], ["a", "b"]]),
    st.sampled_from([None, 0.0, 0.5, 1.0]),
)
def test_whatever_models_and_users_say_there_is_a_loss_or_a_typed_refusal(
    label, first, second, metric: str, names: list[str], accuracy: float | None
) -> None:
    models = [Member(model=one, version="1", metric=metric, labels=names, accuracy=accuracy) for one in "mk"]
    outputs = {"m": {"y": first}, "k": {"y": second}}
    try:
        assert all(0.0 <= loss <= 1.0 for loss in losses(label, models, outputs).values())
    except (BadLabel, BadOutputs) as error:
        assert str(error).startswith(("label ", "output ", "none of the outputs "))
    try:
        answer = combined({"m": 0.5, "k": 0.5}, models, outputs)
    except BadOutputs as error:
        assert str(error).startswith(("output ", "none of the outputs "))
    else:
        assert answer.outputs["y"].shape == first.shape
        assert all(0 <= count <= 2 for count in answer.agree)


# -- labels against what a model gives, without an answer


def model(datatype: str, shape: list[int], metric: str = "top1", labels: list[str] | None = None) -> ModelRecord:
    outputs = [TensorSpec(name="y", datatype=datatype, shape=shape)]
    return ModelRecord(
        model="m", version="1", task=None, metric=metric, format="onnx", source="s", validation="v",
        signature=Signature(inputs=[], outputs=outputs), created=1.0, registration="r", labels=labels or [],
    )  # fmt: skip


TEN, NAMED = model("FP32", [10]), model("FP32", [2], labels=["no", "yes"])
SEQUENCE, REGRESSION = model("FP32", [-1, 3]), model("FP32", [1], "mae")
INDEX, TEXT, OPEN = model("INT64", []), model("BYTES", [], labels=["cat", "dog"]), model("FP32", [-1])
EVERY = (TEN, NAMED, SEQUENCE, REGRESSION, INDEX, TEXT, OPEN)


@pytest.mark.parametrize(
    ("record", "label"),
    [
        (TEN, 0), (TEN, 9), (TEN, 9.0), (NAMED, "yes"), (NAMED, 1), (SEQUENCE, [0, 2, 1, 1]), (REGRESSION, -3.5),
        (INDEX, 12), (TEXT, "cat"), (TEXT, 1), (OPEN, 7), (OPEN, "x"),
    ],
)  # fmt: skip
def test_a_label_that_could_be_right_passes(record: ModelRecord, label: object) -> None:
    assert label_error(label, [record]) is None
    assert label_error(label, []) is None


@pytest.mark.parametrize(
    ("record", "label", "words"),
    [
        (TEN, 99, "label 99 is no class of the models: give an index from 0 to 9"),
        (TEN, -1, "from 0 to 9"), (TEN, "x", "label 'x' is no class"), (TEN, 0.5, "0.5"), (TEN, [1, 2], "has 2 values"),
        (NAMED, "maybe", "or one of no, yes"), (NAMED, 2, "from 0 to 1"), (SEQUENCE, [0, 3], "from 0 to 2"),
        (REGRESSION, "x", "no number"), (INDEX, "x", "'x'"), (TEXT, "cow", "cat, dog"),
        *((record, value, "not a finite number") for record in EVERY for value in (math.nan, math.inf, [math.nan])),
    ],
)  # fmt: skip
def test_a_label_that_can_never_be_right_is_named(record: ModelRecord, label: object, words: str) -> None:
    assert words in (label_error(label, [record]) or "")
