"""The chunks that a worker has taken from the queue, the runner's commands for them, and what it reads of their answers."""

from hashlib import blake2b

from msgspec import Raw, Struct

from bus.messages.flow import Route
from bus.messages.jobs import OFFLINE, Chunk, JobStatus, Part
from bus.messages.public import Error, ObjectRef

ChunkKey = tuple[str, int]  # job and number
NO_OUTPUTS = Raw(b"\x80")
DEADLINE_S = 3600.0  # far behind every online query's, so that those go first
ALONE = True  # in a batch of its own, so that no online query waits for offline work, or fails with it


class TakeChunk(Struct, frozen=True):
    """Fetch one chunk from the queue. Result: the Chunk, or None when there is none."""


class ExtendChunks(Struct, frozen=True):
    """Tell the queue that these chunks are still being worked on."""

    keys: list[ChunkKey]


class ReturnChunk(Struct, frozen=True):
    """Give a chunk back to the queue, which hands it out again after `delay` seconds."""

    key: ChunkKey
    delay: float


class DropChunk(Struct, frozen=True):
    """Remove a chunk that nobody needs from the queue."""

    key: ChunkKey


class StorePart(Struct, frozen=True):
    """Put the part into its bucket, then remove its chunk from the queue. ref: where the outputs are, if the answer has none."""

    part: Part
    ref: ObjectRef | None = None


class ChunkAnswer(Struct, frozen=True):
    """What a runner reads of an Answer or a Refusal."""

    outputs: Raw = NO_OUTPUTS
    outputs_ref: ObjectRef | None = None
    variant: str = ""
    batch: int = 1
    cost: float = 0.0
    error: Error | None = None


class TakenChunk:
    """A chunk from when it is taken until its part is in the bucket.

    state: "waiting" (for an instance, or to be sent again), "flying" (with the executor) or "storing"; a metric shows it. refusals: how
    often the model has refused it. crashes: how many executors ended while they computed it. computing: an executor computes it now.
    """

    __slots__ = (
        "chunk", "computing", "crashes", "device", "due", "instance", "key", "refusals", "route", "sent", "state", "status", "uid",
        "variant", "waits_since",
    )  # fmt: skip

    def __init__(self, chunk: Chunk, status: JobStatus, now: float) -> None:
        self.chunk = chunk
        self.status = status
        self.key = (chunk.job, chunk.number)
        self.state = "waiting"
        self.refusals = 0
        self.crashes = 0
        self.computing = False
        self.waits_since = now
        self.due = now
        self.sent = 0.0
        self.variant = self.device = self.instance = ""
        self.route: Route | None = None
        self.uid = uid_of(chunk.job, chunk.number, 0)

    def send(self, runner: str, instance: str, reply_to: str, now: float) -> Route:
        """It goes to the executor now."""
        self.state, self.instance, self.sent, self.computing = "flying", instance, now, False
        self.route = Route(
            self.uid, 0, 0, reply_to, now + DEADLINE_S, now, runner, instance, self.status.app, self.chunk.items,
            f"{self.chunk.job}/{self.chunk.number}", None, self.status.accuracy, None, 9, None, None, OFFLINE, None,
            self.status.model, None, self.status.variant, False, ALONE,
        )  # fmt: skip
        return self.route

    def wait(self, until: float) -> None:
        """It is to be sent (again), not before then."""
        self.state, self.due, self.instance, self.computing = "waiting", until, "", False

    def refused(self) -> int:
        """The model refused it, and that is recorded, so that the next attempt is another query. Returns how often by now."""
        self.refusals += 1
        self.uid = uid_of(self.chunk.job, self.chunk.number, self.refusals)
        return self.refusals


def uid_of(job: str, number: int, refusals: int) -> bytes:
    """The same for the same chunk on every worker, so that it is charged once."""
    return blake2b(f"{job}/{number}/{refusals}".encode(), digest_size=16, person=b"infaas offline").digest()
