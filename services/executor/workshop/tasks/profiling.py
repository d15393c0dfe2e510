"""Profile one artifact with one number of threads, in a fresh sandbox: load, latency table, memory, accuracy, agreement.

A measurement says when it cannot be trusted. On shared cores the same model measures twice as slow from one minute to the next, so
wall time is kept beside CPU time and the time spent waiting for a core. A cell counts as clean if wall time is within 12 % of CPU
time (one thread), or if the threads hardly waited for a core (several).
"""

import gc
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy import ndarray

from bus.messages.catalog import ProfileRow, Signature
from services.core.placement import REMOTE
from services.executor.backends.base import Handle, trim_memory
from services.executor.workshop.sandbox.protocol import Frame, Measured, MeasureTask, Step, UploadRejected
from services.executor.workshop.tasks import inspection, validation
from services.executor.workshop.tasks.inspection import TRIAL_S, RunnableUpload
from services.executor.workshop.tasks.validation import Accuracy, Scorer, ValidationSet
from services.shell.host.accelerators import cuda_memory_used_mb

CLEAN = 1.12
MOST_CALLS = 20_000
LEAST_CALLS = 5

# Instruction sets that decide how fast, and for int8 how accurate, a model runs; the best one is named.
_SETS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512f", "avx2", "i8mm", "asimddp", "asimd")


@dataclass(frozen=True)
class LatencyCell:
    """One measurement of one batch, in ms a call. waited: share of the time in which a thread waited for a core."""

    p50_ms: float
    p99_ms: float
    least_ms: float
    cpu_ms: float
    wall_over_cpu: float
    waited: float

    def clean(self, threads: int) -> bool:
        """threads: 0 if an accelerator computes and the CPU only waits."""
        return self.wall_over_cpu <= CLEAN if threads == 1 else self.waited <= CLEAN - 1.0

    def estimate_ms(self, threads: int) -> float:
        """The median of a clean cell; otherwise the least that it can be without neighbours."""
        if self.clean(threads):
            return self.p50_ms
        return min(self.least_ms, self.cpu_ms) if threads == 1 and self.cpu_ms > 0 else self.least_ms


