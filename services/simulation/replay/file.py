"""A recording as a file, a sequence of MessagePack values: a map (the head), an array for each query, and their number.

It is written and read a row at a time, so memory does not grow with it. A file whose name ends in .gz is compressed.
"""

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgpack
import msgspec

from bus.codec import encode, explain
from services.simulation.replay.recording import (
    VERSION,
    RecordedQuery,
    Recording,
    RecordingHead,
    ReplayError,
    head_fault,
    query_fault,
)

_REMEDY = "export it again (infaas replay --export)"
_LARGEST = 256 * 2**20  # bytes of one value
_CHUNK = 2**20


def export(source: Recording, path: Path) -> int:
    """Write a recording; returns the number of queries. The file appears when it is complete. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    count = 0
    try:
        with _opened(path, part, "wb") as file:
            file.write(encode(source.head))
            for query in source.queries:
                file.write(encode(query))
                count += 1
            file.write(encode(count))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def exported(path: Path) -> Recording:
    """The recording in a file of `export`. Raises ReplayError, which names file and row, also while queries are read."""
    values = _values(path)
    first = next(values, None)
    if not isinstance(first, dict) or first.get("format") != "infaas-recording":
        raise ReplayError(f"{path}: is no recording: make one with infaas replay --export {path.name}")
    if first.get("version") != VERSION:
        raise ReplayError(
            f"{path}: has version {first.get('version')!r} of the format, version {VERSION} is read here: {_REMEDY}"
        )
    try:
        head = msgspec.convert(first, RecordingHead)
    except msgspec.ValidationError as error:
        raise ReplayError(f"{path}: head: {explain(error)}: {_REMEDY}") from error
    fault = head_fault(head)
    if fault:
        raise ReplayError(f"{path}: head: {fault}: {_REMEDY}")
    return Recording(head, _queries(path, head, values))


def _queries(path: Path, head: RecordingHead, values: Iterator[Any]) -> Iterator[RecordedQuery]:
    count, last = 0, head.begins
    for value in values:
        if isinstance(value, int):
            if value != count:
                raise ReplayError(f"{path}: ends after {count} of {value} queries: {_REMEDY}")
            if next(values, None) is not None:
                raise ReplayError(f"{path}: goes on after its end: {_REMEDY}")
            return
        count += 1
        try:
            query = msgspec.convert(value, RecordedQuery)
        except msgspec.ValidationError as error:
            raise ReplayError(f"{path}: row {count}: {_named(error)}: {_REMEDY}") from error
        fault = query_fault(query, head, last)
        if fault:
            raise ReplayError(f"{path}: row {count}: {fault}: {_REMEDY}")
        last = query.time
        yield query
    raise ReplayError(f"{path}: ends in the middle, after row {count}: {_REMEDY}")


def _named(error: msgspec.ValidationError) -> str:
    """The error's text with the field's name in place of its number."""
    text = str(error)
    for number, name in enumerate(RecordedQuery.__struct_fields__):
        text = text.replace(f" - at `$[{number}]`", f" for {name}")
    return text


def _values(path: Path) -> Iterator[Any]:
    """The values in order. A truncated value ends them."""
    number = 0
    try:
        with _opened(path, path, "rb") as file:
            unpacker = msgpack.Unpacker(max_buffer_size=_LARGEST, strict_map_key=True)
            while data := file.read(_CHUNK):
                unpacker.feed(data)
                for value in unpacker:
                    yield value
                    number += 1
    except FileNotFoundError:
        raise ReplayError(f"{path}: there is no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ReplayError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (ValueError, msgpack.UnpackException) as error:  # not MessagePack, or too large
        where = f"row {number}" if number else "head"
        raise ReplayError(f"{path}: {where}: is not valid MessagePack ({error}): {_REMEDY}") from error


def _opened(name: Path, path: Path, mode: str) -> IO[bytes]:
    """Open a file, compressed or not. name: its suffix decides."""
    if mode == "wb":
        # Only the owner may read recorded queries.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        plain = os.fdopen(descriptor, "wb")
        return cast(IO[bytes], _Gzip(plain)) if name.suffix == ".gz" else plain
    return cast(IO[bytes], gzip.open(path, "rb")) if name.suffix == ".gz" else path.open("rb")


class _Gzip(gzip.GzipFile):
    """Closes the underlying file too. It stores no time and no name: equal recordings are equal bytes."""

    def __init__(self, beneath: IO[bytes]) -> None:
        super().__init__(filename="", mode="wb", fileobj=beneath, compresslevel=6, mtime=0)
        self._beneath = beneath

    def close(self) -> None:
        super().close()
        self._beneath.close()
