"""Whether a model's answer to an item depends on the other items of its batch. Then items are computed alone. Runs in the sandbox.

The same items are asked alone, together, in another order and beside others that no client is kept from sending: the largest and smallest
numbers, and NaN where a model takes it. A batch that fails proves nothing: executors compute its items one by one then.
"""

from collections.abc import Iterator
from functools import partial
from math import inf
from typing import Any

import numpy as np
from numpy import ndarray

from services.executor.backends.base import BackendError, Handle
from services.executor.workshop.tasks import validation
from services.executor.workshop.tasks.validation import ValidationSet

Array = ndarray[Any, Any]
Outputs = dict[str, Array]

ITEMS = 4
LARGEST_BATCH = 32
EXTREME = 1e6
LONG = "x" * 4096
HALF = ("fp16", "bf16")  # of 8 to 11 bits
NOISE, NOISE_OF_HALF = 1e-3, 2e-2  # of an answer; differences by sums in another order stay below

CHANGES = "an item's answer is another one"


def why_alone(handle: Handle, data: ValidationSet, most: int, *, allow_nan: bool, precision: str = "fp32") -> str:
    """Why the items of this model must be computed alone. Empty: they need not, as far as a handful of batches shows, or it fails.

    most: items of a batch.
    """
    if most < 2:
        return ""
    noise = NOISE_OF_HALF if precision in HALF else NOISE
    items = validation.shuffled(len(data))[: min(ITEMS, most)]
    singly = [_ask(handle, data.take(items[i : i + 1])) for i in range(len(items))]
    again = _ask(handle, data.take(items[:1]))
    if again is None or any(one is None for one in singly):
        return ""
    alone = _joined([one for one in singly if one is not None])
    if not same(again, _part(alone, np.arange(1)), noise):
        return f"{CHANGES} at each call"
    for how, batch, places in _batches(data, items, most, allow_nan=allow_nan):
        found = _ask(handle, batch)
        kept = _part(alone, np.arange(len(places)))
        if found is not None and not same(_part(found, places), kept, noise):
            return f"{CHANGES} {how}"
    return ""


def same(found: Outputs, alone: Outputs, noise: float = NOISE) -> bool:
    """Whether these outputs are the same but for noise, as a share of each answer. Integers, of models in half precision, may be near a tie."""
    floats = any(output.dtype.kind == "f" for output in alone.values())
    return all(
        _close(found[name], output, noise)
        for name, output in alone.items()
        if output.dtype.kind == "f" or noise < NOISE_OF_HALF or not floats
    )


def _close(found: Array, alone: Array, noise: float) -> bool:
    if found.shape != alone.shape:
        return False
    if alone.dtype.kind != "f":
        return bool((found == alone).all())
    scale = float(np.abs(alone[np.isfinite(alone)]).max(initial=1.0))
    return bool(np.allclose(found, alone, rtol=noise, atol=0.1 * noise * scale, equal_nan=True))


def _batches(
    data: ValidationSet, items: Array, most: int, *, allow_nan: bool
) -> Iterator[tuple[str, dict[str, Array], Array]]:
    """How a batch is made, the batch, and the places in it of the first items."""
    count = len(items)
    yield "in a batch", data.take(items), np.arange(count)
    yield "in another order", data.take(items[::-1]), np.arange(count)[::-1]
    size = min(most, LARGEST_BATCH)
    if size > count:
        rest = np.arange(size - count) % len(data)
        yield f"in a batch of {size}", data.take(np.concatenate([rest, items])), np.arange(size - count, size)
    few = items[: most - 1]
    real = data.take(few)
    for what, extreme in _extremes(data.take(items[:1]), allow_nan=allow_nan):
        for first in (True, False):
            batch = {name: np.concatenate([extreme[name], one] if first else [one, extreme[name]]) for name, one in real.items()}  # fmt: skip
            yield f"beside an item of {what}", batch, np.arange(len(few)) + first


def _extremes(item: dict[str, Array], *, allow_nan: bool) -> Iterator[tuple[str, dict[str, Array]]]:
    """Items that are extreme in their floating-point numbers, their integers, or their texts, and what they are."""
    for number in (EXTREME, -EXTREME, *((np.nan, inf) if allow_nan else ())):
        yield from _with(item, "f", f"{number:g}", partial(_fitting, number))
    yield from _with(item, "O", f"{len(LONG)} letters", lambda _: LONG)
    # Last, since an index outside a table ends some processes.
    yield from _with(item, "iu", "the largest integers", lambda kind: np.iinfo(kind).max)
    yield from _with(item, "iu", "the smallest integers", lambda kind: np.iinfo(kind).min)


def _fitting(number: float, kind: Any) -> float:
    """The number, or the nearest one that a half-precision float can hold."""
    return float(np.clip(number, np.finfo(kind).min, np.finfo(kind).max)) if np.isfinite(number) else number


def _with(item: dict[str, Array], kinds: str, what: str, value: Any) -> Iterator[tuple[str, dict[str, Array]]]:
    if any(array.dtype.kind in kinds for array in item.values()):
        yield (
            what,
            {
                name: np.full_like(array, value(array.dtype)) if array.dtype.kind in kinds else array
                for name, array in item.items()
            },
        )


def _ask(handle: Handle, inputs: dict[str, Array]) -> Outputs | None:
    """The answer to a batch. None: it failed, or has not one answer for each item."""
    n = len(next(iter(inputs.values())))
    try:
        with np.errstate(all="ignore"):
            outputs = handle.run(inputs)
    except BackendError:
        return None
    return outputs if all(output.ndim and len(output) == n for output in outputs.values()) else None


def _joined(parts: list[Outputs]) -> Outputs:
    return {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}


def _part(outputs: Outputs, places: Array) -> Outputs:
    return {name: output[places] for name, output in outputs.items()}
