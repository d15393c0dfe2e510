"""Make a model's artifacts, in the sandbox, and note the model's own answers as the reference for all of them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from services.executor.backends import pt2
from services.executor.workshop.sandbox.protocol import Artifact, BuildTask, Frame, Made, NotMade, Step, UploadRejected
from services.executor.workshop.tasks import inspection, validation
from services.executor.workshop.tasks.inspection import RunnableUpload
from services.executor.workshop.tasks.validation import Scorer, ValidationSet

# Which artifact a framework runs: one ONNX file, or the torch program.
ON_ONNX = ("ort", "ort-cuda", "trt")
ON_TORCH = ("torch", "torch-cuda", "neuron")


def build(job: BuildTask, tell: Callable[[Frame], None]) -> None:
    """One Made or NotMade for each artifact; raises UploadRejected when the model itself cannot be read or run any more."""
    tell(Step(step="reading the model"))
    upload = inspection.open_upload(
        Path(job.model), job.format, Path(job.scratch), job.most_bytes, allow_torchscript=job.allow_torchscript
    )
    candidate = upload.candidates[-1 if job.fixed_batch else 0]
    data = validation.read(job.data, job.signature)
    if not Path(job.reference).exists():
        _note_reference(job, candidate, data, tell)
    base: Path | None = None  # the fp32 ONNX file that quantised ones are made of
    for artifact in job.artifacts:
        # Named first: if this one takes the process down, the helper knows which one it was.
        tell(Step(step=f"building {artifact.framework} {artifact.precision}"))
        try:
            if artifact.framework in ON_ONNX and base is None:
                base = _onnx_of(job, candidate, data)
            _make(artifact, candidate, base, data, job.fixed_batch, tell)
        except UploadRejected as refusal:
            tell(NotMade(path=artifact.path, reason=str(refusal)))
        else:
            tell(Made(path=artifact.path))


def _note_reference(
    job: BuildTask, candidate: RunnableUpload, data: ValidationSet, tell: Callable[[Frame], None]
) -> None:
    """Predictions of the model as uploaded, for agreement; how many there are says how many samples are scored."""
    handle = candidate.load()
    scorer = Scorer(job.data.metric, job.signature)
    indices = validation.split(len(data))[1]
    predictions = inspection.predictions(
        handle,
        data,
        indices,
        scorer,
        1 if job.fixed_batch else inspection.BATCH,
        lambda share: tell(Step(step="noting the model's answers", progress=share)),
        budget_s=inspection.BUDGET_S,
    )
    handle.close()
    with Path(job.reference).open("wb") as file:
        np.save(file, predictions, allow_pickle=False)


def _onnx_of(job: BuildTask, candidate: RunnableUpload, data: ValidationSet) -> Path:
    if candidate.format == "onnx":
        return candidate.path
    from services.executor.workshop.tasks import torch_files  # noqa: PLC0415  # needs torch

    target = Path(job.scratch) / "converted.onnx"
    if not target.exists():
        part = target.with_suffix(".part")
        torch_files.to_onnx(candidate.path, candidate.format, part, job.signature, data)
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
    if artifact.framework in ON_TORCH:
        _make_program(artifact, candidate, data)
        return
    if artifact.framework not in ON_ONNX or base is None:
        raise UploadRejected(f"there is no recipe for {artifact.framework} {artifact.precision}")
    if artifact.precision == "fp32":
        target.write_bytes(base.read_bytes())
        return
    if artifact.precision == "fp16":
        from services.executor.workshop.tasks import onnx_files  # noqa: PLC0415

        onnx_files.to_fp16(base, target)
        return
    from services.executor.workshop.tasks import quantise  # noqa: PLC0415  # a heavy import, only where it is used

    if artifact.precision == "int8-dynamic":
        quantise.dynamic(base, target)
    elif artifact.precision == "int8":
        step = f"calibrating {artifact.framework} {artifact.precision}"
        quantise.static(
            base,
            target,
            data,
            1 if fixed else 8,
            lambda share: tell(Step(step=step, progress=share)),
            symmetric=artifact.framework == "trt",
        )
    else:
        raise UploadRejected(
            f"there is no recipe for precision {artifact.precision!r}: use fp32, fp16, int8 or int8-dynamic"
        )


def _make_program(artifact: Artifact, candidate: RunnableUpload, data: ValidationSet) -> None:
    """A torch program as it came, or with weights and operators in half precision."""
    target = Path(artifact.path)
    halved = artifact.precision in ("fp16", "bf16") and artifact.framework == "torch-cuda" and candidate.format == "pt2"
    if artifact.format != candidate.format or not (halved or artifact.precision == "fp32"):
        raise UploadRejected(
            f"{artifact.framework} runs this model as {candidate.format}, and not in {artifact.precision} from {artifact.format}"
        )
    if halved:
        from services.executor.workshop.tasks import torch_files as halved_programs  # noqa: PLC0415  # needs torch

        halved_programs.to_half(candidate.path, target, artifact.precision, data)
    else:
        target.write_bytes(candidate.path.read_bytes())
    if artifact.format == "pt2":
        pt2.check(target)
