"""The labelled validation set (.npz), read as what it is: an untrusted zip file of numpy arrays."""

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from bus.messages.catalog import Signature
from bus.tensors import BadTensor, fit
from services.executor.workshop.jobs import Data, Refusal

Array = ndarray[Any, Any]

LEAST_SAMPLES = 20
CALIBRATION = 64
LEAST_TO_SPLIT = 100


@dataclass(frozen=True)
class ValidationSet:
    """inputs: by name, [n, ...] each, in the model's datatypes. labels: [n, ...]."""

    inputs: dict[str, Array]
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Array) -> dict[str, Array]:
        return {name: np.ascontiguousarray(array[indices]) for name, array in self.inputs.items()}


def arrays(data: Data) -> dict[str, Array]:
    """All arrays in the file by key; raises Refusal for anything that is not a plain .npz."""
    try:
        with zipfile.ZipFile(data.path) as archive:
            size = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise Refusal(
            "validation: not an .npz file; write it with numpy.savez_compressed(file, x=..., y=...)"
        ) from error
    if size > data.most_bytes:
        raise Refusal(f"validation: unpacks to {size >> 20} MB, more than the {data.most_bytes >> 20} MB allowed")
    return dict(_members(data.path))


def _members(path: str) -> Iterator[tuple[str, Array]]:
    try:
        with np.load(Path(path), allow_pickle=False) as file:
            for key in file.files:
                array = _member(file, key)
                if not isinstance(array, ndarray) or array.ndim == 0:
                    raise Refusal(f"validation: entry `{key[:40]}` is not an array of samples")
                yield key, array
    except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
        raise Refusal(f"validation: the file is damaged ({type(error).__name__})") from error


def _member(file: Any, key: str) -> Any:
    try:
        return file[key]
    except ValueError as error:
        if "allow_pickle" in str(error) or "Object arrays" in str(error):
            raise Refusal(f"validation: array `{key[:40]}` holds Python objects; save plain numbers") from error
        raise Refusal(f"validation: array `{key[:40]}` is damaged") from error
    except MemoryError as error:
        raise Refusal(f"validation: array `{key[:40]}` is too large") from error


def read(data: Data, signature: Signature) -> ValidationSet:
    """The set as this model takes it; raises Refusal naming the array that does not fit."""
    found = arrays(data)
    labels = found.get(data.labels_key)
    if labels is None:
        raise Refusal(f"validation: there are no labels `{data.labels_key}`; the file has {_listed(found)}")
    inputs: dict[str, Array] = {}
    for spec in signature.inputs:
        key = _key(spec.name, len(signature.inputs) == 1, data, found)
        array = found[key]
        if array.dtype.kind == "U":
            array = array.astype(object)
        try:
            inputs[spec.name] = np.ascontiguousarray(fit(array, spec, key))
        except BadTensor as error:
            raise Refusal(f"validation: {error}") from error
    check_sizes(inputs, labels, data)
    return ValidationSet(inputs, check_labels(labels, data))


def check_sizes(inputs: dict[str, Array], labels: Array, data: Data) -> None:
    """As many labels as samples, and enough of them."""
    n = len(labels)
    for name, array in inputs.items():
        if len(array) != n:
            raise Refusal(f"validation: {len(array)} samples of `{name}` but {n} labels `{data.labels_key}`")
    if n < LEAST_SAMPLES:
        raise Refusal(f"validation: {n} samples are too few to measure accuracy; give at least {LEAST_SAMPLES}")


def check_labels(labels: Array, data: Data) -> Array:
    """Whole numbers for top1 and top5, finite numbers for mae and rmse."""
    name = data.labels_key
    if labels.dtype.kind not in "biuf":
        raise Refusal(f"validation: labels `{name}` must be numbers, not {labels.dtype}")
    if not np.isfinite(labels).all():
        raise Refusal(f"validation: labels `{name}` hold NaN or infinite values")
    if data.metric in {"mae", "rmse"}:
        return labels.astype(np.float64)
    whole = labels.astype(np.int64)
    if not (whole == labels).all():
        raise Refusal(f"validation: labels `{name}` must be class numbers (integers) for {data.metric}")
    if whole.ndim == 2 and whole.shape[1] == 1:
        whole = whole[:, 0]
    return whole


def split(n: int) -> tuple[Array, Array]:
    """Which samples calibrate a quantisation and which measure: the same for every variant of a model.

    Disjoint, at most 64 for calibration, where there are enough samples; else all measure and the first calibrate too.
    """
    shuffled = np.random.default_rng(0).permutation(n)
    if n < LEAST_TO_SPLIT:
        return shuffled[:CALIBRATION], shuffled
    count = min(CALIBRATION, n // 5)
    return shuffled[:count], shuffled[count:]


def _key(name: str, alone: bool, data: Data, found: dict[str, Array]) -> str:
    """The array for this input: `x` or the input's own name for one input, `name` or `x.name` for several."""
    candidates = (data.inputs_key, name) if alone else (name, f"{data.inputs_key}.{name}")
    for key in candidates:
        if key in found:
            return key
    raise Refusal(
        f"validation: there is no array `{candidates[0]}` for the model's input {name!r}; the file has {_listed(found)}"
    )


def _listed(found: dict[str, Array]) -> str:
    return ", ".join(f"`{key[:40]}`" for key in list(found)[:8]) or "nothing"
