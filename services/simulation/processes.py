"""Point processes in chunks: in operational time (one arrival a unit on average), and their way to seconds."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


class Rates:
    """A rate over [starts[0], ends[-1]): in each piece straight from `first` to `last` (queries/s, at least 0).

    Pieces follow each other without gaps and have a length above 0. before: operational time (queries expected) that has
    passed at the first piece's start; until: at the last one's end.
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
        """Over [0, duration) through (second, queries/s) points, straight between them and constant beyond.

        Points with the same second make a step.
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
        """One constant rate after the other, each for `width` seconds; ends with the last of them, at latest at `duration`."""
        rates = np.asarray(rates[: int(np.ceil(duration / width))], np.float64)
        starts = np.arange(len(rates), dtype=np.float64) * width
        kept = starts < duration
        ends = np.minimum((np.arange(len(rates)) + 1) * width, duration)
        return cls(starts[kept], ends[kept], rates[kept], rates[kept])

    def when(self, passed: Times) -> Times:
        """Seconds at which operational times (rising, below `until`) are reached: the inverse of the rate's integral.

        Each lies in its piece, before the piece's end. Rounding may turn neighbours round.
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


STAYS = 1024  # of a modulated process, drawn at once
FIRST = 256  # arrivals in the first chunk
MOST_AT_ONCE = 2**20  # arrivals of a line that are drawn at once


def timed(blocks: Iterator[Rates], passed: Iterator[Times]) -> Iterator[Times]:
    """Seconds of arrivals given in operational time (rising, without end), under rates that follow each other in blocks."""
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
    """Gamma gaps of mean 1 and this coefficient of variation, seen from a random moment of a process that has always run.

    The gap that is met at such a moment is a long one (its density is x times that of a gap: gamma of shape + 1), and the
    moment lies anywhere in it. So as many arrivals as asked are expected in any time from 0 on, however large the CV.
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
    """The rate of an MMPP over [0, duration), in blocks of stays."""
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
    """So many arrivals in each line (a fraction at random), uniform in it: a Poisson process whose counts are known."""
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
    """Of chunks: small at first, so that few arrivals cost little."""
    size = min(chunk, FIRST)
    while True:
        yield size
        size = min(chunk, 2 * size)


def _parts(counts: Times, width: float, rng: np.random.Generator) -> tuple[Times, Times, NDArray[np.int64]]:
    """Starts, ends and numbers of arrivals of lines; a line with very many is split into equal parts."""
    whole = np.floor(counts)
    numbers = (whole + (rng.random(len(counts)) < counts - whole)).astype(np.int64)
    pieces = np.maximum(-(-numbers // MOST_AT_ONCE), 1)
    line = np.repeat(np.arange(len(counts)), pieces)
    within = np.arange(len(line)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    split = numbers[line]
    for large in np.flatnonzero(pieces > 1):
        split[line == large] = rng.multinomial(numbers[large], np.full(pieces[large], 1 / pieces[large]))
    return (line + within / pieces[line]) * width, (line + (within + 1) / pieces[line]) * width, split
