"""A recording: machines, catalogue, queries and their outcomes, without payloads; its checks, and its file.

Times are Unix seconds (of bins: seconds from the recording's beginning), money is in US$, latencies are in milliseconds.
"""

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import IO, Annotated, Any, Literal, cast

import msgpack
import msgspec
from msgspec import Struct

from bus.codec import encode, explain
from bus.fields import SHARE, TARGET, Number, check_of, faults
from bus.messages.catalog import AppRecord, VariantRecord
from services.core.pipelines.checks import pipeline_errors
from services.core.placement import Device

VERSION = 1
LONGEST = 400 * 86400.0  # s
LARGEST = 1e12  # of any number


class ReplayError(ValueError):
    """A recording that cannot be replayed. The text says where, what is wrong there, and the remedy."""


class NothingRecorded(ReplayError):
    """No query came in the range."""


_AMOUNT = Number(below=LARGEST)


class RecordedQuery(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One query: when it arrived, what it asked for, and its outcome (as in `query_outcomes`)."""

    time: float
    app: str
    items: Annotated[int, Number(1, 10**6)]
    slo_ms: Annotated[float | None, _AMOUNT]
    accuracy_required: Annotated[float | None, SHARE]
    cost_limit: Annotated[float | None, _AMOUNT]
    outcome: str
    latency_ms: Annotated[float | None, _AMOUNT]
    accuracy: Annotated[float | None, SHARE]
    variant: str | None
    code: str | None


_wrong = check_of(RecordedQuery)


class RecordedWorker(Struct, frozen=True, kw_only=True):
    """A machine that ran. first, last: times of its first and last sample."""

    worker: str
    devices: list[Device]
    first: float
    last: float


class Bin(Struct, frozen=True, kw_only=True):
    """An interval of `every_s`. instances: by variant, on average. workers: those that ran. cost: by app, "" for the unused part.

    utilisation: 0..1, mean over all devices; None without samples.
    """

    instances: dict[str, float]
    workers: list[str]
    cost: dict[str, float]
    utilisation: float | None


class RecordedJob(Struct, frozen=True, kw_only=True):
    """A submitted offline job."""

    app: str
    created: float
    inputs: Annotated[int, Number(1, 10**9)]
    accuracy: float = 0.0
    model: str | None = None


class RecordingHead(Struct, frozen=True, kw_only=True):
    """Everything but the queries. only: its apps; None: all. queries: their number. billed: whether cost was recorded.

    slo_target: of apps without a target of their own; None: not recorded. simulated_cost: the cost of simulated devices, by app as in bins. actions: number of scaling actions, by kind.
    visits: of the answered queries of each pipeline, how many visited each vertex. items: how often they asked it together, for each item, and the sum
    of the squares of these numbers.
    """

    format: Literal["infaas-recording"] = "infaas-recording"
    version: int = VERSION
    begins: float
    ends: float
    every_s: float
    only: list[str] | None
    queries: int
    apps: list[AppRecord]
    variants: list[VariantRecord]
    prices: dict[str, Annotated[float, _AMOUNT]]
    workers: list[RecordedWorker]
    bins: list[Bin]
    billed: bool
    simulated_cost: dict[str, float]
    actions: dict[str, int]
    jobs: list[RecordedJob] = []
    notes: list[str] = []
    slo_target: Annotated[float | None, TARGET] = None
    visits: dict[str, dict[str, int]] = {}
    items: dict[str, dict[str, tuple[int, int]]] = {}

    @property
    def duration_s(self) -> float:
        """Seconds."""
        return self.ends - self.begins


class Recording(Struct, frozen=True):
    """A recording. queries: in the order of their arrival; they can be read once."""

    head: RecordingHead
    queries: Iterator[RecordedQuery]


def with_stages(apps: Iterable[str], known: Iterable[AppRecord]) -> set[str]:
    """These apps, and those that answer for them as stages of pipelines, however deep."""
    asks = {one.app: [vertex.app for vertex in one.pipeline.vertices] for one in known if one.pipeline is not None}
    found: set[str] = set()
    ahead = list(apps)
    while ahead:
        app = ahead.pop()
        if app not in found:
            found.add(app)
            ahead += asks.get(app, ())
    return found


def written(at: float) -> str:
    """A time (Unix seconds) as text, in the local time zone."""
    return datetime.fromtimestamp(at, UTC).astimezone().isoformat(" ", "seconds")


def head_fault(head: RecordingHead) -> str:
    """What is invalid, with the key; empty if nothing is."""
    if not (isfinite(head.begins) and 0 < head.duration_s <= LONGEST):
        return f"ends: must lie after begins, by at most {LONGEST / 86400:g} days"
    if not 0 < head.every_s <= head.duration_s:
        return f"every_s: must be above 0 and at most the duration ({head.duration_s:g} s)"
    if head.duration_s / head.every_s > 1e6:
        return "every_s: is too small for so long a duration"
    if (wrong := next(faults(head), None)) is not None:
        return f"{wrong.key}: {wrong.reason}"
    for i, app in enumerate(head.apps):
        if app.pipeline is not None and (refused := pipeline_errors(app.app, app.latency_ms, app.pipeline, None)):
            return f"apps[{i}].{refused[0]}"
    for i, one in enumerate(head.variants):
        if not one.profile.rows:
            return f"variants[{i}].profile.rows: is empty: nothing was measured of it"
    for i, job in enumerate(head.jobs):
        if not head.begins <= job.created < head.ends:
            return f"jobs[{i}]: must be created within the recording"
    return ""


def query_fault(one: RecordedQuery, head: RecordingHead, last: float) -> str:
    """What is invalid in a query; empty if nothing is. last: arrival of the query before it."""
    if not head.begins <= one.time < head.ends:
        return f"time {one.time!r} lies outside the recording ({head.begins!r} to {head.ends!r})"
    if one.time < last:
        return f"time {one.time!r} comes after {last!r}: rows must be in the order of arrival"
    wrong = _wrong(one)
    return "" if wrong is None else str(wrong)


# -- as a file, a sequence of MessagePack values: a map (the head), an array for each query, and their number
#
# It is written and read a row at a time, so memory does not grow with it. A file whose name ends in .gz is compressed.

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
    text = explain(error)
    for number, name in enumerate(RecordedQuery.__struct_fields__):
        text = text.replace(f"`[{number}]`", f"`{name}`")
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
