"""Arrivals of a load's queries: when, and for which app. The simulator uses this, and `infaas bench` against live systems.

Times come in chunks, so memory does not grow with their number. They depend only on the load, the duration and the random generator, and
not on the size of the chunks. Point processes give them in operational time (on average one a unit), and rates map them to seconds. The last
part of the module reads files of recorded loads.
"""

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.simulation.scenario.model import WorkloadSpec

Times = NDArray[np.float64]


class Rates:
    """A piecewise linear rate over [starts[0], ends[-1]): in each piece from `first` to `last` (queries/s, at least 0).

    Pieces follow each other without gaps and have a positive length. before: operational time (expected queries) at the first piece's
    start. until: at the last piece's end.
    """

    def __init__(self, starts: Times, ends: Times, first: Times, last: Times, before: float = 0.0) -> None:
        self.first, self.last = first, last
        self._starts, self._lengths = starts, ends - starts
        self._latest = np.nextafter(ends, 0)
        passed = before + np.concatenate([[0.0], np.cumsum(self._lengths * (first + last) / 2)])
        self._passed = passed[:-1]
        self.expected, self.until = float(passed[-1] - before), float(passed[-1])

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]], duration: float) -> "Rates":
        """A rate over [0, duration) through (second, queries/s) points: linear between them, constant beyond.

        Two points with the same second are a step.
        """
        at, rates = np.array(points, np.float64).T
        at = np.concatenate([[min(0.0, at[0])], at, [max(duration, at[-1])]])
        rates = np.concatenate([rates[:1], rates, rates[-1:]])
        kept = (at[:-1] < at[1:]) & (at[:-1] < duration)
        starts, first, ends, last = at[:-1][kept], rates[:-1][kept], at[1:][kept], rates[1:][kept]
        if ends[-1] > duration:
            last[-1] = first[-1] + (last[-1] - first[-1]) * (duration - starts[-1]) / (ends[-1] - starts[-1])
            ends[-1] = duration
        return cls(starts, ends, first, last)

    @classmethod
    def stairs(cls, rates: Times, width: float, duration: float) -> "Rates":
        """Constant rates, each for `width` seconds. It ends with the last of them, at the latest at `duration`."""
        rates = np.asarray(rates[: int(np.ceil(duration / width))], np.float64)
        starts = np.arange(len(rates), dtype=np.float64) * width
        kept = starts < duration
        ends = np.minimum((np.arange(len(rates)) + 1) * width, duration)
        return cls(starts[kept], ends[kept], rates[kept], rates[kept])

    def when(self, passed: Times) -> Times:
        """The seconds of operational times (rising, below `until`): the exact inverse of the rate's integral.

        Each lies in its piece, before the piece's end. Rounding may swap neighbours.
        """
        piece: NDArray[np.intp] | int = 0
        if len(self._starts) > 1:
            piece = np.searchsorted(self._passed, passed, "right") - 1
        length, first = self._lengths[piece], self.first[piece]
        # Within a piece: first x s + (last - first) x s² / 2 = mean so far, s from 0 to 1, solved without cancellation.
        mean = np.maximum(passed - self._passed[piece], 0) / length
        root = np.sqrt(np.maximum(first * first + 2 * (self.last[piece] - first) * mean, 0))
        share = np.divide(2 * mean, first + root, out=np.zeros_like(mean), where=first + root > 0)
        seconds: Times = np.minimum(self._starts[piece] + share * length, self._latest[piece])
        return seconds


STAYS = 1024  # stays of a modulated process that are drawn at once
FIRST = 256  # arrivals in the first chunk
MOST_AT_ONCE = 2**20  # arrivals of a line that are drawn at once


def timed(blocks: Iterator[Rates], passed: Iterator[Times]) -> Iterator[Times]:
    """Seconds of arrivals. blocks: the rate, in consecutive blocks. passed: the arrivals in operational time, rising and without end."""
    block = next(blocks)
    last = 0.0
    for part in passed:
        while True:
            cut = int(np.searchsorted(part, block.until))
            if cut:
                times = block.when(part[:cut])
                times[0] = max(times[0], last)
                np.maximum.accumulate(times, out=times)  # rounding
                last = float(times[-1])
                yield times
            if cut == len(part):
                break
            part = part[cut:]
            following = next(blocks, None)
            if following is None:
                return
            block = following


def even(chunk: int) -> Iterator[Times]:
    """0, 1, 2, ..."""
    at = 0
    for size in _sizes(chunk):
        yield np.arange(at, at + size, dtype=np.float64)
        at += size


