"""What people judge models by beside the share of right answers: numpy's versions of scikit-learn's metrics, a function of the user's own, and
agreement with the model as it was uploaded. Runs in the sandbox.
"""

import json
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from bus.functions import FunctionFailed, made
from bus.messages.catalog import TOLERANCE, is_error
from services.executor.backends.base import plain
from services.executor.workshop.sandbox.protocol import UploadRejected

Array = ndarray[Any, Any]
Measure = Callable[[Array, Array], float]  # labels [n], what was predicted [n, ...]


def f1_macro(labels: Array, found: Array) -> float:
    """The mean of the classes' F1 scores. found: class numbers."""
    scores = []
    for one in np.union1d(labels, found):
        right = int(((labels == one) & (found == one)).sum())
        scores.append(2 * right / int((labels == one).sum() + (found == one).sum()))
    return float(np.mean(scores))


def roc_auc(labels: Array, scores: Array) -> float:
    """The share of pairs of an item of the class and one that is none in which the first has the larger score; ties count half."""
    return _each(labels, scores, _auc)


def average_precision(labels: Array, scores: Array) -> float:
    """The mean of the precision at each recall."""
    return _each(labels, scores, _precision)


def log_loss(labels: Array, scores: Array) -> float:
    """The mean negative logarithm of the right class' probability."""
    likely = _by_class(scores)
    if likely.min() < 0.0 or not np.allclose(likely.sum(axis=1), 1.0, atol=1e-3):
        raise UploadRejected(
            "metric log_loss needs probabilities, and the model's scores do not add up to 1: end the model with a softmax"
        )
    right = likely[np.arange(len(labels)), labels]
    return float(-np.log(np.clip(right, np.finfo(np.float32).eps, 1.0)).mean())


def r2(labels: Array, found: Array) -> float:
    """1 less the share of the targets' variance that is left; the mean over the outputs."""
    n = len(labels)
    left = ((found.reshape(n, -1) - labels.reshape(n, -1)) ** 2).sum(axis=0)
    whole = ((labels.reshape(n, -1) - labels.reshape(n, -1).mean(axis=0)) ** 2).sum(axis=0)
    return float(np.where(whole > 0.0, 1.0 - left / np.where(whole > 0.0, whole, 1.0), (left == 0.0) * 1.0).mean())


def ndcg(labels: Array, scores: Array) -> float:
    """The normalised discounted cumulative gain of one list: labels are gains. Equal scores share their places."""
    best = _gain(labels, labels)
    return _gain(labels, scores.reshape(len(labels))) / best if best > 0.0 else 1.0


MEASURES: dict[str, Measure] = {
    "f1_macro": f1_macro, "roc_auc": roc_auc, "average_precision": average_precision, "log_loss": log_loss, "r2": r2, "ndcg": ndcg
}  # fmt: skip


def _by_class(scores: Array) -> Array:
    """One column for each class; one score alone is that of class 1."""
    columns = scores.reshape(len(scores), -1)
    return np.hstack([1.0 - columns, columns]) if columns.shape[1] == 1 else columns


def _each(labels: Array, scores: Array, measure: Callable[[Array, Array], float]) -> float:
    """The mean over the classes, each against all others; of two classes, that of class 1."""
    columns = _by_class(scores)
    classes = [1] if columns.shape[1] == 2 else range(columns.shape[1])
    there = [one for one in classes if 0 < int((labels == one).sum()) < len(labels)]
    if not there:
        raise UploadRejected("validation: all labels are of one class; this metric needs items of several")
    return float(np.mean([measure(labels == one, columns[:, one]) for one in there]))


def _auc(right: Array, scores: Array) -> float:
    others, ours = np.sort(scores[~right]), scores[right]
    below, upto = (np.searchsorted(others, ours, side) for side in ("left", "right"))
    return float((below + upto).mean()) / (2 * len(others))  # equal ones count half


def _precision(right: Array, scores: Array) -> float:
    order = np.argsort(-scores, kind="stable")
    hits = right[order].cumsum()
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # of each group of equal scores
    return float((np.diff(hits[last], prepend=0) * hits[last] / (last + 1)).sum() / hits[-1])


