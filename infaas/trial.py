"""A model's file tried on the caller's side, before it is registered: what it takes and gives, and its answer to the first sample."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from bus.datatypes import DATATYPES
from bus.messages.catalog import AGREEMENT, METRICS, TARGETS, TensorSpec
from bus.tensors import BadTensor, datatype_of, fit, scored_shape, shown
from infaas.errors import BadInput

Array = np.ndarray[Any, Any]
SHOWN = 5  # classes, or numbers of an answer
_DATATYPES = {f"tensor({row.onnx})": name for name, row in DATATYPES.items()}


class Trial(Struct, frozen=True, kw_only=True):
    """What a run of the first sample shows. batch: items that each run takes; None: any number. answers: by output, of the first sample.

    failed: why there is no answer.
    """

    inputs: list[TensorSpec]
    outputs: list[TensorSpec] = []
    batch: int | None = None
    answers: dict[str, Any] = {}
    failed: str = ""

    @property
    def scores(self) -> int:
        """How many scores each item gets; 0: it gets none."""
        for one in self.outputs:
            shape = scored_shape(one.shape)
            if DATATYPES[one.datatype].kind == "f" and len(shape) == 1 and shape[0] > 1:
                return shape[0]
        return 0

    @property
    def one_number(self) -> bool:
        """Whether the model gives one number for each item, as regressors do."""
        floats = [one for one in self.outputs if DATATYPES[one.datatype].kind == "f"]
        return len(self.outputs) == len(floats) == 1 and floats[0].shape in ([], [1])


def try_file(path: Path, given: Mapping[str, Array], key: str = "x", kind: str = "") -> Trial | None:
    """Run the first sample. given: samples by input; those of an only input may have the name `key`. kind: its format; default: its name tells it.

    None: this machine cannot run such files. Raises BadInput where the samples do not fit the model's inputs.
    """
    kind = kind or path.suffix.lower().removeprefix(".")
    if kind == "onnx":
        return _try_onnx(path, given, key)
    if kind == "pt2":
        return _try_pt2(path, given)
    return None


def _try_onnx(path: Path, given: Mapping[str, Array], key: str) -> Trial | None:
    try:
        import onnxruntime  # noqa: PLC0415  (a client that registers nothing starts without it)
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the worker says what is wrong with the file
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception:
        return None
    specs = specs_of(session)
    if not specs:
        return None  # the worker says what is wrong with it
    first = session.get_inputs()[0].shape[0]
    batch = first if isinstance(first, int) else None
    feed = _feed(specs, given, key, batch or 1)
    try:
        outputs = session.run(None, feed)
    except Exception as error:
        return Trial(inputs=specs, batch=batch, failed=" ".join(str(error).split())[:200])
    named = dict(zip([one.name for one in session.get_outputs()], outputs, strict=True))
    return trial_of(specs, batch, named)


def specs_of(session: Any) -> list[TensorSpec]:
    """The inputs of an ONNX model. Empty: it has none, or such as nobody can send."""
    found = session.get_inputs()
    if any(not one.shape or one.type not in _DATATYPES for one in found):
        return []
    return [
        TensorSpec(
            name=one.name,
            datatype=_DATATYPES[one.type],
            shape=[length if isinstance(length, int) else -1 for length in one.shape[1:]],
        )
        for one in found
    ]


def _try_pt2(path: Path, given: Mapping[str, Array]) -> Trial | None:
    from importlib.util import find_spec  # noqa: PLC0415

    if find_spec("torch") is None:
        return None
    import torch  # noqa: PLC0415

    arrays = {name: np.ascontiguousarray(array[:1]) for name, array in given.items()}

    def specs() -> list[TensorSpec]:
        return [TensorSpec(name=k, datatype=datatype_of(one), shape=list(one.shape[1:])) for k, one in arrays.items()]

    log = logging.getLogger("torch.export")
    try:
        log.disabled = True  # it prints a traceback of what it raises
        program = torch.export.load(path)
        taken = {node.name: node.meta["val"].dtype for node in program.graph.nodes if node.op == "placeholder"}
        for name, (key, array) in zip(program.graph_signature.user_inputs, arrays.items(), strict=True):
            if array.dtype == np.float64:  # as JSON and DataFrames have numbers
                arrays[key] = torch.from_numpy(array).to(taken[str(name)]).numpy()
        with torch.inference_mode():
            found = program.module()(*map(torch.from_numpy, arrays.values()))
    except Exception as error:
        return Trial(inputs=specs(), failed=" ".join(str(error).split())[:200])
    finally:
        log.disabled = False
    parts = found if isinstance(found, (tuple, list)) else [found]
    if isinstance(found, dict):
        return trial_of(specs(), None, {name: part.numpy() for name, part in found.items()})
    names = ["output", *(f"output_{number}" for number in range(1, len(parts)))]
    return trial_of(specs(), None, {name: part.numpy() for name, part in zip(names, parts, strict=True)})


def trial_of(specs: list[TensorSpec], batch: int | None, named: dict[str, Any]) -> Trial:
    tensors = {name: one for name, one in named.items() if hasattr(one, "dtype") and one.ndim}
    try:
        outputs = [
            TensorSpec(name=name, datatype=datatype_of(one), shape=list(one.shape[1:])) for name, one in tensors.items()
        ]
    except BadTensor as error:
        return Trial(inputs=specs, batch=batch, failed=str(error))
    answers = {
        spec.name: tensors[spec.name][:1].reshape(scored_shape(spec.shape))
        for spec in outputs
        if len(tensors[spec.name])
    }
    return Trial(inputs=specs, outputs=outputs, batch=batch, answers=answers)


def _feed(specs: list[TensorSpec], given: Mapping[str, Array], key: str, items: int) -> dict[str, Any]:
    """The first samples, in the model's datatypes. The last one is repeated where a batch takes more than there are."""
    feed = {}
    for spec in specs:
        array = given.get(spec.name)
        if array is None and len(specs) == 1:
            array = only(given) if len(given) == 1 else given.get(key)
        if array is None:
            names = ", ".join(one.name for one in specs)
            raise BadInput(f"x: the samples have no {spec.name!r}, only {', '.join(given)}; the model takes {names}")
        some = np.resize(array[:items], (items, *array.shape[1:]))
        some = some.reshape(-1, 1) if some.ndim == 1 and spec.shape == [1] else some
        try:
            feed[spec.name] = fit(some, spec, spec.name)
        except BadTensor as error:
            raise BadInput(str(error)) from error
    return feed


