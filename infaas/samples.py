"""Samples and their labels: by the model's inputs, as class numbers or targets, and as the file that is sent."""

import ast
import json
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from bus.fields import meant
from bus.functions import Alike, FunctionFailed, applied, made
from bus.messages.catalog import AGREEMENT, METRICS, MOST_SOURCE, TARGETS, Functions, TensorSpec
from bus.messages.public import Register, Requirements
from bus.tensors import BadTensor, datatype_of, fit
from infaas.errors import BadInput
from infaas.inputs import opened
from infaas.trial import Trial, trial_of, try_file, understood

Array = np.ndarray[Any, Any]
Named = dict[str, Array]
CHECKED = 1000  # samples that the file and the object are compared on
NO_GROUPS = (
    "metric: ndcg judges rankings: pass groups=, of each sample the list that it is ranked in (in a file the array `y.groups`), or use mae, "
    "rmse or r2 for single numbers"
)
MOST_TRIED = 2**29  # bytes of a validation set that is read here, to try the model on its first item


def labels_of(
    y: Any, metric: str | None, classes: Array | None = None, one_number: bool = False
) -> tuple[Array, list[str], str]:
    """Class numbers or targets, the names of the classes, and the metric. classes: in the order of the model's scores; None: sorted.

    Whole numbers and texts are classes, others are targets. one_number: the model gives one number an item; then more than two different
    whole numbers are targets as well. y None: there are no labels, and the metric is agreement with the model itself. A metric of the user's
    own gets y as it is; what is no array of numbers as JSON, item by item. Raises BadInput.
    """
    if y is None:
        if metric not in (None, AGREEMENT):
            raise BadInput(
                f"y: metric {metric} needs labels; pass them, or leave metric out: then agreement with the model is measured"
            )
        return np.zeros(0), [], AGREEMENT
    if metric == AGREEMENT:
        raise BadInput("y: metric agreement compares variants with the model itself; leave y out")
    if metric is not None and metric not in METRICS:
        return _own_labels(y), [], metric
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
    if metric in TARGETS or metric == "ndcg":
        if values.dtype.kind in "US":
            raise BadInput(
                f"y: metric {metric} needs numbers, and these are texts; use metric top1, or f1_macro, for classes"
            )
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


def _own_labels(y: Any) -> Array:
    try:
        values = np.asarray(y)
    except ValueError:  # items of different lengths
        values = np.empty(0, dtype=object)
    if values.dtype.kind in "biufS" and values.ndim:  # bytes: they were made so before
        return values
    try:
        return np.array([json.dumps(one, default=_listed) for one in y], np.bytes_)
    except TypeError as error:
        raise BadInput(f"y: a label is neither numbers nor what JSON can say ({error})") from error


