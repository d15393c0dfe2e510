"""Which feedbacks have counted in a context, beyond the last ones, whose marks its value has. Pure.

A value's marks are written with what they taught. Once it has many, the oldest of them move to a key of their own: they are written there
first, and leave the value with its next write, so that a crash in between loses none. Both writes are by compare-and-set.
"""

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

MARK = 8  # bytes of a feedback's mark; one of a context's is another's by chance once in 10^14 feedbacks
MOVED = 512  # marks that move at once: a value has at most 5 kB of them
MOST = 60_000  # marks in the other key, 480 kB: those of the last 20,000 feedbacks at least, of three each at most
MOST_BYTES = 64 * 2**20  # of other keys in a dispatcher's memory; those that were used last. The others are read again


def mark_of_bytes(app: str, what: bytes) -> bytes:
    """By which a feedback is known again."""
    return blake2b(what, digest_size=MARK, key=app.encode()[:64]).digest()


class OlderMarks:
    """revision: of the key; 0: it is not there. covers: the revision up to which these are all marks that there were; it is the later one
    where some are lost. full: the oldest have gone, or are lost.
    """

    __slots__ = ("_sorted", "covers", "full", "marks", "revision")

    def __init__(self, marks: bytes, revision: int, covers: int) -> None:
        self.marks = marks
        self.revision = revision
        self.covers = max(revision, covers)
        self.full = len(marks) >= MARK * MOST or revision < covers
        self._sorted = np.sort(np.frombuffer(marks[: len(marks) // MARK * MARK], "<u8"))

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return 2 * len(self.marks) + 500

    def has(self, marks: bytes) -> bool:
        """Whether all of these are among them."""
        wanted = np.frombuffer(marks, "<u8")
        if not self._sorted.size:
            return not wanted.size
        places = np.searchsorted(self._sorted, wanted).clip(max=self._sorted.size - 1)
        return bool((self._sorted[places] == wanted).all())

    def plus(self, marks: bytes) -> bytes:
        return (self.marks + marks)[-MARK * MOST :]


NONE = OlderMarks(b"", 0, 0)


class Counted:
    """Older marks of contexts, by the context's key."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.bytes = 0
        self._most_bytes = most_bytes
        self._held: OrderedDict[str, OlderMarks] = OrderedDict()

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def get(self, key: str, moved: int) -> OlderMarks | None:
        """All that have moved up to this revision; 0: none has; -1: whichever have. None: they are not in memory."""
        held = self._held.get(key)
        if held is None or held.covers < moved:
            return None if moved else NONE
        self._held.move_to_end(key)
        return held

    def put(self, key: str, marks: bytes, revision: int, moved: int) -> None:
        """They have been read or written. moved: the revision up to which all should be there."""
        self.pop(key)
        held = self._held[key] = OlderMarks(marks, revision, moved)
        self.bytes += held.size
        while self.bytes > self._most_bytes and len(self._held) > 1:
            self.pop(next(iter(self._held)))

    def pop(self, key: str) -> None:
        """Forget them, so that they are read again."""
        held = self._held.pop(key, None)
        self.bytes -= 0 if held is None else held.size
