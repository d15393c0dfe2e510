"""What the demo's pipeline is made of: a cheap digit model, an accurate one for what that is unsure of, and a check of what they say.

All are made from the demo's own digits, without training: the threshold by the validation part, the check from the training part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from infaas.demo.digits import CLASSES, TRAIN, VALIDATION, Digits, load, models, scores_of

PIPELINE = "digits"
QUICK, EXACT, CHECK = "quick", "exact", "check"  # vertices
APPS = {QUICK: "digits-quick", EXACT: "digits-exact", CHECK: "digits-check"}
CHEAP, ACCURATE = "mlp-s", "cnn-l"  # models of the family
NEAREST = "nearest"  # the model that checks
LATENCY_MS = 250.0
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
ALIKE = (
    0.005  # by which the two models together may be less accurate on the validation part than the accurate one alone
)
COMPONENTS = 40  # of the pictures, by which the check compares them
SCALE = 0.1  # of squared distances, in the exponent
FAR = 1e6  # beyond any squared distance

Scores = NDArray[np.float32]


@dataclass(frozen=True)
class DemoStages:
    """files: by app, its model and the file. validation: by app. threshold: confidence of the cheap model below which the accurate one is asked.

    share: of the validation digits, those below.
    """

    files: Mapping[str, tuple[str, Path]]
    validation: Mapping[str, Path]
    threshold: float
    share: float


def make_stages(directory: Path) -> DemoStages:
    """Write the models that there are no files of, and the validation sets."""
    family, validation = models(), load(VALIDATION)
    said = scores_of(family[CHEAP], validation.x)
    threshold, share = unsure_below(said, scores_of(family[ACCURATE], validation.x), validation.y)
    nearest = save_nearest(directory / f"{NEAREST}.onnx", load(TRAIN))
    plain, checked = directory / "validation.npz", directory / "checked.npz"
    np.savez_compressed(plain, x=validation.x, y=validation.y)
    np.savez_compressed(checked, x=validation.x, scores=said, y=(said.argmax(axis=1) == validation.y).astype(np.int64))
    return DemoStages(
        files={
            APPS[QUICK]: (CHEAP, family[CHEAP]),
            APPS[EXACT]: (ACCURATE, family[ACCURATE]),
            APPS[CHECK]: (NEAREST, nearest),
        },
        validation={APPS[QUICK]: plain, APPS[EXACT]: plain, APPS[CHECK]: checked},
        threshold=threshold,
        share=share,
    )


def unsure_below(quick: Scores, exact: Scores, labels: NDArray[np.int64]) -> tuple[float, float]:
    """The least of THRESHOLDS with which both models together are about as accurate as the accurate one alone, and the share below it."""
    confidence = quick.max(axis=1)
    for threshold in THRESHOLDS:
        below = confidence < threshold
        if accuracy(merged(quick, exact, below), labels) >= accuracy(exact, labels) - ALIKE:
            break
    return threshold, float(below.mean())


def merged(quick: Scores, exact: Scores, asked: NDArray[np.bool_]) -> Scores:
    """The scores of `exact` where it is asked."""
    return np.where(asked[:, None], exact, quick)


def accuracy(scores: Scores, labels: NDArray[np.int64]) -> float:
    return float((scores.argmax(axis=1) == labels).mean())


def save_nearest(path: Path, known: Digits) -> Path:
    """Write a model that compares a picture with known ones.

    Inputs: x [n, 784], and scores [n, 10] that say which digit it should be. Output: verdict [n, 2], how likely the most similar known
    picture shows another digit, and how likely this one. Similar are pictures whose principal components are near each other.
    known: as many pictures of each class.
    """
    order = np.argsort(known.y, kind="stable")
    x = known.x[order]
    basis = np.linalg.eigh(np.cov(x, rowvar=False))[1][:, -COMPONENTS:].astype(np.float32)
    points = x @ basis
    each = len(known) // CLASSES
    constants: dict[str, Any] = {
        "basis": basis,
        "points": -2.0 * points.T,
        "norms": (points * points).sum(axis=1),
        "by_class": np.array([0, CLASSES, each], np.int64),
        "classes": np.array(CLASSES, np.int64),
        "off_on": np.array([0.0, 1.0], np.float32),
        "far": np.array(FAR, np.float32),
        "axis": np.array([1], np.int64),
        "scale": np.array(-SCALE, np.float32),
    }
    nodes: list[tuple[str, list[str], str, dict[str, int | list[int]]]] = [
        ("MatMul", ["x", "basis"], "point", {}),
        ("MatMul", ["point", "points"], "products", {}),
        ("Add", ["products", "norms"], "distances", {}),  # squared, but for the picture's own norm
        ("Reshape", ["distances", "by_class"], "grouped", {}),
        ("ReduceMin", ["grouped"], "nearest", {"axes": [2], "keepdims": 0}),
        ("ArgMax", ["scores"], "said", {"axis": 1, "keepdims": 0}),
        ("OneHot", ["said", "classes", "off_on"], "mask", {}),
        ("Mul", ["nearest", "mask"], "masked", {}),
        ("ReduceSum", ["masked", "axis"], "own", {"keepdims": 1}),
        ("Mul", ["mask", "far"], "away", {}),
        ("Add", ["nearest", "away"], "rest", {}),
        ("ReduceMin", ["rest"], "other", {"axes": [1], "keepdims": 1}),
        ("Concat", ["other", "own"], "both", {"axis": 1}),
        ("Mul", ["both", "scale"], "logits", {}),
        ("Softmax", ["logits"], "verdict", {"axis": 1}),
    ]
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, [output], **attributes) for kind, inputs, output, attributes in nodes],
        NEAREST,
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", x.shape[1]]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", CLASSES]),
        ],
        [helper.make_tensor_value_info("verdict", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def pipeline_file(stages: DemoStages, rate: float) -> str:
    """The pipeline as `infaas pipeline` takes it. rate: queries/s that it is planned for."""
    return f"""\
[pipeline]
name = "{PIPELINE}"
latency_ms = {LATENCY_MS:g}

[[vertex]]                                # cheap
name = "{QUICK}"
app = "{APPS[QUICK]}"
inputs = {{ x = "$.x" }}

[[vertex]]                                # for what the cheap one is unsure of
name = "{EXACT}"
app = "{APPS[EXACT]}"
inputs = {{ x = "$.x" }}

[[vertex]]                                # whether the nearest known picture shows the same digit
name = "{CHECK}"
app = "{APPS[CHECK]}"
inputs = {{ x = "$.x", scores = "{EXACT}.scores | {QUICK}.scores" }}

[[edge]]
from = "{QUICK}"
to = "{EXACT}"
when = {{ output = "scores", reduce = "max", op = "<", value = {stages.threshold:g} }}
probability = {stages.share:.3f}

[[edge]]
from = "{QUICK}"
to = "{CHECK}"

[[edge]]
from = "{EXACT}"
to = "{CHECK}"

[output]
scores = "{EXACT}.scores | {QUICK}.scores"
verdict = "{CHECK}.verdict"

[[load]]
rate = {rate:.4g}
"""
