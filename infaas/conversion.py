"""Trained models as Python objects, made into files that can be registered. Runs in the caller's process: no service ever unpickles anything.

scikit-learn needs the extra `sklearn`, XGBoost and LightGBM the extra `boosting`, torch the extra `torch`. What was converted is asked the
caller's own samples, and must answer as the object does.
"""

import re
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from bus.messages.catalog import TensorSpec
from bus.messages.public import Register
from bus.tensors import BadTensor, fit
from infaas.errors import BadInput
from infaas.trial import Trial, try_file, understood

if TYPE_CHECKING:
    from numpy import ndarray

    Array = ndarray[Any, Any]
    Named = dict[str, Array]

CHECKED = 1000  # samples that the file and the object are compared on
LEAST_AGREEMENT = 0.99
MOST_TRIED = 2**29  # bytes of a validation set that is read here, to try the model on its first item
SERVE_IT = "serve the object itself with `infaas container` (docs/containers.md)"


class Converted(Struct, frozen=True, kw_only=True):
    """A model's file, and what its samples are called.

    inputs: by the model's input names, [n, ...] each. labels: class numbers, or targets. classes: names of the classes, in the order of
    the scores; empty: there are none. note: what was done, for people. trial: of the file, on the first sample; None: it was not tried.
    """

    path: Path
    inputs: "Named"
    labels: "Array"
    metric: str = ""
    classes: list[str] = []
    note: str = ""
    trial: Trial | None = None


def convert(
    model: Any, x: Any, y: Any, directory: Path, metric: str | None = None, *, allow_nan: bool = False
) -> Converted:
    """Convert a model to a file in `directory`, and try it on the first sample.

    model: a scikit-learn, XGBoost, LightGBM, torch or Keras object, an onnx.ModelProto, or a path of a file. x: an array, a mapping of input
    names to arrays, or a DataFrame; y: labels or targets. metric: None: labels and outputs tell it. Raises BadInput.
    """
    kind = _FILE if isinstance(model, (str, Path)) else kind_of(model)
    if kind is None:
        raise BadInput(
            f"model: a {type(model).__module__}.{type(model).__name__} cannot be converted; pass a scikit-learn, XGBoost, LightGBM or "
            f"torch model, an ONNX model or a file, or {SERVE_IT}"
        )
    if not allow_nan:
        check_finite(_by_name(x))
    found = _KINDS[kind](model, x, y, directory, metric)
    trial = try_file(found.path, found.inputs)
    if found.metric:
        return structs.replace(found, trial=trial)
    labels, classes, metric = labels_of(found.labels, metric, None, trial is not None and trial.one_number)
    return structs.replace(found, labels=labels, classes=classes, metric=metric, trial=trial)


def kind_of(model: Any) -> str | None:
    """The library that an object belongs to, by the modules of its classes. None: no known one."""
    for one in type(model).__mro__:
        package = one.__module__.partition(".")[0]
        if package in _KINDS:
            return package
    return None


def name_of(model: Any) -> str:
    """The name that a model gets if its owner gives none: that of its class or file, as names are written."""
    if isinstance(model, (str, Path)):
        text = Path(model).stem
    elif hasattr(model, "steps") and model.steps:
        text = type(model.steps[-1][1]).__name__
    else:
        text = type(model).__name__
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_").lower()[:64] or "model"


# -- labels and inputs


def labels_of(
    y: Any, metric: str | None, classes: "Array | None" = None, one_number: bool = False
) -> "tuple[Array, list[str], str]":
    """Class numbers or targets, the names of the classes, and the metric. classes: in the order of the model's scores; None: sorted.

    Whole numbers and texts are classes, others are targets. one_number: the model gives one number an item; then more than two different
    whole numbers are targets as well. Raises BadInput.
    """
    import numpy as np  # noqa: PLC0415  (the client starts without it)

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


def _arrays(x: Any, names: "list[str]") -> "Named":
    """The inputs by these names. Raises BadInput."""
    import numpy as np  # noqa: PLC0415

    if isinstance(x, Mapping):
        missing = [name for name in names if name not in x]
        if missing:
            raise BadInput(f"x: the model's input {missing[0]!r} is missing; it takes {', '.join(names)}")
        return {name: np.asarray(x[name]) for name in names}
    if len(names) != 1:
        raise BadInput(f"x: the model takes {', '.join(names)}: pass a mapping of these names to arrays")
    return {names[0]: np.asarray(x)}


