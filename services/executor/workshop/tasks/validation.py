"""The labelled validation set (.npz), an untrusted zip file of numpy arrays, and scores on it. Runs in the sandbox."""

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy import ndarray

from bus.datatypes import DATATYPES
from bus.messages.catalog import AGREEMENT, METRICS, TARGETS, Signature, TensorSpec, accuracy_of
from bus.tensors import BadTensor, check_finite, datatype_of, fit, scored_shape
from services.executor.workshop.sandbox.protocol import UploadRejected, ValidationFile
from services.executor.workshop.tasks.measures import MEASURES, Answers, agreeing, own_measure, read_labels

Array = ndarray[Any, Any]

LEAST_SAMPLES = 20
CALIBRATION = 64  # samples


@dataclass(frozen=True)
class ValidationSet:
    """inputs: by name, [n, ...] each, in the model's datatypes. labels: [n, ...]; of agreement there are none.

    groups: of each sample, the number of the list that it is ranked in; None: all are one list. source: the file of the user's own metric.
    """

    inputs: dict[str, Array]
    labels: Array
    groups: Array | None = None
    source: bytes = b""

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    @property
    def named(self) -> bool:
        """Whether labels are the classes' names."""
        return bool(self.labels.dtype.kind == "U")

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
    if labels is None and data.metric != AGREEMENT:
        remedy = "name them by labels_key (--labels-key), or give metric agreement, which needs none"
        raise UploadRejected(
            f"validation: there are no labels `{data.labels_key}`; the file has {_listed(found)}: {remedy}"
        )
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
    groups, source = found.get(f"{data.labels_key}.groups"), found.get(f"{data.labels_key}.metric")
    if labels is None or data.metric == AGREEMENT:
        labels = next(iter(inputs.values()))
        check_sizes(inputs, labels, data)
        return ValidationSet(inputs, labels[:0])
    if groups is None and data.metric == "ndcg":
        raise UploadRejected(
            f"validation: ndcg needs the array `{data.labels_key}.groups`: of each sample, the list that it is ranked in"
        )
    check_sizes(inputs, labels if groups is None else groups, data)
    check_sizes(inputs, labels, data)
    return ValidationSet(
        inputs, check_labels(labels, data), groups, b"" if source is None else source.astype(np.uint8).tobytes()
    )


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
    """The labels: whole numbers of classes, finite numbers of targets and gains, anything for a user's own metric. Raises UploadRejected."""
    name = data.labels_key
    if data.metric not in METRICS or (data.named and labels.dtype.kind == "U" and data.metric in BY_NAME):
        return labels
    if labels.dtype.kind not in "biuf":
        raise UploadRejected(f"validation: labels `{name}` must be numbers, not {labels.dtype}")
    if not np.isfinite(labels).all():
        raise UploadRejected(f"validation: labels `{name}` hold NaN or infinite values: leave those samples out")
    if data.metric == "ndcg" and labels.min() < 0:
        raise UploadRejected(f"validation: labels `{name}` must be gains of at least 0 for ndcg")
    if data.metric in TARGETS or data.metric == "ndcg":
        return labels.astype(np.float64)
    whole = labels.astype(np.int64)
    if not (whole == labels).all():
        raise UploadRejected(
            f"validation: labels `{name}` must be class numbers (integers) for {data.metric}; of other numbers, give metric mae"
        )
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


def inputs_of(file: ValidationFile) -> list[TensorSpec]:
    """The inputs that samples are of: the array `x`, or the arrays `x.name`. Bytes are no texts. Raises UploadRejected."""
    found = arrays(file)
    key = file.inputs_key
    names = (
        {key: key}
        if key in found
        else {name.removeprefix(f"{key}."): name for name in found if name.startswith(f"{key}.")}
    )
    if not names:
        listed = ", ".join(f"`{name[:40]}`" for name in found)
        raise UploadRejected(f"validation: there are no inputs `{key}`, and none `{key}.name`; the file has {listed}")
    try:
        return [
            TensorSpec(
                name=name,
                datatype=datatype_of(found[stored]),
                shape=list(found[stored].shape[1:]),
                binary=found[stored].dtype.kind == "S",
            )
            for name, stored in names.items()
        ]
    except BadTensor as error:
        raise UploadRejected(f"validation: {error}") from error


def _listed(found: dict[str, Array]) -> str:
    return ", ".join(f"`{key[:40]}`" for key in list(found)[:8]) or "nothing"


# -- scores, 0..1, by metric, as `accuracy_of` counts its values