def _gain(gains: Array, scores: Array) -> float:
    discounts = 1.0 / np.log2(np.arange(len(gains)) + 2.0)
    _, places, counts = np.unique(-scores, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    shares = np.diff(np.append(0.0, discounts.cumsum()[ends - 1])) / counts
    return float((np.bincount(places, weights=gains) * shares).sum())


# -- a function of the user's own


def own_measure(name: str, source: bytes) -> Callable[[Any, dict[str, Any]], float]:
    """The function of this name in a Python file: from labels and outputs by name to a number. Raises UploadRejected, as it does itself."""
    try:
        function: Callable[..., Any] = made(name, source, f"metric {name}")
    except FunctionFailed as error:
        raise UploadRejected(plain(error)) from error

    def measured(labels: Any, outputs: dict[str, Any]) -> float:
        try:
            value = float(function(labels, outputs))
        except (Exception, SystemExit) as error:
            raise UploadRejected(
                f"metric {name}: the function failed: {type(error).__name__}: {plain(error)}"
            ) from error
        if not isfinite(value) or value < 0.0 or (value > 1.0 and not is_error(name)):
            raise UploadRejected(
                f"metric {name}: the function gives {value:.6g}; it must give 0 to 1, more is better, or, with a name that ends in _error "
                "or _loss, at least 0, less is better"
            )
        return value

    return measured


def read_labels(labels: Array) -> Any:
    """The labels as the user gave them: what is no array of numbers comes as JSON, one text an item."""
    return [json.loads(one) for one in labels.tolist()] if labels.dtype.kind in "US" else labels


# -- agreement


class Answers(NamedTuple):
    """Answers to the first samples. scored: predictions of the output that is scored. others: the further outputs, item by item, of as many
    samples as were kept.
    """

    scored: Array
    others: dict[str, list[Array]]

    def packed(self) -> dict[str, Array]:
        """As arrays of a file, also where items differ in shape."""
        found = {"scored": self.scored}
        for name, items in self.others.items():
            plain_items = [one.astype(str) if one.dtype.kind == "O" else one for one in items]
            found[f"flat.{name}"] = np.concatenate([one.reshape(-1) for one in plain_items])
            found[f"shapes.{name}"] = np.array([one.shape for one in items], np.int64).reshape(len(items), -1)
        return found

    @staticmethod
    def unpacked(arrays: dict[str, Array]) -> "Answers":
        others: dict[str, list[Array]] = {}
        for key in (one for one in arrays if one.startswith("shapes.")):
            name, shapes = key.removeprefix("shapes."), arrays[key]
            ends = shapes.prod(axis=1).astype(np.int64).cumsum()[:-1]
            parts = np.split(arrays[f"flat.{name}"], ends)
            others[name] = [part.reshape(shape) for part, shape in zip(parts, shapes.tolist(), strict=True)]
        return Answers(arrays["scored"], others)


def agreeing(found: Sequence[Array], reference: Sequence[Array]) -> float:
    """The share of an output's answers that equal those of the model as it came: whole numbers and texts are the same, others differ by at
    most TOLERANCE of the number, or of the spread that its column has over all items. An item of another shape agrees in nothing.
    """
    count = min(len(found), len(reference))
    if not count:
        return 1.0
    if reference[0].dtype.kind != "f":
        return float(np.mean([_equal(*pair) for pair in zip(found, reference, strict=False)]))
    widths = {one.shape[-1:] for one in reference}
    columns = widths.pop()[0] if len(widths) == 1 and reference[0].ndim else 1
    numbers = np.concatenate([one.reshape(-1) for one in reference]).astype(np.float64).reshape(-1, max(columns, 1))
    spread = numbers.std(axis=0) if len(numbers) else np.zeros(1)
    shares = []
    for one, wanted in zip(found, reference, strict=False):
        if one.shape != wanted.shape:
            shares.append(0.0)
            continue
        right = wanted.astype(np.float64)
        with np.errstate(invalid="ignore"):
            near = np.abs(one - right) <= TOLERANCE * np.maximum(np.abs(right), spread)
        shares.append(_share(near | (one == right)))
    return float(np.mean(shares))


def _equal(found: Array, wanted: Array) -> float:
    return _share(found.astype(wanted.dtype) == wanted) if found.shape == wanted.shape else 0.0


def _share(near: Any) -> float:
    return float(np.mean(near)) if np.size(near) else 1.0
