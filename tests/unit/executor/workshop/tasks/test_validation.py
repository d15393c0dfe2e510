"""Validation sets: read as plain numbers or refused with the array's name."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bus.messages.catalog import Signature, TensorSpec, value_of
from services.executor.workshop.sandbox.protocol import UploadRejected, ValidationFile
from services.executor.workshop.tasks import validation
from services.executor.workshop.tasks.measures import Answers
from services.executor.workshop.tasks.validation import Scorer
from tests.support.models.tiny_models import npz
from tests.support.servers.processes import environ

X, Y = np.zeros((30, 16), "f4"), np.arange(30) % 4
ONE = Signature(inputs=[TensorSpec(name="pixels", datatype="FP32", shape=[16])], outputs=[])
TWO = Signature(
    inputs=[TensorSpec(name=name, datatype="FP32", shape=[16]) for name in ("a", "b")],
    outputs=[],
)


def read(path: Path, content: bytes, signature=ONE, metric="top1", most=2**20):
    (path / "v.npz").write_bytes(content)
    return validation.read(
        ValidationFile(path=str(path / "v.npz"), inputs_key="x", labels_key="y", metric=metric, most_bytes=most),
        signature,
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


def test_arrays_are_named_by_key_or_model_and_a_missing_one_is_told(tmp_path) -> None:
    for key in ("x", "pixels"):
        data = read(tmp_path, npz(y=Y, **{key: X.astype("f8")}))
        assert (data.inputs["pixels"].dtype, len(data)) == (np.float32, 30)
    assert float(read(tmp_path, npz(a=X, y=Y, **{"x.b": X + 1}), TWO).inputs["b"][0, 0]) == 1.0
    assert read(tmp_path, npz(x=X, y=Y.reshape(-1, 1).astype("f8"))).labels.tolist() == Y.tolist()
    assert read(tmp_path, npz(x=X, y=Y / 3), metric="mae").labels.dtype == np.float64
    with pytest.raises(UploadRejected, match="no array `b`"):
        read(tmp_path, npz(a=X, y=Y), TWO)


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
        (npz(x=np.array([["a"] * 16] * 30), y=Y), "texts"),
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
    with pytest.raises(UploadRejected, match=why):
        read(tmp_path, content)


@given(st.integers(1, 3000))
def test_all_samples_measure_and_the_first_of_the_same_order_calibrate(n):
    order = validation.shuffled(n).tolist()
    assert sorted(order) == list(range(n))
    assert validation.shuffled(n).tolist() == order
    assert validation.calibration(n).tolist() == order[: validation.CALIBRATION]


# -- Accuracy and agreement by metric, and which output counts.


def scorer(metric: str, *outputs: tuple[str, str, list[int]]) -> Scorer:
    specs = [TensorSpec(name=name, datatype=datatype, shape=shape) for name, datatype, shape in outputs]
    return Scorer(metric, Signature(inputs=[], outputs=specs))


SCORES = ("scores", "FP32", [4])
LABEL = ("label", "INT64", [])


def test_the_largest_score_is_the_class_and_labels_have_its_shape() -> None:
    top1 = scorer("top1", SCORES)
    found = top1.predictions(np.array([[0, 3, 1, 2], [9, 1, 1, 1]], "f4"))
    assert found.tolist() == [1, 0]
    assert top1.accuracy(found, np.array([1, 2])).value == 0.5
    top1 = scorer("top1", SCORES)
    with pytest.raises(UploadRejected, match="shape"):
        top1.accuracy(np.zeros(3, int), np.zeros((3, 2), int))
    assert top1.agreement(np.zeros(3), np.zeros(4)) == 0.0


def test_one_score_is_a_probability_and_labels_go_by_name() -> None:
    top1 = scorer("top1", LABEL, SCORES)
    assert top1.output == "label"
    assert top1.predictions(np.array([7, 9])).tolist() == [7, 9]
    top1.check(np.array([7, 9, 11, 13]))  # a classifier's classes may be any numbers
    with pytest.raises(UploadRejected, match="5 different labels"):
        top1.check(np.arange(5))
    for shape in ([1], []):
        top1 = scorer("top1", ("p", "FP32", shape))
        assert top1.predictions(np.array([0.2, 0.7], "f4").reshape(2, *shape)).tolist() == [0, 1]
        top1.check(np.array([0, 1]))
        with pytest.raises(UploadRejected, match="label 2"):
            top1.check(np.array([0, 2]))


@pytest.mark.parametrize("wrong", [-1, 4, 2**40])
def test_labels_of_other_classes_are_refused(wrong):
    with pytest.raises(UploadRejected, match="outside the model's 4 classes"):
        scorer("top1", SCORES).check(np.array([0, wrong]))


def test_top5_mae_and_rmse_are_what_they_are_called() -> None:
    top5 = scorer("top5", ("scores", "FP32", [7]))
    found = top5.predictions(np.arange(14, dtype="f4").reshape(2, 7))
    assert top5.accuracy(found, np.array([2, 1])).value == 0.5
    assert top5.agreement(found, found[:, ::-1]) == 0.0
    with pytest.raises(UploadRejected, match="more than five"):
        scorer("top5", SCORES)
    values, labels = np.array([[1.0], [2.0]]), np.array([1.0, 5.0])
    assert scorer("mae", ("y", "FP32", [1])).accuracy(values, labels).value == 1 / (1 + 1.5)
    assert scorer("rmse", ("y", "FP32", [1])).accuracy(values, labels).value == 1 / (1 + np.sqrt(4.5))


@given(hnp.arrays(np.float64, st.integers(1, 20), elements=st.floats(-1e6, 1e6)), st.sampled_from(["mae", "rmse"]))
def test_errors_become_a_share_that_is_one_without_error(values, metric):
    numbers = scorer(metric, ("y", "FP32", [1]))
    found = numbers.predictions(values.reshape(-1, 1))
    assert numbers.accuracy(found, values) == (1.0, 1.0, 1.0)
    assert numbers.agreement(found, found) == 1.0
    assert 0.0 <= numbers.accuracy(found + 1.0, values).value < 1.0


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    # 81 of 263: Newcombe, "Two-sided confidence intervals for the single proportion", 1998
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_the_interval_of_a_share_is_wilsons(right: int, n: int, low: float, high: float):
    assert validation.wilson(right / n, n) == pytest.approx((right / n, low, high), abs=5e-5)


@pytest.mark.parametrize("metric", ["top1", "mae", "rmse"])
def test_an_interval_holds_the_truth_19_times_of_20(metric):
    rng, hits, trials = np.random.default_rng(1), 0, 400
    one = scorer(metric, SCORES if metric == "top1" else ("y", "FP32", [1]))
    truth = {"top1": 0.8, "mae": 1 / (1 + np.sqrt(2 / np.pi)), "rmse": 1 / (1 + 1.0)}[metric]
    for _ in range(trials):
        labels = np.zeros(200)
        found = (rng.random(200) > 0.8).astype(int) if metric == "top1" else rng.normal(0.0, 1.0, 200)
        measured = one.accuracy(found, labels)
        hits += measured.low <= truth <= measured.high
    assert 0.92 <= hits / trials <= 0.98


@given(hnp.arrays(np.float32, (8, 4), elements=st.floats(-5, 5, width=32)), st.data())
def test_scores_are_shares(scores, data):
    labels = np.array(data.draw(st.lists(st.integers(0, 3), min_size=8, max_size=8)))
    top1 = scorer("top1", SCORES)
    found = top1.predictions(scores)
    share = top1.accuracy(found, labels)
    assert 0.0 <= share.low < share.high <= 1.0
    assert share.low <= share.value <= share.high
    assert share.value == sum(int(a == b) for a, b in zip(found, labels, strict=True)) / 8
    assert top1.agreement(found, found) == 1.0


@pytest.mark.parametrize(
    ("metric", "outputs"), [("bleu", [SCORES]), ("top1", [("s", "BYTES", [])]), ("mae", [("s", "BYTES", [1])])]
)
def test_what_cannot_be_scored_is_refused(metric, outputs):
    with pytest.raises(UploadRejected):
        scorer(metric, *outputs)


# -- what people judge by, as scikit-learn computes it


@pytest.mark.parametrize("classes", [2, 3])
def test_metrics_are_scikit_learns(classes: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(4)
    labels = rng.integers(0, classes, 300)
    scores = np.round(rng.dirichlet(np.ones(classes), 300) + 0.3 * np.eye(classes)[labels], 2)
    scores /= scores.sum(axis=1, keepdims=True)
    columns = scores[:, 1] if classes == 2 else scores
    expected = {
        "f1_macro": metrics.f1_score(labels, scores.argmax(axis=1), average="macro"),
        "roc_auc": metrics.roc_auc_score(labels, columns, multi_class="ovr"),
        "average_precision": metrics.average_precision_score(labels if classes == 2 else np.eye(3)[labels], columns),
        "log_loss": metrics.log_loss(labels, scores),
    }
    for name, value in expected.items():
        one = scorer(name, ("scores", "FP32", [classes]))
        found = one.accuracy(one.predictions(scores), labels)
        assert value_of(found.value, name) == pytest.approx(value, abs=1e-6)
        assert 0.0 <= found.low < found.value < found.high <= 1.0
    targets, guesses = rng.normal(size=300), rng.normal(size=300)
    r2 = scorer("r2", ("y", "FP32", [1])).accuracy(guesses, targets).value
    assert value_of(r2, "r2") == pytest.approx(metrics.r2_score(targets, guesses))
    gains, lists = rng.integers(0, 4, 300).astype(float), np.arange(300) // 10
    ranked = np.round(gains + rng.normal(size=300))
    ndcg = scorer("ndcg", ("y", "FP32", [1])).accuracy(ranked.reshape(-1, 1), gains, lists).value
    assert ndcg == pytest.approx(metrics.ndcg_score(gains.reshape(30, 10), ranked.reshape(30, 10)))


OWN = b"def map50(y, outputs):\n    return float((outputs['boxes'][:, 0] == [one['at'] for one in y]).mean())\n"


def test_a_function_of_the_users_own_judges_all_outputs(tmp_path) -> None:
    labels = np.array([f'{{"at": {n % 3}}}' for n in range(30)])
    data = read(
        tmp_path, npz(x=X, y=labels, **{"y.metric": np.frombuffer(OWN, np.uint8)}), metric="map50", signature=ONE
    )
    outputs = [TensorSpec(name="boxes", datatype="FP32", shape=[4])]
    own = Scorer("map50", Signature(inputs=[], outputs=outputs), data.source)
    boxes = [np.full(4, n % 3 if n else 7, "f4") for n in range(30)]
    found = own.judge(Answers(np.zeros(0), {"boxes": boxes}), data, np.arange(30))
    assert found.value == pytest.approx(29 / 30)
    for wrong, says in ((b"import nothing_here", "cannot be run"), (OWN.replace(b"'at'", b"'to'"), "the function failed"), (b"def map50(y, o): raise SystemExit", "the function failed"), (b"map50 = lambda y, o: 3", "must give 0 to 1")):  # fmt: skip
        with pytest.raises(UploadRejected, match=says):
            Scorer("map50", Signature(inputs=[], outputs=outputs), wrong).judge(
                Answers(np.zeros(0), {"boxes": boxes}), data, np.arange(30)
            )


def test_without_labels_every_output_is_compared_within_the_tolerance(tmp_path) -> None:
    data = read(tmp_path, npz(x=X), metric="agreement")
    assert (len(data), len(data.labels)) == (30, 0)
    price = ("price", "FP32", [])
    both = scorer("agreement", ("embedding", "FP32", [2]), price)
    assert both.others == ["embedding", "price"]
    rng = np.random.default_rng(1)
    prices = [np.float32(one) for one in rng.uniform(100.0, 110.0, 50)]
    boxes = [rng.normal(size=(n % 4, 2)).astype("f4") for n in range(50)]  # as many as there are
    known = Answers(np.zeros(0), {"embedding": boxes, "price": [np.asarray(one) for one in prices]})
    kept = Answers.unpacked(known.packed())
    assert both.compare(known, kept) == {"embedding": 1.0, "price": 1.0}
    off = Answers(np.zeros(0), {"embedding": [*boxes[:-1], boxes[0]], "price": [np.asarray(1.011 * one) for one in prices]})  # fmt: skip
    assert both.compare(off, kept) == {"embedding": 0.98, "price": 0.0}
    assert scorer("top1", SCORES, price).others == ["price"], "a second output counts beside the one that is scored"
    assert scorer("top1", LABEL, SCORES).others == [], "the scores of a label are no second output"


def test_a_sandbox_loads_no_library_that_its_task_may_not_need() -> None:
    """Each registration starts several, and loading scipy takes longer than everything else that they do for a small model."""
    tasks = "services.executor.workshop.tasks"
    code = f"import sys, {tasks}.build, {tasks}.inspection, {tasks}.profiling; print({{'scipy', 'onnx', 'torch'}} & {{*sys.modules}})"
    ran = subprocess.run([sys.executable, "-c", code], env=environ(), capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
