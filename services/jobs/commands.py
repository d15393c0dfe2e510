"""The commands of the coordinator's actor to its edge, and their results."""

from msgspec import Struct

from bus.messages.catalog import Signature
from bus.messages.jobs import Checkpoint, JobRecord, Position
from bus.messages.public import Error
from services.jobs.urls import ParsedUrl


class JobRoute(Struct, frozen=True):
    """Where a job's items come from and go to. signature: the model's, which says what they look like."""

    job: str
    source: ParsedUrl
    target: ParsedUrl
    signature: Signature


class Accept(Struct, frozen=True):
    """Check that input and output can be used, then keep the job. Result: None, or the Error that it is refused with."""

    route: JobRoute
    record: JobRecord


class Read(Struct, frozen=True):
    """Fetch a remote input, and look at every item. Result: WasRead or Broken."""

    route: JobRoute


class WasRead(Struct, frozen=True):
    """items: in the whole input. stamp: of the file that was read."""

    items: int
    stamp: str


class Broken(Struct, frozen=True):
    """The job cannot go on, on no coordinator; reason: which field, and why."""

    reason: str


class ChunkRange(Struct, frozen=True):
    """One chunk: its number, its first item, how many items, and where it begins and ends in the input."""

    number: int
    first: int
    items: int
    start: Position
    end: Position


class Feed(Struct, frozen=True):
    """Cut up to `count` chunks from `position` on and queue them, except those in `skip`. Result: list of ChunkRange, or Broken."""

    route: JobRoute
    stamp: str
    chunk_items: int
    number: int
    first: int
    total: int
    position: Position
    count: int
    skip: frozenset[int]
    generation: int


class Resume(Struct, frozen=True):
    """Find what is already done of a job. Result: Resumed."""

    route: JobRoute
    checkpoint: Checkpoint


class Resumed(Struct, frozen=True):
    """written: the output is there up to the checkpoint. parts: numbers of those in the bucket."""

    written: bool
    parts: frozenset[int]


class Assemble(Struct, frozen=True):
    """Append to the output the parts of these chunks, which follow the checkpoint. Result: Assembled or Broken."""

    route: JobRoute
    total: int
    checkpoint: Checkpoint
    chunks: list[ChunkRange]


class Assembled(Struct, frozen=True):
    """checkpoint: after the parts that were appended, which are on disk. cost, variants: of these parts.

    failure: why the next chunk has no outputs; failed: its items.
    """

    checkpoint: Checkpoint
    cost: float
    variants: list[str]
    failure: str = ""
    failed: int = 0


class Keep(Struct, frozen=True):
    """Write the record, unless another coordinator has written it since. Result: whether it was written.

    drop: chunks whose parts nobody needs after that.
    """

    record: JobRecord
    drop: list[int] = []


class Conclude(Struct, frozen=True):
    """Give the finished output its name, or store it where the job says. Result: None or Broken."""

    route: JobRoute
    checkpoint: Checkpoint


class Abandon(Struct, frozen=True):
    """Delete what a job that failed or was cancelled leaves behind. keep: its partial output stays, under another name.

    Result: the URL of the partial output; empty if there is none.
    """

    route: JobRoute
    checkpoint: Checkpoint
    keep: bool


class MarkJobCancelled(Struct, frozen=True):
    """Mark the job as cancelled, whichever coordinator carries it on. Result: CancelResult."""

    job: str
    now: float


class CancelResult(Struct, frozen=True):
    """record: as it is kept now. error: why the job was not cancelled."""

    record: JobRecord | None = None
    error: Error | None = None


class TakeOverJob(Struct, frozen=True):
    """Make `owner` the owner of a job whose owner `previous` is gone. Result: the record; None when another was faster."""

    job: str
    owner: str
    previous: str


class ForgetJob(Struct, frozen=True):
    """Delete the record of a job that ended long ago."""

    job: str