def only(given: Mapping[str, Array]) -> Array:
    return next(iter(given.values()))


# -- in words


def understood(
    note: str,
    given: Mapping[str, Array],
    labels: Array,
    classes: list[str],
    metric: str,
    trial: Trial | None,
    size: int = 0,
    task: str | None = None,
) -> list[str]:
    """What was understood, one line each: the file, inputs, outputs, labels and metric, and one answer beside its label. size: bytes."""
    samples = len(only(given))
    lines = [f"model: {note}" + f" ({size / 1e6:.2f} MB)" * bool(size)]
    if trial is None:
        lines += [f"input {name}: {datatype_of(a)}{shown(a.shape[1:], 'n')}" for name, a in given.items()]
        lines.append("outputs: a worker finds them out, since this machine cannot run the file")
    else:
        lines += [f"input {_spec(spec, trial.batch)}" for spec in trial.inputs]
        lines += [f"output {_spec(spec, given=False)}" for spec in trial.outputs]
    kind = task or ("regression" if metric in TARGETS else "ranking" if metric == "ndcg" else "classification")
    if metric == AGREEMENT:
        what, kind = "none", task or "any"
    elif metric not in METRICS:
        what, kind = f"{len(labels)}, as the function takes them", task or "any"
    elif labels.dtype.kind == "U":
        what = f"{len(np.unique(labels))} classes by their names"
    elif classes:
        names = ", ".join(classes[:SHOWN]) + ", …" * (len(classes) > SHOWN)
        what = f"{len(classes)} classes ({names})"
    elif metric in TARGETS or metric == "ndcg":
        what = (
            f"{'gains' if metric == 'ndcg' else 'targets'} from {float(labels.min()):.4g} to {float(labels.max()):.4g}"
        )
    else:
        what = f"class numbers {int(labels.min())} to {int(labels.max())}"
    scored = f"{metric}, {METRICS.get(metric, 'a function of your own')}"
    lines.append(f"validation: {samples} items; labels: {what}; task: {kind}; metric: {scored}")
    if trial is not None and trial.answers:
        label = f"; its label: {_label(labels[0], classes)}" if len(labels) and metric in METRICS else ""
        lines.append(f"first item: {answer_words(trial, classes, metric)}{label}")
    elif trial is not None:
        lines.append(f"first item: no answer, since the model fails on it: {trial.failed}")
    return lines


