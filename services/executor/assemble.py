"""From queries to one array, and from its outputs back to queries: n items in, n items out, in order. Pure."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.datatypes import DATATYPES
from bus.messages.catalog import Signature, TensorSpec
from bus.messages.public import Tensor, TensorView
from bus.tensors import check_finite, datatype_of, dtype_of, fit, from_array, to_array
from services.executor.queue import Inputs, QueuedQuery

Array = NDArray[Any]
UNKNOWN = 2**62


class NotANumber(ValueError):
    """The model returned NaN or infinity for this query."""


def single(queries: list[QueuedQuery], spec: TensorSpec, *, allow_nan: bool = False) -> Array:
    """One array [items, ...] of the model's only input. Raises BadTensor, also where it holds NaN or an infinite value."""
    array = _single(queries, spec)
    if not allow_nan:
        check_finite(array, "inputs")
    return array


def _single(queries: list[QueuedQuery], spec: TensorSpec) -> Array:
    if (
        len(queries) > 1
        and DATATYPES[spec.datatype].code
        and all(type(query.inputs) is TensorView and query.inputs.datatype == spec.datatype for query in queries)
    ):
        # The usual case: the bytes are the model's own layout, checked for size by the dispatcher.
        views: list[TensorView] = [query.inputs for query in queries]  # type: ignore[misc]
        joined = b"".join([view.data for view in views])
        whole: Array = np.frombuffer(joined, dtype_of(spec.datatype)).reshape((-1, *views[0].shape[1:]))
        return fit(whole, spec, "inputs")
    parts = [_one(query.inputs, spec, "inputs") for query in queries]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def several(queries: list[QueuedQuery], signature: Signature, *, allow_nan: bool = False) -> dict[str, Array]:
    """The arrays of a model with several inputs, by name. Raises BadTensor, also where one holds NaN or an infinite value."""
    arrays = {}
    for spec in signature.inputs:
        where = f"inputs.{spec.name}"
        parts = [_one(query.inputs[spec.name], spec, where) for query in queries]  # type: ignore[index,call-overload]
        arrays[spec.name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if not allow_nan:
            check_finite(arrays[spec.name], where)
    return arrays


def _one(inputs: Inputs | None, spec: TensorSpec, where: str) -> Array:
    if isinstance(inputs, dict):
        inputs = inputs[spec.name]
    if inputs is None:
        raise ValueError(f"{where} is missing")
    return fit(to_array(inputs, where), spec, where)


def split(outputs: list[Array], names: tuple[str, ...], queries: list[QueuedQuery]) -> list[dict[str, Tensor]]:
    """Each query's rows of every output. Raises NotANumber, or ValueError if the model returned another number of rows."""
    total = sum(query.items for query in queries)
    answers: list[dict[str, Tensor]] = [{} for _ in queries]
    for name, array in zip(names, outputs, strict=True):
        if array.ndim == 0 or array.shape[0] != total:
            raise ValueError(f"output {name!r} has shape {list(array.shape)} for {total} items")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise NotANumber(f"the model returned NaN or infinity in output {name!r}")
        if array.dtype.kind in "OUS":
            _split_strings(array, name, queries, answers)
            continue
        datatype = datatype_of(array)
        whole = array.tobytes()
        row = len(whole) // total
        tail = list(array.shape[1:])
        at = 0
        for query, answer in zip(queries, answers, strict=True):
            n = query.items
            answer[name] = Tensor(datatype, [n, *tail], whole[at : at + n * row])
            at += n * row
    return answers


def named_classes(outputs: list[Array], labels: list[str], queries: list[QueuedQuery]) -> list[list[str]] | None:
    """The name of each item's class, by query: of class numbers, else of the largest score. None: no output tells the class."""
    n = len(labels)
    for array in outputs:
        if array.dtype.kind in "iu" and array.size == len(array):
            numbers = array.reshape(-1)
            break
        if array.dtype.kind == "f" and n > 1 and array.size == n * len(array):
            numbers = array.reshape(-1, n).argmax(axis=1)
            break
        if array.dtype.kind == "f" and n == 2 and array.size == len(array):
            numbers = array.reshape(-1) > 0.5
            break
    else:
        return None
    names = [labels[int(number)] if 0 <= number < n else str(number) for number in numbers.tolist()]
    found, at = [], 0
    for query in queries:
        found.append(names[at : at + query.items])
        at += query.items
    return found


def most_bytes(outputs: list[Array]) -> int:
    """How many bytes all outputs have at most. UNKNOWN if there are texts, before they are encoded."""
    return sum(UNKNOWN if array.dtype.kind in "OUS" else array.nbytes for array in outputs)


def _split_strings(array: Array, name: str, queries: list[QueuedQuery], answers: list[dict[str, Tensor]]) -> None:
    at = 0
    for query, answer in zip(queries, answers, strict=True):
        answer[name] = from_array(array[at : at + query.items])
        at += query.items