def exponential(rng: np.random.Generator, chunk: int) -> Iterator[Times]:
    """A Poisson process."""
    end = 0.0
    for size in _sizes(chunk):
        part = rng.standard_exponential(size)
        part[0] += end
        np.cumsum(part, out=part)
        end = float(part[-1])
        yield part


def gamma(cv: float, rng: np.random.Generator, chunk: int) -> Iterator[Times]:
    """Gamma gaps of mean 1 and coefficient of variation `cv`, from a random moment on of a process that has always run.

    Such a moment falls into a gap in proportion to its length (gamma of shape + 1), and lies anywhere in it. The expected number of
    arrivals is therefore right from time 0 on, however large the CV.
    """
    shape = cv**-2
    end = float(rng.random() * rng.standard_gamma(shape + 1) / shape)
    yield np.array([end])
    for size in _sizes(chunk):
        part = rng.standard_gamma(shape, size) / shape
        part[0] += end
        np.cumsum(part, out=part)
        end = float(part[-1])
        yield part


def modulated(
    rates: Sequence[float], dwell: Sequence[float], duration: float, rng: np.random.Generator
) -> Iterator[Rates]:
    """The rate of a Markov-modulated Poisson process over [0, duration), in blocks of stays."""
    levels, means = np.array(rates, np.float64), np.array(dwell, np.float64)
    states = len(levels)
    state = int(rng.choice(states, p=means / means.sum()))
    start, passed = 0.0, 0.0
    while start < duration:
        # Each other state is as likely as the next: a step of 1 to states - 1 on the ring.
        steps = rng.integers(1, states, STAYS) if states > 1 else np.zeros(STAYS, np.int64)
        visited = (state + np.concatenate([[0], np.cumsum(steps)])) % states
        lengths = rng.standard_exponential(STAYS) * means[visited[:-1]]
        ends = np.minimum(start + np.cumsum(lengths), duration)
        starts = np.concatenate([[start], ends[:-1]])
        kept = starts < ends
        level = levels[visited[:-1][kept]]
        if len(level):
            block = Rates(starts[kept], ends[kept], level, level, passed)
            passed = block.until
            yield block
        state, start = int(visited[-1]), float(ends[-1])


def counted(
    counts: Times, seconds_per_line: float, duration: float, rng: np.random.Generator, chunk: int
) -> Iterator[Times]:
    """Arrivals for given counts: uniform within each line (a fraction is rounded at random). This is a Poisson process with known counts."""
    starts, ends, numbers = _parts(counts[: int(np.ceil(duration / seconds_per_line))], seconds_per_line, rng)
    until = np.cumsum(numbers)
    latest = np.nextafter(ends, 0)
    at = 0
    while at < len(numbers):
        done = until[at] - numbers[at]
        stop = max(int(np.searchsorted(until, done + chunk, "right")), at + 1)
        part = np.repeat(np.arange(at, stop), numbers[at:stop])
        times = starts[part] + rng.random(len(part)) * (ends[part] - starts[part])
        times = np.sort(np.minimum(times, latest[part]))
        at = stop
        times = times[: np.searchsorted(times, duration)]
        if len(times):
            yield times


def _sizes(chunk: int) -> Iterator[int]:
    """Sizes of chunks: small at first, so that few arrivals cost little."""
    size = min(chunk, FIRST)
    while True:
        yield size
        size = min(chunk, 2 * size)


def _parts(counts: Times, width: float, rng: np.random.Generator) -> tuple[Times, Times, NDArray[np.int64]]:
    """Starts, ends and numbers of arrivals of lines. A line with very many arrivals is split into equal parts."""
    whole = np.floor(counts)
    numbers = (whole + (rng.random(len(counts)) < counts - whole)).astype(np.int64)
    pieces = np.maximum(-(-numbers // MOST_AT_ONCE), 1)
    line = np.repeat(np.arange(len(counts)), pieces)
    within = np.arange(len(line)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    split = numbers[line]
    for large in np.flatnonzero(pieces > 1):
        split[line == large] = rng.multinomial(numbers[large], np.full(pieces[large], 1 / pieces[large]))
    return (line + within / pieces[line]) * width, (line + (within + 1) / pieces[line]) * width, split


# -- the arrivals of a load

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
        return counted(load.counts, load.seconds_per_line, duration, rng, chunk)
    if load.arrivals == "mmpp":
        stays = np.random.default_rng(rng.integers(2**63, size=4))
        blocks = modulated(load.rates, load.dwell_s, duration, stays)
    else:
        blocks = iter([_rates(load, duration)])
    match load.arrivals:
        case "uniform":
            return timed(blocks, even(chunk))
        case "gamma":
            return timed(blocks, gamma(load.cv, rng, chunk))
        case _:
            return timed(blocks, exponential(rng, chunk))


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
