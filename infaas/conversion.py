"""Trained models as Python objects, made into files that can be registered. Runs in the caller's process: no service ever unpickles anything.

scikit-learn needs the extra `sklearn`, XGBoost and LightGBM the extra `boosting`, torch the extra `torch`. What was converted is asked the
caller's own samples, and must answer as the object does.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, structs

from bus.messages.catalog import TARGETS
from infaas.errors import BadInput
from infaas.folders import import_of, is_mlflow, mlflow_model, short_of, whole_onnx
from infaas.samples import (
    CHECKED,
    arrays_of,
    by_name,
    called,
    check_finite,
    check_groups,
    columns_of,
    float32_of,
    labels_of,
    numbered,
)
from infaas.tables import framed
from infaas.trial import Trial, answers_of, try_file

Array = np.ndarray[Any, Any]
Named = dict[str, Array]
LEAST_AGREEMENT = 0.99
OLDER = {"": 17, "ai.onnx.ml": 3}
_OF_CLASSES = ("top1", "top5", "f1_macro", "roc_auc", "average_precision", "log_loss")
SERVE_IT = "serve the object itself with `infaas container` (docs/containers.md)"


class Converted(Struct, frozen=True, kw_only=True):
    """A model's file, and what its samples are called.

    inputs: by the model's input names, [n, ...] each. labels: class numbers, or targets. classes: names of the classes, in the order of
    the scores; empty: there are none. columns: of a table that is the only input. note: what was done, for people. trial: of the file, on the first sample; None: it was not tried.
    """

    path: Path
    inputs: Named
    labels: Array
    metric: str = ""
    classes: list[str] = []
    columns: list[str] = []
    note: str = ""
    trial: Trial | None = None


def convert(
    model: Any,
    x: Any,
    y: Any,
    directory: Path,
    metric: str | None = None,
    *,
    names: Sequence[str] = (),
    allow_nan: bool = False,
    dynamic_shapes: Mapping[str, Mapping[int, Any]] | None = None,
    apart: bool = False,
) -> Converted:
    """Convert a model to a file in `directory`, and try it on the first sample.

    model: a scikit-learn, XGBoost, LightGBM, torch or Keras object, an onnx.ModelProto, or a path of a file or of a folder of MLflow. x: an array, a mapping
    of input names to arrays, a DataFrame, rows (a list of maps) or columns (a map of lists), a Series or texts; y: labels or targets; None:
    there are no labels. metric: None: labels and outputs tell it. allow_nan: samples may hold NaN. names: of the classes, in the order of the
    scores; an estimator knows its own. dynamic_shapes: of a torch module, the axes of any length by input, besides the first: a
    torch.export.Dim, or a name, which axes of one length share. apart: the columns of a table stay inputs of their own, as a function gives
    them. Raises BadInput.
    """
    if isinstance(model, (str, Path)) and is_mlflow(model):
        model = mlflow_model(Path(model))
    kind = _FILE if isinstance(model, (str, Path)) else kind_of(model)
    if kind is None:
        raise BadInput(
            f"model: a {f'{type(model).__module__}.'.removeprefix('builtins.')}{type(model).__name__} cannot be converted; pass a scikit-learn, XGBoost, LightGBM, "
            f"torch or Keras model, an ONNX model or a file, or {SERVE_IT}"
        )
    if kind in ("sklearn", "xgboost", "lightgbm") or (isinstance(x, list) and x and isinstance(x[0], Mapping)):
        x = framed(x)
    if not allow_nan:
        check_finite(by_name(x))
    if dynamic_shapes and kind != "torch":
        raise BadInput(
            "dynamic_shapes: only torch modules are told which axes have any length; other files say it themselves"
        )
    if kind == "torch":
        found = _torch(model, x, y, directory, dynamic_shapes or {})
    else:
        found = _KINDS[kind](model, x, y, directory, metric)
    if apart and hasattr(x, "columns") and list(found.inputs) == ["x"]:
        found = structs.replace(found, inputs=_put_together(found.path, columns_of(x) or {}))
    elif hasattr(x, "columns") and len(found.inputs) == 1:
        found = structs.replace(found, columns=[str(name) for name in x.columns])
    trial = try_file(found.path, found.inputs)
    if found.metric:
        return structs.replace(found, trial=trial, classes=called(found.classes, names))
    labels, classes, metric = numbered(found.labels, metric, names, trial)
    return structs.replace(found, labels=labels, classes=classes, metric=metric, trial=trial)


def check_given(model: Any, x: Any, y: Any, metric: str | None, options: Mapping[str, Any]) -> None:
    """What can be told before a conversion: raises BadInput for a model that is not fitted, too few or many labels, and words that do not fit."""
    if isinstance(model, (str, Path)) and "://" not in str(model) and not Path(model).exists():
        raise BadInput(f"model: there is no file {model}: give its path, or the model itself")
    if isinstance(model, type):
        raise BadInput(f"model: {model.__name__} is a class: make one, {model.__name__}(...), and fit it")
    samples = next(iter(x.values())) if isinstance(x, Mapping) and x else x
    if isinstance(samples, (str, Path)):
        raise BadInput(
            f"x: {str(samples)[:40]!r} is a text: give the samples themselves, as of pandas.read_csv or numpy.load"
        )
    if hasattr(samples, "__len__") and len(samples) == 0:
        raise BadInput("x: there are no samples: give at least one, better hundreds")
    if hasattr(samples, "__len__") and hasattr(y, "__len__") and len(samples) != len(y):
        raise BadInput(f"y: {len(y)} labels for {len(samples)} samples: give each sample one")
    if hasattr(model, "fit") and kind_of(model) in ("sklearn", "xgboost", "lightgbm"):
        from sklearn.base import is_classifier, is_regressor  # noqa: PLC0415
        from sklearn.exceptions import NotFittedError  # noqa: PLC0415
        from sklearn.utils.validation import check_is_fitted  # noqa: PLC0415

        try:
            check_is_fitted(model)
        except NotFittedError:
            raise BadInput(f"model: this {type(model).__name__} is not fitted: call its fit(x, y) first") from None
        number = is_regressor(model)
        if metric in (_OF_CLASSES if number else (*TARGETS, "ndcg") if is_classifier(model) else ()):
            gives, right = ("a number", ("mae", "rmse", "r2")) if number else ("classes", _OF_CLASSES)
            raise BadInput(
                f"metric: {metric} is not for this {type(model).__name__}, which gives {gives}: use one of {', '.join(right)}, or leave it out"
            )
        if metric == "top5" and len(getattr(model, "classes_", range(6))) <= 5:
            raise BadInput(
                f"metric: top5 needs more than five classes, and this model has {len(model.classes_)}: use top1"
            )
    check_groups(options.get("groups"), samples, metric, model)
    classes = metric in ("top1", "top5") or (metric is None and hasattr(model, "predict_proba"))
    if classes and (word := next((name for name in ("unit", "target") if options.get(name)), None)):
        raise BadInput(f"{word}: is of a regressor's number, and this model gives classes: leave it out")


def kind_of(model: Any) -> str | None:
    """The library that an object belongs to, by the modules of its classes. None: no known one."""
    for one in type(model).__mro__:
        package = one.__module__.partition(".")[0]
        if package in _KINDS or package == "torch":
            return package
    return None


# -- one function for each kind


def _sklearn(model: Any, x: Any, y: Any, directory: Path, metric: str | None) -> Converted:
    import_of("skl2onnx", "sklearn", "convert")
    from skl2onnx import convert_sklearn, to_onnx  # noqa: PLC0415
    from sklearn.base import is_classifier, is_regressor  # noqa: PLC0415
    from sklearn.ensemble import IsolationForest  # noqa: PLC0415

    if not hasattr(model, "predict") and not hasattr(model, "transform"):
        raise BadInput(f"model: {type(model).__name__} neither predicts nor transforms; {SERVE_IT}")
    if y is not None and metric is None and not (is_classifier(model) or is_regressor(model)):
        raise BadInput(
            f"y: {type(model).__name__} is neither a classifier nor a regressor: leave y out, and agreement with the model itself is "
            "measured, or name a metric"
        )
    columns = columns_of(x)
    if columns is not None:  # numbers are one input, whichever way the estimator takes them
        texts = any(one.dtype.kind == "U" for one in columns.values())
        inputs = columns if texts else {"x": np.hstack(list(columns.values()))}
    else:
        array = np.asarray(x)
        texts = array.dtype.kind == "U" or any(isinstance(one, str) for one in array.reshape(-1)[:1])  # for vectorizers
        inputs = {"x": array.astype(np.str_).reshape(len(array), -1) if texts else float32_of(x)}
    classifier = is_classifier(model)

    def made(options: Any, given: Named = inputs) -> Any:
        initial = [(name, _onnx_type(array)) for name, array in given.items()]
        try:
            own = {IsolationForest: _isolation_forest}
            return _portable(convert_sklearn(model, None, initial, options=options, custom_conversion_functions=own))
        except RuntimeError as error:  # some converters know only an older set of operators
            if "ai.onnx.ml" not in str(error):
                raise
            return _portable(to_onnx(model, initial_types=initial, options=options, target_opset=OLDER))

    tries: list[Any] = [{id(model): {"zipmap": False}}, None] if classifier else [None]
    try:
        try:
            proto = _first(made, tries)
        except Exception:
            if columns is None or inputs is columns:
                raise
            proto = _taken_apart(_first(lambda options: made(options, columns), tries))  # a ColumnTransformer, by names
    except Exception as error:
        raise BadInput(
            f"skl2onnx cannot convert this {type(model).__name__} ({short_of(error)}); {SERVE_IT}"
        ) from error
    _named_again(proto.graph, list(inputs))
    return _scored(model, proto, x, inputs, y, directory, metric, classifier, "scikit-learn")


def _taken_apart(proto: Any) -> Any:
    """The model of columns, with the table as its only input `x`."""
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415

    graph, count = proto.graph, len(proto.graph.input)
    _named_again(graph, names := [f"x.{number}" for number in range(count)])
    for number, name in enumerate(names):
        graph.initializer.append(numpy_helper.from_array(np.array([number]), f"{name}.at"))
        graph.node.insert(number, helper.make_node("Gather", ["x", f"{name}.at"], [name], axis=1))
    del graph.input[1:]
    graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, count]))
    return proto


def _put_together(path: Path, columns: Named) -> Named:
    """Give the model in this file, whose only input is the table `x`, an input for each column. Returns the columns."""
    import onnx  # noqa: PLC0415

    model, helper, kind = onnx.load(str(path)), onnx.helper, onnx.TensorProto.FLOAT
    _named_again(model.graph, ["x.all"])
    del model.graph.input[:]
    model.graph.input.extend(helper.make_tensor_value_info(name, kind, [None, 1]) for name in columns)
    model.graph.node.insert(0, helper.make_node("Concat", list(columns), ["x.all"], axis=1))
    onnx.save(model, str(path))
    return columns


def _isolation_forest(scope: Any, operator: Any, container: Any) -> None:
    """One ensemble of trees, whose leaves weigh as scikit-learn counts them. skl2onnx makes 30 nodes a tree, which take seconds to load."""
    from skl2onnx.algebra import onnx_ops as ops  # noqa: PLC0415
    from skl2onnx.common import tree_ensemble  # noqa: PLC0415

    def length(samples: Any) -> Any:
        """Of the path that a search for one of so many takes on average (Liu et al., Isolation Forest, 2008, equation 1)."""
        n = np.maximum(samples, 2.0)
        return np.where(samples > 2, 2.0 * (np.log(n - 1.0) + np.euler_gamma - (n - 1.0) / n), samples == 2)

    model = operator.raw_operator
    label, score = operator.outputs
    scale = -len(model.estimators_) * float(length(np.float64(model.max_samples_))) or -1.0
    forest = tree_ensemble.get_default_tree_regressor_attribute_pairs()
    for number, (one, features) in enumerate(zip(model.estimators_, model.estimators_features_, strict=True)):
        tree, nodes, leaves = one.tree_, len(forest["nodes_featureids"]), len(forest["target_weights"])
        tree_ensemble.add_tree_to_attribute_pairs(forest, False, tree, number, 1.0, 0, False, True, dtype=np.float32)
        lengths = (tree.compute_node_depths() + length(tree.n_node_samples) - 1.0) / scale
        forest["target_weights"][leaves:] = lengths[forest["target_nodeids"][leaves:]].tolist()
        forest["nodes_featureids"][nodes:] = features[forest["nodes_featureids"][nodes:]].tolist()
    at = {"op_version": container.target_opset}
    grown = ops.OnnxTreeEnsembleRegressor_1(operator.inputs[0], op_version=1, **(forest | {"n_targets": 1}))
    power = ops.OnnxPow(np.array([2], np.float32), grown, **at)
    found = ops.OnnxSub(np.array([-model.offset_], np.float32), power, **at, output_names=score.full_name)
    inside = ops.OnnxCast(ops.OnnxLess(found, np.array([0], np.float32), **at), to=7, **at)  # int64
    twice = ops.OnnxMul(inside, np.array([2], np.int64), **at)
    ops.OnnxSub(np.array([1], np.int64), twice, **at, output_names=label.full_name).add_to(scope, container)


def _named_again(graph: Any, names: list[str]) -> None:
    """Give the inputs the names of their columns: the converter replaces what is no letter, as in `od280/od315`."""
    for given, name in zip(graph.input, names, strict=True):
        for node in graph.node:
            node.input[:] = [name if one == given.name else one for one in node.input]
        given.name = name


def _portable(proto: Any) -> Any:
    """Texts are made lower case by rules that every Linux machine has; ONNX's default, those of American English, many lack."""
    import onnx  # noqa: PLC0415

    for node in proto.graph.node:
        if node.op_type == "StringNormalizer" and not any(one.name == "locale" for one in node.attribute):
            node.attribute.append(onnx.helper.make_attribute("locale", "C.UTF-8"))
    return proto


