"""Inspects and measures a user's own process (`infaas container`): its signature, accuracy and latencies. It runs beside that process."""

import io
import time
from collections.abc import Callable
from hashlib import sha256

import numpy as np
from numpy import ndarray

from bus.messages.catalog import Profile, Signature, TensorSpec
from bus.messages.public import ContainerReport
from bus.tensors import BadTensor, fit
from services.executor.backends.container import UserProcess
from services.executor.workshop.sandbox.protocol import UploadRejected, ValidationFile
from services.executor.workshop.tasks import inspection, validation
from services.executor.workshop.tasks.independence import why_alone
from services.executor.workshop.tasks.measures import Answers
from services.executor.workshop.tasks.measuring import host
from services.executor.workshop.tasks.profiling import BATCHES, BUDGET_S, LONGEST_BATCH_S, CellTable, SeenSamples
from services.executor.workshop.tasks.validation import Array, Scorer, ValidationSet

REFERENCE = 64  # samples whose answers are kept, for further processes of the same version to agree with
PREDICTIONS = "predictions"  # the key in references of older versions

Tell = Callable[[str], None]
See = Callable[[dict[str, Array], dict[str, Array]], None]


class InspectedContainer:
    """A process that answers the validation set, its signature and its largest batch."""

    def __init__(self, process: UserProcess, file: ValidationFile, app: Signature | None, most: int) -> None:
        """app: the signature that the app has already. most: items of a batch. Raises UploadRejected."""
        self._process = process
        inputs = app.inputs if app is not None else validation.inputs_of(file)
        self.data = validation.read(file, Signature(inputs=inputs, outputs=[]))
        first = inspection.run_batch(process, self.data.take(np.arange(1)))
        if app is not None:
            outputs = _as_the_app(first, app.outputs)
        else:
            outputs = inspection.outputs_seen(first, [], varying=False)
        self.signature = process.signature = Signature(inputs=inputs, outputs=outputs)
        self._scorer = Scorer(file.metric, self.signature)
        self._scorer.check(self.data.labels)
        self.alone = "" if most == 1 else inspection.why_single(process, self.data)
        self.alone = self.alone or why_alone(process, self.data, most, allow_nan=False)
        self.max_batch = 1 if self.alone else most
        self.distribution = b""  # as `report` found it; empty: not known

    def report(self, tell: Tell) -> ContainerReport:
        """Accuracy and profile. Raises UploadRejected."""
        tell("measuring accuracy")
        indices = validation.shuffled(len(self.data))
        seen = SeenSamples(self.signature, self.data)
        accuracy = self._scorer.judge(self._answers(self.data, indices, seen.see), self.data, indices)
        self.distribution = seen.packed()
        tell("measuring latency")
        table = CellTable(self._process, self.data, self.signature, 0)  # 0 threads: not in this process
        lengths = table.lengths()
        most = 1
        for batch in sorted({size for size in (*BATCHES, self.max_batch) if size <= self.max_batch}):
            slowest_s = table.add(batch, lengths[-1], lengths[-1]).p50_ms / 1000.0
            most = batch
            if 2 * slowest_s > LONGEST_BATCH_S:
                break
        for length in lengths[:-1]:
            table.add(1, length, lengths[-1])
        table.repeat(lengths[-1], time.monotonic() + BUDGET_S)
        rows = table.rows()
        profile = Profile(
            rows=rows,
            load_ms=0.0,  # the process runs
            memory_mb=self._process.measure_memory(),
            saturation_qps=max(row.batch / row.p50_ms * 1000.0 for row in rows if row.length in (None, lengths[-1])),
            disturbed=table.disturbed(),
            host=host(self._process.proof),
        )
        return ContainerReport(
            signature=self.signature,
            accuracy=accuracy.value,
            accuracy_low=accuracy.low,
            accuracy_high=accuracy.high,
            max_batch=most,
            profile=profile,
            alone=self.alone,
            distribution=sha256(self.distribution).hexdigest() if self.distribution else "",
        )

    def reference(self) -> bytes:
        """An .npz file: some inputs, and the answers of this process."""
        some = np.arange(min(REFERENCE, len(self.data)))
        inputs = self.data.take(some)
        stored: dict[str, Array] = {f"inputs.{name}": _plain(array) for name, array in inputs.items()}
        stored |= self._answers(self.data, some).packed()
        file = io.BytesIO()
        np.savez_compressed(file, allow_pickle=False, **stored)
        return file.getvalue()

    def agreement(self, reference: bytes) -> float:
        """The share of the reference's answers that this process gives, too, of the output with the least. Raises UploadRejected."""
        try:
            with np.load(io.BytesIO(reference), allow_pickle=False) as file:
                stored = {name: file[name] for name in file.files}
            known = Answers.unpacked({"scored": stored.get(PREDICTIONS, np.zeros(0)), **stored})
            inputs = {spec.name: _fitted(stored[f"inputs.{spec.name}"], spec) for spec in self.signature.inputs}
        except (OSError, ValueError, KeyError) as error:
            raise UploadRejected(f"the answers of the first process of this version cannot be read: {error}") from error
        data = ValidationSet(inputs, known.scored)
        found = self._answers(data, np.arange(len(data)))
        known.others.update({name: [] for name in found.others if name not in known.others})  # of an older version
        return min(self._scorer.compare(found, known).values())

    def _answers(
        self, data: ValidationSet, indices: "ndarray[tuple[int], np.dtype[np.int64]]", see: See | None = None
    ) -> Answers:
        batch = min(self.max_batch, inspection.BATCH)
        return inspection.predictions(self._process, data, indices, self._scorer, batch, _nothing, see=see)


def _as_the_app(outputs: dict[str, Array], wanted: list[TensorSpec]) -> list[TensorSpec]:
    """The app's outputs. Raises UploadRejected unless these are such."""
    if outputs.keys() != {spec.name for spec in wanted}:
        names = ", ".join(spec.name for spec in wanted)
        raise UploadRejected(f"predict_batch returns {', '.join(outputs)}; the app's outputs are {names}")
    for spec in wanted:
        try:
            fit(outputs[spec.name], spec, spec.name)
        except BadTensor as error:
            raise UploadRejected(f"the app's output is another one than predict_batch returns: {error}") from error
    return wanted


def _nothing(share: float) -> None:
    del share


def _plain(array: Array) -> Array:
    return array.astype(str) if array.dtype.kind == "O" else array


def _fitted(array: Array, spec: TensorSpec) -> Array:
    return fit(array, spec, spec.name)
