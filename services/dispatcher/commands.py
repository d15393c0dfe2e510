"""The commands of the dispatcher's actor to its edge, and their results."""

from msgspec import Struct


class ReadContext(Struct, frozen=True):
    """Read what is stored of a context in the selection bucket; comes back as StoredContext."""

    key: str


class StoredContext(Struct, frozen=True):
    """The present value of a context. value: None if there is none; then the revision is 0."""

    value: bytes | None
    revision: int


class WriteContext(Struct, frozen=True):
    """Store a context if it is still at this revision (0: not there); comes back as ContextWritten, otherwise as StoredContext."""

    key: str
    value: bytes
    revision: int


class ContextWritten(Struct, frozen=True):
    """The value is stored, at this revision."""

    revision: int