def _by_name(x: Any) -> "Named":
    import numpy as np  # noqa: PLC0415

    if isinstance(x, Mapping):
        return {str(name): np.asarray(one) for name, one in x.items()}
    return _columns(x) or {"x": np.asarray(x)}


def _float32(x: Any) -> "Array":
    """The samples as models compute. Raises BadInput if numbers are too large for it."""
    import numpy as np  # noqa: PLC0415

    array = np.asarray(x)
    if array.dtype.kind == "O":
        array = array.astype("f8")
    try:
        return fit(array, TensorSpec(name="x", datatype="FP32", shape=list(array.shape[1:])), "x")
    except BadTensor as error:
        raise BadInput(str(error)) from error


def check_finite(inputs: "Mapping[str, Array]") -> None:
    """Raises BadInput if an input holds NaN or an infinite value, which names the first one."""
    import numpy as np  # noqa: PLC0415

    for name, array in inputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            at = int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))[0])
            raise BadInput(
                f"x: {name!r} holds NaN or infinite values, first in sample {at}: fill or drop them, or register with allow_nan=True "
                "(--allow-nan) if the model takes them"
            )


def _columns(x: Any) -> "Named | None":
    """A DataFrame's columns as inputs of their own, [n, 1] each; None: it is none. Numbers become 32-bit floats, as models compute."""
    if not hasattr(x, "columns") or not hasattr(x, "to_numpy"):
        return None
    import numpy as np  # noqa: PLC0415

    found = {}
    for column in x.columns:
        values = x[column].to_numpy()
        values = _float32(values) if values.dtype.kind in "biuf" else values.astype(str).astype(np.str_)
        found[str(column)] = values.reshape(-1, 1)
    return found


# -- one function for each kind


def _sklearn(model: Any, x: Any, y: Any, directory: Path, metric: str | None) -> Converted:
    _need("skl2onnx", "sklearn")
    from skl2onnx import to_onnx  # noqa: PLC0415
    from sklearn.base import is_classifier, is_clusterer, is_regressor  # noqa: PLC0415

    if not (is_classifier(model) or is_regressor(model)) or is_clusterer(model):
        raise BadInput(f"model: {type(model).__name__} is neither a classifier nor a regressor; {SERVE_IT}")
    columns = _columns(x)
    inputs = columns if columns is not None else {"x": _float32(x)}
    initial = [(name, _onnx_type(array)) for name, array in inputs.items()]
    classifier = is_classifier(model)

    def made(options: Any) -> Any:
        return _portable(to_onnx(model, initial_types=initial, options=options))

    try:
        proto = _first(made, [{id(model): {"zipmap": False}}, None] if classifier else [None])
    except Exception as error:
        raise BadInput(f"skl2onnx cannot convert this {type(model).__name__} ({_short(error)}); {SERVE_IT}") from error
    return _scored(model, proto, x, inputs, y, directory, metric, classifier, "scikit-learn")


def _portable(proto: Any) -> Any:
    """Texts are made lower case by rules that every Linux machine has; ONNX's default, those of American English, many lack."""
    import onnx  # noqa: PLC0415

    for node in proto.graph.node:
        if node.op_type == "StringNormalizer" and not any(one.name == "locale" for one in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("locale", "C.UTF-8"))
    return proto


def _boosting(model: Any, x: Any, y: Any, directory: Path, metric: str | None) -> Converted:
    _need("onnxmltools", "boosting")
    import onnxmltools  # noqa: PLC0415
    from onnxmltools.convert.common.data_types import FloatTensorType  # noqa: PLC0415

    package = str(kind_of(model))
    if not hasattr(model, "predict") or not hasattr(model, "fit"):
        raise BadInput(
            f"model: pass {package}'s scikit-learn interface (XGBClassifier, LGBMRegressor, ...), or {SERVE_IT}"
        )
    array = _float32(x)
    if array.ndim != 2:
        raise BadInput(f"x: must have the shape [samples, features], not {list(array.shape)}")
    inputs = {"x": array}
    classifier = hasattr(model, "predict_proba")
    try:
        types = [("x", FloatTensorType([None, array.shape[1]]))]
        if package == "xgboost":
            proto = onnxmltools.convert_xgboost(model, initial_types=types)
        else:
            proto = onnxmltools.convert_lightgbm(model, initial_types=types, zipmap=False)
    except Exception as error:
        raise BadInput(
            f"onnxmltools cannot convert this {type(model).__name__} ({_short(error)}); {SERVE_IT}"
        ) from error
    return _scored(model, proto, array, inputs, y, directory, metric, classifier, package)


