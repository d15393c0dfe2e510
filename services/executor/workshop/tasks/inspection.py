"""Inspect an upload: open it, find out how it runs, its signature and operators, and its accuracy. Runs in the sandbox."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec import Struct, structs
from numpy import ndarray

from bus.fields import filled
from bus.messages.catalog import Signature, TensorSpec
from bus.tensors import BadTensor, datatype_of
from services.core.placement import FORMATS, REMOTE
from services.executor.backends import backend, survey
from services.executor.backends.base import BackendError, Handle, LoadSpec
from services.executor.backends.functions import FunctionProcess, WithFunctions, prepared
from services.executor.workshop.sandbox.protocol import (
    BuildTask,
    Frame,
    Inspected,
    InspectTask,
    Step,
    UploadRejected,
    ValidationFile,
)
from services.executor.workshop.tasks import validation
from services.executor.workshop.tasks.independence import CHANGES, same
from services.executor.workshop.tasks.measures import Answers
from services.executor.workshop.tasks.validation import Scorer, ValidationSet

CPU_FRAMEWORKS = ("ort", "torch")  # that read and run an upload; accelerators are probed without it


class RunnableUpload(Struct, frozen=True, kw_only=True):
    """One way to run an upload. framework: backend name. fixed: it takes one item at a time.

    opened: its fixed batch was opened here; a run must prove that this works.
    process: of its owner's functions; then `signature` is what the model takes and gives inside, and `whole` what queries do.
    """

    framework: str
    path: Path
    format: str
    signature: Signature | None
    fixed: bool = False
    opened: bool = False
    process: FunctionProcess | None = None
    whole: Signature | None = None

    def load(self, threads: int = 1, device: str = "cpu", max_batch: int = 1, precision: str = "fp32") -> Handle:
        """Raises UploadRejected."""
        spec = LoadSpec(
            device=device,
            threads=threads,
            max_batch=max_batch,
            format=self.format,
            precision=precision,
            signature=self.signature,
            options={"allow_torchscript": "true"} if self.format == "torchscript" else {},
        )
        try:
            handle = backend(self.framework).load(self.path, spec)
        except BackendError as error:
            raise UploadRejected(str(error)) from error
        if self.process is None or self.signature is None or self.whole is None:
            return handle
        return WithFunctions(handle, self.process, self.signature, self.whole, own=False)


class Upload(Struct, frozen=True, kw_only=True):
    """candidates: best first. frameworks: "" or why not, by backend name. most_batch: items of a batch at most; 0: not known."""

    candidates: list[RunnableUpload]
    operators: list[str]
    frameworks: dict[str, str]
    most_batch: int = 0


def open_upload(task: InspectTask | BuildTask) -> Upload:
    """Check an uploaded file's content against its format. Raises UploadRejected."""
    path, scratch, most_bytes = Path(task.model), Path(task.scratch), task.most_bytes
    if path.stat().st_size > most_bytes:
        raise UploadRejected(f"the model file is larger than the {most_bytes >> 20} MB allowed")
    if task.format == "onnx":
        return _onnx(path, scratch, most_bytes)
    if task.format == "pt2":
        return _pt2(path, scratch, most_bytes)
    if task.format == "torchscript":
        return _torchscript(path, allow_torchscript=task.allow_torchscript)
    if task.format == REMOTE:
        return _remote(path)
    raise UploadRejected(f"format {task.format[:20]!r} is unknown: use one of {', '.join(FORMATS)}")


def _onnx(path: Path, scratch: Path, most_bytes: int) -> Upload:
    if find_spec("onnx") is None:
        raise UploadRejected("this worker cannot read ONNX files: pip install 'infaas[up]' there")
    from services.executor.workshop.tasks import onnx_files  # noqa: PLC0415  # each format imports only its own framework

    model = onnx_files.read(path, most_bytes)
    signature = onnx_files.signature(model)
    sizes = onnx_files.batch_sizes(model)
    candidates = [RunnableUpload(framework="ort", path=path, format="onnx", signature=signature, fixed=bool(sizes))]
    if sizes:
        free = scratch / "free.onnx"
        free.write_bytes(onnx_files.free_batch(model).SerializeToString())
        candidates.insert(
            0, RunnableUpload(framework="ort", path=free, format="onnx", signature=signature, opened=True)
        )
    return Upload(
        candidates=candidates if sizes <= {1} else candidates[:1],
        operators=onnx_files.operators(model),
        frameworks=survey("cpu", ("ort",)) | {"torch": "it runs torch.export files (.pt2), and this model is ONNX"},
    )


