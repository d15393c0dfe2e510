"""The labelled validation set (.npz), an untrusted zip file of numpy arrays, and scores on it. Runs in the sandbox."""

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy import ndarray

from bus.datatypes import DATATYPES
from bus.messages.catalog import METRICS, Signature, TensorSpec, scored_shape
from bus.tensors import BadTensor, check_finite, fit
from services.executor.workshop.sandbox.protocol import UploadRejected, ValidationFile

Array = ndarray[Any, Any]

LEAST_SAMPLES = 20
CALIBRATION = 64  # samples


@dataclass(frozen=True)
class ValidationSet:
    """inputs: by name, [n, ...] each, in the model's datatypes. labels: [n, ...]."""

    inputs: dict[str, Array]
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Array) -> dict[str, Array]:
        return {name: np.ascontiguousarray(array[indices]) for name, array in self.inputs.items()}


def arrays(data: ValidationFile) -> dict[str, Array]:
    """All arrays in the file by key. Raises UploadRejected if it is no plain .npz."""
    try:
        with zipfile.ZipFile(data.path) as archive:
            size = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise UploadRejected(
            "validation: not an .npz file; write it with numpy.savez_compressed(file, x=..., y=...)"
        ) from error
    if size > data.most_bytes:
        raise UploadRejected(
            f"validation: unpacks to {size >> 20} MB, more than the {data.most_bytes >> 20} MB allowed"
        )
    return dict(_members(data.path))


def _members(path: str) -> Iterator[tuple[str, Array]]:
    try:
        with np.load(Path(path), allow_pickle=False) as file:
            for key in file.files:
                array = _member(file, key)
                if not isinstance(array, ndarray) or array.ndim == 0:
                    raise UploadRejected(f"validation: entry `{key[:40]}` is not an array of samples")
                yield key, array
    except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
        raise UploadRejected(f"validation: the file is damaged ({type(error).__name__})") from error


def _member(file: Any, key: str) -> Any:
    try:
        return file[key]
    except ValueError as error:
        if "allow_pickle" in str(error) or "Object arrays" in str(error):
            raise UploadRejected(f"validation: array `{key[:40]}` holds Python objects; save plain numbers") from error
        raise UploadRejected(f"validation: array `{key[:40]}` is damaged") from error
    except MemoryError as error:
        raise UploadRejected(f"validation: array `{key[:40]}` is too large") from error


def read(data: ValidationFile, signature: Signature) -> ValidationSet:
    """The set as this model takes it. Raises UploadRejected that names the array that does not fit."""
    found = arrays(data)
    labels = found.get(data.labels_key)
    if labels is None:
        raise UploadRejected(f"validation: there are no labels `{data.labels_key}`; the file has {_listed(found)}")
    inputs: dict[str, Array] = {}
    for spec in signature.inputs:
        key = _key(spec.name, len(signature.inputs) == 1, data, found)
        array = found[key]
        try:
            if not data.allow_nan:
                check_finite(array, key)
            inputs[spec.name] = np.ascontiguousarray(fit(array, spec, key))
        except BadTensor as error:
            raise UploadRejected(f"validation: {error}") from error
    check_sizes(inputs, labels, data)
    return ValidationSet(inputs, check_labels(labels, data))


def check_sizes(inputs: dict[str, Array], labels: Array, data: ValidationFile) -> None:
    """Check that there are as many labels as samples, and enough. Raises UploadRejected."""
    n = len(labels)
    for name, array in inputs.items():
        if len(array) != n:
            raise UploadRejected(
                f"validation: {len(array)} samples of `{name}` but {n} labels `{data.labels_key}`: give each sample one"
            )
    if n < LEAST_SAMPLES:
        raise UploadRejected(f"validation: {n} samples are too few to measure accuracy; give at least {LEAST_SAMPLES}")


def check_labels(labels: Array, data: ValidationFile) -> Array:
    """The labels: whole numbers for top1 and top5, finite numbers for mae and rmse. Raises UploadRejected."""
    name = data.labels_key
    if labels.dtype.kind not in "biuf":
        raise UploadRejected(f"validation: labels `{name}` must be numbers, not {labels.dtype}")
    if not np.isfinite(labels).all():
        raise UploadRejected(f"validation: labels `{name}` hold NaN or infinite values")
    if data.metric in {"mae", "rmse"}:
        return labels.astype(np.float64)
    whole = labels.astype(np.int64)
    if not (whole == labels).all():
        raise UploadRejected(f"validation: labels `{name}` must be class numbers (integers) for {data.metric}")
    if whole.ndim == 2 and whole.shape[1] == 1:
        whole = whole[:, 0]
    return whole


def shuffled(n: int) -> Array:
    """The indices of all n samples in the order in which every variant of a model answers them. Any first part is a random sample."""
    return np.random.default_rng(0).permutation(n)


def calibration(n: int) -> Array:
    """The indices of the samples whose inputs calibrate a quantisation. Their labels are not read, so they measure accuracy too."""
    return shuffled(n)[:CALIBRATION]


def _key(name: str, alone: bool, data: ValidationFile, found: dict[str, Array]) -> str:
    """The array for this input: `x` or the input's own name for one input, `name` or `x.name` for several."""
    candidates = (data.inputs_key, name) if alone else (name, f"{data.inputs_key}.{name}")
    for key in candidates:
        if key in found:
            return key
    raise UploadRejected(
        f"validation: there is no array `{candidates[0]}` for the model's input {name!r}; the file has {_listed(found)}"
    )


