"""Make a model's artifacts, and keep the predictions of the model as uploaded as the reference for all of them. Runs in the sandbox."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec import structs

from bus.messages.catalog import Signature
from services.core.placement import REMOTE
from services.executor.backends import backend, pt2
from services.executor.backends.base import BackendUnavailable
from services.executor.backends.functions import FunctionProcess
from services.executor.workshop.sandbox.protocol import Artifact, BuildTask, Frame, Made, NotMade, Step, UploadRejected
from services.executor.workshop.tasks import inspection, validation
from services.executor.workshop.tasks.inspection import RunnableUpload
from services.executor.workshop.tasks.validation import Scorer, ValidationSet
from services.shell.host.accelerators import processor

TENSORRT = "tensorrt"  # it needs symmetric int8


def build(task: BuildTask, tell: Callable[[Frame], None], process: FunctionProcess | None = None) -> None:
    """process: of its owner's functions. Send one Made or NotMade for each artifact. Raises UploadRejected if the model itself cannot be read or run any more."""
    tell(Step(step="reading the model"))
    upload = inspection.open_upload(task)
    candidate = upload.candidates[-1 if task.fixed_batch else 0]
    inside = task.signature if task.functions is None or task.functions.model is None else task.functions.model
    if process is not None or any(spec.bare for spec in inside.outputs):
        candidate = structs.replace(candidate, signature=inside, process=process, whole=task.signature)
    data = validation.read(task.data, task.signature)
    if not Path(task.reference).exists():
        most = 1 if task.fixed_batch else min(inspection.BATCH, upload.most_batch or inspection.BATCH)
        _note_reference(task, candidate, data, most, tell)
    if process is not None:
        data = inspection.inside_of(process, inside, data)
    base: Path | None = None  # the fp32 ONNX file that quantised ones are made of
    for artifact in task.artifacts:
        # Named before it is made: if this one ends the process, the helper knows which one it was.
        tell(Step(step=f"building {artifact.framework} {artifact.precision}"))
        try:
            if artifact.format == "onnx" and base is None:
                base = _onnx_of(task, candidate, inside, data)
            _make(artifact, candidate, base, data, task.fixed_batch, tell)
        except UploadRejected as refusal:
            tell(NotMade(path=artifact.path, reason=str(refusal)))
        else:
            tell(Made(path=artifact.path))


def _note_reference(
    task: BuildTask, candidate: RunnableUpload, data: ValidationSet, most: int, tell: Callable[[Frame], None]
) -> None:
    """Write the predictions of the model as uploaded, for agreement, which is measured on as many samples as there are predictions.

    most: items of a batch.
    """
    handle = candidate.load()
    scorer = Scorer(task.data.metric, task.signature, data.source, named=data.named)
    indices = validation.shuffled(len(data))
    answers = inspection.predictions(
        handle,
        data,
        indices,
        scorer,
        most,
        lambda share: tell(Step(step="noting the model's answers", progress=share)),
        budget_s=inspection.BUDGET_S,
    )
    handle.close()
    with Path(task.reference).open("wb") as file:
        np.savez(file, allow_pickle=False, **answers.packed())


def _onnx_of(task: BuildTask, candidate: RunnableUpload, inside: Signature, data: ValidationSet) -> Path:
    if candidate.format == "onnx":
        return candidate.path
    from services.executor.workshop.tasks import torch_files  # noqa: PLC0415  # needs torch

    target = Path(task.scratch) / "converted.onnx"
    if not target.exists():
        part = target.with_suffix(".part")
        torch_files.to_onnx(candidate.path, candidate.format, part, inside, data)
        part.rename(target)
    return target


def _make(
    artifact: Artifact,
    candidate: RunnableUpload,
    base: Path | None,
    data: ValidationSet,
    fixed: bool,
    tell: Callable[[Frame], None],
) -> None:
    target = Path(artifact.path)
    try:
        formats = backend(artifact.framework).formats
    except BackendUnavailable as error:
        raise UploadRejected(str(error)) from error
    if artifact.format not in formats:
        raise UploadRejected(f"{artifact.framework} runs {', '.join(formats)} files, not {artifact.format}")
    if artifact.format == REMOTE:
        target.write_bytes(candidate.path.read_bytes())  # the engine has the model
        return
    if artifact.format != "onnx":
        _make_program(artifact, candidate, data)
        return
    assert base is not None, "made before the first ONNX artifact"
    if artifact.precision == "fp32":
        target.write_bytes(base.read_bytes())
        return
    if artifact.precision == "fp16":
        from services.executor.workshop.tasks import onnx_files  # noqa: PLC0415

        onnx_files.to_fp16(base, target)
        return
    from services.executor.workshop.tasks import quantise  # noqa: PLC0415  # a heavy import, only where it is used

    if artifact.precision == "int8":
        step = f"calibrating {artifact.framework} {artifact.precision}"
        quantise.static(
            base,
            target,
            data,
            1 if fixed else 8,
            lambda share: tell(Step(step=step, progress=share)),
            symmetric=artifact.framework == TENSORRT,
            exact=processor().arithmetic == "exact",
        )
    else:
        raise UploadRejected(f"there is no recipe for precision {artifact.precision!r}: use fp32, fp16 or int8")


def _make_program(artifact: Artifact, candidate: RunnableUpload, data: ValidationSet) -> None:
    """A torch program as it came, or with weights and operators in half precision."""
    target = Path(artifact.path)
    halved = artifact.precision in ("fp16", "bf16") and artifact.framework == "torch-cuda" and candidate.format == "pt2"
    if artifact.format != candidate.format or not (halved or artifact.precision == "fp32"):
        raise UploadRejected(
            f"{artifact.framework} runs this model as {candidate.format}, and not in {artifact.precision} from {artifact.format}"
        )
    if halved:
        from services.executor.workshop.tasks import torch_files  # noqa: PLC0415  # needs torch

        torch_files.to_half(candidate.path, target, artifact.precision, data)
    else:
        target.write_bytes(candidate.path.read_bytes())
    if artifact.format == "pt2":
        pt2.check(target)
