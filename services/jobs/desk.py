"""The blocking half of the coordinator's hands: inputs cut into chunks, parts appended to outputs. Runs in threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bus.messages.jobs import Checkpoint, Part, Position
from bus.messages.public import Tensor
from services.jobs.commands import Assembled, Broken, Feed, Route, Spot, WasRead
from services.jobs.files import BadFile, Files, Source
from services.jobs.items import BadItem
from services.jobs.readers import Bad, Reader, open_reader
from services.jobs.writers import rendered

CHANGED = "input: the file was changed while the job ran"
_outputs = msgspec.msgpack.Decoder(dict[str, Tensor]).decode


class Desk:
    """files: what file:// may name. spool: a directory of our own, for inputs and outputs that are elsewhere."""

    def __init__(self, files: Files, spool: Path) -> None:
        self.files = files
        self._spool = spool
        self._spooled = Files([spool])

    def spooled(self, route: Route, what: str) -> Path:
        """Where a remote input ("in") or output ("out") of a job is kept meanwhile."""
        self._spool.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._spool / f"{route.job}.{what}"

    def target(self, route: Route) -> tuple[Files, str]:
        """The output as a file, and who may touch it."""
        if route.target.scheme == "file":
            return self.files, route.target.path
        return self._spooled, str(self.spooled(route, "out"))

    @contextmanager
    def _source(self, route: Route) -> Iterator[Source]:
        if route.source.scheme == "file":
            with self.files.source(route.source.path) as source:
                yield source
        else:
            with self._spooled.source(str(self.spooled(route, "in"))) as source:
                yield source._replace(stamp=str(source.size))  # another coordinator may have fetched it once more

    @contextmanager
    def _reader(self, route: Route) -> Iterator[tuple[Reader, Source]]:
        with self._source(route) as source:
            yield open_reader(route.source.format, source.file, source.size, route.signature), source

    def look(self, route: Route) -> None:
        """Whether a local input begins as it should. Raises BadFile, Bad."""
        with self._reader(route) as (reader, source):
            if source.size == 0:
                raise Bad("the file is empty")
            reader.cut(Position(), 0, 1, 1)

    def read(self, route: Route) -> WasRead | Broken:
        """Look at every item once."""
        try:
            with self._reader(route) as (reader, source):
                items = reader.count()
        except (BadFile, Bad, OSError) as error:
            return Broken(named(error, "input"))
        return WasRead(items, source.stamp) if items else Broken("input: it holds no items")

    def cut(self, feed: Feed, most_bytes: int) -> list[tuple[Spot, bytes]] | Broken:
        """The next chunks and their bodies, by the field `inputs`."""
        found: list[tuple[Spot, bytes]] = []
        number, first, position = feed.number, feed.first, feed.position
        try:
            with self._reader(feed.route) as (reader, source):
                if source.stamp != feed.stamp:
                    return Broken(CHANGED)
                while len(found) < feed.count and first < feed.total:
                    cut = reader.cut(position, first, min(feed.chunk_items, feed.total - first), most_bytes)
                    found.append((Spot(number, first, cut.items, position, cut.next), cut.body))
                    number, first, position = number + 1, first + cut.items, cut.next
        except (BadFile, Bad, OSError) as error:
            return Broken(named(error, "input"))
        return found

    def append(
        self, route: Route, total: int, before: Checkpoint, spots: list[Spot], parts: list[Part]
    ) -> Assembled | Broken:
        """Write these parts behind the checkpoint; ends early at one that failed."""
        pieces: list[bytes] = []
        checkpoint, cost, variants, failure, failed = before, 0.0, list[str](), "", 0
        for spot, part in zip(spots, parts, strict=True):
            if part.error:
                last = spot.first + spot.items - 1
                failure, failed = f"items {spot.first} to {last}: {part.error}", spot.items
                break
            try:
                data, checkpoint = rendered(route.target.format, _outputs(part.outputs), spot.items, checkpoint, total)
            except (BadItem, msgspec.DecodeError) as error:
                return Broken(f"output: {error}")
            pieces.append(data)
            checkpoint = msgspec.structs.replace(
                checkpoint,
                chunks=spot.number + 1,
                items=spot.first + spot.items,
                bytes=checkpoint.bytes + len(data),
                position=spot.end,
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

    def written(self, route: Route, checkpoint: Checkpoint) -> bool:
        """Whether what the checkpoint speaks of is there."""
        files, path = self.target(route)
        try:
            return checkpoint.bytes == 0 or files.growing(path, route.job).stat().st_size >= checkpoint.bytes
        except OSError:
            return False

    def finish(self, route: Route) -> None:
        """The output gets its name. Raises BadFile, OSError."""
        files, path = self.target(route)
        files.finish(path, route.job)

    def set_aside(self, route: Route, checkpoint: Checkpoint) -> str:
        """Keep what was written of an output that will not be finished, as NAME.partial beside it; returns its URL."""
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

    def discard(self, route: Route) -> None:
        """Remove what the job keeps on disk beside its finished output."""
        files, path = self.target(route)
        files.discard(path, route.job)
        for what in ("in", "out"):
            self.spooled(route, what).unlink(missing_ok=True)


def named(error: Exception, field: str) -> str:
    """The error with the field that it is about."""
    text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return text if text.startswith(("input:", "output:")) else f"{field}: {text}"
