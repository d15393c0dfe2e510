"""Files that jobs read and write: only below allowed roots, whatever symbolic links say, also while somebody changes them.

A path is resolved first; then every directory on the way is opened in turn without following links, so that what is opened is
what was checked. Outputs grow in a hidden file beside their final name and get it in one step, which never overwrites.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from services.jobs.npy import HEADER, write_header
from services.jobs.urls import below

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)


class BadFile(ValueError):
    """A file that cannot be used; the text says which, why, and what to do. forbidden: it is not below an allowed root."""

    def __init__(self, text: str, *, forbidden: bool = False) -> None:
        super().__init__(text)
        self.forbidden = forbidden


class Source(NamedTuple):
    """An input, open for reading. stamp: changes when the file does."""

    file: BinaryIO
    size: int
    stamp: str


class Files:
    """roots: directories below which files may be named."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(root) for root in roots]

    @contextmanager
    def source(self, path: str) -> Iterator[Source]:
        """Open an input. Raises BadFile."""
        directory, name = self._directory(os.path.realpath(path), path, "input")
        try:
            number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        except OSError as error:
            raise BadFile(f"input: cannot read {path}: {error.strerror}") from error
        finally:
            os.close(directory)
        facts = os.fstat(number)
        if not stat.S_ISREG(facts.st_mode):
            os.close(number)
            raise BadFile(f"input: {path} is no file")
        with os.fdopen(number, "rb") as file:
            yield Source(file, facts.st_size, f"{facts.st_size}-{facts.st_mtime_ns}-{facts.st_ino}")

    def check_target(self, path: str) -> None:
        """Whether an output may be written there. Raises BadFile."""
        with self._parent(path) as (directory, name):
            if _exists(directory, name):
                raise BadFile(f"output: {path} exists already: remove it, or choose another name")
            probe = f".{name}.probe-{os.getpid()}"
            try:
                os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o644, dir_fd=directory))
                os.unlink(probe, dir_fd=directory)
            except OSError as error:
                raise BadFile(f"output: cannot write to {os.path.dirname(path)}: {error.strerror}") from error

    def append(self, path: str, job: str, at: int, data: bytes) -> None:
        """Write `data` at byte `at` of the growing output, cut off what was behind it, and have it on disk. Raises OSError."""
        with self._parent(path) as (directory, name):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(_growing(name, job), flags, 0o644, dir_fd=directory), "r+b") as file:
                if file.seek(0, os.SEEK_END) < at:
                    raise BadFile(f"output: what was written of {path} is gone")
                file.truncate(at)
                file.seek(at)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def finish(self, path: str, job: str, name: str = "") -> None:
        """The output gets its name (or `name`, in the same directory). Raises BadFile when that is taken meanwhile, OSError."""
        with self._parent(path) as (directory, own):
            growing, final = _growing(own, job), name or own
            try:
                os.link(growing, final, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
                os.unlink(growing, dir_fd=directory)
            except FileExistsError:
                raise BadFile(f"output: {os.path.join(os.path.dirname(path), final)} exists meanwhile") from None
            except FileNotFoundError:
                if not _exists(directory, final):  # else an earlier try came so far
                    raise
            except OSError as error:
                if error.errno not in _NO_LINKS or _exists(directory, final):
                    raise
                os.rename(growing, final, src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)

    def shorten_npy(self, path: str, job: str, datatype: str, items: int, shape: list[int]) -> None:
        """The growing .npy file is to hold only so many items. Raises OSError."""
        with self._parent(path) as (directory, name):
            number = os.open(_growing(name, job), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            with os.fdopen(number, "r+b") as file:
                header = write_header(datatype, items, shape)
                assert len(header) == HEADER
                file.write(header)

    def discard(self, path: str, job: str) -> None:
        """Remove the growing output, if there is one."""
        with contextlib.suppress(OSError, BadFile), self._parent(path) as (directory, name):
            os.unlink(_growing(name, job), dir_fd=directory)

    def growing(self, path: str, job: str) -> Path:
        """Where the growing output is."""
        return Path(os.path.dirname(path)) / _growing(os.path.basename(path), job)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        parent, name = os.path.split(path)
        directory, name = self._directory(os.path.join(os.path.realpath(parent), name), path, "output")
        try:
            yield directory, name
        finally:
            os.close(directory)

    def _directory(self, real: str, path: str, field: str) -> tuple[int, str]:
        """The open directory of a resolved path, and the name in it."""
        for root in self.roots:
            base = os.path.realpath(root)
            if below(real, base):
                *way, name = real[len(base.rstrip("/")) + 1 :].split("/")
                try:
                    return _walk(base, way), name
                except OSError as error:
                    raise BadFile(f"{field}: cannot open the directory of {path}: {error.strerror}") from error
        allowed = ", ".join(str(root) for root in self.roots)
        raise BadFile(
            f"{field}: {path} is not below a directory that jobs may use ({allowed}): the setting jobs.roots adds some",
            forbidden=True,
        )


def _walk(base: str, way: list[str]) -> int:
    directory = os.open(base, _DIRECTORY)
    for part in way:
        try:
            inner = os.open(part, _DIRECTORY, dir_fd=directory)
        finally:
            os.close(directory)
        directory = inner
    return directory


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _growing(name: str, job: str) -> str:
    return f".{name[:100]}.{job}.part"
