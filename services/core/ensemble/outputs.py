"""How outputs of several models become one, who agrees with it, and how far each is from a label. Pure.

Which output counts is what measures accuracy, too: for top1 one that gives class labels (integers or texts, one an item), else the largest
score of the first floating-point output; one score alone is a probability, 0.5 the threshold. For mae and rmse it is the first one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bus.datatypes import DATATYPES
from bus.messages.catalog import TARGETS, ModelRecord
from bus.values import leaves
from services.core.ensemble.base import Array, Combined, Member, Outputs

WORST = 4.0  # typical errors at which the loss is 1: of a normal error, 1 in 1,000 is further off than four mean errors
RELATIVE = 0.05  # of the value: the typical error of models whose error nobody has measured
NAMED = 20  # classes that an error names
MOST_CHECKED = 65_536  # values of an item's output up to which a label is compared with its shape


# Metrics that are means over items, by which labels score them; of errors: so many times the (squared) registered one counts as the worst.
SCORED = {"top1": 1.0, "top5": 1.0, "mae": 20.0, "rmse": 100.0}


class BadLabel(ValueError):
    """A feedback's label does not fit the outputs of the models. The text names the label and what is known."""


class BadOutputs(ValueError):
    """Outputs of several models cannot become one. The text names the output and the models."""


class _Counts(NamedTuple):
    """The output that counts. kind: "label", "score" (last axis: classes), "threshold" (one score) or "error"."""

    name: str
    kind: str


def combined(weights: Mapping[str, float], members: Sequence[Member], outputs: Mapping[str, Outputs]) -> Combined:
    """One answer of all models in `outputs`: the weighted mean of numbers, the weighted vote of class labels and texts.

    weights: by model, not negative, not all 0; they need not sum to 1, and do not count where only one model is in `outputs`. Among labels with equal votes, that of the first member counts.
    Raises BadOutputs if the models' outputs differ in names or shapes, or none is of a member.
    """
    there = [member for member in members if member.model in outputs]
    if not there:
        raise BadOutputs(f"no outputs of the members {', '.join(member.model for member in members)}")
    first = outputs[there[0].model]
    counts = _counts(first, there[0].metric)
    if len(there) == 1:
        return Combined(dict(first), np.ones(len(first[counts.name]), np.int64))
    total = sum(weights[member.model] for member in there) or 1.0
    shares = np.array([weights[member.model] / total for member in there])
    one: dict[str, Array] = {}
    agree = None
    for name in first:
        stack = _stack(name, there, outputs)
        mean = stack.dtype.kind == "f" or (counts.kind == "error" and stack.dtype.kind in "iu")
        one[name] = _mean(shares, stack) if mean else _vote(shares, stack)
        if name == counts.name:
            same = _same(stack, one[name], counts.kind, members)
            agree = (same if same.ndim == 2 else same.reshape(*same.shape[:2], -1).all(axis=2)).sum(axis=0)
    assert agree is not None, "the output that counts is one of them"
    return Combined(one, agree)


def losses(label: Any, members: Sequence[Member], outputs: Mapping[str, Outputs]) -> dict[str, float]:
    """How far the output of each model for one item is from the label, 0..1.

    label: the class (its index or its name), the value, or a nested list of them where an item has several. top1 and top5: the share of
    classes missed. mae and rmse: min(1, |y - y'| / scale); the scale is four times the median of the errors that the members have
    measured, else the value itself. Raises BadLabel.
    """
    return {
        member.model: _loss(label, member, outputs[member.model], members)
        for member in members
        if member.model in outputs
    }


MOST_SAID = 64  # items of a query whose answers are kept for labels


def said(outputs: Outputs, metric: str) -> list[Any] | None:
    """Of each item, what a label is compared with: its class, for top5 the five best classes, a regressor's number.

    None: the metric is no mean over the items, or an item has several answers.
    """
    if metric not in SCORED:
        return None
    try:
        counts = _counts(outputs, metric)
    except BadOutputs:
        return None
    array = outputs[counts.name]
    if array.ndim != 2 if counts.kind == "score" else array.size != len(array):
        return None
    if counts.kind == "score" and metric == "top5":
        best: list[Any] = np.argsort(-array, axis=1, kind="stable")[:, :5].tolist()
        return best
    found: list[Any] = _labels(array, counts.kind).reshape(-1).tolist()
    return [int(one) for one in found] if counts.kind == "threshold" else found


