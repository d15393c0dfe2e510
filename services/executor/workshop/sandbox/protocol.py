"""The tasks of a sandbox, and the frames that it sends back. Everything in a frame is a claim, which is checked by its type."""

from math import isfinite

from msgspec import Struct

from bus.fields import filled
from bus.messages.catalog import Functions, Profile, ProfileRow, Signature


class ValidationFile(Struct, frozen=True, kw_only=True):
    """The validation set: a file, the keys in it, and how answers are scored. most_bytes: unpacked. allow_nan: inputs may hold NaN.

    named: labels may be the classes' names, which a function of the model's owner says.
    """

    path: str
    inputs_key: str
    labels_key: str
    metric: str
    most_bytes: int
    allow_nan: bool = False
    named: bool = False


class _UploadTask(Struct, frozen=True, kw_only=True):
    """What tasks on a registration's files have. scratch: a directory to write in."""

    data: ValidationFile
    scratch: str
    functions: Functions | None = None


class _ModelTask(_UploadTask, frozen=True, kw_only=True):
    """What tasks on a model's file have besides."""

    model: str
    format: str
    most_bytes: int
    allow_torchscript: bool = False


class InspectTask(_ModelTask, frozen=True, kw_only=True, tag=True):
    """Check that a file has its format and runs, and find its signature."""


class Artifact(Struct, frozen=True, kw_only=True):
    """A file to make, shared by all variants with this framework and precision."""

    framework: str
    precision: str
    format: str
    path: str


class BuildTask(_ModelTask, frozen=True, kw_only=True, tag=True):
    """Make these artifacts of a model, and `reference`: its own answers on the validation set."""

    signature: Signature
    artifacts: list[Artifact]
    reference: str
    fixed_batch: bool = False


class MeasureTask(_UploadTask, frozen=True, kw_only=True, tag=True):
    """Profile one artifact with so many threads, for these largest batches; score it when `score`. device: where.

    contended: beside further instances that compute all the time. contexts: with so many batches at a time on one copy of the weights.
    goes_on: of a cascade, the file that says which samples go on to its second part. reference: empty: agreement is not measured.
    """

    artifact: Artifact
    signature: Signature
    reference: str
    threads: int
    max_batches: list[int]
    score: bool
    contended: bool = False
    contexts: int = 1
    device: str = "cpu"
    goes_on: str = ""


class CascadePair(Struct, frozen=True, kw_only=True):
    """Files of two parts, what an item costs in each, and what it may cost in both, in seconds of a core."""

    first: str
    then: str
    first_cost: float
    then_cost: float
    most: float


class CascadeTask(_UploadTask, frozen=True, kw_only=True, tag=True):
    """Find the pair of which the cheapest cascade is made, and write that to `target`, and to `goes_on` which samples go on to the second part."""

    signature: Signature
    pairs: list[CascadePair]
    target: str
    goes_on: str


class ProbeTask(Struct, frozen=True, kw_only=True, tag=True):
    """Find which frameworks work on this device. No uploaded file is involved."""

    hardware: str
    device: str
    scratch: str


SandboxTask = InspectTask | BuildTask | MeasureTask | CascadeTask | ProbeTask


class SandboxLimits(Struct, frozen=True, kw_only=True):
    """What one sandbox may use. seconds: of wall time; file_bytes: of one written file; hardware: whose devices it may open."""

    memory_bytes: int
    seconds: float
    file_bytes: int
    hardware: str = "cpu"


class SandboxInput(Struct, frozen=True, kw_only=True):
    """What a sandbox reads on its standard input."""

    task: SandboxTask
    limits: SandboxLimits


class Step(Struct, frozen=True, kw_only=True, tag=True):
    """The next step. Silence for longer than `within` seconds means that the model hangs."""

    step: str
    progress: float = 0.0
    within: float = 120.0


class TaskRefused(Struct, frozen=True, kw_only=True, tag=True):
    """The task cannot be done, and why. The last frame."""

    reason: str