BY_NAME = ("top1", "f1_macro")  # metrics of which labels may be the classes' names, where the model says them
FOLDS = 20  # parts of the samples, each left out once, that an interval is made of
KEPT = 2**26  # bytes of outputs that are not scored, kept to compare them


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

    Which output counts: for top1 and f1_macro one that gives class labels (integers, one an item: scikit-learn's `label`), else the
    largest score of the first floating-point output; one score alone is a probability, 0.5 the threshold. output: its name; empty: all
    count, of agreement and of a user's own metric. others: the outputs that are compared with the model's own besides.
    """

    def __init__(self, metric: str, signature: Signature, source: bytes = b"", *, named: bool = False) -> None:
        """source: the file of the user's own metric. named: labels are the classes' names. Raises UploadRejected if no output can be scored so."""
        self.own = None if metric in METRICS or not source else own_measure(metric, source)
        if metric not in METRICS and self.own is None:
            raise UploadRejected(f"metric {metric!r} is unknown: use one of {', '.join(METRICS)}, or FILE.py:FUNCTION")
        self.metric = metric
        self.output, self._labels = "", False
        floats = [
            structs.replace(one, shape=scored_shape(one.shape))
            for one in signature.outputs
            if DATATYPES[one.datatype].kind == "f"
        ]
        self._named = named = named and metric in BY_NAME
        kinds = "O" if named else "iub"
        labels = [one for one in signature.outputs if DATATYPES[one.datatype].kind in kinds and one.shape in ([], [1])]
        if named and not labels:
            raise UploadRejected(
                "validation: the labels are texts, but no output is one text an item: name the classes in the order of the scores "
                "(labels=[...], --labels), or give class numbers"
            )
        self._scores = next((one for one in floats if one.shape), floats[0] if floats else None)
        if metric in ("top1", "f1_macro") and labels:
            self.output = labels[0].name
            self._labels = True
        elif self.own is None and metric != AGREEMENT:
            self.output = self._usable(metric, signature).name
        scored = {self.output}
        if self._by_class and self._scores is not None:  # the scores and the label that is made of them are one answer
            scored |= {self._scores.name, *(one.name for one in labels[:1])}
        self.others = [one.name for one in signature.outputs if one.name not in scored]

    @property
    def scores(self) -> str | None:
        """The output that gives each class a score; None: there is none."""
        one = self._scores
        return one.name if one is not None and len(one.shape) == 1 and one.shape[0] > 1 else None

    @property
    def _by_class(self) -> bool:
        return self.metric in METRICS and self.metric not in (*TARGETS, AGREEMENT, "ndcg")

    def _usable(self, metric: str, signature: Signature) -> TensorSpec:
        if self._scores is None:
            names = ", ".join(f"{one.name} ({one.datatype})" for one in signature.outputs)
            raise UploadRejected(
                f"no output can be scored by {metric}: there is no floating-point one among {names}; use top1, or export the scores as well"
            )
        if metric == "top5" and (not self._scores.shape or self._scores.shape[-1] in {1, 2, 3, 4, 5}):
            raise UploadRejected("metric top5 needs an output with more than five classes")
        return self._scores

    def check(self, labels: Array) -> None:
        """Raises UploadRejected if the labels are not of the model's classes."""
        if not self._by_class or self._scores is None or self._named:
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
        """The predictions in a batch's output: class numbers, the five best, the scores, or the numbers themselves."""
        if self.metric in TARGETS or self.metric == "ndcg":
            return output.astype(np.float64)
        if self._labels:
            return output.reshape(len(output)).astype(str if self._named else np.int64)
        output = output.reshape(len(output), *scored_shape(list(output.shape[1:])))
        if self.metric not in ("top1", "top5", "f1_macro"):
            return output.astype(np.float64)
        if output.ndim == 1 or output.shape[-1] == 1:
            return (output.reshape(len(output), -1)[:, 0] > 0.5).astype(np.int64)
        if self.metric != "top5":
            best: Array = output.argmax(axis=-1)
            return best
        ranked: Array = np.argsort(-output, axis=-1, kind="stable")
        return ranked[..., :5]

    def accuracy(self, predictions: Array, labels: Array, groups: Array | None = None) -> MeasuredAccuracy:
        """Higher is better. Raises UploadRejected if the shapes do not match.

        The interval of top1 and top5 is Wilson's, with one trial for each sample, even if a sample has several labels. That of mae and
        rmse is the normal interval of the mean absolute or squared error of a sample. That of the others is the jackknife's.
        """
        if self.metric == "top5":
            self._same(predictions.shape[:-1], labels.shape)
            return wilson(float((predictions == labels[..., None]).any(axis=-1).mean()), len(labels))
        if self.metric == "top1":
            self._same(predictions.shape, labels.shape)
            return wilson(float((predictions == labels).mean()), len(labels))
        if self.metric in MEASURES:
            if self.metric in TARGETS and predictions.size != labels.size:
                self._same(predictions.shape, labels.shape)
            if self.metric not in TARGETS:
                self._same(predictions.shape[:1], labels.shape)
            measure = MEASURES[self.metric]

            def value(some: Array) -> float:
                lists = [some] if groups is None else [some[groups[some] == one] for one in np.unique(groups[some])]
                return float(np.mean([measure(labels[each], predictions[each]) for each in lists]))

            return self._jackknife(value, len(labels))
        if predictions.size != labels.size:
            self._same(predictions.shape, labels.shape)
        n = len(labels)
        difference = predictions.reshape(n, -1) - labels.reshape(n, -1)
        errors = (np.abs(difference) if self.metric == "mae" else difference**2).mean(axis=1)
        mean, half = float(errors.mean()), Z * float(errors.std()) / sqrt(n)
        return MeasuredAccuracy(*(self._of_error(error) for error in (mean, mean + half, max(0.0, mean - half))))

    def judge(self, answers: Answers, data: ValidationSet, indices: Array) -> MeasuredAccuracy:
        """The accuracy of these answers to all samples. Of agreement it is 1: that of the model as it came, with itself."""
        if self.metric == AGREEMENT:
            return MeasuredAccuracy(1.0, 1.0, 1.0)
        if self.own is None:
            groups = None if data.groups is None else data.groups[indices]
            return self.accuracy(answers.scored, data.labels[indices], groups)
        labels, own = data.labels[indices], self.own

        def value(some: Array) -> float:
            return own(read_labels(labels[some]), {name: _stacked(one, some) for name, one in answers.others.items()})

        return self._jackknife(value, len(indices))

    def _jackknife(self, value: Callable[[Array], float], n: int) -> MeasuredAccuracy:
        """The accuracy of all samples, and its interval by how much it depends on each twentieth of them. value: of these samples."""
        places = np.arange(n)
        whole = accuracy_of(value(places), self.metric)
        try:
            parts = np.array(
                [accuracy_of(value(places[places % FOLDS != fold]), self.metric) for fold in range(min(FOLDS, n))]
            )
        except UploadRejected:  # without some samples it is none: nothing is known
            return MeasuredAccuracy(whole, 0.0, 1.0)
        half = Z * sqrt((len(parts) - 1) / len(parts) * float(((parts - parts.mean()) ** 2).sum()))
        return MeasuredAccuracy(whole, max(0.0, whole - half), min(1.0, whole + half))

    def compare(self, found: Answers, reference: Answers) -> dict[str, float]:
        """The share of answers that equal the reference's, by output; the scored one, if any, comes first."""
        scored = {} if not self.output else {self.output: self.agreement(found.scored[: len(reference.scored)], reference.scored)}  # fmt: skip
        return scored | {name: agreeing(found.others[name], reference.others[name]) for name in self.others}

    def agreement(self, predictions: Array, reference: Array) -> float:
        """The share of answers equal to the reference's: same class, or numbers within 5 % (or 1 % of their spread)."""
        if predictions.shape != reference.shape:
            return 0.0
        if self.metric in TARGETS or self.metric == "ndcg":
            slack = 0.01 * float(reference.std()) if reference.size else 0.0
            return float(np.isclose(predictions, reference, rtol=0.05, atol=slack).mean())
        if self.metric == "top5":
            return float((predictions[..., 0] == reference[..., 0]).mean())
        if predictions.dtype.kind == "f":
            predictions, reference = _best(predictions), _best(reference)
        return float((predictions == reference).mean())

    def _of_error(self, error: float) -> float:
        return 1.0 / (1.0 + (error if self.metric == "mae" else sqrt(error)))

    def _same(self, outputs: tuple[int, ...], labels: tuple[int, ...]) -> None:
        if outputs != labels:
            raise UploadRejected(
                f"validation: labels have shape {list(labels)}, but answers have {list(outputs)}: give whole numbers of classes, one an item (of rows of zeros and ones `y.argmax(axis=1)`), or a target for each number that the model gives"
            )


def _best(scores: Array) -> Array:
    columns = scores.reshape(len(scores), -1)
    best: Array = columns.argmax(axis=1) if columns.shape[1] > 1 else (columns[:, 0] > 0.5).astype(np.int64)
    return best


def _stacked(items: list[Array], some: Array) -> Any:
    """One array of these items; a list of them where they differ in shape."""
    found = [items[i] for i in some.tolist()]
    return np.stack(found) if len({one.shape for one in found}) == 1 else found
