"""Files of recorded loads: queries counted per line, or one arrival time a line. Plain or .gz; '#' begins a comment line."""

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
MOST_IN_LINE = 1_000_000_000  # queries; more is no count


class WorkloadError(ValueError):
    """A load that cannot be generated, or a file of one that cannot be read; the text names file and line, and what helps."""


def read_counts(path: str | Path) -> Times:
    """Queries in each line of a file: one whole number of at least 0 a line, blank lines skipped.

    Raises WorkloadError, naming file and line; also for a file in which all counts are 0.
    """
    counts: list[int] = []
    for number, text in _lines(path):
        if not (text.isascii() and text.isdecimal()) or int(text) > MOST_IN_LINE:
            raise WorkloadError(f"{path}, line {number}: {text[:40]!r} is no count of queries: write a whole number")
        counts.append(int(text))
    if not any(counts):
        raise WorkloadError(f"the trace {path} holds no arrivals: it needs one count of queries a line")
    return np.array(counts, np.float64)


def read_times(path: str | Path) -> Times:
    """Arrival times, seconds from the load's start, one a line, rising (equal ones allowed); blank lines skipped.

    Raises WorkloadError, naming file and line; also for a file without any.
    """
    times: list[float] = []
    last = 0.0
    for number, text in _lines(path):
        time = _seconds(text)
        if time is None:
            raise WorkloadError(f"{path}, line {number}: {text[:40]!r} is no time: write seconds of at least 0")
        if time < last:
            raise WorkloadError(
                f"{path}, line {number}: {text[:40]} comes after {last:g}: sort the times, earliest first"
            )
        times.append(time)
        last = time
    if not times:
        raise WorkloadError(f"the file {path} holds no arrivals: it needs one time in seconds a line")
    return np.array(times, np.float64)


def _seconds(text: str) -> float | None:
    try:
        time = float(text)
    except ValueError:
        return None
    return time if 0 <= time < math.inf else None


def _lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that hold something."""
    path = Path(path)
    if path.is_char_device():
        raise WorkloadError(f"cannot read the trace {path}: it is a device, which may never end")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                text = line.strip()
                if text and not text.startswith("#"):
                    yield number, text
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise WorkloadError(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}") from error