def _boosting(model: Any, x: Any, y: Any, directory: Path, metric: str | None) -> Converted:
    import_of("onnxmltools", "boosting", "convert")
    import onnxmltools  # noqa: PLC0415
    from onnxmltools.convert.common.data_types import FloatTensorType  # noqa: PLC0415

    package = str(kind_of(model))
    if not hasattr(model, "predict") or not hasattr(model, "fit"):
        raise BadInput(
            f"model: pass {package}'s scikit-learn interface (XGBClassifier, LGBMRegressor, ...), or {SERVE_IT}"
        )
    array = float32_of(x)
    if array.ndim != 2:
        raise BadInput(f"x: must have the shape [samples, features], not {list(array.shape)}")
    inputs = {"x": array}
    classifier = hasattr(model, "predict_proba")
    try:
        types = [("x", FloatTensorType([None, array.shape[1]]))]
        if package == "xgboost":
            proto = onnxmltools.convert_xgboost(_without_ranks(model, directory), initial_types=types)
        else:
            proto = onnxmltools.convert_lightgbm(model, initial_types=types, zipmap=False)
    except Exception as error:
        raise BadInput(
            f"onnxmltools cannot convert this {type(model).__name__} ({short_of(error)}); {SERVE_IT}"
        ) from error
    return _scored(model, proto, array, inputs, y, directory, metric, classifier, package)


