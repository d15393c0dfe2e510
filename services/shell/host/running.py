"""What a process does at this moment, in memory that its supervisor shares: that its loop turns, what it loads, and which queries it
computes. So it is known after any crash, and while the process hangs. Here, too, a process that is to leave and its supervisor agree when
it goes: its successor comes first (`succession`). And here is what a process must not take with it when it is killed (`kept`).
"""

import hashlib
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path

from services.shell.host.kept import SIZE, Kept

_MEMORY, _ROOM = Path("/dev/shm"), 2**30  # noqa: S108  (bytes that must be free there)
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
_SIZE = _KEPT_AT + SIZE

READY, LEAVES = 1, 2  # it can do its work; it was asked to end
BESIDE, AFTER = 1, 2  # a successor: it works beside the one before it, or begins when that one has ended
GO, SUCCEEDED = 1, 2  # it ends at once; its successor does its work from now on


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

    file: of memory that outlives us all, for `unsent`.
    """
    if not hasattr(os, "memfd_create"):
        return None
    fd = os.memfd_create("infaas-running") if file is None else os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.truncate(fd, _SIZE)
    running = Running(fd)
    running.forget()
    return running


def lasting(data_dir: Path) -> Path | None:
    """A directory in memory for the files of this system's processes. None: there is none, or little room: a process that finds none left dies."""
    try:
        there = os.statvfs(_MEMORY)
    except OSError:
        return None
    name = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:16]
    return _MEMORY / f"infaas-{os.getuid()}-{name}" if there.f_bavail * there.f_frsize > _ROOM else None


def unsent(place: Path) -> list[bytes]:
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