def _torch(model: Any, x: Any, y: Any, directory: Path, _metric: str | None) -> Converted:
    """A .pt2 program: the registrar makes variants in torch and, through ONNX, in onnxruntime of it, and measures which is faster."""
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    names = [str(name) for name in _forward_names(model)]
    inputs = _arrays(x, names if isinstance(x, Mapping) else names[:1])
    inputs = {name: _float32(array) if array.dtype == np.float64 else array for name, array in inputs.items()}
    tensors = tuple(torch.from_numpy(np.ascontiguousarray(array[:2])) for array in inputs.values())
    batch = torch.export.Dim("batch", min=1, max=1024)
    model = model.eval().cpu()
    try:
        program = torch.export.export(model, tensors, dynamic_shapes=tuple({0: batch} for _ in tensors))
        path = directory / "model.pt2"
        torch.export.save(program, path)
    except Exception as error:
        raise BadInput(
            f"torch.export cannot convert this {type(model).__name__} ({_short(error)}): its batch axis must be the first one of each "
            f"input and may have any length; else {SERVE_IT}"
        ) from error
    return Converted(path=path, inputs=inputs, labels=y, note="exported by torch.export")


def _forward_names(model: Any) -> list[str]:
    import inspect  # noqa: PLC0415

    return [
        name
        for name, one in inspect.signature(model.forward).parameters.items()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ] or ["x"]


def _proto(model: Any, x: Any, y: Any, directory: Path, _metric: str | None) -> Converted:
    path = directory / "model.onnx"
    path.write_bytes(model.SerializeToString())
    names = [one.name for one in model.graph.input if one.name not in {w.name for w in model.graph.initializer}]
    return Converted(path=path, inputs=_arrays(x, names), labels=y, note="an ONNX model")


def _file(model: str | Path, x: Any, y: Any, directory: Path, _metric: str | None) -> Converted:
    path = whole_onnx(Path(model), directory)
    names = [str(name) for name in x] if isinstance(x, Mapping) else ["x"]
    return Converted(path=path, inputs=_arrays(x, names), labels=y, note=f"{path.name} as it is")


def whole_onnx(path: Path, directory: Path) -> Path:
    """The file itself; of an ONNX model whose weights are in files beside it, a copy in `directory` that holds them. Raises BadInput."""
    if path.suffix.lower() != ".onnx" or not _has_external(path):
        return path
    _need("onnx", "sklearn")
    import onnx  # noqa: PLC0415

    try:
        model = onnx.load(str(path))  # reads the files beside it
        whole = directory / path.name
        onnx.save(model, str(whole), save_as_external_data=False)
    except Exception as error:
        raise BadInput(
            f"{path.name} keeps its weights in files beside it, which cannot be put into one file ({_short(error)}): are they all "
            "there? Models above 2 GB cannot be registered"
        ) from error
    return whole


def _has_external(path: Path) -> bool:
    """Whether the file names files beside it. torch.onnx.export writes them by default."""
    with suppress(OSError):
        return any(path.parent.glob(f"{path.name}.*")) or any(path.parent.glob(f"{path.stem}*.data"))
    return False


_FILE = "file"
_KINDS: dict[str, Callable[[Any, Any, Any, Path, str | None], Converted]] = {
    "sklearn": _sklearn,
    "xgboost": _boosting,
    "lightgbm": _boosting,
    "torch": _torch,
    "onnx": _proto,
    _FILE: _file,
}


# -- shared by what is converted to ONNX


