"""First runs: does a model answer, does it take batches, what shapes come out, and what does it answer on the validation set?"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from bus.messages.catalog import Signature, TensorSpec
from bus.tensors import BadTensor, datatype_of
from services.executor.backends.base import BackendError, Handle
from services.executor.workshop.jobs import Refusal
from services.executor.workshop.scoring import Scorer
from services.executor.workshop.validation import ValidationSet

Array = ndarray[Any, Any]
Tell = Callable[[float], None]

TRIAL = 3  # items run at once and one by one: the least that shows a batch axis that is none
BATCH = 32
BUDGET_S = 20.0
LEAST_SCORED = 200


def run(handle: Handle, inputs: dict[str, Array]) -> dict[str, Array]:
    """One batch; raises Refusal when the model fails, or does not give one answer an item."""
    n = len(next(iter(inputs.values())))
    try:
        outputs = handle.run(inputs)
    except BackendError as error:
        raise Refusal(f"the model does not run on a batch of {n}: {error}") from error
    for name, output in outputs.items():
        if output.ndim == 0 or len(output) != n:
            raise Refusal(
                f"output {name!r} has shape {list(output.shape)} for {n} items: its first axis must count items"
            )
        if output.dtype.kind == "f" and np.isnan(output).any():
            raise Refusal(f"output {name!r} holds NaN on the validation set")
    return outputs


def proves_batching(handle: Handle, data: ValidationSet) -> bool:
    """Whether three items at once get the answers that they get one by one."""
    picked = np.arange(TRIAL)
    try:
        together = run(handle, data.take(picked))
        singles = [run(handle, data.take(picked[i : i + 1])) for i in range(TRIAL)]
    except Refusal:
        return False
    return all(_same(output, np.concatenate([one[name] for one in singles])) for name, output in together.items())


def _same(together: Array, singly: Array) -> bool:
    if together.shape != singly.shape:
        return False
    if together.dtype.kind != "f":
        return bool((together == singly).all())
    scale = float(np.abs(singly[np.isfinite(singly)]).max(initial=1.0))
    return bool(np.allclose(together, singly, rtol=1e-3, atol=1e-4 * scale, equal_nan=True))


def outputs_seen(outputs: dict[str, Array], claimed: list[TensorSpec], varying: bool) -> list[TensorSpec]:
    """The outputs with the shapes that came out; an axis stays open only where the inputs' lengths vary too."""
    specs = {spec.name: spec for spec in claimed}
    seen = []
    for name, output in outputs.items():
        shape = list(output.shape[1:])
        said = specs[name].shape if name in specs else []
        if varying and len(said) == len(shape):
            shape = [-1 if wanted == -1 else length for wanted, length in zip(said, shape, strict=True)]
        try:
            seen.append(TensorSpec(name=name, datatype=datatype_of(output), shape=shape))
        except BadTensor as error:
            raise Refusal(f"output {name!r}: {error}") from error
    return seen


def varies(signature: Signature) -> bool:
    """Whether any input has an axis besides the batch whose length is open."""
    return any(-1 in spec.shape for spec in signature.inputs)


def predictions(
    handle: Handle, data: ValidationSet, indices: Array, scorer: Scorer, batch: int, tell: Tell, budget_s: float = 0.0
) -> Array:
    """The scored output's predictions on these samples, in their order.

    budget_s: stop after so many seconds (not before 200 samples); fewer predictions than samples then. tell: 0..1.
    """
    parts: list[Array] = []
    start = time.monotonic()
    for at in range(0, len(indices), batch):
        some = indices[at : at + batch]
        parts.append(scorer.predictions(run(handle, data.take(some))[scorer.output]))
        tell(at / len(indices))
        if budget_s and at + batch >= LEAST_SCORED and time.monotonic() - start > budget_s:
            break
    return np.concatenate(parts)