class Inspected(Struct, frozen=True, kw_only=True, tag=True):
    """What a model proved to be. most_batch: items of a batch at most; 0: not known. alone: why it takes one item at a time."""

    signature: Signature
    operators: list[str]
    fixed_batch: bool
    samples: int
    accuracy: float
    frameworks: dict[str, str]
    most_batch: int = 0
    alone: str = ""
    functions: Functions | None = None


class Made(Struct, frozen=True, kw_only=True, tag=True):
    """The artifact with this path is written."""

    path: str


class NotMade(Struct, frozen=True, kw_only=True, tag=True):
    """The artifact with this path cannot be made, and why."""

    path: str
    reason: str


class Measured(Struct, frozen=True, kw_only=True, tag=True):
    """One artifact's profile with so many threads. memory_mb: by largest batch. accuracy with its interval, agreement: None when not scored.
    differing: the further outputs that differ from those of the model as it came, with the share of answers that agree.

    transfer_ms, host_mb: of its way from host memory to the device, and what it takes there; None: it cannot be kept there. short_of: the
    largest batch that was measured when larger ones take too long or fail, else 0. neighbours: further instances that
    computed while latencies were measured. functions_ms: of one item's latency, what its owner's functions take; None: there are none.
    distribution: an encoded `services.core.drift.Distribution`; empty: it was not scored, or has too many columns.
    """

    rows: list[ProfileRow]
    load_ms: float
    memory_mb: dict[int, float]
    disturbed: bool
    host: dict[str, str]
    transfer_ms: float | None = None
    host_mb: float | None = None
    short_of: int = 0
    neighbours: int = 0
    accuracy: float | None = None
    agreement: float | None = None
    differing: dict[str, float] = {}
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    contexts: int = 1
    functions_ms: float | None = None
    distribution: bytes = b""


class Independence(Struct, frozen=True, kw_only=True, tag=True):
    """Why the items of an artifact must be computed alone; empty: they need not. It follows `Measured` where that was scored."""

    alone: str


class Joined(Struct, frozen=True, kw_only=True, tag=True):
    """A cascade is written, of the pair with this number. share: of the samples that go on, those with less than `threshold` confidence."""

    pair: int
    threshold: float
    share: float


class Probed(Struct, frozen=True, kw_only=True, tag=True):
    """By framework: "" where it works on the device, else why not."""

    frameworks: dict[str, str]


Frame = Step | TaskRefused | Inspected | Made | NotMade | Measured | Independence | Joined | Probed


class UploadRejected(Exception):
    """This file or variant is not acceptable. The text is for the model's owner."""


def _provenance(measured: Measured) -> str:
    beside, contexts = measured.neighbours, measured.contexts
    if beside:
        return f"measured: beside {beside} further instance{'s' * (beside > 1)}"
    return f"measured: {contexts} batches at a time" if contexts > 1 else "measured"


def profile_of(measured: Measured, largest: int) -> Profile:
    """The part of the measurements up to this largest batch. Raises UploadRejected if its batches take too long."""
    if measured.short_of and largest > measured.short_of:
        raise UploadRejected(
            f"a batch of {largest} takes more than 10 s, or the model does not take it: use a smaller largest batch"
        )
    rows = [row for row in measured.rows if row.batch <= largest and isfinite(row.p50_ms) and row.p50_ms > 0]
    if not rows:
        raise UploadRejected("nothing could be measured")
    longest = max((row.length for row in rows if row.length is not None), default=None)
    memory = [mb for batch, mb in measured.memory_mb.items() if batch <= largest]
    return filled(
        Profile,
        measured,
        rows=rows,
        init_ms=None if measured.transfer_ms is None else max(0.0, measured.load_ms - measured.transfer_ms),
        transfer_ms=None if measured.transfer_ms is None else min(measured.load_ms, measured.transfer_ms),
        memory_mb=max(memory, default=0.0),
        saturation_qps=max(row.batch / row.p50_ms * 1000.0 for row in rows if row.length == longest),
        provenance=_provenance(measured),
    )
