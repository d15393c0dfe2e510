"""Inspect one upload, in the sandbox: prove its format, find its signature, run it, score it."""

from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from services.executor.backends.base import Handle
from services.executor.workshop import trial, uploads, validation
from services.executor.workshop.jobs import Data, Frame, Inspect, Inspected, Refusal, Step
from services.executor.workshop.scoring import Scorer
from services.executor.workshop.uploads import Candidate
from services.executor.workshop.validation import ValidationSet

TRIAL_S = 30.0  # an answer that takes longer counts as a model that hangs


def inspect(job: Inspect, tell: Callable[[Frame], None]) -> Inspected:
    """What the upload proved to be; raises Refusal."""
    tell(Step(step="reading the model", progress=0.05))
    upload = uploads.opened(
        Path(job.model), job.format, Path(job.scratch), job.most_bytes, allow_torchscript=job.allow_torchscript
    )
    tell(Step(step="first runs", progress=0.3, within=TRIAL_S))
    candidate, handle, data = _first_that_works(upload.candidates, job.data)
    if candidate.signature is None:
        raise Refusal("the model has no signature")
    scorer = Scorer(job.data.metric, candidate.signature)
    scorer.check(data.labels)
    tell(Step(step="measuring accuracy", progress=0.5))
    indices = validation.split(len(data))[1]
    found = trial.predictions(
        handle,
        data,
        indices,
        scorer,
        1 if candidate.fixed else trial.BATCH,
        lambda share: tell(Step(step="measuring accuracy", progress=0.5 + share / 2)),
        budget_s=trial.BUDGET_S,
    )
    return Inspected(
        signature=candidate.signature,
        operators=upload.operators,
        fixed_batch=candidate.fixed,
        samples=len(data),
        accuracy=scorer.accuracy(found, data.labels[indices[: len(found)]]),
        frameworks=upload.frameworks,
    )


def _first_that_works(candidates: list[Candidate], data: Data) -> tuple[Candidate, Handle, ValidationSet]:
    """The best candidate that answers: with its outputs as they came out, and fixed unless it proved that it takes batches."""
    for last, candidate in zip([*[False] * (len(candidates) - 1), True], candidates, strict=True):
        try:
            tried, handle, samples = _try(candidate, data)
        except Refusal:
            if last:
                raise
            continue
        if last or not tried.fixed:
            return tried, handle, samples
        handle.close()
    raise Refusal("the model does not run")


def _try(candidate: Candidate, data: Data) -> tuple[Candidate, Handle, ValidationSet]:
    handle = candidate.load()
    signature = candidate.signature
    if signature is None:
        from services.executor.workshop import torch_files  # noqa: PLC0415  # TorchScript only

        signature = torch_files.script_signature(handle.inputs, validation.arrays(data), data.inputs_key)
    samples = validation.read(data, signature)
    first = trial.run(handle, samples.take(validation.split(len(samples))[1][:1]))
    outputs = trial.outputs_seen(first, signature.outputs, trial.varies(signature))
    fixed = candidate.fixed or not trial.proves_batching(handle, samples)
    if fixed and candidate.opened:
        raise Refusal("the model's batch is fixed and cannot be opened: export it with an open (dynamic) first axis")
    return (
        structs.replace(candidate, signature=structs.replace(signature, outputs=outputs), fixed=fixed),
        handle,
        samples,
    )