def _pt2(path: Path, scratch: Path, most_bytes: int) -> Upload:
    from services.executor.backends import pt2  # noqa: PLC0415

    reduced = scratch / "reduced.pt2"
    try:
        pt2.reduce(path, reduced, most_bytes)
    except pt2.BadArchive as error:
        raise UploadRejected(str(error)) from error
    frameworks = survey("cpu", CPU_FRAMEWORKS)
    if frameworks["torch"]:
        raise UploadRejected(f"this worker cannot read .pt2 files: {frameworks['torch']}")
    from services.executor.workshop.tasks import torch_files  # noqa: PLC0415  # imports torch

    signature, fixed = torch_files.signature(reduced)
    candidate = RunnableUpload(framework="torch", path=reduced, format="pt2", signature=signature, fixed=fixed)
    return Upload(candidates=[candidate], operators=pt2.operators(reduced), frameworks=_with_converter(frameworks))


def _torchscript(path: Path, *, allow_torchscript: bool) -> Upload:
    if not allow_torchscript:
        raise UploadRejected("TorchScript is not accepted here (registrar.allow_torchscript): upload ONNX or .pt2")
    frameworks = survey("cpu", CPU_FRAMEWORKS)
    if frameworks["torch"]:
        raise UploadRejected(f"this worker cannot read TorchScript: {frameworks['torch']}")
    from services.executor.workshop.tasks import torch_files  # noqa: PLC0415

    candidate = RunnableUpload(framework="torch", path=path, format="torchscript", signature=None)
    return Upload(
        candidates=[candidate], operators=torch_files.script_operators(path), frameworks=_with_converter(frameworks)
    )


def _remote(path: Path) -> Upload:
    """A file that names a model on a remote engine, as the engine describes it. The sandbox has a relay to the engine."""
    from services.executor.backends.remote import RemoteBackend  # noqa: PLC0415

    try:
        model = RemoteBackend().describe(path)
    except BackendError as error:
        raise UploadRejected(str(error)) from error
    candidate = RunnableUpload(framework=REMOTE, path=path, format=REMOTE, signature=model.signature, fixed=model.fixed)
    return Upload(candidates=[candidate], operators=[], frameworks={REMOTE: ""}, most_batch=model.most)


def _with_converter(frameworks: dict[str, str]) -> dict[str, str]:
    """A torch model runs on onnxruntime only if it can be converted."""
    if not frameworks["ort"] and find_spec("onnxscript") is None:
        return frameworks | {"ort": "converting torch models needs the onnxscript package: install infaas[torch]"}
    return frameworks


# -- first runs: does a model answer, does it take batches, which shapes come out, what are its predictions?

Array = ndarray[Any, Any]
Tell = Callable[[float], None]

BARE_S = 2.0  # in which single items are asked for outputs that count none
TRIAL = 3  # items run at once and one by one: the least number that shows whether the batch axis is one
BATCH = 32
BUDGET_S = 20.0
LEAST_SCORED = 200


class Answering(Protocol):
    """What answers batches: a loaded model, or answers that are there already."""

    def run(self, inputs: dict[str, Array], /) -> dict[str, Array]: ...


def run_batch(handle: Answering, inputs: dict[str, Array]) -> dict[str, Array]:
    """Run one batch. Raises UploadRejected if the model fails, or does not give one answer for each item."""
    n = len(next(iter(inputs.values())))
    try:
        outputs = handle.run(inputs)
    except BackendError as error:
        raise UploadRejected(f"the model does not run on a batch of {n}: {error}") from error
    for name, output in outputs.items():
        if output.ndim == 0 or len(output) != n:
            raise UploadRejected(
                f"output {name!r} has shape {list(output.shape)} for {n} items: its first axis must count items"
            )
        if output.dtype.kind == "f" and np.isnan(output).any():
            raise UploadRejected(
                f"output {name!r} holds NaN on the validation set: mend the model, or leave the samples out that it fails on"
            )
    return outputs


