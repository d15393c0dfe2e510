"""What the runner's actor has its edge do, what comes back, and what it reads of an answer."""

from hashlib import blake2b

from msgspec import Raw, Struct

from bus.messages.flow import Route
from bus.messages.jobs import OFFLINE, Chunk, JobStatus, Part
from bus.messages.public import Error, ObjectRef

ChunkKey = tuple[str, int]  # job and chunk
NO_OUTPUTS = Raw(b"\x80")


class ChunkAnswer(Struct, frozen=True):
    """An Answer or a Refusal, as far as it concerns us."""

    outputs: Raw = NO_OUTPUTS
    outputs_ref: ObjectRef | None = None
    variant: str = ""
    batch: int = 1
    cost: float = 0.0
    error: Error | None = None


class TakeChunk(Struct, frozen=True):
    """Fetch one chunk from the queue. Result: the Chunk, or None when there is none."""


class ExtendChunks(Struct, frozen=True):
    """These are still being worked on."""

    keys: list[ChunkKey]


class ReturnChunk(Struct, frozen=True):
    """Somebody else may have it, after `delay` seconds."""

    key: ChunkKey
    delay: float


class DropChunk(Struct, frozen=True):
    """Nobody needs it any more."""

    key: ChunkKey


class StorePart(Struct, frozen=True):
    """Put the part into the bucket and take its chunk off the queue. ref: where the outputs are when the answer has none."""

    part: Part
    ref: ObjectRef | None = None


# -- a chunk that this worker has taken

DEADLINE_S = 3600.0  # far behind every online query's: these go first
ALONE = True  # a batch of its own, so that no online query waits for, or dies with, offline work


class TakenChunk:
    """state: "waiting" (for an instance, or a retry), "flying" (with the executor), "storing".

    tries: refused by the model so often; crashes: executors that died while they computed it. begun: one computes it now.
    """

    __slots__ = (
        "began", "begun", "chunk", "crashes", "device", "due", "instance", "key", "route", "sent", "state", "status", "tries",
        "uid", "variant",
    )  # fmt: skip

    def __init__(self, chunk: Chunk, status: JobStatus, now: float) -> None:
        self.chunk = chunk
        self.status = status
        self.key = (chunk.job, chunk.number)
        self.state = "waiting"
        self.tries = 0
        self.crashes = 0
        self.begun = False
        self.began = now
        self.due = now
        self.sent = 0.0
        self.variant = self.device = self.instance = ""
        self.route: Route | None = None
        self.uid = uid_of(chunk.job, chunk.number, 0)

    def depart(self, runner: str, instance: str, reply_to: str, now: float) -> Route:
        """It goes to the executor now."""
        self.state, self.instance, self.sent, self.begun = "flying", instance, now, False
        self.route = Route(
            self.uid, 0, 0, reply_to, now + DEADLINE_S, now, runner, instance, self.status.app, self.chunk.items,
            f"{self.chunk.job}/{self.chunk.number}", None, self.status.accuracy, None, 9, None, None, OFFLINE, None,
            self.status.model, None, self.status.variant, False, ALONE,
        )  # fmt: skip
        return self.route

    def wait(self, until: float) -> None:
        """It is to be sent (again), not before then."""
        self.state, self.due, self.instance, self.begun = "waiting", until, "", False

    def refused(self) -> int:
        """The model refused it, which has been recorded: the next try is another query. Returns how often by now."""
        self.tries += 1
        self.uid = uid_of(self.chunk.job, self.chunk.number, self.tries)
        return self.tries


def uid_of(job: str, number: int, tries: int) -> bytes:
    """The same for the same chunk, whichever worker computes it: it is charged once."""
    return blake2b(f"{job}/{number}/{tries}".encode(), digest_size=16, person=b"infaas offline").digest()