def answer_words(trial: Trial, classes: list[str], metric: str) -> str:
    """The answer to the first sample: its class and score, or its numbers."""
    name, found = next(iter(trial.answers.items()))
    by_class = metric in METRICS and metric not in (*TARGETS, AGREEMENT, "ndcg")
    if by_class:
        name, found = next(
            ((name, one) for name, one in trial.answers.items() if one.ndim == 1 and len(one) > 1), (name, found)
        )
    if by_class and found.ndim == 1 and len(found) > 1 and found.dtype.kind == "f":
        best = int(found.argmax())
        return f"answer {_label(best, classes)} ({float(found[best]):.3g})"
    flat = np.asarray(found).reshape(-1)
    first = ", ".join(f"{one:.4g}" if isinstance(one, float) else str(one) for one in flat[:SHOWN].tolist())
    return f"answer {first}{', …' * (len(flat) > SHOWN)}"


def _label(value: Any, classes: list[str]) -> str:
    if isinstance(value, str):
        return value
    if hasattr(value, "ndim") and value.ndim:
        return ", ".join(f"{one:.4g}" for one in value.reshape(-1)[:SHOWN].tolist())
    number = float(value)
    if classes and number.is_integer() and 0 <= number < len(classes):
        return classes[int(number)]
    return f"{number:.6g}"


def _spec(spec: TensorSpec, batch: int | None = None, *, given: bool = True) -> str:
    """given: it is an input."""
    notes = []
    if batch is not None:
        notes.append(f"each run takes {batch} item{'s' * (batch > 1)}: a fixed batch")
    if -1 in spec.shape:
        notes.append("any: an axis of variable length")
    if spec.datatype == "UINT8" and given:
        notes.append("whole numbers 0 to 255")
    if spec.datatype == "BYTES":
        notes.append("bytes" if spec.binary else "texts")
    picture = _picture(spec.shape)
    if picture and given:
        notes.append(picture)
    return f"{spec.name}: {spec.datatype}{shown(spec.shape, 'n')}" + f" ({'; '.join(notes)})" * bool(notes)


def _picture(shape: list[int]) -> str:
    if len(shape) != 3:
        return ""
    if shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4):
        return "pictures, channels last"
    return "pictures, channels first" if shape[0] in (1, 3, 4) and shape[-1] not in (1, 3, 4) else ""


def answers_of(model: Any, x: Any) -> Array:
    """What the object answers: the class with the highest probability where it gives any, which is not what every `predict` gives."""
    with suppress(AttributeError):  # scikit-learn hides the method where the estimator was not fitted for it
        likeliest = np.asarray(model.predict_proba(x)).argmax(axis=1)
        found: Array = np.asarray(model.classes_)[likeliest]
        return found
    if not hasattr(model, "predict"):  # an embedder
        found = model.transform(x)
        return np.asarray(found.toarray() if hasattr(found, "toarray") else found)
    return np.asarray(model.predict(x))