def _without_ranks(model: Any, directory: Path) -> Any:
    """A ranker of XGBoost as a regressor of the same trees: its scores are their sums, and its objective only trains them."""
    import xgboost  # noqa: PLC0415

    if not isinstance(model, xgboost.XGBRanker):
        return model
    booster, scorer, path = model.get_booster().copy(), xgboost.XGBRegressor(), directory / "scores.ubj"
    booster.set_param({"objective": "reg:squarederror"})
    booster.save_model(path)
    scorer.load_model(path)
    return scorer


def _torch(model: Any, x: Any, y: Any, directory: Path, shapes: Mapping[str, Mapping[int, Any]]) -> Converted:
    """A .pt2 program: the registrar makes variants in torch and, through ONNX, in onnxruntime of it, and measures which is faster."""
    import torch  # noqa: PLC0415

    names = [str(name) for name in _forward_names(model)]
    inputs = arrays_of(x, names if isinstance(x, Mapping) else names[:1])
    inputs = {name: float32_of(array) if array.dtype == np.float64 else array for name, array in inputs.items()}
    tensors = tuple(torch.from_numpy(np.ascontiguousarray(array[:2])) for array in inputs.values())
    if unknown := shapes.keys() - inputs.keys():
        raise BadInput(f"dynamic_shapes: the model has no input {min(unknown)!r}, only {', '.join(inputs)}")
    dims: dict[Any, Any] = {"batch": torch.export.Dim("batch", min=1, max=1024)}
    axes = [{0: "batch", **shapes.get(name, {})} for name in inputs]
    for dim in {one for each in axes for one in each.values() if isinstance(one, str)} - dims.keys():
        dims[dim] = torch.export.Dim(dim)
    model = model.eval().cpu()
    path = directory / "model.pt2"
    try:
        program = torch.export.export(
            model,
            tensors,
            dynamic_shapes=tuple({axis: dims.get(one, one) for axis, one in each.items()} for each in axes),
        )
        torch.export.save(program, path)
    except Exception as error:
        path = directory / "model.onnx"
        try:
            free = {
                name: {a: getattr(d, "__name__", str(d)) for a, d in each.items()}
                for name, each in zip(inputs, axes, strict=True)
            }
            given = {"input_names": list(inputs), "dynamic_axes": free, "dynamo": False, "verbose": False}
            torch.onnx.export(model, tensors, str(path), **given)
        except Exception:
            raise BadInput(
                f"torch.export cannot convert this {type(model).__name__} ({short_of(error)}): its batch axis must be the first one of each "
                f"input and may have any length; name further such axes by dynamic_shapes={{'input': {{1: 'length'}}}}; else {SERVE_IT}"
            ) from error
        return Converted(
            path=path, inputs=inputs, labels=y, note="traced to ONNX, since torch.export cannot convert it"
        )
    return Converted(path=path, inputs=inputs, labels=y, note="exported by torch.export")


