"""What a process does at this moment, in memory that its supervisor shares: that its loop turns, what it loads, and which queries it
computes. So it is known after any crash, and while the process hangs. Here, too, a process that is to leave and its supervisor agree when
it goes: its successor comes first (`succession`). And here is what a process must not take with it when it is killed: its successor finds it (`Kept`).
"""

import hashlib
import mmap
import os
import shutil
import struct
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path

_MEMORY, _ROOM = Path("/dev/shm"), 2**30  # noqa: S108  (bytes that must be free there)
ROOM = 8 << 20  # bytes of each half; only what is written takes memory
KEPT_SIZE = 8 + 2 * ROOM
# which half is used; before each entry: its length, 0 if none follows
_HALF, _LENGTH = struct.Struct("<Q"), struct.Struct("<I")
_NONE = bytes(_LENGTH.size)
_OVER, _WILL = 1 << 31, 1 << 30  # in a length: the entry need not be kept any more; it is a will
_OVER_AT, _OVER_BYTE = _LENGTH.size - 1, 0x80
_LONGEST = _WILL - 1
RUNNING = "INFAAS_RUNNING_FD"  # the variable that tells a service where it writes
UID = 16  # bytes
MOST = 4096  # uids
UNKNOWN = 0xFFFFFFFF  # in the place of their number
_TURNS, _LOADS, _NUMBER = struct.Struct("=Q"), struct.Struct("=I"), struct.Struct("=I")
_LOADS_AT = _TURNS.size
_SAID_AT = _LOADS_AT + _LOADS.size  # READY or LEAVES, by the process
_ROLE_AT = _SAID_AT + 1  # BESIDE, AFTER or none, by the supervisor
_LET_GO_AT = _ROLE_AT + 1  # GO or SUCCEEDED, by the supervisor
_NUMBER_AT = _LET_GO_AT + 2
_UIDS_AT = _NUMBER_AT + _NUMBER.size
_KEPT_AT = _UIDS_AT + UID * MOST
_SIZE = _KEPT_AT + KEPT_SIZE

READY, LEAVES = 1, 2  # it can do its work; it was asked to end
BESIDE, AFTER = 1, 2  # a successor: it works beside the one before it, or begins when that one has ended
GO, SUCCEEDED = 1, 2  # it ends at once; its successor does its work from now on


