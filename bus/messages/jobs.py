"""Offline jobs: what outsiders send and hear, and what travels between the coordinator and the workers' runners.

A job's input is cut into numbered chunks; each chunk is computed by one worker and leaves one part behind, under its number.
"""

from typing import Literal

from msgspec import Raw, Struct

JobState = Literal["accepted", "reading", "running", "writing", "done", "failed", "cancelled"]
OVER: frozenset[str] = frozenset({"done", "failed", "cancelled"})
OFFLINE = "offline"  # the policy of offline work in routes and outcomes


class SubmitJob(Struct, frozen=True, kw_only=True):
    """`infaas.job.<app>`: compute every item of `input` and write the outputs in the same order to `output`. Both are URLs.

    accuracy: 0..1, at least. model, variant: only this one; without either, the cheapest that meets the accuracy.
    job: optional id chosen by the client.
    """

    input: str
    output: str
    accuracy: float | None = None
    model: str | None = None
    variant: str | None = None
    job: str | None = None


class JobAccepted(Struct, frozen=True, kw_only=True):
    """The immediate reply to `SubmitJob`; progress follows on `infaas.job-status.<id>`."""

    job: str


class CancelJob(Struct, frozen=True, kw_only=True):
    """`infaas.job-cancel.<id>`: the subject says it all; the body may be empty."""


class JobCancelled(Struct, frozen=True, kw_only=True):
    """The reply to `infaas.job-cancel.<id>`: nothing more of this job is computed."""

    cancelled: bool = True


class JobStatus(Struct, frozen=True, kw_only=True):
    """`infaas.job-status.<id>`: told at every step until `state` is done, failed or cancelled; a request answers with the last.

    total, done, failed: items; total is None until the input has been read once. cost: US$ so far. step: for people.
    variants: those that computed it. created, started, finished: Unix seconds.
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
    """Where in an input file the next item begins: a byte offset, and how many items of what begins there to pass over."""

    offset: int = 0
    skip: int = 0


class Checkpoint(Struct, frozen=True, kw_only=True):
    """How far the output is on disk: so many chunks and items, which end at this byte of it; there the input goes on.

    datatype, shape: of an output's items, for files that hold one array. generation: grows when it all begins anew.
    """

    chunks: int = 0
    items: int = 0
    bytes: int = 0
    position: Position = Position()
    datatype: str = ""
    shape: list[int] = []
    generation: int = 0


class JobRecord(Struct, frozen=True, kw_only=True):
    """One job as the jobs bucket keeps it, under the job's id. owner: the coordinator that carries it on.

    chunk_items: at most so many items a chunk; it never changes, so that a chunk's number always means the same items.
    stamp: of the input file, to notice that it was changed meanwhile.
    """

    status: JobStatus
    owner: str
    chunk_items: int
    checkpoint: Checkpoint = Checkpoint()
    stamp: str = ""


class Chunk(Struct, frozen=True, array_like=True):
    """`infaas.offline.chunks.<job>`, in the jobs' work queue. body: the fields `inputs` or `inputs_ref` of a query.

    first: number of its first item, counted from 0. generation: of the checkpoint that it follows.
    """

    job: str
    number: int
    first: int
    items: int
    body: Raw
    generation: int = 0


class Part(Struct, frozen=True, kw_only=True):
    """What became of one chunk, in the bucket of parts under `<job>/<number>`. outputs: MessagePack, name to tensor.

    error: why it could not be computed, empty when it was.
    """

    job: str
    number: int
    items: int
    outputs: Raw
    worker: str
    variant: str = ""
    cost: float = 0.0
    error: str = ""


class PartStored(Struct, frozen=True, kw_only=True):
    """`infaas.offline.part`: runner -> coordinators; a part is in the bucket."""

    job: str
    number: int


class RunnerNote(Struct, frozen=True, kw_only=True):
    """`infaas.offline.note`: runner -> coordinators, while there are jobs. why: it takes nothing now; empty when it does."""

    worker: str
    why: str


class JobsHeartbeat(Struct, frozen=True, kw_only=True, gc=False):
    """`infaas.offline.alive`, every second: coordinator -> coordinators. When it stops, another one takes its jobs over."""

    coordinator: str
    leaving: bool = False