def _keras(model: Any, x: Any, y: Any, directory: Path, _metric: str | None) -> Converted:
    """ONNX by Keras' own export: on its torch backend by onnxscript, on TensorFlow by tf2onnx, on JAX by both jax2tf and tf2onnx."""
    given = {name: float32_of(one) if one.dtype == np.float64 else one for name, one in by_name(x).items()}
    path = directory / "model.onnx"
    try:
        some = [array[:2] for array in given.values()]
        model(some if len(some) > 1 else some[0])  # it is built by its first call
        model.export(str(path), format="onnx", verbose=False)
    except Exception as error:
        raise BadInput(
            f"Keras cannot export this {type(model).__name__} to ONNX ({short_of(error)}): with the torch backend it needs "
            "pip install 'infaas[torch]', with TensorFlow pip install tf2onnx; or give the ONNX file"
        ) from error
    import onnx  # noqa: PLC0415

    names = [one.name for one in onnx.load(str(path), load_external_data=False).graph.input]
    if len(names) != len(given):
        raise BadInput(
            f"x: the model takes {len(names)} inputs ({', '.join(names)}): pass a mapping of these names to arrays"
        )
    inputs = {name: given.get(name, one) for name, one in zip(names, given.values(), strict=True)}
    return Converted(path=path, inputs=inputs, labels=y, note="exported by Keras")


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
    return Converted(path=path, inputs=arrays_of(x, names), labels=y, note="an ONNX model")