class Kept:
    """Entries by number, of two kinds: rows, and wills, which take at most half of the room. The length of each is written last, so a death at any moment leaves whole ones only. memory, at: where its `KEPT_SIZE` bytes begin.

    What a process has left before this one is nobody's until `left`.
    """

    def __init__(self, memory: mmap.mmap, at: int = 0) -> None:
        self._memory = memory
        self._at = at
        self._places: dict[int, tuple[int, int]] = {}  # by number: where it begins, and its bytes
        self._counts = 0  # bytes of all that count
        self._number = 0
        self._half: int = _HALF.unpack_from(memory, at)[0] & 1
        self._begin: int = at + _HALF.size + self._half * ROOM
        self._end, self._limit = self._begin, self._begin + ROOM
        while length := _LENGTH.unpack_from(memory, self._end)[0]:
            size = _LENGTH.size + (length & _LONGEST)
            if not length & _OVER:
                self._number += 1
                self._places[self._number] = (self._end, size)
                self._counts += size
            self._end += size
        self._nobodys = list(self._places)

    def put(self, body: bytes, *, will: bool = False) -> int:
        """Keep this; returns its number. 0: there is no room."""
        if not self._places and self._end > self._begin:
            _LENGTH.pack_into(self._memory, self._begin, 0)
            self._end = self._begin
        needed = len(body) + 2 * _LENGTH.size + (ROOM // 2 if will else 0)
        if self._end + needed > self._limit:
            over = self._end - self._begin - self._counts
            if self._counts + needed > ROOM or over < ROOM // 4:  # moving costs more than it brings
                return 0
            self._move()
        number = self._number = self._number + 1
        self._write(number, body, len(body) | (_WILL if will else 0))
        return number

    def drop(self, number: int) -> None:
        """It need not be kept any more."""
        place = self._places.pop(number, None)
        if place is not None:
            self._memory[place[0] + _OVER_AT] = _OVER_BYTE
            self._counts -= place[1]

    def leave(self, numbers: Iterable[int]) -> None:
        """Who has kept these ends."""
        self._nobodys.extend(number for number in numbers if number in self._places)

    def left(self, *, wills: bool = False) -> dict[int, bytes]:
        """What is nobody's, by number. It is the caller's from now on."""
        entries = {number: self._entry(number) for number in self._nobodys if number in self._places}
        taken = {number: body for number, (body, length) in entries.items() if bool(length & _WILL) is wills}
        self._nobodys = [number for number in entries if number not in taken]
        return taken

    def _entry(self, number: int) -> tuple[bytes, int]:
        """Its body, and its length with what else that says."""
        place, size = self._places[number]
        return self._memory[place + _LENGTH.size : place + size], _LENGTH.unpack_from(self._memory, place)[0]

    def _write(self, number: int, body: bytes, length: int) -> None:
        place = self._end
        begin = place + _LENGTH.size
        self._end = end = begin + len(body)
        self._memory[begin : end + _LENGTH.size] = body + _NONE
        _LENGTH.pack_into(self._memory, place, length)
        self._places[number] = (place, end - place)
        self._counts += end - place

    def _move(self) -> None:
        """Go on in the other half, which gets what counts."""
        entries = {number: self._entry(number) for number in self._places}
        self._counts = 0
        self._half ^= 1
        self._end = self._begin = self._at + _HALF.size + self._half * ROOM
        self._limit = self._begin + ROOM
        _LENGTH.pack_into(self._memory, self._begin, 0)
        for number, entry in entries.items():
            self._write(number, *entry)
        _HALF.pack_into(self._memory, self._at, self._half)


class Running:
    """turns: of its event loop, 0 while it starts or stops. loads: models that are being made. fd: of the shared memory, which it closes."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.before: Running | None = None  # of the process that this one succeeds
        self._memory = mmap.mmap(fd, _SIZE)
        self._lock = threading.Lock()
        self._batches: dict[int, bytes] = {}
        self._number = 0
        weakref.finalize(self, os.close, fd)

    # -- said by the process

    def turn(self) -> None:
        """Its event loop turns, and everything in it has been started."""
        _TURNS.pack_into(self._memory, 0, self.turns + 1)

    def leave(self) -> None:
        """It stops: from now on nobody waits for a turn."""
        _TURNS.pack_into(self._memory, 0, 0)

    def says(self, word: int) -> None:
        """READY or LEAVES."""
        self._memory[_SAID_AT] = word

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A model is being made meanwhile: the library that makes it may hold up the loop, and wait for a device."""
        self._load(1)
        try:
            yield
        finally:
            self._load(-1)

    def _load(self, more: int) -> None:
        with self._lock:
            _LOADS.pack_into(self._memory, _LOADS_AT, self.loads + more)

    def begin(self, uids: Iterable[bytes]) -> int:
        """A batch with these queries begins; returns its number. Any thread may call it."""
        with self._lock:
            self._number += 1
            self._batches[self._number] = b"".join(uids)
            self._write()
            return self._number

    def end(self, number: int) -> None:
        """That batch is over."""
        with self._lock:
            del self._batches[number]
            self._write()

    def clear(self) -> None:
        """Nothing runs: the process starts."""
        with self._lock:
            self._batches.clear()
            _TURNS.pack_into(self._memory, 0, 0)
            _LOADS.pack_into(self._memory, _LOADS_AT, 0)
            self._memory[_SAID_AT] = 0
            self._write()

    def _write(self) -> None:
        """The number comes last: if another thread ends the process meanwhile, it says that the queries are not known."""
        memory = self._memory
        if not self._batches:
            _NUMBER.pack_into(memory, _NUMBER_AT, 0)
            return
        joined = b"".join(self._batches.values())
        _NUMBER.pack_into(memory, _NUMBER_AT, UNKNOWN)
        if len(joined) <= UID * MOST:
            memory[_UIDS_AT : _UIDS_AT + len(joined)] = joined
            _NUMBER.pack_into(memory, _NUMBER_AT, len(joined) // UID)

    @cached_property
    def kept(self) -> Kept:
        """What its successor must have if it is killed."""
        return Kept(self._memory, _KEPT_AT)

    # -- said by its supervisor

    @property
    def role(self) -> int:
        """BESIDE or AFTER: it is a successor. 0: it begins at once."""
        return self._memory[_ROLE_AT]

    @role.setter
    def role(self, role: int) -> None:
        self._memory[_ROLE_AT] = role

    @property
    def let_go(self) -> int:
        """GO or SUCCEEDED. 0: one that was asked to end waits for its successor."""
        return self._memory[_LET_GO_AT]

    @let_go.setter
    def let_go(self, how: int) -> None:
        self._memory[_LET_GO_AT] = how

    def bequeath(self, rows: Iterable[bytes]) -> None:
        """It sends these rows before its own. Called before it is started."""
        kept = Kept(self._memory, _KEPT_AT)
        for row in rows:
            kept.put(row)

    # -- read by its supervisor

    @property
    def said(self) -> int:
        return self._memory[_SAID_AT]

    @property
    def turns(self) -> int:
        found: int = _TURNS.unpack_from(self._memory, 0)[0]
        return found

    @property
    def loads(self) -> int:
        found: int = _LOADS.unpack_from(self._memory, _LOADS_AT)[0]
        return found

    @property
    def busy(self) -> bool:
        """Whether it loads or computes a model."""
        return self.loads > 0 or _NUMBER.unpack_from(self._memory, _NUMBER_AT)[0] not in (0, UNKNOWN)

    def forget(self) -> None:
        """What it does is not known until a process clears this."""
        self.leave()
        _NUMBER.pack_into(self._memory, _NUMBER_AT, UNKNOWN)

    def read(self) -> list[bytes] | None:
        """The queries that run, or ran when the process ended. None: not known."""
        (number,) = _NUMBER.unpack_from(self._memory, _NUMBER_AT)
        if number == UNKNOWN:
            return None
        at = range(_UIDS_AT, _UIDS_AT + UID * number, UID)
        return [self._memory[i : i + UID] for i in at]


def shared(file: Path | None = None) -> Running | None:
    """For a process that is to be started, which gets `fd` and its number in `RUNNING`. None where the system has no such memory (only Linux has).

    file: of `LastingMemory`.
    """
    if not hasattr(os, "memfd_create"):
        return None
    fd = os.memfd_create("infaas-running") if file is None else os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    if file is None or file.is_relative_to(_MEMORY):
        os.truncate(fd, _SIZE)
    else:
        os.posix_fallocate(fd, 0, _SIZE)  # a page that finds no room on the disk ends the process
    running = Running(fd)
    running.forget()
    return running


class LastingMemory:
    """Files that a system's processes map, which outlive also their supervisor. open: takes what a system that was killed as a whole has left."""

    def __init__(self) -> None:
        self._place: Path | None = None
        self._unsent: list[bytes] = []
        self._made = 0

    def open(self, data_dir: Path) -> None:
        """Raises OSError."""
        for left in _places(data_dir):
            if left.exists():
                self._unsent += _unsent(left)
                shutil.rmtree(left)
        self._place = next((place for place in _places(data_dir) if _has_room(place.parent)), None)
        if self._place is not None:
            self._place.mkdir(mode=0o700)

    def of(self, part: str) -> Running | None:
        """For a new process of this part. The first dispatcher sends what was left."""
        self._made += 1
        running = shared(None if self._place is None else self._place / f"{part}.{self._made}")
        if running is not None and part.startswith(("dispatcher-", "fused")):
            running.bequeath(self._unsent)
            self._unsent = []
        return running

    def close(self) -> None:
        """All processes have ended. What they have left stays for the next start."""
        if self._place is not None and not _unsent(self._place):
            shutil.rmtree(self._place)


def _places(data_dir: Path) -> tuple[Path, Path]:
    """The directories that this system's files may have, the better one first: in memory, of which a container has 64 MB, and on disk."""
    name = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:16]
    return _MEMORY / f"infaas-{os.getuid()}-{name}", data_dir / "unsent"


def _has_room(directory: Path) -> bool:
    """A process that finds none left dies."""
    try:
        there = os.statvfs(directory)
    except OSError:
        return False
    return there.f_bavail * there.f_frsize > _ROOM


def _unsent(place: Path) -> list[bytes]:
    """The rows that processes have left in these files: they and their supervisor were killed. What they were about to say is over."""
    found: list[bytes] = []
    for file in sorted(place.glob("*")):
        with file.open("r+b") as opened, suppress(ValueError), mmap.mmap(opened.fileno(), _SIZE) as memory:
            found += Kept(memory, _KEPT_AT).left().values()
    return found


@cache
def inherited() -> Running | None:
    """The same memory, in the process that was started with it. None: it was started without."""
    found = os.environ.pop(RUNNING, "")
    if not found:
        return None
    fds = [int(fd) for fd in found.split(",")]
    for fd in fds:
        os.set_inheritable(fd, False)
    running, *before = map(Running, fds)
    running.before = before[0] if before else None
    running.clear()
    return running