def _listed(found: dict[str, Array]) -> str:
    return ", ".join(f"`{key[:40]}`" for key in list(found)[:8]) or "nothing"


# -- scores, 0..1, by metric: top1, top5, and 1/(1+error) of mae and rmse


class MeasuredAccuracy(NamedTuple):
    """An accuracy 0..1 as measured, and its 95 % confidence interval, low <= value <= high."""

    value: float
    low: float
    high: float


Z = 1.959964  # standard deviations on each side that hold 95 % of a normal distribution


def wilson(share: float, n: int) -> MeasuredAccuracy:
    """The interval of a share of n independent samples (Wilson, 1927). It is never empty, not even at a share of 0 or 1."""
    middle = share + Z * Z / (2 * n)
    half = Z * sqrt(share * (1 - share) / n + (Z / (2 * n)) ** 2)
    scale = 1 + Z * Z / n
    return MeasuredAccuracy(
        share, max(0.0, min(share, (middle - half) / scale)), min(1.0, max(share, (middle + half) / scale))
    )


class Scorer:
    """Turns outputs into predictions and compares them with labels, or with another model's predictions.

    Which output counts: for top1 one that gives class labels (integers, one an item: scikit-learn's `label`), else the
    largest score of the first floating-point output; one score alone is a probability, 0.5 the threshold.
    """

    def __init__(self, metric: str, signature: Signature) -> None:
        """Raises UploadRejected if no output can be scored by this metric."""
        if metric not in METRICS:
            raise UploadRejected(f"metric {metric!r} is unknown: use one of {', '.join(METRICS)}")
        self.metric = metric
        floats = [
            structs.replace(one, shape=scored_shape(one.shape))
            for one in signature.outputs
            if DATATYPES[one.datatype].kind == "f"
        ]
        labels = [one for one in signature.outputs if DATATYPES[one.datatype].kind in "iub" and one.shape in ([], [1])]
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
            raise UploadRejected(f"no output can be scored by {metric}: there is no floating-point one among {names}")
        if metric == "top5" and (not self._scores.shape or self._scores.shape[-1] in {1, 2, 3, 4, 5}):
            raise UploadRejected("metric top5 needs an output with more than five classes")
        return self._scores

    def check(self, labels: Array) -> None:
        """Raises UploadRejected if the labels are not of the model's classes."""
        if self.metric not in {"top1", "top5"} or self._scores is None:
            return
        classes = self._scores.shape[-1] if self._scores.shape else 1
        if classes == -1:
            return
        classes = max(classes, 2)
        if self._labels:
            if len(np.unique(labels)) > classes:
                raise UploadRejected(
                    f"validation: {len(np.unique(labels))} different labels, but the model has {classes} classes"
                )
            return
        lowest, highest = int(labels.min()), int(labels.max())
        if lowest < 0 or highest >= classes:
            wrong = lowest if lowest < 0 else highest
            raise UploadRejected(
                f"validation: label {wrong} is outside the model's {classes} classes (0 to {classes - 1}): number the classes from 0"
            )

    def predictions(self, output: Array) -> Array:
        """The predictions in a batch's output: class numbers, the five best, or the numbers themselves."""
        if self.metric in {"mae", "rmse"}:
            return output.astype(np.float64)
        if self._labels:
            return output.reshape(len(output)).astype(np.int64)
        output = output.reshape(len(output), *scored_shape(list(output.shape[1:])))
        if output.ndim == 1 or output.shape[-1] == 1:
            return (output.reshape(len(output), -1)[:, 0] > 0.5).astype(np.int64)
        if self.metric == "top1":
            best: Array = output.argmax(axis=-1)
            return best
        ranked: Array = np.argsort(-output, axis=-1, kind="stable")
        return ranked[..., :5]

    def accuracy(self, predictions: Array, labels: Array) -> MeasuredAccuracy:
        """Higher is better. Raises UploadRejected if the shapes do not match.

        The interval of top1 and top5 is Wilson's, with one trial for each sample, even if a sample has several labels. That of mae and
        rmse is the normal interval of the mean absolute or squared error of a sample.
        """
        if self.metric == "top5":
            self._same(predictions.shape[:-1], labels.shape)
            return wilson(float((predictions == labels[..., None]).any(axis=-1).mean()), len(labels))
        if self.metric == "top1":
            self._same(predictions.shape, labels.shape)
            return wilson(float((predictions == labels).mean()), len(labels))
        if predictions.size != labels.size:
            self._same(predictions.shape, labels.shape)
        n = len(labels)
        difference = predictions.reshape(n, -1) - labels.reshape(n, -1)
        errors = (np.abs(difference) if self.metric == "mae" else difference**2).mean(axis=1)
        mean, half = float(errors.mean()), Z * float(errors.std()) / sqrt(n)
        return MeasuredAccuracy(*(self._of_error(error) for error in (mean, mean + half, max(0.0, mean - half))))

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

    def _of_error(self, error: float) -> float:
        return 1.0 / (1.0 + (error if self.metric == "mae" else sqrt(error)))

    def _same(self, outputs: tuple[int, ...], labels: tuple[int, ...]) -> None:
        if outputs != labels:
            raise UploadRejected(f"validation: labels have shape {list(labels)}, but answers have {list(outputs)}")
