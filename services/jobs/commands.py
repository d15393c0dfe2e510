"""What the coordinator's actor has its edge do, and what comes back."""

from msgspec import Struct

from bus.messages.catalog import Signature
from bus.messages.jobs import Checkpoint, JobRecord, Position
from bus.messages.public import Error
from services.jobs.urls import Location


class JobRoute(Struct, frozen=True):
    """Where a job's items come from and go to, and what they look like."""

    job: str
    source: Location
    target: Location
    signature: Signature


class Accept(Struct, frozen=True):
    """Look whether input and output can be used at all, then keep the job. Result: None, or the Error it is refused with."""

    route: JobRoute
    record: JobRecord


class Read(Struct, frozen=True):
    """Fetch the input where it is elsewhere, and look at every item once. Result: WasRead or Broken."""

    route: JobRoute


class WasRead(Struct, frozen=True):
    """items: in the whole input. stamp: of the file as it was read."""

    items: int
    stamp: str


class Broken(Struct, frozen=True):
    """The job cannot go on, whoever tries; reason: which field, and why."""

    reason: str


class Spot(Struct, frozen=True):
    """One chunk: its number, its first item, how many items, and where it begins and ends in the input."""

    number: int
    first: int
    items: int
    start: Position
    end: Position


class Feed(Struct, frozen=True):
    """Cut up to `count` chunks from there on and queue them, those in `skip` apart. Result: list of Spot, or Broken."""

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
    """Look what there is of a job that goes on. Result: Resumed."""

    route: JobRoute
    checkpoint: Checkpoint


class Resumed(Struct, frozen=True):
    """written: the output up to the checkpoint is there. parts: numbers of those that are in the bucket."""

    written: bool
    parts: frozenset[int]


class Assemble(Struct, frozen=True):
    """Append these chunks' parts, which follow the checkpoint, to the output. Result: Assembled or Broken."""

    route: JobRoute
    total: int
    checkpoint: Checkpoint
    spots: list[Spot]


class Assembled(Struct, frozen=True):
    """checkpoint: with what was appended and is on disk. cost, variants: of it. failure: why the next chunk has no outputs.

    failed: items of that chunk.
    """

    checkpoint: Checkpoint
    cost: float
    variants: list[str]
    failure: str = ""
    failed: int = 0


class Keep(Struct, frozen=True):
    """Write the record, unless somebody else has written it since. Result: whether it was written.

    drop: chunks whose parts nobody needs once it is kept.
    """

    record: JobRecord
    drop: list[int] = []


class Conclude(Struct, frozen=True):
    """Give the finished output its name, or put it where it belongs. Result: None or Broken."""

    route: JobRoute
    checkpoint: Checkpoint


class Abandon(Struct, frozen=True):
    """Take away what a job that failed or was cancelled has left behind; keep: what it wrote, under another name.

    Result: where that is, empty when nothing was kept.
    """

    route: JobRoute
    checkpoint: Checkpoint
    keep: bool


class MarkCancelled(Struct, frozen=True):
    """Mark the job as cancelled, whoever carries it on. Result: the record as it is now, or an Error."""

    job: str
    now: float


class CancelResult(Struct, frozen=True):
    """record: as kept now. error: why it was not cancelled."""

    record: JobRecord | None = None
    error: Error | None = None


class TakeOverJob(Struct, frozen=True):
    """Become the owner of a job whose coordinator is gone. Result: the record as it is now; None when another was faster."""

    job: str
    owner: str
    previous: str


class ForgetJob(Struct, frozen=True):
    """Delete the record of a job that ended long ago."""

    job: str