def why_single(handle: Handle, data: ValidationSet) -> str:
    """Why this model takes one item at a time; empty: three items in one batch get the same answers as one by one."""
    picked = np.arange(TRIAL)
    try:
        together = run_batch(handle, data.take(picked))
        singles = [run_batch(handle, data.take(picked[i : i + 1])) for i in range(TRIAL)]
    except UploadRejected as refusal:
        return str(refusal)
    singly = {name: np.concatenate([one[name] for one in singles]) for name in together}
    return "" if same(together, singly) else f"{CHANGES} in a batch"


def outputs_seen(outputs: dict[str, Array], claimed: list[TensorSpec], varying: bool) -> list[TensorSpec]:
    """The outputs with the shapes that came out. An axis stays open only if the inputs' lengths vary, too."""
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
            raise UploadRejected(f"output {name!r}: {error}") from error
    return seen


def varies(signature: Signature) -> bool:
    """Whether any input has an axis besides the batch whose length is open."""
    return any(-1 in spec.shape for spec in signature.inputs)


def predictions(
    handle: Answering, data: ValidationSet, indices: Array, scorer: Scorer, batch: int, tell: Tell, budget_s: float = 0.0,
    see: Callable[[dict[str, Array], dict[str, Array]], None] | None = None,
) -> Answers:  # fmt: skip
    """The scored output's predictions on these samples, in their order, and the further outputs of the first ones, as many as memory may hold.

    budget_s: stop after so many seconds, but not before 200 samples; then there are fewer predictions than samples. tell: 0..1. see: is told the
    inputs and outputs of each batch.
    """
    parts: list[Array] = []
    others: dict[str, list[Array]] = {name: [] for name in scorer.others}
    left = inf if scorer.own is not None else validation.KEPT
    start = time.monotonic()
    for at in range(0, len(indices), batch):
        some = indices[at : at + batch]
        outputs = run_batch(handle, inputs := data.take(some))
        if see is not None:
            see(inputs, outputs)
        if scorer.output:
            parts.append(scorer.predictions(outputs[scorer.output]))
        if left > 0:
            for name, items in others.items():
                items.extend(outputs[name])
                left -= outputs[name].nbytes
        tell(at / len(indices))
        if budget_s and at + batch >= LEAST_SCORED and time.monotonic() - start > budget_s:
            break
    further = {name: [np.asarray(one) for one in found] for name, found in others.items()}
    return Answers(np.concatenate(parts) if parts else np.zeros(0), further)


# -- the task

TRIAL_S = 30.0  # a model that takes longer for an answer counts as hanging


def inspect(task: InspectTask, tell: Callable[[Frame], None], process: FunctionProcess | None = None) -> Inspected:
    """The facts about an upload. process: of its owner's functions. Raises UploadRejected."""
    tell(Step(step="reading the model", progress=0.05))
    upload = open_upload(task)
    tell(Step(step="first runs", progress=0.3, within=TRIAL_S))
    candidate, handle, data, alone = _first_that_works(upload.candidates, task.data, process)
    signature = candidate.whole or candidate.signature
    if signature is None:
        raise UploadRejected("the model has no signature")
    scorer = Scorer(task.data.metric, signature, data.source, named=data.named)
    scorer.check(data.labels)
    tell(Step(step="measuring accuracy", progress=0.5))
    indices = validation.shuffled(len(data))
    found = predictions(
        handle,
        data,
        indices,
        scorer,
        1 if candidate.fixed else min(BATCH, upload.most_batch or BATCH),
        lambda share: tell(Step(step="measuring accuracy", progress=0.5 + share / 2)),
    )
    return filled(
        Inspected,
        upload,
        signature=signature,
        fixed_batch=candidate.fixed,
        samples=len(data),
        accuracy=scorer.judge(found, data, indices).value,
        alone=alone,
        functions=None
        if task.functions is None
        else structs.replace(task.functions, model=candidate.signature, ms=None),
    )


def _first_that_works(
    candidates: list[RunnableUpload], data: ValidationFile, process: FunctionProcess | None
) -> tuple[RunnableUpload, Handle, ValidationSet, str]:
    """The best candidate that answers, with its outputs as they came out. It is fixed unless it proved that it takes batches; the text says
    why not.
    """
    for last, candidate in zip([*[False] * (len(candidates) - 1), True], candidates, strict=True):
        try:
            tried, handle, samples, why = _try(candidate, data, process)
        except UploadRejected:
            if last:
                raise
            continue
        if last or not tried.fixed:
            return tried, handle, samples, why
        handle.close()
    raise UploadRejected("the model does not run")


