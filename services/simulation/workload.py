"""Arrivals of a load's queries: when, and for which app. The simulator uses this, and `infaas bench` against live systems.

Times come in chunks, so memory does not grow with their number. They depend only on the load, the duration and the random generator, and
not on the size of the chunks. The second part of the module reads files of recorded loads.
"""

import gzip
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.simulation import processes
from services.simulation.processes import Rates, Times
from services.simulation.scenario.model import WorkloadSpec

CHUNK = 65_536  # arrivals in a chunk, about
PEAK_OVER = 1.0  # s over which the peak of given arrival times is measured

Apps = NDArray[np.int64]


def arrivals(
    load: WorkloadSpec, duration_s: float, rng: np.random.Generator, *, chunk: int = CHUNK
) -> Iterator[tuple[Times, Apps]]:
    """Rising times in [0, duration_s), seconds, each with the index into load.apps of its app. Apps are drawn by `shares`.

    poisson, gamma: a renewal process that has always run, in operational time. Gaps stretch and shrink with the rate and keep their CV.
    uniform: equal gaps in operational time, the first arrival at 0.
    mmpp: Poisson at the rate of the present state. A stay lasts exponentially with the state's mean dwell_s; then each other state is
    equally likely. The first state follows the long-run distribution.
    trace: as many as each line says (a fraction is rounded at random), uniform in the line. With range_qps, a line is a rate and
    arrivals are Poisson: the trace's lowest line has the range's lowest rate, its highest (also of a flat trace) the highest, linear between.
    times: as given. A load ends with its trace or times if they are shorter than the duration.

    Raises WorkloadError for an invalid load.
    """
    _check(load, duration_s)
    # Times and apps have a random generator each, so that neither depends on where chunks end.
    when, which = (np.random.default_rng(rng.integers(2**63, size=4)) for _ in range(2))
    return _with_apps(_times(load, duration_s, when, chunk), load.shares, which)


def at_once(load: WorkloadSpec, duration_s: float, rng: np.random.Generator) -> tuple[Times, Apps]:
    """All arrivals in two arrays (times, apps). Raises WorkloadError."""
    parts = list(arrivals(load, duration_s, rng))
    if not parts:
        return np.empty(0), np.empty(0, np.int64)
    return np.concatenate([times for times, _ in parts]), np.concatenate([apps for _, apps in parts])


def mean_rate(load: WorkloadSpec, duration_s: float) -> float:
    """Expected queries/s over the duration, all apps together. mmpp: in the long run."""
    _check(load, duration_s)
    if load.arrivals == "mmpp":
        return math.fsum(rate * dwell for rate, dwell in zip(load.rates, load.dwell_s, strict=True)) / sum(load.dwell_s)
    if load.times is not None and load.arrivals == "times":
        return float(np.searchsorted(load.times, duration_s)) / duration_s
    return _rates(load, duration_s).expected / duration_s