def score(label: Any, answer: Any, metric: str, names: Sequence[str], error: float | None) -> float | None:
    """How right an item's answer (`said`) is by a label: 1 or 0; of a number 1 less its error, where SCORED times the registered `error` is 1.

    None: it cannot be told.
    """
    values = leaves(label)
    if len(values) != 1 or (metric in TARGETS and not error):
        return None
    best: list[Any] = answer if metric == "top5" else [answer]
    try:
        if metric not in TARGETS:
            return 1.0 if _value(values[0], best[0], names) in best else 0.0
        off: float = abs(float(values[0]) - answer) / (error or 1.0)
    except (BadLabel, TypeError, ValueError, OverflowError):
        return None
    return 1.0 - min(1.0, (off * off if metric == "rmse" else off) / SCORED[metric])


def aim_of(metric: str, registered: float | None) -> float:
    """The mean of scores that is as good as this accuracy, by whose error they are scored."""
    return 1.0 - 1.0 / SCORED[metric] if metric in TARGETS else registered or 0.0


def reached(share: float, metric: str, registered: float) -> float:
    """The accuracy that a mean of scores stands for. registered: the accuracy by whose error they were scored."""
    if metric not in TARGETS:
        return share
    times = SCORED[metric] * (1.0 - share)
    return 1.0 / (1.0 + (1.0 / registered - 1.0) * (math.sqrt(times) if metric == "rmse" else times))


def label_error(label: Any, models: Iterable[ModelRecord]) -> str | None:
    """Why no answer of these models could be right by this label; None: one could, or the sizes of its outputs do not tell.

    The text names the label, and the classes where a model has some.
    """
    values = leaves(label)
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        return f"label {_text(label)} is not a finite number"
    errors = [_label_error(label, len(values), model) for model in models]
    return None if None in errors else next(iter(errors), None)


def _label_error(label: Any, count: int, model: ModelRecord) -> str | None:
    outputs: dict[str, Array] = {}
    for spec in model.signature.outputs:
        kind = DATATYPES[spec.datatype].kind
        scores = kind == "f"
        shape = [count if size < 0 else size for size in spec.shape]
        unknown = spec.shape.count(-1) > 1 or (scores and model.metric not in TARGETS and spec.shape[-1:] == [-1])
        if unknown or math.prod(shape) > MOST_CHECKED:
            return None
        outputs[spec.name] = np.zeros((1, *shape), np.float32 if scores else np.str_ if kind == "O" else np.int64)
    member = Member(model=model.model, version=model.version, metric=model.metric, labels=model.labels)
    try:
        _loss(label, member, outputs, [member])
    except BadLabel as error:
        return str(error)
    except BadOutputs:
        return None
    return None


# -- which output counts


def _counts(outputs: Outputs, metric: str) -> _Counts:
    if metric in TARGETS:
        numbers = (name for name, array in outputs.items() if array.dtype.kind in "fiu")
        found = next(numbers, None)
        if found is None:
            raise BadOutputs(f"none of the outputs {', '.join(outputs)} has numbers, which {metric} needs")
        return _Counts(found, "error")
    scores = [name for name, array in outputs.items() if array.dtype.kind == "f"]
    if metric == "top1" or not scores:
        for name, array in outputs.items():
            if array.dtype.kind != "f" and (array.ndim == 1 or array.shape[1:] == (1,)):
                return _Counts(name, "label")
    if not scores:
        return _Counts(next(iter(outputs)), "label")
    name = next((one for one in scores if outputs[one].ndim > 1), scores[0])
    array = outputs[name]
    return _Counts(name, "threshold" if array.ndim == 1 or array.shape[-1] == 1 else "score")


