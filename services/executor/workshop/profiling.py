"""Profile one artifact with one number of threads, in a fresh sandbox: load, latency table, memory, accuracy, agreement."""

import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from bus.messages.catalog import ProfileRow, Signature
from services.executor.backends.base import Handle
from services.executor.workshop import measure, trial, validation
from services.executor.workshop.inspection import TRIAL_S
from services.executor.workshop.jobs import Frame, Measure, Measured, Refusal, Step
from services.executor.workshop.scoring import Scorer
from services.executor.workshop.uploads import Candidate
from services.executor.workshop.validation import ValidationSet

Array = ndarray[Any, Any]

CELL_S = 0.06
CELL_OTHER_LENGTH_S = 0.03
PASSES = 3
COMPILE_S = 600.0  # an engine for an accelerator, at its first load
LONGEST_BATCH_S = 10.0  # a batch that takes longer is not worth having
BUDGET_S = 20.0  # of repetitions
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = 4


class Table:
    """Latency cells by (length, batch), measured again while the machine disturbed them."""

    def __init__(self, handle: Handle, data: ValidationSet, signature: Signature, threads: int) -> None:
        self._handle, self._data, self._threads = handle, data, threads
        self._open_axes = {
            spec.name: [a + 1 for a, size in enumerate(spec.shape) if size == -1] for spec in signature.inputs
        }
        self._cells: dict[tuple[int, int], list[measure.Cell]] = {}
        self._single = len(data.inputs) == 1

    def lengths(self) -> list[int]:
        """Buckets of the first open axis: the validation set's length and, down from it, its halves. [0] when none is open."""
        for name, axes in self._open_axes.items():
            if axes:
                longest = self._data.inputs[name].shape[axes[0]]
                return sorted({max(1, longest >> step) for step in range(LENGTHS)})
        return [0]

    def batch(self, batch: int, length: int, longest: int) -> dict[str, Array]:
        """Real samples, repeated where there are too few, cut to the length's share along every open axis."""
        inputs = self._data.take(np.arange(batch) % len(self._data))
        if length == longest:
            return inputs
        return {name: self._cut(name, array, length / longest) for name, array in inputs.items()}

    def add(self, batch: int, length: int, longest: int) -> measure.Cell:
        """Measure one cell, once more if it was measured before."""
        inputs = self.batch(batch, length, longest)
        trial.run(self._handle, inputs)
        call = self._call(inputs)
        cell = measure.cell(call, CELL_S if length == longest else CELL_OTHER_LENGTH_S, self._threads)
        self._cells.setdefault((length, batch), []).append(cell)
        return cell

    def repeat(self, longest: int, until: float) -> None:
        """Measure disturbed cells again, up to three times in all, while there is time."""
        for _ in range(PASSES - 1):
            for length, batch in [key for key, cells in self._cells.items() if not self._clean(cells)]:
                if time.monotonic() < until:
                    self.add(batch, length, longest)

    def disturbed(self) -> bool:
        return not all(self._clean(cells) for cells in self._cells.values())

    def rows(self) -> list[ProfileRow]:
        return [self._row(length, batch, cells) for (length, batch), cells in sorted(self._cells.items())]

    def _clean(self, cells: Iterable[measure.Cell]) -> bool:
        return any(cell.clean(self._threads) for cell in cells)

    def _row(self, length: int, batch: int, cells: list[measure.Cell]) -> ProfileRow:
        clean = [cell for cell in cells if cell.clean(self._threads)]
        best = min(clean or cells, key=lambda cell: cell.p50_ms)
        p50 = min(cell.estimate_ms(self._threads) for cell in clean or cells)
        return ProfileRow(
            batch=batch,
            p50_ms=p50,
            p99_ms=max(p50, min(cell.p99_ms for cell in clean or cells)),
            cpu_ms=min(cell.cpu_ms for cell in clean or cells),
            wall_over_cpu=best.wall_over_cpu,
            length=length or None,
        )

    def _call(self, inputs: dict[str, Array]) -> Callable[[], object]:
        if self._single:
            run, array = self._handle.run_single, next(iter(inputs.values()))
            return lambda: run(array)
        run_named = self._handle.run
        return lambda: run_named(inputs)

    def _cut(self, name: str, array: Array, share: float) -> Array:
        for axis in self._open_axes[name]:
            array = array.take(range(max(1, round(array.shape[axis] * share))), axis=axis)
        return np.ascontiguousarray(array)


