"""Point processes: arrivals in operational time (on average one a unit), and rates that map them to seconds. Arrivals come in chunks."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

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
