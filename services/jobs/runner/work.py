"""What the runner's actor has its edge do, and what comes back."""

from msgspec import Struct

from bus.messages.jobs import Part
from bus.messages.public import ObjectRef

Key = tuple[str, int]  # job and chunk


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