def measure_calls(call: Callable[[], object], seconds: float, threads: int) -> LatencyCell:
    """Call for about so many seconds, at least five times, or fewer times if one call takes long."""
    # The clock of one thread is exact; the process's may advance in ticks.
    cpu_ns = time.thread_time_ns if threads == 1 else time.process_time_ns
    walls: list[int] = []
    counter = time.perf_counter_ns
    gc.disable()
    try:
        call()
        waited = _waited_ns()
        cpu = cpu_ns()
        start = counter()
        end = start + int(seconds * 1e9)
        before = start
        while True:
            call()
            after = counter()
            walls.append(after - before)
            before = after
            count = len(walls)
            if count >= MOST_CALLS or (after >= end and (count >= LEAST_CALLS or after - start > 1_000_000_000)):
                break
        cpu = cpu_ns() - cpu
        waited = _waited_ns() - waited
    finally:
        gc.enable()
    total = before - start
    walls.sort()
    return LatencyCell(
        p50_ms=walls[len(walls) // 2] / 1e6,
        p99_ms=walls[min(len(walls) - 1, int(len(walls) * 0.99))] / 1e6,
        least_ms=walls[0] / 1e6,
        cpu_ms=cpu / len(walls) / 1e6,
        wall_over_cpu=total / cpu if cpu > 0 else 1.0,
        waited=waited / total if total > 0 else 0.0,
    )


def _waited_ns() -> int:
    """Nanoseconds that the slowest thread of this process has waited for a core. 0 if Linux does not report it."""
    most = 0
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/schedstat", "rb") as file:
                most = max(most, int(file.read().split()[1]))
    except (OSError, ValueError, IndexError):
        return 0
    return most


class Memory:
    """Growth of this process's resident memory since this was made, in MB: what a model keeps, and what its batches need."""

    def __init__(self) -> None:
        self.loaded()
        self._base = _status_mb("VmRSS")

    def loaded(self) -> None:
        """The model is loaded. What only its load needed is given back, as in executors, and counts no more."""
        gc.collect()
        trim_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            self._peak = "VmHWM"
        except OSError:
            self._peak = "VmRSS"

    def peak_mb(self) -> float:
        """The highest growth since then."""
        return max(0.0, max(_status_mb("VmRSS"), _status_mb(self._peak)) - self._base)


class DeviceMemory:
    """The same for an accelerator's memory: growth of what all processes take of it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._base = cuda_memory_used_mb(device)
        self._peak = 0.0

    def loaded(self) -> None:
        """Nothing: frameworks keep what a load needed."""

    def peak_mb(self) -> float:
        """The highest growth that was seen. Frameworks keep the memory that large batches needed."""
        self._peak = max(self._peak, cuda_memory_used_mb(self._device) - self._base)
        return self._peak


def memory_of(device: str) -> Memory | DeviceMemory:
    """Measures what a model that is loaded from now on takes of the device's memory, or of the host's if the device cannot be asked."""
    return DeviceMemory(device) if device.startswith("cuda") else Memory()


def _status_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024.0
    return 0.0


def host(framework: str) -> dict[str, str]:
    """Where and when a profile was made: an int8 model's speed and answers depend on the instruction set."""
    model, flags = platform.machine(), set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() in {"flags", "Features"}:
                flags = set(value.split())
                break
    except OSError:
        pass
    isa = next((name for name in _SETS if name in flags), platform.machine())
    return {"isa": isa, "cpu": model, "framework": framework, "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}


# -- the task

Array = ndarray[Any, Any]

CELL_S = 0.06
CELL_OTHER_LENGTH_S = 0.03
PASSES = 3
COMPILE_S = 600.0  # an engine for an accelerator, at its first load
LONGEST_BATCH_S = 10.0  # a batch that takes longer is not worth having
BUDGET_S = 20.0  # of repetitions
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = 4
MOST_NEIGHBOURS = 7  # each is a copy of the model


class Neighbours:
    """Further instances of a variant that compute all the time, each in a thread of its own, as the instances on one device do."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        """They compute nothing before the first `feed`."""
        self._handles = handles
        self._threads: list[Thread] = []
        self._inputs: dict[str, Array] | None = None
        self._failure: Exception | None = None

    def __len__(self) -> int:
        return len(self._handles)

    def feed(self, inputs: dict[str, Array]) -> None:
        """Compute this batch again and again from now on."""
        self._inputs = inputs
        if not self._threads:
            self._threads = [Thread(target=self._compute, args=(handle,), daemon=True) for handle in self._handles]
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
        for handle in self._handles:
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
    ) -> None:
        """threads: 0 if an accelerator or another process computes. neighbours: compute each batch while it is measured."""
        self._handle, self._data, self._threads, self._neighbours = handle, data, threads, neighbours
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
        inputs = self._data.take(np.arange(batch) % len(self._data))
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
        found = CellTable(self._handle, self._data, self._signature, self._threads, neighbours)
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


def profile(task: MeasureTask, tell: Callable[[Frame], None]) -> Measured:
    """Profile one artifact with one number of threads. Raises UploadRejected."""
    what = f"{task.artifact.framework} {task.artifact.precision}, {task.threads} thread{'s' * (task.threads > 1)}"
    alone = task.device == "cpu"
    first_load_s = TRIAL_S if alone else COMPILE_S
    tell(Step(step=f"profiling {what}"))
    data = validation.read(task.data, task.signature)
    candidate = RunnableUpload(
        framework=task.artifact.framework,
        path=Path(task.artifact.path),
        format=task.artifact.format,
        signature=task.signature,
    )
    one = data.take(np.arange(1))
    _import(candidate, task.device)
    tell(Step(step=f"profiling {what}", progress=0.1, within=first_load_s))
    if alone and task.artifact.framework != REMOTE:  # what a framework takes for its first model is no model's own
        _load(candidate, task, one)[0].close()
    memory = memory_of(task.device)
    handle, load_ms = _load(candidate, task, one)
    memory.loaded()
    table = CellTable(handle, data, task.signature, task.threads if alone else 0)
    peaks, short_of = _fill(
        table, task, memory, lambda share: tell(Step(step=f"profiling {what}", progress=0.1 + share / 2))
    )
    neighbours = 0
    if task.contended:
        neighbours = min(MOST_NEIGHBOURS, max(1, len(os.sched_getaffinity(0)) // task.threads - 1)) if alone else 1
        table = _contended(
            candidate,
            task,
            table,
            neighbours,
            one,
            lambda share: tell(Step(step=f"profiling {what} beside {neighbours} more", progress=0.6 + share / 4)),
        )
    accuracy: Accuracy | None = None
    agreement = None
    if task.score:
        tell(Step(step=f"measuring the accuracy of {what}", progress=0.6))
        accuracy, agreement = _score(task, handle, data, max(peaks), tell)
    where = _host(handle.proof)
    if task.artifact.framework == REMOTE:
        peaks = dict.fromkeys(peaks, 0.0)  # what grew here is no model
        where["engine"] = handle.proof.rpartition(" ")[2]
    transfer_ms, host_mb = transfer_of(handle, one)
    handle.close()
    for _ in range(2 if alone else 1):
        if load_ms < 1000.0 or not alone:  # an accelerator's first load compiles; executors keep what comes out of it
            again, ms = _load(candidate, task, one)
            again.close()
            load_ms = min(load_ms, ms)
    return Measured(
        rows=table.rows(),
        load_ms=load_ms,
        memory_mb=peaks,
        disturbed=table.disturbed(),
        host=where,
        transfer_ms=transfer_ms,
        host_mb=host_mb,
        short_of=short_of,
        neighbours=neighbours,
        accuracy=accuracy.value if accuracy is not None else None,
        accuracy_low=accuracy.low if accuracy is not None else None,
        accuracy_high=accuracy.high if accuracy is not None else None,
        agreement=agreement,
    )


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
    task: MeasureTask, handle: Handle, data: ValidationSet, most: int, tell: Callable[[Frame], None]
) -> tuple[Accuracy, float]:
    """Accuracy on all samples, and agreement with the model as uploaded on the samples that the reference has."""
    try:
        reference = np.load(task.reference, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UploadRejected("the model's own answers are missing") from error
    scorer = Scorer(task.data.metric, task.signature)
    indices = validation.shuffled(len(data))
    step = f"measuring the accuracy of {task.artifact.framework} {task.artifact.precision}"
    found = inspection.predictions(
        handle,
        data,
        indices,
        scorer,
        min(most, inspection.BATCH),
        lambda share: tell(Step(step=step, progress=0.6 + 0.4 * share)),
    )
    return scorer.accuracy(found, data.labels[indices]), scorer.agreement(found[: len(reference)], reference)


def _load(candidate: RunnableUpload, task: MeasureTask, one: dict[str, Array]) -> tuple[Handle, float]:
    """A handle, and the ms until its first answer."""
    start = time.perf_counter()
    handle = candidate.load(task.threads, task.device, max(task.max_batches), task.artifact.precision)
    inspection.run_batch(handle, one)
    return handle, (time.perf_counter() - start) * 1000.0


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
