"""Profile one artifact with one number of threads, in a fresh sandbox: load, latency table, memory, accuracy, agreement."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy import ndarray

from bus.codec import encode
from bus.messages.catalog import FLOOR, ProfileRow, Signature
from services.core.drift import Distribution, measure, samples_of, words_of
from services.core.placement import REMOTE
from services.executor.backends.base import Handle
from services.executor.backends.functions import FunctionProcess, WithFunctions
from services.executor.workshop.sandbox.protocol import Frame, Independence, Measured, MeasureTask, Step, UploadRejected
from services.executor.workshop.tasks import inspection, validation
from services.executor.workshop.tasks.independence import why_alone
from services.executor.workshop.tasks.inspection import TRIAL_S, RunnableUpload
from services.executor.workshop.tasks.measures import Answers
from services.executor.workshop.tasks.measuring import (
    DeviceMemory,
    LatencyCell,
    Memory,
    Mix,
    host,
    measure_calls,
    memory_of,
)
from services.executor.workshop.tasks.validation import MeasuredAccuracy, Scorer, ValidationSet, wilson

Array = ndarray[Any, Any]

CELL_S = 0.06
CELL_OTHER_LENGTH_S = 0.03
PASSES = 3
FUNCTIONS_S = 1.0  # in which those of an owner are measured alone
COMPILE_S = 600.0  # an engine for an accelerator, at its first load
LONGEST_BATCH_S = 10.0  # a batch that takes longer is not worth having
BUDGET_S = 20.0  # of repetitions
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = 4
LARGEST_DISTRIBUTION = 2**19  # bytes
MOST_NEIGHBOURS = 7  # each is a copy of the model


@dataclass(slots=True, eq=False)
class Neighbours:
    """Further instances of a variant that compute all the time, each in a thread of its own, as the instances on one device do.

    They compute nothing before the first `feed`. own: they are closed at the end; else they are further contexts of one instance.
    """

    handles: Sequence[Handle]
    own: bool = True
    _threads: list[Thread] = field(default_factory=list)
    _inputs: dict[str, Array] | None = None
    _failure: Exception | None = None

    def __len__(self) -> int:
        return len(self.handles)

    def feed(self, inputs: dict[str, Array]) -> None:
        """Compute this batch again and again from now on."""
        self._inputs = inputs
        if not self._threads:
            self._threads = [Thread(target=self._compute, args=(handle,), daemon=True) for handle in self.handles]
            for thread in self._threads:
                thread.start()

    def check(self) -> None:
        """Raises UploadRejected if one has failed: what was measured since is not what it says."""
        if self._failure is not None:
            raise UploadRejected(f"a further instance failed while it was measured beside them: {self._failure}")

    def close(self) -> None:
        self._inputs = None
        for thread in self._threads:
            thread.join()
        for handle in self.handles if self.own else ():
            handle.close()

    def _compute(self, handle: Handle) -> None:
        try:
            while (inputs := self._inputs) is not None:
                inspection.run_batch(handle, inputs)
        except Exception as error:  # of a thread: `check` tells it
            self._failure = error


class CellTable:
    """Latency cells by (length, batch). Disturbed cells are measured again, except beside neighbours, whose disturbance is wanted."""

    def __init__(
        self,
        handle: Handle,
        data: ValidationSet,
        signature: Signature,
        threads: int,
        neighbours: Neighbours | None = None,
        pick: Callable[[int], Array] | None = None,
    ) -> None:
        """threads: 0 if an accelerator or another process computes. neighbours: compute each batch while it is measured. pick: the samples of a batch;
        None: the first ones.
        """
        self._handle, self._data, self._threads, self._neighbours = handle, data, threads, neighbours
        self._pick = pick or (lambda batch: np.arange(batch) % len(data))
        self._signature = signature
        self._open_axes = {
            spec.name: [a + 1 for a, size in enumerate(spec.shape) if size == -1] for spec in signature.inputs
        }
        self._cells: dict[tuple[int, int], list[LatencyCell]] = {}
        self._single = len(data.inputs) == 1

    def lengths(self) -> list[int]:
        """Buckets of the first open axis: the validation set's length and its successive halves. [0] if no axis is open."""
        for name, axes in self._open_axes.items():
            if axes:
                longest = self._data.inputs[name].shape[axes[0]]
                return sorted({max(1, longest >> step) for step in range(LENGTHS)})
        return [0]

    def batch(self, batch: int, length: int, longest: int) -> dict[str, Array]:
        """Real samples, repeated if there are too few, cut to the length's share along every open axis."""
        inputs = self._data.take(self._pick(batch))
        if length == longest:
            return inputs
        return {name: self._cut(name, array, length / longest) for name, array in inputs.items()}

    def add(self, batch: int, length: int, longest: int) -> LatencyCell:
        """Measure one cell, once more if it was measured before."""
        inputs = self.batch(batch, length, longest)
        inspection.run_batch(self._handle, inputs)
        if self._neighbours is not None:
            self._neighbours.feed(inputs)
        call = self._call(inputs)
        cell = measure_calls(call, CELL_S if length == longest else CELL_OTHER_LENGTH_S, self._threads)
        if self._neighbours is not None:
            self._neighbours.check()
            if self._threads != 1:  # the process's CPU time is that of all, which are alike
                cell = replace(cell, cpu_ms=cell.cpu_ms / (1 + len(self._neighbours)))
        self._cells.setdefault((length, batch), []).append(cell)
        return cell

    def repeat(self, longest: int, until: float) -> None:
        """Measure disturbed cells again, up to three times in all, while there is time."""
        for _ in range(PASSES - 1):
            for length, batch in [key for key, cells in self._cells.items() if not self._clean(cells)]:
                if time.monotonic() < until:
                    self.add(batch, length, longest)

    def beside(self, neighbours: Neighbours, longest: int, until: float, tell: Callable[[float], None]) -> "CellTable":
        """The same cells beside neighbours: once each, then again up to three times in all, while there is time. tell: 0..1."""
        found = CellTable(self._handle, self._data, self._signature, self._threads, neighbours, self._pick)
        for turn in range(PASSES):
            for done, (length, batch) in enumerate(self._cells):
                if turn == 0 or time.monotonic() < until:
                    tell((turn + done / len(self._cells)) / PASSES)
                    found.add(batch, length, longest)
        return found

    def disturbed(self) -> bool:
        return not all(self._clean(cells) for cells in self._cells.values())

    def rows(self) -> list[ProfileRow]:
        return [self._row(length, batch, cells) for (length, batch), cells in sorted(self._cells.items())]

    def _clean(self, cells: Iterable[LatencyCell]) -> bool:
        return self._neighbours is not None or any(cell.clean(self._threads) for cell in cells)

    def _row(self, length: int, batch: int, cells: list[LatencyCell]) -> ProfileRow:
        alone = self._neighbours is None
        clean = [cell for cell in cells if alone and cell.clean(self._threads)]
        best = min(clean or cells, key=lambda cell: cell.p50_ms)
        p50 = min(cell.estimate_ms(self._threads) if alone else cell.p50_ms for cell in clean or cells)
        slow = min(clean or cells, key=lambda cell: cell.p99_ms)
        return ProfileRow(
            batch=batch,
            p50_ms=p50,
            p99_ms=max(p50, slow.p99_ms),
            p99_low_ms=None if slow.p99_low_ms is None else max(p50, slow.p99_low_ms),
            p99_high_ms=slow.p99_high_ms,
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


def profile(task: MeasureTask, tell: Callable[[Frame], None], process: FunctionProcess | None = None) -> Measured:
    """Profile one artifact with one number of threads. process: of its owner's functions. Raises UploadRejected."""
    what = f"{task.artifact.framework} {task.artifact.precision}, {task.threads} thread{'s' * (task.threads > 1)}"
    alone = task.device == "cpu"
    first_load_s = TRIAL_S if alone else COMPILE_S
    tell(Step(step=f"profiling {what}"))
    data = validation.read(task.data, task.signature)
    candidate = _candidate(task, process)
    one = data.take(np.arange(1))
    _import(candidate, task.device)
    tell(Step(step=f"profiling {what}", progress=0.1, within=first_load_s))
    if alone and task.artifact.framework != REMOTE:  # what a framework takes for its first model is no model's own
        _load(candidate, task, one)[0].close()
    memory = memory_of(task.device)
    handle, load_ms = _load(candidate, task, one)
    memory.loaded()
    mix, tables = Mix.of(task.goes_on), list[CellTable]()
    neighbours, contexts = 0, 1 if handle.one_at_a_time else task.contexts
    for pick in mix.picks if mix is not None else (None,):
        table = CellTable(handle, data, task.signature, task.threads if alone and process is None else 0, pick=pick)
        peaks, short_of = _fill(
            table, task, memory, lambda share: tell(Step(step=f"profiling {what}", progress=0.1 + share / 2))
        )
        if task.contended:
            neighbours = min(MOST_NEIGHBOURS, max(1, len(os.sched_getaffinity(0)) // task.threads - 1)) if alone else 1
            table = _contended(
                candidate,
                task,
                table,
                neighbours,
                one,
                lambda share: tell(Step(step=f"profiling {what} beside further ones", progress=0.6 + share / 4)),
            )
        if contexts > 1:
            with closing(Neighbours([handle] * (contexts - 1), own=False)) as others:
                table = table.beside(
                    others,
                    table.lengths()[-1],
                    time.monotonic() + BUDGET_S,
                    lambda share: tell(Step(step=f"profiling {what}, {contexts} at a time", progress=0.6 + share / 4)),
                )
        tables.append(table)
    accuracy: MeasuredAccuracy | None = None
    agreement, differing, seen = None, dict[str, float](), SeenSamples(task.signature, data) if task.score else None
    if seen is not None:
        tell(Step(step=f"measuring the accuracy of {what}", progress=0.6))
        accuracy, agreement, differing = _score(task, handle, data, max(peaks), tell, seen.see)
    where = _host(handle.proof)
    if process is not None and alone:
        beside = process.measure_memory()
        peaks = {batch: mb + beside for batch, mb in peaks.items()}
    if task.artifact.framework == REMOTE:
        peaks = dict.fromkeys(peaks, 0.0)  # what grew here is no model
        where["engine"] = handle.proof.rpartition(" ")[2]
    functions_ms = functions_of(handle, one)
    transfer_ms, host_mb = transfer_of(handle, one)
    handle.close()
    for _ in range(2 if alone else 1):
        if load_ms < 1000.0 or not alone:  # an accelerator's first load compiles; executors keep what comes out of it
            again, ms = _load(candidate, task, one)
            again.close()
            load_ms = min(load_ms, ms)
    if process is not None:
        load_ms += process.start_ms  # each instance has one of its own
    return Measured(
        rows=table.rows() if mix is None else mix.rows([table.rows() for table in tables]),
        load_ms=load_ms,
        memory_mb=peaks,
        disturbed=any(table.disturbed() for table in tables),
        host=where,
        transfer_ms=transfer_ms,
        host_mb=host_mb,
        short_of=short_of,
        neighbours=neighbours,
        contexts=contexts,
        accuracy=accuracy.value if accuracy is not None else None,
        accuracy_low=accuracy.low if accuracy is not None else None,
        accuracy_high=accuracy.high if accuracy is not None else None,
        agreement=agreement,
        differing=differing,
        functions_ms=functions_ms,
        distribution=seen.packed() if seen is not None else b"",
    )


class SeenSamples:
    """The distribution of a validation set and of a model's answers to it, batch by batch, in the order of `validation.shuffled`."""

    def __init__(self, signature: Signature, data: ValidationSet) -> None:
        self._signature = signature
        self._left = samples_of(signature, len(data))
        half = data.take(validation.shuffled(len(data))[: self._left // 2])
        self._words = words_of(signature, half)
        self._values: list[Array] = []

    def see(self, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        if self._left > 0:
            self._values.append(measure(self._signature, inputs, outputs, self._words))
            self._left -= len(self._values[-1])

    def packed(self) -> bytes:
        """Empty: it is too large."""
        packed = encode(Distribution.of(self._signature, np.concatenate(self._values), self._words))
        return packed if len(packed) <= LARGEST_DISTRIBUTION else b""


def _contended(
    candidate: RunnableUpload,
    task: MeasureTask,
    table: CellTable,
    count: int,
    one: dict[str, Array],
    tell: Callable[[float], None],
) -> CellTable:
    """The table's cells beside so many further instances that compute all the time. Raises UploadRejected if one fails."""
    with closing(Neighbours([_load(candidate, task, one)[0] for _ in range(count)])) as neighbours:
        return table.beside(neighbours, table.lengths()[-1], time.monotonic() + BUDGET_S, tell)


def _fill(
    table: CellTable, task: MeasureTask, memory: Memory | DeviceMemory, tell: Callable[[float], None]
) -> tuple[dict[int, float], int]:
    """Measure all cells. Returns memory by batch at the greatest length, and the last batch before batches took too long or failed, or 0."""
    most = max(task.max_batches)
    batches = sorted({b for b in (*BATCHES, *task.max_batches) if b <= most})
    lengths = table.lengths()
    longest = lengths[-1]
    peaks: dict[int, float] = {}
    short_of, slowest = 0, 0.0
    for done, batch in enumerate(batches):
        tell(done / len(batches))
        if peaks and slowest * batch / max(peaks) > LONGEST_BATCH_S:
            short_of = max(peaks)
            break
        try:
            slowest = table.add(batch, longest, longest).p50_ms / 1000.0
        except UploadRejected:
            if not peaks:
                raise
            short_of = max(peaks)  # smaller batches may do
            break
        peaks[batch] = memory.peak_mb()
    for length in lengths[:-1]:
        for batch in (b for b in peaks if b in (1, 4, 16, max(peaks))):
            try:
                table.add(batch, length, longest)
            except UploadRejected:  # shorter than the model takes: this bucket does not exist
                break
    table.repeat(longest, time.monotonic() + BUDGET_S)
    return peaks, short_of


def _score(
    task: MeasureTask,
    handle: Handle,
    data: ValidationSet,
    most: int,
    tell: Callable[[Frame], None],
    see: Callable[[dict[str, Array], dict[str, Array]], None],
) -> tuple[MeasuredAccuracy, float | None, dict[str, float]]:
    """Accuracy on all samples, agreement of the scored output with the model as uploaded on the samples that the reference has, and of each
    further output that differs. Where a metric of the user's own judges all outputs, there is only the accuracy.
    """
    reference = Answers(np.zeros(0), {})
    try:
        if task.reference:
            with np.load(task.reference, allow_pickle=False) as file:
                reference = Answers.unpacked({name: file[name] for name in file.files})
    except (OSError, ValueError) as error:
        raise UploadRejected("the model's own answers are missing") from error
    scorer = Scorer(task.data.metric, task.signature, data.source, named=data.named)
    indices = validation.shuffled(len(data))
    step = f"measuring the accuracy of {task.artifact.framework} {task.artifact.precision}"
    found = inspection.predictions(
        handle,
        data,
        indices,
        scorer,
        min(most, inspection.BATCH),
        lambda share: tell(Step(step=step, progress=0.6 + 0.4 * share)),
        see=see,
    )
    accuracy = scorer.judge(found, data, indices)
    if scorer.own is not None or not task.reference:
        return accuracy, None, {}
    shares = scorer.compare(found, reference)
    if not scorer.output:
        least = min(shares.values())
        return wilson(least, max(map(len, reference.others.values()))), least, {}
    agreement = shares.pop(scorer.output)
    return accuracy, agreement, {name: share for name, share in shares.items() if share < 1.0 - FLOOR}


def _load(candidate: RunnableUpload, task: MeasureTask, one: dict[str, Array]) -> tuple[Handle, float]:
    """A handle, and the ms until its first answer."""
    start = time.perf_counter()
    handle = candidate.load(task.threads, task.device, max(task.max_batches), task.artifact.precision)
    inspection.run_batch(handle, one)
    return handle, (time.perf_counter() - start) * 1000.0


def functions_of(handle: Handle, one: dict[str, Array]) -> float | None:
    """The ms that its owner's functions take of one item, at best; None if there are none."""
    if not isinstance(handle, WithFunctions):
        return None
    times, until = list[float](), time.monotonic() + FUNCTIONS_S
    while len(times) < PASSES or (len(times) < 10 * PASSES and time.monotonic() < until):
        handle.took()
        inspection.run_batch(handle, one)
        times.append(sum(handle.took()) * 1000.0)
    return min(times)


def transfer_of(handle: Handle, one: dict[str, Array]) -> tuple[float, float] | tuple[None, None]:
    """The ms from host memory until an answer, at best, and the MB that the model takes there; None if it cannot be kept there.

    It is the last thing that happens to the handle: a failed transfer breaks it.
    """
    from services.executor.backends.base import BackendError, Demotable  # noqa: PLC0415

    if not isinstance(handle, Demotable):
        return None, None
    times = []
    try:
        for _ in range(PASSES):
            handle.demote()
            start = time.perf_counter()
            handle.promote()
            inspection.run_batch(handle, one)
            times.append((time.perf_counter() - start) * 1000.0)
    except BackendError:
        return None, None
    return min(times), handle.host_mb


def _import(candidate: RunnableUpload, device: str) -> None:
    """Import the framework first: an executor has it in memory before it loads a model."""
    from services.executor.backends import backend  # noqa: PLC0415
    from services.executor.backends.base import BackendUnavailable  # noqa: PLC0415

    try:
        backend(candidate.framework).probe(device)
    except BackendUnavailable as error:
        raise UploadRejected(str(error)) from error


def _host(proof: str) -> dict[str, str]:
    found = host(proof)
    try:
        found["onnxruntime"] = version("onnxruntime")
    except PackageNotFoundError:
        pass
    return found


def independence(task: MeasureTask, most: int, process: FunctionProcess | None = None) -> Independence:
    """Load the artifact once more and ask it alone and in batches. most: items of a batch."""
    handle = _candidate(task, process).load(task.threads, task.device, max(task.max_batches), task.artifact.precision)
    data = validation.read(task.data, task.signature)
    alone = why_alone(handle, data, most, allow_nan=task.data.allow_nan, precision=task.artifact.precision)
    handle.close()
    return Independence(alone=alone)


def _candidate(task: MeasureTask, process: FunctionProcess | None) -> RunnableUpload:
    artifact = task.artifact
    return RunnableUpload(
        framework=artifact.framework,
        path=Path(artifact.path),
        format=artifact.format,
        signature=task.signature if task.functions is None else task.functions.model,
        process=process,
        whole=task.signature,
    )