def _labels(array: Array, kind: str) -> Array:
    if kind == "score" and array.shape[-1]:
        best: Array = array.argmax(axis=-1)
        return best
    return array > 0.5 if kind == "threshold" else array


def _same(stack: Array, final: Array, kind: str, members: Sequence[Member]) -> Array:
    """Whether each member says the same as the answer; shape [members, items, ...]."""
    if kind != "error":
        same: Array = _labels(stack, kind) == _labels(final, kind)
        return same
    typical = _typical_error(members)
    slack = typical or RELATIVE * np.abs(final)
    with np.errstate(invalid="ignore"):
        near: Array = np.abs(stack.astype(np.float64) - final) <= slack
    return near


# -- combining


def _stack(name: str, members: Sequence[Member], outputs: Mapping[str, Outputs]) -> Array:
    """One output of all members, [members, items, ...]."""
    try:
        arrays = [outputs[member.model][name] for member in members]
    except KeyError:
        without = ", ".join(member.model for member in members if name not in outputs[member.model])
        raise BadOutputs(f"output {name!r} is missing from {without}") from None
    shape, kind = arrays[0].shape, arrays[0].dtype.kind
    for member, array in zip(members, arrays, strict=True):
        if array.shape != shape:
            raise BadOutputs(
                f"output {name!r} of {member.model} has shape {list(array.shape)}, but that of {members[0].model} {list(shape)}: "
                "models that answer together need equal outputs"
            )
        if array.dtype.kind != kind:
            raise BadOutputs(
                f"output {name!r} of {member.model} has other values than that of {members[0].model}: {array.dtype} and {arrays[0].dtype}"
            )
    try:
        return np.array(arrays)
    except ValueError as error:  # pragma: no cover  (objects that numpy takes for sequences)
        raise BadOutputs(f"output {name!r} cannot be combined: {error}") from error


def _mean(shares: NDArray[np.float64], stack: Array) -> Array:
    mean = np.dot(shares, stack.reshape(len(stack), -1)).reshape(stack.shape[1:])
    if stack.dtype.kind != "f":
        mean = np.rint(mean)
    one: Array = mean.astype(stack.dtype)
    return one


def _vote(shares: NDArray[np.float64], stack: Array) -> Array:
    """Of each element, the value with the largest sum of shares."""
    values = stack.reshape(len(stack), -1)
    votes = np.array([np.dot(shares, values == value) for value in values])
    # Shares that are equal but for rounding are equal votes, so that the first member counts and not the order of a sum.
    winners = np.round(votes, 12).argmax(axis=0)
    one: Array = values[winners, np.arange(values.shape[1])].reshape(stack.shape[1:])
    return one


# -- labels


def class_names(outputs: Iterable[Array], labels: Sequence[str]) -> list[str] | None:
    """The name of each item's class: of class numbers, else of the largest score; without labels, the text that comes out. None: no output
    tells the class.
    """
    n = len(labels)
    for array in outputs:
        if array.dtype.kind in "OUS" and not n and array.size == len(array):
            return [str(one) for one in array.reshape(-1).tolist()]
        if not n:
            continue
        if array.dtype.kind in "iu" and array.size == len(array):
            numbers = array.reshape(-1)
        elif array.dtype.kind == "f" and n > 1 and array.size == n * len(array):
            numbers = array.reshape(-1, n).argmax(axis=1)
        elif array.dtype.kind == "f" and n == 2 and array.size == len(array):
            numbers = array.reshape(-1) > 0.5
        else:
            continue
        return [labels[int(number)] if 0 <= number < n else str(number) for number in numbers.tolist()]
    return None