def profile(job: Measure, tell: Callable[[Frame], None]) -> Measured:
    """Everything measured of one artifact with so many threads; raises Refusal."""
    what = f"{job.artifact.framework} {job.artifact.precision}, {job.threads} thread{'s' * (job.threads > 1)}"
    alone = job.device == "cpu"
    first_load_s = TRIAL_S if alone else COMPILE_S
    tell(Step(step=f"profiling {what}"))
    data = validation.read(job.data, job.signature)
    candidate = Candidate(
        framework=job.artifact.framework,
        path=Path(job.artifact.path),
        format=job.artifact.format,
        signature=job.signature,
    )
    one = data.take(np.arange(1))
    _import(candidate, job.device)
    memory = measure.memory_of(job.device)
    tell(Step(step=f"profiling {what}", progress=0.1, within=first_load_s))
    handle, load_ms = _load(candidate, job, one)
    table = Table(handle, data, job.signature, job.threads if alone else 0)
    peaks, short_of = _fill(
        table, job, memory, lambda share: tell(Step(step=f"profiling {what}", progress=0.1 + share / 2))
    )
    accuracy = agreement = None
    if job.score:
        tell(Step(step=f"measuring the accuracy of {what}", progress=0.6))
        accuracy, agreement = _score(job, handle, data, max(peaks), tell)
    handle.close()
    for _ in range(2 if alone else 1):
        if load_ms < 1000.0 or not alone:  # an accelerator's first load compiles; executors keep what comes out of it
            again, ms = _load(candidate, job, one)
            again.close()
            load_ms = min(load_ms, ms)
    return Measured(
        rows=table.rows(),
        load_ms=load_ms,
        memory_mb=peaks,
        disturbed=table.disturbed(),
        host=_host(handle.proof),
        short_of=short_of,
        accuracy=accuracy,
        agreement=agreement,
    )


def _fill(
    table: Table, job: Measure, memory: measure.Memory | measure.DeviceMemory, tell: Callable[[float], None]
) -> tuple[dict[int, float], int]:
    """Measure all cells; memory by batch at the greatest length, and the last batch before they took too long, or 0."""
    most = max(job.max_batches)
    batches = sorted({b for b in (*BATCHES, *job.max_batches) if b <= most})
    lengths = table.lengths()
    longest = lengths[-1]
    peaks: dict[int, float] = {}
    short_of, slowest = 0, 0.0
    for done, batch in enumerate(batches):
        tell(done / len(batches))
        if peaks and slowest * batch / max(peaks) > LONGEST_BATCH_S:
            short_of = max(peaks)
            break
        slowest = table.add(batch, longest, longest).p50_ms / 1000.0
        peaks[batch] = memory.peak_mb()
    for length in lengths[:-1]:
        for batch in (b for b in peaks if b in (1, 4, 16, max(peaks))):
            try:
                table.add(batch, length, longest)
            except Refusal:  # shorter than the model takes: this bucket does not exist
                break
    table.repeat(longest, time.monotonic() + BUDGET_S)
    return peaks, short_of


def _score(
    job: Measure, handle: Handle, data: ValidationSet, most: int, tell: Callable[[Frame], None]
) -> tuple[float, float]:
    """Accuracy, and agreement with the model as uploaded, on the samples that the reference has."""
    try:
        reference = np.load(job.reference, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise Refusal("the model's own answers are missing") from error
    scorer = Scorer(job.data.metric, job.signature)
    indices = validation.split(len(data))[1][: len(reference)]
    step = f"measuring the accuracy of {job.artifact.framework} {job.artifact.precision}"
    found = trial.predictions(
        handle,
        data,
        indices,
        scorer,
        min(most, trial.BATCH),
        lambda share: tell(Step(step=step, progress=0.6 + 0.4 * share)),
    )
    return scorer.accuracy(found, data.labels[indices]), scorer.agreement(found, reference)


def _load(candidate: Candidate, job: Measure, one: dict[str, Array]) -> tuple[Handle, float]:
    """A handle and the milliseconds until it had answered once."""
    start = time.perf_counter()
    handle = candidate.load(job.threads, job.device, max(job.max_batches), job.artifact.precision)
    trial.run(handle, one)
    return handle, (time.perf_counter() - start) * 1000.0


def _import(candidate: Candidate, device: str) -> None:
    """Import the framework first: an executor has it in memory long before it loads its next model."""
    from services.executor.backends import backend  # noqa: PLC0415
    from services.executor.backends.base import Unavailable  # noqa: PLC0415

    try:
        backend(candidate.framework).probe(device)
    except Unavailable as error:
        raise Refusal(str(error)) from error


def _host(proof: str) -> dict[str, str]:
    found = measure.host(proof)
    try:
        found["onnxruntime"] = version("onnxruntime")
    except PackageNotFoundError:
        pass
    return found
