"""Make a model's artifacts, and keep the predictions of the model as uploaded as the reference for all of them. Runs in the sandbox."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy import ndarray

from bus.messages.catalog import Signature
from services.core.placement import REMOTE
from services.executor.backends import backend, pt2
from services.executor.backends.base import BackendUnavailable
from services.executor.backends.functions import FunctionProcess
from services.executor.workshop.sandbox.protocol import (
    Artifact,
    BuildTask,
    CascadeTask,
    Frame,
    Joined,
    Made,
    NotMade,
    Step,
    UploadRejected,
)
from services.executor.workshop.tasks import inspection, validation
from services.executor.workshop.tasks.inspection import RunnableUpload
from services.executor.workshop.tasks.validation import Scorer, ValidationSet
from services.shell.host.accelerators import processor

Array = ndarray[Any, Any]

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


# -- cascades


class PartAnswers(NamedTuple):
    """One part's answers, in the order of `validation.shuffled`: whether each is right, and the largest probability. normal: the scores are
    probabilities themselves.
    """

    right: Array
    confidence: Array
    normal: bool


class Choice(NamedTuple):
    """threshold: of confidence, below which items go on. share: of the items that do. cost: expected, of an item."""

    threshold: float
    share: float
    cost: float


def choose(first: PartAnswers, then: PartAnswers, costs: tuple[float, float], most: float) -> Choice | None:
    """The lowest threshold at which a cascade is at least as right as its second part; None: there is none at a cost of at most `most`.

    It must be as right in each half of the samples: one half alone lets chance choose, and a threshold that one half chooses fails in the other
    every second time.
    """
    order = np.argsort(first.confidence, kind="stable")
    sure, gain = first.confidence[order], first.right[order].astype(int) - then.right[order]
    enough = sure[1:] > sure[:-1]
    for half in (order < len(order) // 2, order >= len(order) // 2):
        # What those that stay are righter than in the second part, by how many go on.
        kept = (gain * half)[::-1].cumsum()[::-1]
        enough &= kept[1:] >= 0
    if not enough.any():
        return None
    goes = int(enough.argmax()) + 1
    share = goes / len(order)
    cost = costs[0] + share * costs[1]
    return None if cost > most else Choice(float(np.float32((sure[goes - 1] + sure[goes]) / 2.0)), share, cost)


def cascade(task: CascadeTask, tell: Callable[[Frame], None]) -> None:
    """Find the pair that makes the cheapest cascade, and write its file. Sends one `Joined`, or nothing. Raises UploadRejected."""
    from services.executor.workshop.tasks import onnx_files  # noqa: PLC0415

    data = validation.read(task.data, task.signature)
    scorer = Scorer(task.data.metric, task.signature, data.source)
    if scorer.scores is None or data.labels.ndim != 1:
        return
    answers: dict[str, PartAnswers] = {}
    for path in dict.fromkeys(path for pair in task.pairs for path in (pair.first, pair.then)):
        tell(Step(step="looking for a cascade"))
        answers[path] = _answers_of(Path(path), task, data, scorer, tell)
    found = []
    for number, pair in enumerate(task.pairs):
        first = answers[pair.first]
        choice = choose(first, answers[pair.then], (pair.first_cost, pair.then_cost), pair.most)
        if choice is not None:
            found.append((choice.cost / pair.most, number, choice, first))
    for _, number, choice, first in sorted(found, key=lambda one: one[:2]):
        pair, target = task.pairs[number], Path(task.target)
        try:
            content = onnx_files.cascade(
                Path(pair.first), Path(pair.then), task.signature, scorer.scores, choice.threshold, normal=first.normal
            )
            target.write_bytes(content)
            joined = _answers_of(target, task, data, scorer, tell)
        except UploadRejected:
            continue
        on = first.confidence < choice.threshold
        if (joined.right != np.where(on, answers[pair.then].right, first.right)).mean() > SLACK:
            continue
        places = np.zeros(len(data), bool)
        places[validation.shuffled(len(data))] = on
        np.save(task.goes_on, places)
        tell(Joined(pair=number, threshold=choice.threshold, share=choice.share))
        return


SLACK = 0.005  # of the samples, which may be at the threshold, or near a tie


def _answers_of(
    path: Path, task: CascadeTask, data: ValidationSet, scorer: Scorer, tell: Callable[[Frame], None]
) -> PartAnswers:
    handle = RunnableUpload(framework="ort", path=path, format="onnx", signature=task.signature).load()
    indices, parts = validation.shuffled(len(data)), list[Array]()
    scores = scorer.scores or ""
    found = inspection.predictions(
        handle,
        data,
        indices,
        scorer,
        inspection.BATCH,
        lambda share: tell(Step(step="looking for a cascade", progress=share)),
        see=lambda _, outputs: parts.append(outputs[scores]),
    )
    handle.close()
    likely = np.concatenate(parts)
    normal = bool(likely.min() >= 0.0 and np.allclose(likely.sum(axis=1), 1.0, atol=1e-3))
    if not normal:
        likely = np.exp(likely - likely.max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
    return PartAnswers(found.scored == data.labels[indices], likely.max(axis=1).astype(np.float32), normal)
