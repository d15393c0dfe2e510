"""Offline jobs: messages between clients and the coordinator, and between the coordinator and the workers' runners.

A job's input is split into numbered chunks. One worker computes each chunk, and stores the result as a part of the same number.
"""

from typing import Literal

from msgspec import Raw, Struct

JobState = Literal["accepted", "reading", "running", "writing", "done", "failed", "cancelled"]
OVER: frozenset[str] = frozenset({"done", "failed", "cancelled"})
OFFLINE = "offline"  # the policy of offline work in routes and outcomes
SYSTEM = "_system"  # pays for offline work that no app has asked for: copies of queries (services/dispatcher/copies.py)


def uploads_of(app: str) -> str:
    """How the keys of this app's job files begin in the bucket of uploads, where only its jobs may name them."""
    return f"jobs/{app}/"


class SubmitJob(Struct, frozen=True, kw_only=True):
    """`infaas.job.<app>`: compute every item of `input`, and write the outputs in the same order to `output`. Both are URLs.

    accuracy: the least accuracy, 0..1, stated in metric, as of a query. model, variant: use only this one; without both, the cheapest variant that meets the accuracy.
    job: an id that the client may choose. The others are needs of queries only: a job that states one is refused.
    """

    input: str
    output: str
    accuracy: float | None = None
    metric: str | None = None
    model: str | None = None
    variant: str | None = None
    job: str | None = None
    latency_ms: float | None = None
    deadline: float | None = None
    cost: float | None = None
    priority: int | None = None
    confidence: float | None = None
    context: str | None = None
    version: str | None = None


class JobAccepted(Struct, frozen=True, kw_only=True):
    """The immediate reply to `SubmitJob`. Progress follows on `infaas.job-status.<id>`."""

    job: str


class CancelJob(Struct, frozen=True, kw_only=True):
    """`infaas.job-cancel.<id>`: cancel the job that the subject names. The body may be empty."""


class JobCancelled(Struct, frozen=True, kw_only=True):
    """The reply to `infaas.job-cancel.<id>`: no more items of this job are computed."""

    cancelled: bool = True


class JobStatus(Struct, frozen=True, kw_only=True):
    """`infaas.job-status.<id>`: published at every step until `state` is done, failed or cancelled. A request gets the latest status.

    total, done, failed: items. total is None until the input has been read once. cost: US$ so far. step: the present step, for people.
    variants: those that computed items of the job. created, started, finished: Unix seconds.
    """

    job: str
    app: str
    state: JobState
    input: str
    output: str
    accuracy: float | None = None
    model: str | None = None
    variant: str | None = None
    total: int | None = None
    done: int = 0
    failed: int = 0
    progress: float = 0.0
    step: str = ""
    reason: str | None = None
    cost: float = 0.0
    variants: list[str] = []
    created: float = 0.0
    started: float | None = None
    finished: float | None = None


class Position(Struct, frozen=True, array_like=True):
    """Where the next item begins in an input file. offset: in bytes. skip: how many items to skip from that offset on."""

    offset: int = 0
    skip: int = 0


class Checkpoint(Struct, frozen=True, kw_only=True):
    """How much of the output is on disk.

    chunks, items: how many are on disk. bytes: where they end in the output. position: where the input continues.
    datatype, shape: those of an output item, for files that hold one array. generation: grows each time the job starts over.
    """

    chunks: int = 0
    items: int = 0
    bytes: int = 0
    position: Position = Position()
    datatype: str = ""
    shape: list[int] = []
    generation: int = 0


class JobRecord(Struct, frozen=True, kw_only=True):
    """One job in the jobs bucket, under the job's id.

    owner: the coordinator that runs the job. chunk_items: the most items of a chunk. It never changes, so that a chunk's number always
    means the same items. stamp: changes when the input file changes, so that the change is detected.
    """

    status: JobStatus
    owner: str
    chunk_items: int
    checkpoint: Checkpoint = Checkpoint()
    stamp: str = ""


class Chunk(Struct, frozen=True, array_like=True):
    """`infaas.offline.chunks.<job>`, in the work queue of the jobs.

    first: the number of its first item, counted from 0. body: the fields `inputs` or `inputs_ref` of a query.
    generation: that of the job's checkpoint.
    """

    job: str
    number: int
    first: int
    items: int
    body: Raw
    generation: int = 0


class Part(Struct, frozen=True, kw_only=True):
    """The result of one chunk, in the bucket of parts under `<job>/<number>`.

    outputs: MessagePack, name to tensor. labels: the name of each item's class, if the model has names of its classes. error: why the chunk
    could not be computed; empty if it was computed.
    """

    job: str
    number: int
    items: int
    outputs: Raw
    worker: str
    variant: str = ""
    cost: float = 0.0
    labels: list[str] | None = None
    error: str = ""


class PartStored(Struct, frozen=True, kw_only=True):
    """`infaas.offline.part`: runner -> coordinators. A part is in the bucket."""

    job: str
    number: int


class RunnerNote(Struct, frozen=True, kw_only=True):
    """`infaas.offline.note`: runner -> coordinators, while there are jobs.

    why: the reason why the runner takes no chunks now; empty if it takes chunks. jobs: why it computes nothing of this job, although it may
    compute others.
    """

    worker: str
    why: str
    jobs: dict[str, str] = {}


class JobsHeartbeat(Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.offline.alive`, every second: coordinator -> coordinators. When it stops, another coordinator takes over its jobs."""

    coordinator: str
    leaving: bool = False