def _file(model: str | Path, x: Any, y: Any, directory: Path, _metric: str | None) -> Converted:
    path = whole_onnx(Path(model), directory)
    names = [str(name) for name in x] if isinstance(x, Mapping) else ["x"]
    return Converted(path=path, inputs=arrays_of(x, names), labels=y, note=f"{path.name} as it is")


_FILE = "file"
_KINDS: dict[str, Callable[[Any, Any, Any, Path, str | None], Converted]] = {
    "sklearn": _sklearn,
    "xgboost": _boosting,
    "lightgbm": _boosting,
    "keras": _keras,
    "onnx": _proto,
    _FILE: _file,
}


# -- shared by what is converted to ONNX


def _scored(
    model: Any,
    proto: Any,
    x: Any,
    inputs: Named,
    y: Any,
    directory: Path,
    metric: str | None,
    classifier: bool,
    whose: str,
) -> Converted:
    """The file, with the scores as its only output if it is a classifier; checked against the object."""
    import onnxruntime  # noqa: PLC0415

    classes = np.asarray(model.classes_) if classifier else None
    usual = None if classifier or y is None else "ndcg" if type(model).__name__.endswith("Ranker") else "mae"
    labels, names, metric = labels_of(y, metric or usual, classes)
    if classes is not None and y is None:
        names = [str(one) for one in classes.tolist()]
    try:
        expected = answers_of(model, x.iloc[:CHECKED] if hasattr(x, "iloc") else x[:CHECKED])
    except ValueError as error:
        raise BadInput(f"x: the model itself refuses these samples: {short_of(error)}") from error
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
    answers = session.run(
        None, {name: array.astype(object) if array.dtype.kind == "U" else array for name, array in some.items()}
    )
    answer = answers[0]
    if classes is not None:
        if answer.ndim != 2 or answer.shape[1] != len(classes):
            raise BadInput(f"model: this {type(model).__name__} has no score for each class; {SERVE_IT}")
        agreement = float((classes[answer.argmax(axis=1)] == expected).mean())
    elif answer.size != expected.size:
        raise BadInput(
            f"model: the converted {type(model).__name__} answers {list(answer.shape)}, the object {list(expected.shape)}; {SERVE_IT}"
        )
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


def _onnx_type(array: Array) -> Any:
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType  # noqa: PLC0415

    kind = StringTensorType if array.dtype.kind == "U" else FloatTensorType
    return kind([None, *array.shape[1:]])


def _first(make: Callable[[Any], Any], options: list[Any]) -> Any:
    """The first of these that works: not every estimator knows each option."""
    for one in options[:-1]:
        with suppress(NameError):  # skl2onnx's error for an option that the estimator does not have
            return make(one)
    return make(options[-1])