def _listed(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


def own_metric(metric: str | None) -> tuple[str | None, bytes]:
    """A metric's name, and the file that has the function, where it is given as FILE.py:FUNCTION. Raises BadInput."""
    file, colon, name = (metric or "").rpartition(":")
    if not colon:
        if metric is not None and metric not in METRICS:
            hint = meant(metric, METRICS, 0.4)
            raise BadInput(f"metric: {metric!r} is none of {', '.join(METRICS)}, nor FILE.py:FUNCTION{hint}")
        return metric, b""
    if name in METRICS or name in Requirements.__struct_fields__ or not name.isidentifier():
        raise BadInput(
            f"metric: a function of your own cannot be called {name!r}, which means something else; rename it"
        )
    return name, _source("metric", file, name)[1].encode()


def functions_of(before: Any = None, after: Any = None) -> Functions | None:
    """A registration's functions before and after the model: each FILE.py:FUNCTION, MODULE:FUNCTION or the function itself. Raises BadInput."""
    named, sources = dict[str, str](), dict[str, str]()
    for field, given in (("before", before), ("after", after)):
        if not given:
            continue
        said = f"{given.__module__}:{given.__qualname__}" if callable(given) else str(given)
        file, _, name = said.rpartition(":")
        if not file or not name.isidentifier():
            raise BadInput(f"{field}: {said!r} names no function: give FILE.py:FUNCTION or MODULE:FUNCTION")
        path, source = _source(field, file, name)
        if sources.setdefault(path.name, source) != source:
            raise BadInput(f"{field}: {path} has the name of another file: rename it, or put both functions into one")
        named[field] = f"{path.name}:{name}"
    return Functions(before=named.get("before", ""), after=named.get("after", ""), sources=sources) if named else None


def _source(field: str, file: str, name: str) -> tuple[Path, str]:
    """A file of Python, or that of a module, and its text, which has a function of this name. Raises BadInput."""
    path = Path(file)
    if path.suffix != ".py":
        module = sys.modules.get(file)
        try:
            found = getattr(module, "__file__", None) or getattr(_found(file), "origin", None)
        except (ImportError, ValueError):
            found = None
        path = Path(found or f"{file.replace('.', '/')}.py")
    try:
        source = path.read_text("utf-8")
        there = {one.name for one in ast.parse(source).body if isinstance(one, ast.FunctionDef)}
    except (OSError, SyntaxError, ValueError) as error:
        raise BadInput(
            f"{field}: {file} cannot be read as Python: {getattr(error, 'strerror', None) or error}"
        ) from error
    if name not in there:
        raise BadInput(f"{field}: {file} has no function {name}, only {', '.join(sorted(there)) or 'none'}")
    if len(source) > MOST_SOURCE:
        raise BadInput(f"{field}: {file} has more than {MOST_SOURCE >> 10} kB: put the function into a file of its own")
    running = getattr(sys.modules["__main__"], "__file__", None)
    if running and path.resolve() == Path(running).resolve() and "__name__" not in source:
        raise BadInput(
            f'{field}: {file} is the script that runs now, which would run again: put its work under `if __name__ == "__main__":`, or '
            "the function into a file of its own"
        )
    return path, source


def _found(module: str) -> Any:
    """Where a module that is not imported is, also in the working directory, as for scripts and commands."""
    first = module.partition(".")[0]
    return find_spec(module) if find_spec(first) else PathFinder.find_spec(first, [str(Path.cwd())])


def made_here(functions: Functions, when: str, inputs: Mapping[str, Any]) -> list[Alike]:
    """What one of the functions makes of these items, here, where its owner trusts it. Raises BadInput."""
    said = getattr(functions, when)
    file, _, name = said.rpartition(":")
    try:
        return applied(made(name, functions.sources[file], said), said, inputs)
    except FunctionFailed as error:
        raise BadInput(f"{when}: {error}") from error


def raw_samples(x: Any) -> Named:
    """What `before` is given: arrays by input; bytes stay bytes, and paths become those of their files. Raises BadInput."""
    found = {}
    for name, given in x.items() if isinstance(x, Mapping) else (columns_of(x) or {"x": x}).items():
        values = opened(list(given) if isinstance(given, tuple) else given)
        if isinstance(values, list) and any(isinstance(one, bytes) and one.endswith(b"\0") for one in values):
            raise BadInput(f"x: an item of {name!r} ends in a zero byte, which numpy's files lose: append another byte")
        found[str(name)] = np.asarray(values)
        if found[str(name)].dtype.kind == "O":
            raise BadInput(f"x: {name!r} holds Python objects: give bytes, texts, numbers, or arrays of one shape")
    return found


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
    """The samples as models compute. Raises BadInput if numbers are too large for it, or are none."""
    array = np.asarray(x)
    try:
        array = array.astype("f8") if array.dtype.kind == "O" else array
        return fit(array, TensorSpec(name="x", datatype="FP32", shape=list(array.shape[1:])), "x")
    except BadTensor as error:
        raise BadInput(str(error)) from error
    except (TypeError, ValueError) as error:
        raise BadInput(f"x: the model takes numbers: {error}: give numbers, or NaN where there is none") from error


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


def check_groups(groups: Any, samples: Any, metric: str | None, model: Any) -> None:
    """Raises BadInput if a ranking has no lists, or not one for each sample. A ranker without lists ranks one."""
    if metric == "ndcg" and groups is None and not type(model).__name__.endswith("Ranker"):
        raise BadInput(NO_GROUPS)
    if groups is not None and hasattr(samples, "__len__") and len(groups) != len(samples):
        raise BadInput(
            f"groups: {len(groups)} for {len(samples)} samples: give each sample the number of its list; of sizes, that is "
            "numpy.repeat(range(len(sizes)), sizes)"
        )


def called(classes: list[str], names: Sequence[str]) -> list[str]:
    """The names of an estimator's classes: those that its owner gives for numbers, else its own. Raises BadInput."""
    numbers = all(one.lstrip("-").isdecimal() or one in ("False", "True") for one in classes)
    if not names or list(names) == classes:
        return classes
    if len(names) != len(classes) or not numbers:
        own = ", ".join(classes[:5]) + ", …" * (len(classes) > 5) if classes else "none, since it gives numbers"
        raise BadInput(
            f"labels: {len(names)} names for the classes of the model, which has {own}: give one for each number in this order, or leave labels out"
        )
    return list(names)


# -- samples and labels as a file


def numbered(y: Any, metric: str | None, names: Sequence[str], trial: Trial | None) -> tuple[Array, list[str], str]:
    """As `labels_of`, with what a trial showed. names: of the classes, in the order of the scores; empty: none are given. Raises BadInput."""
    if y is None or (metric is not None and metric not in METRICS):
        labels, classes, metric = labels_of(y, metric)
    else:
        texts = np.asarray(y).dtype.kind in "USO"
        given = np.array(names) if names and texts else None
        labels, classes, metric = labels_of(y, metric, given, trial is not None and trial.one_number)
    if names and metric in TARGETS:
        raise BadInput(f"labels: are names of classes, and {metric} is of numbers: leave labels out")
    classes = classes or list(names)
    scores = 0 if trial is None or metric in TARGETS else trial.scores
    if classes and scores and scores != len(classes):
        raise BadInput(
            f"labels: the model gives {scores} scores, and there are {len(classes)} names of classes: give all names in the order of the "
            "scores, as labels=[...] or --labels a,b,c"
        )
    return labels, classes, metric


def validation_file(
    model: Path,
    validation: str | Path | tuple[Array | Named, Array | None],
    request: Register,
    directory: Path,
    say: Callable[[str], None] | None,
    groups: Any = None,
) -> tuple[Path, Register]:
    """The validation set as a file, and the request with the metric and the names of the classes.

    Labels that are texts become the numbers of their names, and a copy of the set holds them. Without names, the sorted texts are the
    names: so scikit-learn numbers them. groups: of each sample, the list that it is ranked in. Raises BadInput.
    """
    held = isinstance(validation, (str, Path)) and _holds(Path(validation), f"{request.labels_key}.metric")
    name, source = (request.metric, b"") if held else own_metric(request.metric or None)
    request = structs.replace(request, metric=name or "")
    more = {} if groups is None else {f"{request.labels_key}.groups": np.asarray(groups)}
    if source:
        more[f"{request.labels_key}.metric"] = np.frombuffer(source, np.uint8)
    if isinstance(validation, tuple):
        path, arrays = directory / "validation.npz", _named(validation, request)
    else:
        path = Path(validation)
        try:
            with np.load(path, allow_pickle=False) as file:
                all_ = bool(more) or (say is not None and path.stat().st_size <= MOST_TRIED)
                wanted = file.files if all_ else [one for one in file.files if one == request.labels_key]
                arrays = {name: file[name] for name in wanted}
                if request.labels_key in arrays and arrays[request.labels_key].dtype.kind == "U":
                    arrays = {name: file[name] for name in file.files}
        except (ValueError, OSError, EOFError, zipfile.BadZipFile):
            return path, structs.replace(request, metric=request.metric or "top1")  # the worker says what is wrong
    key = request.labels_key
    about = (key, f"{key}.groups", f"{key}.metric")
    given = None if request.metric == AGREEMENT else arrays.get(key)
    for name, array in arrays.items():
        if (not array.ndim or not len(array)) and not (name == key and given is None):
            what = "no items" if array.ndim else "one value, without an axis of items"
            raise BadInput(f"validation: array {name!r} holds {what}: the first axis of each counts items, at least 20")
    prefix = f"{request.inputs_key}."
    inputs = {name.removeprefix(prefix): one for name, one in arrays.items() if name not in about}
    if not request.allow_nan:
        check_finite(inputs)
    trial = _trial(model, inputs, request) if say is not None and inputs else None
    texts = given is not None and given.dtype.kind in "US"
    if given is not None and texts and _says_class(request):
        labels, classes, metric = given.astype(str), list[str](), request.metric or "top1"
    else:
        labels, classes, metric = numbered(given, request.metric or None, request.labels, trial)
    if metric == "ndcg" and groups is None and not _holds(path, f"{key}.groups"):
        raise BadInput(NO_GROUPS)
    if groups is not None and metric in METRICS and metric != "ndcg":
        raise BadInput(f"groups: {metric} judges single answers: leave groups out, or rank by metric ndcg")
    request = structs.replace(request, metric=metric, labels=classes)
    if say is not None and inputs:
        note = f"{model.name}, {request.format}"
        for line in understood(note, inputs, labels, request.labels, metric, trial, model.stat().st_size, request.task):
            say(line)
    texts = texts and labels is not given  # as a function of the owner takes them
    if texts or more or isinstance(validation, tuple):
        path = directory / path.name
        kept = {} if given is None else {request.labels_key: labels if texts else given}
        np.savez(path, allow_pickle=False, **{**arrays, **kept, **more})
    return path, request


def _holds(path: Path, array: str) -> bool:
    """Whether a validation set has this array, as the function of a metric that a set was sent with."""
    with suppress(ValueError, OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as file:
        return f"{array}.npy" in file.namelist()
    return False


def _says_class(request: Register) -> bool:
    """Whether the model's owner has a function say the classes' names, which labels in words are then compared with."""
    after = request.functions is not None and request.functions.after
    return bool(after) and not request.labels and request.metric in ("", "top1", "f1_macro")


def _trial(model: Path, inputs: Named, request: Register) -> Trial | None:
    """The first sample's way through the functions and the model. Raises BadInput."""
    functions = request.functions
    first = {name: one[:1] for name, one in inputs.items()}
    inside = made_here(functions, "before", first)[0].arrays if functions and functions.before else inputs
    trial = try_file(model, inside, request.inputs_key, request.format)
    if trial is None or trial.failed or functions is None:
        return trial
    specs = trial.inputs
    if functions.before:
        specs = [TensorSpec(name=k, datatype=datatype_of(a), shape=list(a.shape[1:]), binary=a.dtype.kind == "S") for k, a in first.items()]  # fmt: skip
    if not functions.after:
        return structs.replace(trial, inputs=specs)
    raw = {spec.name: trial.answers[spec.name].reshape(1, *spec.shape) for spec in trial.outputs}
    return trial_of(specs, None, made_here(functions, "after", raw)[0].arrays)


def _named(validation: tuple[Array | Named, Array | None], request: Register) -> dict[str, Array]:
    """Inputs and labels as arrays of a file. Inputs by name are kept as `x.NAME`, so that none is taken for the labels."""
    given, labels = validation
    key = request.inputs_key
    named = {f"{key}.{name}": one for name, one in given.items()} if isinstance(given, dict) else {key: given}
    try:
        both = named if labels is None else {**named, request.labels_key: labels}
        arrays = {name: np.asarray(one) for name, one in both.items()}
    except (TypeError, ValueError) as error:
        raise BadInput(f"validation: must be inputs and labels, as arrays ({error})") from error
    if any(array.dtype.hasobject for array in arrays.values()):
        raise BadInput("validation: arrays of Python objects cannot be sent; make them numbers")
    return arrays
