"""Files that jobs read and write. They lie below allowed directories only, whatever symbolic links say, even while somebody changes them.

A path is resolved first. Then each directory on the way is opened in turn without following links: the file that is opened is the file
that was checked. An output grows in a hidden file beside its final name and gets that name in one step, which never overwrites.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from bus.messages.jobs import Checkpoint, Part, Position
from bus.messages.public import Tensor
from services.jobs.commands import Assembled, Broken, ChunkRange, Feed, JobRoute, WasRead, below
from services.jobs.formats import BadItem, BadJobInput, Reader, open_reader, rendered, write_header

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)


class BadFile(ValueError):
    """A file that cannot be used; the text says which, why, and what to do. forbidden: it is not below an allowed directory."""

    def __init__(self, text: str, *, forbidden: bool = False) -> None:
        super().__init__(text)
        self.forbidden = forbidden


class InputFile(NamedTuple):
    """An input, open for reading. stamp: changes when the file does."""

    file: BinaryIO
    size: int
    stamp: str


class Files:
    """roots: the directories below which files may be opened."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(root) for root in roots]

    @contextmanager
    def source(self, path: str) -> Iterator[InputFile]:
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
            yield InputFile(file, facts.st_size, f"{facts.st_size}-{facts.st_mtime_ns}-{facts.st_ino}")

    def check_target(self, path: str) -> None:
        """Raises BadFile unless an output may be written there."""
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
        """Write `data` at byte `at` of the growing output, cut off what follows, and sync it to disk. Raises BadFile, OSError."""
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
        """Give the output its name, or `name` in the same directory. Raises BadFile if that exists meanwhile, OSError."""
        with self._parent(path) as (directory, own):
            growing, final = _growing(own, job), name or own
            try:
                os.link(growing, final, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
                os.unlink(growing, dir_fd=directory)
            except FileExistsError:
                raise BadFile(f"output: {os.path.join(os.path.dirname(path), final)} exists meanwhile") from None
            except FileNotFoundError:
                if not _exists(directory, final):  # otherwise an earlier attempt came so far
                    raise
            except OSError as error:
                if error.errno not in _NO_LINKS or _exists(directory, final):
                    raise
                os.rename(growing, final, src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)

    def shorten_npy(self, path: str, job: str, datatype: str, items: int, shape: list[int]) -> None:
        """Rewrite the header of the growing .npy file for so many items. Raises OSError."""
        with self._parent(path) as (directory, name):
            number = os.open(_growing(name, job), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            with os.fdopen(number, "r+b") as file:
                file.write(write_header(datatype, items, shape))

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


# -- what the coordinator does with files; it blocks, and runs in threads

CHANGED = "input: the file was changed while the job ran"
_outputs = msgspec.msgpack.Decoder(dict[str, Tensor]).decode


class JobFiles:
    """Inputs, cut into chunks, and outputs, to which parts are appended.

    files: those that file:// may name. spool: the coordinator's directory for copies of remote inputs and outputs.
    """

    def __init__(self, files: Files, spool: Path) -> None:
        self.files = files
        self._spool = spool
        self._spooled = Files([spool])

    def spooled(self, route: JobRoute, what: str) -> Path:
        """The local copy of a job's remote input ("in") or output ("out")."""
        self._spool.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._spool / f"{route.job}.{what}"

    def target(self, route: JobRoute) -> tuple[Files, str]:
        """The local file of the output, and the allowed directories that it lies in."""
        if route.target.scheme == "file":
            return self.files, route.target.path
        return self._spooled, str(self.spooled(route, "out"))

    @contextmanager
    def _source(self, route: JobRoute) -> Iterator[InputFile]:
        if route.source.scheme == "file":
            with self.files.source(route.source.path) as source:
                yield source
        else:
            with self._spooled.source(str(self.spooled(route, "in"))) as source:
                yield source._replace(stamp=str(source.size))  # another coordinator may have fetched another copy

    @contextmanager
    def _reader(self, route: JobRoute) -> Iterator[tuple[Reader, InputFile]]:
        with self._source(route) as source:
            yield open_reader(route.source.format, source.file, source.size, route.signature), source

    def check_source(self, route: JobRoute) -> None:
        """Look at the first item of a local input. Raises BadFile, BadJobInput."""
        with self._reader(route) as (reader, source):
            if source.size == 0:
                raise BadJobInput("the file is empty")
            reader.cut(Position(), 0, 1, 1)

    def read(self, route: JobRoute) -> WasRead | Broken:
        """Look at every item and count them."""
        try:
            with self._reader(route) as (reader, source):
                items = reader.count()
        except (BadFile, BadJobInput, OSError) as error:
            return Broken(named(error, "input"))
        return WasRead(items, source.stamp) if items else Broken("input: it holds no items")

    def cut(self, feed: Feed, most_bytes: int) -> list[tuple[ChunkRange, bytes]] | Broken:
        """The next chunks, each with the MessagePack of its query's field `inputs`."""
        found: list[tuple[ChunkRange, bytes]] = []
        number, first, position = feed.number, feed.first, feed.position
        try:
            with self._reader(feed.route) as (reader, source):
                if source.stamp != feed.stamp:
                    return Broken(CHANGED)
                while len(found) < feed.count and first < feed.total:
                    cut = reader.cut(position, first, min(feed.chunk_items, feed.total - first), most_bytes)
                    found.append((ChunkRange(number, first, cut.items, position, cut.next), cut.body))
                    number, first, position = number + 1, first + cut.items, cut.next
        except (BadFile, BadJobInput, OSError) as error:
            return Broken(named(error, "input"))
        return found

    def append(
        self, route: JobRoute, total: int, before: Checkpoint, chunks: list[ChunkRange], parts: list[Part]
    ) -> Assembled | Broken:
        """Write these parts behind the checkpoint, up to the first that failed."""
        pieces: list[bytes] = []
        checkpoint, cost, variants, failure, failed = before, 0.0, list[str](), "", 0
        for chunk, part in zip(chunks, parts, strict=True):
            if part.error:
                last = chunk.first + chunk.items - 1
                failure, failed = f"items {chunk.first} to {last}: {part.error}", chunk.items
                break
            try:
                outputs = _outputs(part.outputs)
                data, checkpoint = rendered(route.target.format, outputs, chunk.items, checkpoint, total, part.labels)
            except (BadItem, msgspec.DecodeError) as error:
                return Broken(f"output: {error}")
            pieces.append(data)
            checkpoint = msgspec.structs.replace(
                checkpoint,
                chunks=chunk.number + 1,
                items=chunk.first + chunk.items,
                bytes=checkpoint.bytes + len(data),
                position=chunk.end,
            )
            cost += part.cost
            if part.variant not in variants:
                variants.append(part.variant)
        files, path = self.target(route)
        try:
            files.append(path, route.job, before.bytes, b"".join(pieces))
        except (BadFile, OSError) as error:
            return Broken(named(error, "output"))
        return Assembled(checkpoint, cost, variants, failure, failed)

    def written(self, route: JobRoute, checkpoint: Checkpoint) -> bool:
        """Whether the growing output holds what the checkpoint says."""
        files, path = self.target(route)
        try:
            return checkpoint.bytes == 0 or files.growing(path, route.job).stat().st_size >= checkpoint.bytes
        except OSError:
            return False

    def finish(self, route: JobRoute) -> None:
        """Give the output its name. Raises BadFile, OSError."""
        files, path = self.target(route)
        files.finish(path, route.job)

    def set_aside(self, route: JobRoute, checkpoint: Checkpoint) -> str:
        """Name an output that will not be finished NAME.partial; returns its URL, or an empty text if there is nothing to keep."""
        if checkpoint.items == 0 or route.target.scheme != "file":
            return ""
        path = route.target.path
        try:
            self.files.append(path, route.job, checkpoint.bytes, b"")
            if route.target.format == "npy":
                self.files.shorten_npy(path, route.job, checkpoint.datatype, checkpoint.items, checkpoint.shape)
            self.files.finish(path, route.job, f"{Path(path).name}.partial")
        except (BadFile, OSError):
            return ""
        return f"file://{path}.partial"

    def discard(self, route: JobRoute) -> None:
        """Delete the job's files except its finished output."""
        files, path = self.target(route)
        files.discard(path, route.job)
        for what in ("in", "out"):
            self.spooled(route, what).unlink(missing_ok=True)


def named(error: Exception, field: str) -> str:
    """The error's text, which begins with the field that it is about."""
    text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return text if text.startswith(("input:", "output:")) else f"{field}: {text}"