def _bare(handle: Handle, data: ValidationSet) -> frozenset[str]:
    """The outputs without an axis that counts items: those of a detector that gives as many boxes as there are. Seen on single items."""
    found: set[str] = set()
    start = time.monotonic()
    for count, at in enumerate(validation.shuffled(len(data))[:BATCH].tolist()):
        if count >= TRIAL and time.monotonic() - start > BARE_S:
            break
        try:
            outputs = handle.run(data.take(np.array([at])))
        except BackendError:
            return frozenset()  # the next run says why
        found |= {name for name, output in outputs.items() if output.ndim == 0 or len(output) != 1}
    return frozenset(found)


def _lengths(singles: list[Array], shape: list[int]) -> list[int]:
    """An output's shape, with -1 where items differ."""
    if len({one.ndim for one in singles}) > 1:
        raise UploadRejected("an output has now more axes and now fewer: give it the same number for each item")
    return [size if len({one.shape[axis + 1] for one in singles}) == 1 else -1 for axis, size in enumerate(shape)]


def inside_of(process: FunctionProcess, inside: Signature, data: ValidationSet) -> ValidationSet:
    """What the model itself gets of samples for calibration, those of one shape. Raises UploadRejected."""
    try:
        parts = prepared(process, inside, data.take(validation.calibration(len(data))))
    except BackendError as error:
        raise UploadRejected(str(error)) from error
    most = max(parts, key=lambda part: len(part.places))
    return ValidationSet(most.arrays, np.zeros(len(most.places)))


def _try(
    candidate: RunnableUpload, data: ValidationFile, process: FunctionProcess | None
) -> tuple[RunnableUpload, Handle, ValidationSet, str]:
    handle = candidate.load()
    signature = candidate.signature
    if signature is None:
        from services.executor.workshop.tasks import torch_files  # noqa: PLC0415  # TorchScript only

        signature = torch_files.script_signature(handle.inputs, validation.arrays(data), data.inputs_key)
    whole = signature
    if process is not None and process.functions.before:
        whole = Signature(inputs=validation.inputs_of(data), outputs=[])
    every = validation.read(data, whole)
    samples = every if process is None else inside_of(process, signature, every)
    bare = _bare(handle, samples)
    if bare:
        handle.close()
        specs = {spec.name: spec for spec in signature.outputs}
        marked = [structs.replace(spec, bare=name in bare) for name, spec in specs.items()]
        candidate = structs.replace(candidate, signature=structs.replace(signature, outputs=marked))
        handle = candidate.load()
    inside = structs.replace(signature, outputs=_outputs(handle, samples, signature, bare))
    if process is not None:
        blind = WithFunctions(handle, process, inside, Signature(inputs=whole.inputs, outputs=[]), own=False)
        seen = _outputs(blind, every, whole if not process.functions.after else blind.signature, frozenset())
        whole = structs.replace(whole, outputs=seen)
        handle = WithFunctions(handle, process, inside, whole, own=False)
    why = "its batch has a fixed size of one item" if candidate.fixed else why_single(handle, every)
    if bare:
        why = f"its output {min(bare)!r} does not count items"
    fixed = bool(why)
    if fixed and candidate.opened:
        raise UploadRejected(
            "the model's batch is fixed and cannot be opened: export it with an open (dynamic) first axis"
        )
    return (
        structs.replace(
            candidate, signature=inside, fixed=fixed, process=process, whole=None if process is None else whole
        ),
        handle,
        every,
        why,
    )


def _outputs(handle: Handle, data: ValidationSet, signature: Signature, bare: frozenset[str]) -> list[TensorSpec]:
    """The outputs as they come of single items."""
    indices = validation.shuffled(len(data))[:TRIAL]
    singles = [run_batch(handle, data.take(indices[i : i + 1])) for i in range(len(indices))]
    return [
        structs.replace(spec, shape=_lengths([one[spec.name] for one in singles], spec.shape), bare=spec.name in bare)
        for spec in outputs_seen(singles[0], signature.outputs, varies(signature))
    ]
