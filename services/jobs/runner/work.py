"""What the runner's actor has its edge do, what comes back, and what it reads of an answer."""

from msgspec import Raw, Struct

from bus.messages.jobs import Part
from bus.messages.public import Error, ObjectRef

Key = tuple[str, int]  # job and chunk
NO_OUTPUTS = Raw(b"\x80")


class Heard(Struct, frozen=True):
    """An Answer or a Refusal, as far as it concerns us."""

    outputs: Raw = NO_OUTPUTS
    outputs_ref: ObjectRef | None = None
    variant: str = ""
    batch: int = 1
    cost: float = 0.0
    error: Error | None = None


class Take(Struct, frozen=True):
    """Fetch one chunk from the queue. Result: the Chunk, or None when there is none."""


class Extend(Struct, frozen=True):
    """These are still being worked on."""

    keys: list[Key]


class GiveBack(Struct, frozen=True):
    """Somebody else may have it, after `delay` seconds."""

    key: Key
    delay: float


class Drop(Struct, frozen=True):
    """Nobody needs it any more."""

    key: Key


class Store(Struct, frozen=True):
    """Put the part into the bucket and take its chunk off the queue. ref: where the outputs are when the answer has none."""

    part: Part
    ref: ObjectRef | None = None
