"""Accuracy and agreement of a model's outputs, 0..1, by metric: top1, top5, and 1/(1+error) of mae and rmse."""

from typing import Any

import numpy as np
from numpy import ndarray

from bus.messages.catalog import Signature, TensorSpec
from services.executor.workshop.jobs import Refusal

Array = ndarray[Any, Any]

METRICS = ("top1", "top5", "mae", "rmse")
FLOATS = frozenset({"FP16", "FP32", "FP64", "BF16"})
INTEGERS = frozenset({"INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "BOOL"})


class Scorer:
    """Turns outputs into predictions and compares them with labels, or with another model's predictions.

    Which output counts: for top1 one that gives class labels (integers, one an item: scikit-learn's `label`), else the
    largest score of the first floating-point output; one score alone is a probability, 0.5 the threshold.
    """

    def __init__(self, metric: str, signature: Signature) -> None:
        """Raises Refusal when no output can be scored so."""
        if metric not in METRICS:
            raise Refusal(f"metric {metric!r} is unknown: use one of {', '.join(METRICS)}")
        self.metric = metric
        floats = [one for one in signature.outputs if one.datatype in FLOATS]
        labels = [one for one in signature.outputs if one.datatype in INTEGERS and one.shape in ([], [1])]
        self._scores = next((one for one in floats if one.shape), floats[0] if floats else None)
        if metric == "top1" and labels:
            self.output = labels[0].name
            self._labels = True
        else:
            self.output = self._usable(metric, signature).name
            self._labels = False

    def _usable(self, metric: str, signature: Signature) -> TensorSpec:
        if self._scores is None:
            names = ", ".join(f"{one.name} ({one.datatype})" for one in signature.outputs)
            raise Refusal(f"no output can be scored by {metric}: there is no floating-point one among {names}")
        if metric == "top5" and (not self._scores.shape or self._scores.shape[-1] in {1, 2, 3, 4, 5}):
            raise Refusal("metric top5 needs an output with more than five classes")
        return self._scores

    def check(self, labels: Array) -> None:
        """Raises Refusal when the labels are not of the model's classes."""
        if self.metric not in {"top1", "top5"} or self._scores is None:
            return
        classes = self._scores.shape[-1] if self._scores.shape else 1
        if classes == -1:
            return
        classes = max(classes, 2)
        if self._labels:
            if len(np.unique(labels)) > classes:
                raise Refusal(
                    f"validation: {len(np.unique(labels))} different labels, but the model has {classes} classes"
                )
            return
        lowest, highest = int(labels.min()), int(labels.max())
        if lowest < 0 or highest >= classes:
            wrong = lowest if lowest < 0 else highest
            raise Refusal(f"validation: label {wrong} is outside the model's {classes} classes (0 to {classes - 1})")

    def predictions(self, output: Array) -> Array:
        """What is kept of a batch's output: class numbers, the five best, or the numbers themselves."""
        if self.metric in {"mae", "rmse"}:
            return output.astype(np.float64)
        if self._labels:
            return output.reshape(len(output)).astype(np.int64)
        if output.ndim == 1 or output.shape[-1] == 1:
            return (output.reshape(len(output), -1)[:, 0] > 0.5).astype(np.int64)
        if self.metric == "top1":
            best: Array = output.argmax(axis=-1)
            return best
        ranked: Array = np.argsort(-output, axis=-1, kind="stable")
        return ranked[..., :5]

    def accuracy(self, predictions: Array, labels: Array) -> float:
        """0..1, higher is better. Raises Refusal when shapes do not go together."""
        if self.metric == "top5":
            self._same(predictions.shape[:-1], labels.shape)
            return float((predictions == labels[..., None]).any(axis=-1).mean())
        if self.metric == "top1":
            self._same(predictions.shape, labels.shape)
            return float((predictions == labels).mean())
        if predictions.size != labels.size:
            self._same(predictions.shape, labels.shape)
        difference = predictions.reshape(-1) - labels.reshape(-1)
        error = np.abs(difference).mean() if self.metric == "mae" else np.sqrt((difference**2).mean())
        return float(1.0 / (1.0 + error))

    def agreement(self, predictions: Array, reference: Array) -> float:
        """The share of answers equal to the reference's: same class, or numbers within 5 % (or 1 % of their spread)."""
        if predictions.shape != reference.shape:
            return 0.0
        if self.metric in {"mae", "rmse"}:
            slack = 0.01 * float(reference.std()) if reference.size else 0.0
            return float(np.isclose(predictions, reference, rtol=0.05, atol=slack).mean())
        if self.metric == "top5":
            return float((predictions[..., 0] == reference[..., 0]).mean())
        return float((predictions == reference).mean())

    def _same(self, outputs: tuple[int, ...], labels: tuple[int, ...]) -> None:
        if outputs != labels:
            raise Refusal(f"validation: labels have shape {list(labels)}, but answers have {list(outputs)}")