def _scored(
    model: Any,
    proto: Any,
    x: Any,
    inputs: "Named",
    y: Any,
    directory: Path,
    metric: str | None,
    classifier: bool,
    whose: str,
) -> Converted:
    """The file, with the scores as its only output if it is a classifier; checked against the object."""
    import numpy as np  # noqa: PLC0415
    import onnxruntime  # noqa: PLC0415

    classes = np.asarray(model.classes_) if classifier else None
    labels, names, metric = labels_of(y, metric if classifier else metric or "mae", classes)
    expected = _answers(model, _head(x))
    some = {name: array[:CHECKED] for name, array in inputs.items()}
    path = directory / "model.onnx"
    if classes is not None:
        scores = [one for one in proto.graph.output if one.type.tensor_type.elem_type == 1]
        if not scores:
            raise BadInput(f"model: this {type(model).__name__} gives no scores of its classes; {SERVE_IT}")
        kept = scores[-1]
        del proto.graph.output[:]
        proto.graph.output.append(kept)
    path.write_bytes(proto.SerializeToString())
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    answer = session.run(
        None, {name: array.astype(object) if array.dtype.kind == "U" else array for name, array in some.items()}
    )[0]
    if classes is not None:
        if answer.ndim != 2 or answer.shape[1] != len(classes):
            raise BadInput(f"model: this {type(model).__name__} has no score for each class; {SERVE_IT}")
        agreement = float((classes[answer.argmax(axis=1)] == expected).mean())
    else:
        spread = float(np.std(expected)) or 1.0
        agreement = float((np.abs(answer.reshape(expected.shape) - expected) <= 0.01 * spread).mean())
    if agreement < LEAST_AGREEMENT:
        raise BadInput(
            f"model: the converted {type(model).__name__} answers {agreement:.1%} of {len(expected)} samples as the object does, which is "
            f"too few; {SERVE_IT}"
        )
    note = f"converted from {whose}; {agreement:.1%} of {len(expected)} samples answered as by the object"
    return Converted(path=path, inputs=inputs, labels=labels, metric=metric, classes=names, note=note)


def _answers(model: Any, x: Any) -> "Array":
    """What the object answers: the class with the highest probability where it gives any, which is not what every `predict` gives."""
    import numpy as np  # noqa: PLC0415

    with suppress(AttributeError):  # scikit-learn hides the method where the estimator was not fitted for it
        likeliest = np.asarray(model.predict_proba(x)).argmax(axis=1)
        found: Array = np.asarray(model.classes_)[likeliest]
        return found
    return np.asarray(model.predict(x))


def _head(x: Any) -> Any:
    return x.iloc[:CHECKED] if hasattr(x, "iloc") else x[:CHECKED]


def _onnx_type(array: "Array") -> Any:
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType  # noqa: PLC0415

    kind = StringTensorType if array.dtype.kind == "U" else FloatTensorType
    return kind([None, *array.shape[1:]])


def _first(make: Callable[[Any], Any], options: list[Any]) -> Any:
    """The first of these that works: not every estimator knows each option."""
    for one in options[:-1]:
        with suppress(NameError):  # skl2onnx's error for an option that the estimator does not have
            return make(one)
    return make(options[-1])


def _need(package: str, extra: str) -> None:
    from importlib.util import find_spec  # noqa: PLC0415

    if find_spec(package) is None:
        raise BadInput(f"model: {package} is needed to convert it: pip install 'infaas[{extra}]'")


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


# -- samples and labels as a file


def validation_file(
    model: Path,
    validation: "str | Path | tuple[Array | Named, Array]",
    request: Register,
    directory: Path,
    say: Callable[[str], None] | None,
) -> tuple[Path, Register]:
    """The validation set as a file, and the request with the metric and the names of the classes.

    Labels that are texts become the numbers of their names, and a copy of the set holds them. Without names, the sorted texts are the
    names: so scikit-learn numbers them. Raises BadInput.
    """
    import numpy as np  # noqa: PLC0415  (a query needs none)

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
    names = np.array(request.labels) if request.labels and texts else None
    labels, classes, metric = labels_of(given, request.metric or None, names, trial is not None and trial.one_number)
    request = structs.replace(request, metric=metric, labels=classes or request.labels)
    if say is not None and inputs:
        note = f"{model.name}, {request.format}"
        for line in understood(note, inputs, labels, request.labels, metric, trial, model.stat().st_size, request.task):
            say(line)
    if texts or isinstance(validation, tuple):
        path = directory / path.name
        np.savez(path, allow_pickle=False, **{**arrays, request.labels_key: labels if texts else given})
    return path, request


def _named(validation: "tuple[Array | Named, Array]", request: Register) -> "dict[str, Array]":
    """Inputs and labels as arrays of a file. Inputs by name are kept as `x.NAME`, so that none is taken for the labels."""
    import numpy as np  # noqa: PLC0415

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
