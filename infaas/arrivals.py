"""When queries of an open-loop load set out: seconds from the start, ascending. Poisson, gamma, uniform, or a trace."""

import gzip
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from infaas.errors import BadInput

Times = NDArray[np.float64]
Kind = Literal["poisson", "gamma", "uniform"]
MOST = 20_000_000  # queries of one run


def renewal(kind: Kind, rate: float, seconds: float, rng: np.random.Generator, cv: float = 1.0) -> Times:
    """Arrivals at `rate` a second whose gaps are independent: exponential, gamma, or all equal.

    cv: coefficient of variation of gamma gaps (standard deviation / mean). Raises BadInput.
    """
    if not (0 < rate < np.inf and 0 < seconds < np.inf):
        raise BadInput("rate and seconds must be above 0")
    if rate * seconds > MOST:
        raise BadInput(f"{rate:g}/s for {seconds:g} s is more than {MOST:,} queries: lower one of them")
    if kind == "uniform":
        return np.arange(np.ceil(rate * seconds)) / rate
    if kind == "gamma" and not 0 < cv < np.inf:
        raise BadInput("cv must be above 0")
    squared = 1.0 if kind == "poisson" else cv * cv
    parts: list[Times] = []
    end = 0.0
    while end < seconds:
        # Enough for the rest in nearly all cases; the loop makes up for the others.
        count = int((seconds - end) * rate * 1.1 + 10 * np.sqrt(1 + squared) + 10)
        part = end + np.cumsum(rng.gamma(1 / squared, squared / rate, count))
        parts.append(part)
        end = float(part[-1])
    times = np.concatenate(parts)
    return times[times < seconds]


def from_counts(counts: NDArray[np.int64], seconds_per_line: float, rng: np.random.Generator) -> Times:
    """Arrivals of a trace that counts them per line: within a line anywhere, each as likely (so Poisson given the count)."""
    starts = np.repeat(np.arange(len(counts)), counts)
    return np.sort((starts + rng.random(len(starts))) * seconds_per_line)


def read_counts(path: str | Path) -> NDArray[np.int64]:
    """A trace file: one count a line, plain or .gz. Raises BadInput that names the line."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}") from error
    counts: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if not line.strip().isdecimal():
            raise BadInput(f"{path}, line {number}: {line[:40]!r} is no count of queries")
        counts.append(int(line))
    if not any(counts):
        raise BadInput(f"the trace {path} holds no arrivals")
    return np.array(counts, dtype=np.int64)


def replay(counts: NDArray[np.int64], rng: np.random.Generator, *, seconds: float, rate: float | None = None) -> Times:
    """The first `seconds` lines of a trace with one second a line; rate rescales them to that mean (counts rounded at random)."""
    window = counts[: int(np.ceil(seconds))].astype(np.float64)
    if rate is not None and window.sum() > 0:
        window *= rate / window.mean()
    if window.sum() > MOST:
        raise BadInput(f"the trace holds more than {MOST:,} queries in this time: shorten it or lower the rate")
    whole = np.floor(window)
    rounded = (whole + (rng.random(len(window)) < window - whole)).astype(np.int64)
    times = from_counts(rounded, 1.0, rng)
    return times[times < seconds]
