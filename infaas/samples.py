"""Samples and their labels: by the model's inputs, as class numbers or targets, and as the file that is sent."""

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from bus.messages.catalog import ERRORS, TensorSpec
from bus.messages.public import Register
from bus.tensors import BadTensor, fit
from infaas.errors import BadInput
from infaas.trial import Trial, try_file, understood

Array = np.ndarray[Any, Any]
Named = dict[str, Array]
CHECKED = 1000  # samples that the file and the object are compared on
MOST_TRIED = 2**29  # bytes of a validation set that is read here, to try the model on its first item


def labels_of(
    y: Any, metric: str | None, classes: Array | None = None, one_number: bool = False
) -> tuple[Array, list[str], str]:
    """Class numbers or targets, the names of the classes, and the metric. classes: in the order of the model's scores; None: sorted.

    Whole numbers and texts are classes, others are targets. one_number: the model gives one number an item; then more than two different
    whole numbers are targets as well. Raises BadInput.
    """
    values = np.asarray(y)
    if values.dtype.kind == "O":
        values = values.astype(str) if all(isinstance(one, str) for one in values.ravel()[:CHECKED]) else values
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.dtype.kind not in "biufUS":
        raise BadInput(f"y: labels must be numbers or texts, not {values.dtype}")
    if metric is None:
        targets = values.dtype.kind == "f" and not bool((values == np.round(values)).all())
        targets = targets or (one_number and values.dtype.kind in "iuf" and len(np.unique(values)) > 2)
        metric = "mae" if targets and classes is None else "top1"
    if metric in ("mae", "rmse"):
        if values.dtype.kind in "US":
            raise BadInput(f"y: metric {metric} needs numbers, and these are texts; use metric top1 for classes")
        return values.astype(np.float64), [], metric
    known = np.unique(values) if classes is None else np.asarray(classes)
    if values.dtype.kind in "US" or known.dtype.kind in "USO" or classes is not None:
        known = known.astype(values.dtype) if known.dtype.kind == "O" else known
        place = {one: number for number, one in enumerate(known.tolist())}
        unknown = [one for one in np.unique(values).tolist() if one not in place]
        if unknown:
            raise BadInput(f"y: the model has no class {unknown[0]!r}; its classes are {', '.join(map(str, place))}")
        return np.array([place[one] for one in values.tolist()], "i8"), [str(one) for one in known.tolist()], metric
    return values.astype(np.int64), [], metric


def arrays_of(x: Any, names: list[str]) -> Named:
    """The inputs by these names. Raises BadInput."""
    if isinstance(x, Mapping):
        missing = [name for name in names if name not in x]
        if missing:
            raise BadInput(f"x: the model's input {missing[0]!r} is missing; it takes {', '.join(names)}")
        return {name: np.asarray(x[name]) for name in names}
    if len(names) != 1:
        raise BadInput(f"x: the model takes {', '.join(names)}: pass a mapping of these names to arrays")
    return {names[0]: np.asarray(x)}


def by_name(x: Any) -> Named:
    if isinstance(x, Mapping):
        return {str(name): np.asarray(one) for name, one in x.items()}
    return columns_of(x) or {"x": np.asarray(x)}


def float32_of(x: Any) -> Array:
    """The samples as models compute. Raises BadInput if numbers are too large for it."""
    array = np.asarray(x)
    if array.dtype.kind == "O":
        array = array.astype("f8")
    try:
        return fit(array, TensorSpec(name="x", datatype="FP32", shape=list(array.shape[1:])), "x")
    except BadTensor as error:
        raise BadInput(str(error)) from error


def check_finite(inputs: Mapping[str, Array]) -> None:
    """Raises BadInput if an input holds NaN or an infinite value, which names the first one."""
    for name, array in inputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            at = int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))[0])
            raise BadInput(
                f"x: {name!r} holds NaN or infinite values, first in sample {at}: fill or drop them, or register with allow_nan=True "
                "(--allow-nan) if the model takes them"
            )