def _loss(label: Any, member: Member, outputs: Outputs, members: Sequence[Member]) -> float:
    counts = _counts(outputs, member.metric)
    array = outputs[counts.name]
    if array.size == 0:
        raise BadOutputs(f"output {counts.name!r} of {member.model} has no values: no label is right or wrong")
    if counts.kind == "error":
        return _error(label, array, members)
    if counts.kind == "label":
        said = array.reshape(-1).tolist()
        true = [_value(leaf, said[0], member.labels) for leaf in _leaves(label, len(said))]
        return sum(bool(a != b) for a, b in zip(said, true, strict=True)) / len(said)
    scores = array.reshape(-1, array.shape[-1]) if counts.kind == "score" else array.reshape(-1, 1)
    classes = scores.shape[1] if counts.kind == "score" else 2
    right = [_class(leaf, classes, member.labels) for leaf in _leaves(label, len(scores))]
    if counts.kind == "threshold":
        return _share((scores[:, 0] > 0.5) != right)
    if member.metric == "top5":
        own = scores[np.arange(len(scores)), right]
        return _share((scores > own[:, None]).sum(axis=1) >= 5)
    return _share(scores.argmax(axis=1) != right)


def _share(wrong: Array) -> float:
    return float(np.count_nonzero(wrong) / wrong.size)  # several times as fast as a mean


def _leaves(label: Any, count: int) -> list[Any]:
    """The values of a label, one for each of the item's `count` values."""
    values = leaves(label)
    if len(values) != count:
        raise BadLabel(f"label {_text(label)} has {len(values)} values, but an item's answer has {count}")
    return values


def _class(label: Any, classes: int, names: Sequence[str]) -> int:
    """The index of a class."""
    index = names.index(label) if isinstance(label, str) and label in names else _whole(label)
    if index is None or not 0 <= index < classes:
        raise BadLabel(f"label {_text(label)} is no class of the models: {_known(classes, names)}")
    return index


def _value(label: Any, said: Any, names: Sequence[str]) -> Any:
    """What an output of labels says where it is right. said: what one says, for the type."""
    if isinstance(said, str | bytes):
        index = None if isinstance(label, str) else _whole(label)
        if index is not None and 0 <= index < len(names):
            return names[index] if isinstance(said, str) else names[index].encode()
        if not isinstance(label, str) or (names and label not in names):
            raise BadLabel(f"label {_text(label)} is no class of the models: {_known(len(names), names)}")
        return label if isinstance(said, str) else label.encode()
    index = names.index(label) if isinstance(label, str) and label in names else _whole(label)
    if index is None or (names and not 0 <= index < len(names)):
        raise BadLabel(f"label {_text(label)} is no class of the models: {_known(len(names), names)}")
    return index


def _error(label: Any, array: Array, members: Sequence[Member]) -> float:
    said = array.reshape(-1).astype(np.float64)
    values = _leaves(label, len(said))
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise BadLabel(f"label {_text(label)} is no number, which the models' answers are")
    try:
        true = np.array(values, np.float64)
    except OverflowError:
        true = np.array([math.inf])
    if not np.isfinite(true).all():
        raise BadLabel(f"label {_text(label)} is not a finite number")
    scale = WORST * (_typical_error(members) or 0.0)
    scales = np.full(len(true), scale) if scale > 0.0 else np.where(true == 0.0, 1.0, np.abs(true))
    with np.errstate(over="ignore"):
        off = np.abs(said - true) / scales
    return float(np.mean(np.minimum(1.0, np.nan_to_num(off, nan=1.0, posinf=1.0))))


def _typical_error(members: Sequence[Member]) -> float | None:
    """The median of the members' measured errors: an accuracy is 1 / (1 + error). None: nobody has measured one."""
    known = [1.0 / member.accuracy - 1.0 for member in members if member.accuracy]
    return float(np.median(known)) if known else None


def _whole(label: Any) -> int | None:
    """A whole number, also as JSON's 3.0. None: it is none."""
    if isinstance(label, float):
        return int(label) if label.is_integer() else None
    return int(label) if isinstance(label, int) else None


def _known(classes: int, names: Sequence[str]) -> str:
    if not names:
        return f"give an index from 0 to {classes - 1}" if classes else "give one of the same type as the answers'"
    more = f", … ({len(names)} in all)" if len(names) > NAMED else ""
    return f"give an index from 0 to {max(classes, 1) - 1}, or one of {', '.join(islice(names, NAMED))}{more}"


def _text(label: Any) -> str:
    text = repr(label)
    return text if len(text) <= 60 else text[:59] + "…"