def peak_rate(load: WorkloadSpec, duration_s: float) -> float:
    """The highest rate within the duration, queries/s, all apps together. times: the most in one second, counted from 0."""
    _check(load, duration_s)
    if load.arrivals == "mmpp":
        return max(load.rates)
    if load.times is not None and load.arrivals == "times":
        within = load.times[: np.searchsorted(load.times, duration_s)]
        _, counts = np.unique(within // PEAK_OVER, return_counts=True)
        return float(counts.max(initial=0)) / min(PEAK_OVER, duration_s)
    rates = _rates(load, duration_s)
    return float(max(rates.first.max(), rates.last.max()))


def zipf(n: int, s: float = 1.0) -> tuple[float, ...]:
    """Shares of n apps in proportion to 1 / rank^s, most popular first. They add up to 1."""
    weights = [float(rank) ** -s for rank in range(1, n + 1)]
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def _times(load: WorkloadSpec, duration: float, rng: np.random.Generator, chunk: int) -> Iterator[Times]:
    if load.arrivals == "times":
        assert load.times is not None
        end = int(np.searchsorted(load.times, duration))
        return (load.times[at : min(at + chunk, end)] for at in range(0, end, chunk))
    if load.arrivals == "trace" and load.range_qps is None:
        assert load.counts is not None
        return processes.counted(load.counts, load.seconds_per_line, duration, rng, chunk)
    if load.arrivals == "mmpp":
        stays = np.random.default_rng(rng.integers(2**63, size=4))
        blocks = processes.modulated(load.rates, load.dwell_s, duration, stays)
    else:
        blocks = iter([_rates(load, duration)])
    match load.arrivals:
        case "uniform":
            return processes.timed(blocks, processes.even(chunk))
        case "gamma":
            return processes.timed(blocks, processes.gamma(load.cv, rng, chunk))
        case _:
            return processes.timed(blocks, processes.exponential(rng, chunk))


def _rates(load: WorkloadSpec, duration: float) -> Rates:
    """The rate over the duration, for loads that have one."""
    if load.arrivals != "trace":
        return Rates.through(load.rate, duration)
    assert load.counts is not None
    rates = load.counts / load.seconds_per_line
    if load.range_qps is not None:
        lowest, highest = load.range_qps
        low, high = rates.min(), rates.max()
        rates = lowest + (highest - lowest) * ((rates - low) / (high - low) if high > low else np.ones_like(rates))
    return Rates.stairs(rates, load.seconds_per_line, duration)


def _with_apps(
    times: Iterator[Times], shares: tuple[float, ...], rng: np.random.Generator
) -> Iterator[tuple[Times, Apps]]:
    borders = np.cumsum(shares)[:-1]
    for part in times:
        if len(borders):
            yield part, np.searchsorted(borders, rng.random(len(part)), "right")
        else:
            yield part, np.zeros(len(part), np.int64)


def _check(load: WorkloadSpec, duration: float) -> None:
    """Refuse invalid loads. The readers of scenarios and commands check before, with better messages."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise WorkloadError(what)

    need(0 < duration < math.inf, f"a load's duration must be above 0 s, not {duration:g}")
    need(len(load.apps) == len(load.shares) > 0, f"a load needs one share for each app: {len(load.shares)} given")
    need(
        min(load.shares) >= 0 and abs(sum(load.shares) - 1) < 1e-6,
        f"shares must be at least 0 and add up to 1, not {sum(load.shares):g}",
    )
    match load.arrivals:
        case "mmpp":
            need(len(load.rates) == len(load.dwell_s) > 0, "mmpp needs one dwell_s for each of its rates")
            need(_sane(load.rates), "rates must be at least 0")
            need(_sane(load.dwell_s) and min(load.dwell_s) > 0, "dwell_s must be above 0 s")
        case "trace":
            need(load.counts is not None and len(load.counts) > 0, "a trace needs counts")
            need(0 < load.seconds_per_line < math.inf, "seconds_per_line must be above 0")
            need(
                load.range_qps is None or (_sane(load.range_qps) and load.range_qps[0] <= load.range_qps[1]),
                "range_qps must be two rates of at least 0, the lower first",
            )
        case "times":
            need(load.times is not None, "arrivals at given times need times")
        case _:
            at = tuple(second for second, _ in load.rate)
            need(len(at) > 0, "rate needs a point")
            need(_sane(at) and list(at) == sorted(at), "rate's points must be at rising seconds of at least 0")
            need(_sane(tuple(rate for _, rate in load.rate)), "rate must be at least 0")
            need(load.arrivals != "gamma" or 0 < load.cv < math.inf, "cv must be above 0")


def _sane(values: tuple[float, ...]) -> bool:
    return all(0 <= value < math.inf for value in values)


# -- files of recorded loads

MOST_IN_LINE = 1_000_000_000  # queries


class WorkloadError(ValueError):
    """A load that cannot be generated, or a file that cannot be read. The text names file and line, and the remedy."""


def read_counts(path: str | Path) -> Times:
    """The queries in each line of a file: one whole number of at least 0 a line. Blank lines and lines that begin with # are skipped.

    Raises WorkloadError, which names file and line, also if all counts are 0. Files ending in .gz are decompressed.
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
    """Arrival times, one a line: seconds from the load's start, not decreasing. Blank lines and lines that begin with # are skipped.

    Raises WorkloadError, which names file and line, also for a file without any. Files ending in .gz are decompressed.
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
    """The lines with content, with their numbers."""
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