def columns_of(x: Any) -> Named | None:
    """A DataFrame's columns as inputs of their own, [n, 1] each; None: it is none. Numbers become 32-bit floats, as models compute."""
    if not hasattr(x, "columns") or not hasattr(x, "to_numpy"):
        return None
    found = {}
    for column in x.columns:
        values = x[column].to_numpy()
        values = float32_of(values) if values.dtype.kind in "biuf" else values.astype(str).astype(np.str_)
        found[str(column)] = values.reshape(-1, 1)
    return found


# -- samples and labels as a file


def numbered(y: Any, metric: str | None, names: Sequence[str], trial: Trial | None) -> tuple[Array, list[str], str]:
    """As `labels_of`, with what a trial showed. names: of the classes, in the order of the scores; empty: none are given. Raises BadInput."""
    texts = np.asarray(y).dtype.kind in "USO"
    given = np.array(names) if names and texts else None
    labels, classes, metric = labels_of(y, metric, given, trial is not None and trial.one_number)
    classes = classes or list(names)
    scores = 0 if trial is None or metric in ERRORS else trial.scores
    if classes and scores and scores != len(classes):
        raise BadInput(
            f"labels: the model gives {scores} scores, and there are {len(classes)} names of classes: give all names in the order of the "
            "scores, as labels=[...] or --labels a,b,c"
        )
    return labels, classes, metric


def validation_file(
    model: Path,
    validation: str | Path | tuple[Array | Named, Array],
    request: Register,
    directory: Path,
    say: Callable[[str], None] | None,
) -> tuple[Path, Register]:
    """The validation set as a file, and the request with the metric and the names of the classes.

    Labels that are texts become the numbers of their names, and a copy of the set holds them. Without names, the sorted texts are the
    names: so scikit-learn numbers them. Raises BadInput.
    """
    if isinstance(validation, tuple):
        path, arrays = directory / "validation.npz", _named(validation, request)
    else:
        path = Path(validation)
        try:
            with np.load(path, allow_pickle=False) as file:
                wanted = file.files if say is not None and path.stat().st_size <= MOST_TRIED else [request.labels_key]
                arrays = {name: file[name] for name in wanted}
                if arrays[request.labels_key].dtype.kind == "U":
                    arrays = {name: file[name] for name in file.files}
        except (ValueError, OSError, EOFError, zipfile.BadZipFile):
            return path, structs.replace(request, metric=request.metric or "top1")  # the worker says what is wrong
    given = arrays[request.labels_key]
    prefix = f"{request.inputs_key}."
    inputs = {name.removeprefix(prefix): one for name, one in arrays.items() if name != request.labels_key}
    if not request.allow_nan:
        check_finite(inputs)
    trial = try_file(model, inputs, request.inputs_key, request.format) if say is not None and inputs else None
    texts = given.dtype.kind in "US"
    labels, classes, metric = numbered(given, request.metric or None, request.labels, trial)
    request = structs.replace(request, metric=metric, labels=classes)
    if say is not None and inputs:
        note = f"{model.name}, {request.format}"
        for line in understood(note, inputs, labels, request.labels, metric, trial, model.stat().st_size, request.task):
            say(line)
    if texts or isinstance(validation, tuple):
        path = directory / path.name
        np.savez(path, allow_pickle=False, **{**arrays, request.labels_key: labels if texts else given})
    return path, request


def _named(validation: tuple[Array | Named, Array], request: Register) -> dict[str, Array]:
    """Inputs and labels as arrays of a file. Inputs by name are kept as `x.NAME`, so that none is taken for the labels."""
    given, labels = validation
    key = request.inputs_key
    named = {f"{key}.{name}": one for name, one in given.items()} if isinstance(given, dict) else {key: given}
    try:
        arrays = {name: np.asarray(one) for name, one in {**named, request.labels_key: labels}.items()}
    except (TypeError, ValueError) as error:
        raise BadInput(f"validation: must be inputs and labels, as arrays ({error})") from error
    if any(array.dtype.hasobject for array in arrays.values()):
        raise BadInput("validation: arrays of Python objects cannot be sent; make them numbers")
    return arrays
