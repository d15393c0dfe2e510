"""One queue by deadline for all replicas of a vertex (InferLine, paper 004, section 3.6), simulated for a whole sample. Pure.

An idle replica takes the head of the queue at once, and with it as many as wait, up to the largest batch. When batches begin, and how many
queries are in each, does not depend on which queries they are. So both are found first for arrivals in order, with one iteration for each
batch; then places in batches are given out by deadline, where queries have overtaken each other. Three things save iterations:

- In batches of one that all take as long, begins follow from begins: the n-th query begins at max(its arrival, end of query n - k) with k
  replicas, which is a running maximum.
- Stretches of queries that all find an idle replica are left out.
- Of large samples, a thousand parts are followed side by side, as arrays. Where parts do not agree, they are followed again by themselves.

All results are exact.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ranks = NDArray[np.int64]

MANY = 100_000  # queries of a vertex from which parts of the sample are followed side by side
PARTS = 1024  # at most
WIDE = 512  # replicas times batch; beyond it the parts seldom come to agree in time
WORTH = 64  # queries that must find an idle replica in a row, for them to be left out of the iteration


class StageConfiguration(Struct, frozen=True, gc=False):
    """How a vertex is served. seconds: of a batch of 0, 1, ... `batch` items or more; not decreasing."""

    seconds: tuple[float, ...]
    batch: int
    replicas: int


def served(ready: Floats, stage: StageConfiguration, hops: Floats | None = None) -> Floats:
    """When each query's batch ends. ready: when each arrives, in the order of deadlines. hops: seconds that a batch takes besides, by the place of
    its first query among arrivals; None: nothing.
    """
    if not len(ready):
        return ready
    order: Ranks | None = None
    arrivals = ready
    if np.any(ready[1:] < ready[:-1]):
        order = np.argsort(ready, kind="stable")
        arrivals = ready[order]
    alike = stage.batch == 1 and hops is None
    begins, ends = _singles(arrivals, stage) if alike else _batches(arrivals, stage, hops)
    if order is None:
        return ends
    found = np.empty_like(ends)
    found[_by_deadline(order, arrivals, begins, ends)] = ends
    return found


def _singles(arrivals: Floats, stage: StageConfiguration) -> tuple[Floats, Floats]:
    """Begin and end of batches of one, of arrivals in order."""
    each, k = stage.seconds[1], stage.replicas
    if k >= len(arrivals) or bool((arrivals[k:] >= arrivals[:-k] + each).all()):
        return arrivals, arrivals + each  # none waits
    begins = np.empty_like(arrivals)
    for first in range(min(k, len(arrivals))):
        mine = arrivals[first::k]
        before = each * np.arange(len(mine))
        begins[first::k] = np.maximum.accumulate(mine - before) + before
    begins = np.maximum(begins, arrivals)  # what rounding took
    return begins, begins + each


def _batches(arrivals: Floats, stage: StageConfiguration, hops: Floats | None) -> tuple[Floats, Floats]:
    """Begin and end of each query's batch, of arrivals in order."""
    k, n = stage.replicas, len(arrivals)
    begins, ends = arrivals.copy(), arrivals + stage.seconds[1]  # of those that find an idle replica
    if hops is not None:
        ends += hops
    # those that would not, if all before them did, and those that come at once with another
    tight = np.zeros(n, np.bool_)
    tight[k:] = arrivals[k:] < np.maximum.accumulate(ends)[:-k] if k < n else False
    tight[:-1] |= arrivals[1:] == arrivals[:-1]
    places: list[int] = np.flatnonzero(tight).tolist()
    if n >= MANY and len(places) > n // 32 and k * stage.batch <= WIDE:
        return _side_by_side(arrivals, stage, hops)
    times: list[float] = arrivals.tolist()
    besides: list[float] = [] if hops is None else hops.tolist()
    lengths = np.array(stage.seconds)
    place = 0
    while place < len(places):
        first = places[place]
        free = [-inf] * max(0, k - first) + ends[max(0, first - k) : first].tolist()
        heapify(free)
        starts, sizes, last, place = _followed(times, first, n, free, stage, besides, places, place)
        began, counts = np.array(starts), np.array(sizes)
        begins[first:last] = np.repeat(began, counts)
        ends[first:last] = np.repeat(_ends(began, counts, first, lengths, hops), counts)
    return begins, ends


def _ends(began: Floats, counts: Ranks, first: int, lengths: Floats, hops: Floats | None) -> Floats:
    """Of batches in a row, the first of which begins with query `first`."""
    ends: Floats = began + lengths[counts]
    if hops is not None:
        ends += hops[first + np.cumsum(counts) - counts]
    return ends


def _followed(
    times: list[float],
    i: int,
    end: int,
    free: list[float],
    stage: StageConfiguration,
    besides: Sequence[float],
    places: Sequence[int] = (),
    place: int = 0,
) -> tuple[list[float], list[int], int, int]:
    """Follow batches from query i on, until one begins at or after query `end`, or until the next of `places` is far and all are idle.

    free: when each replica is; a heap, left as it is then. besides: `hops`, or nothing. Gives begins and sizes of batches, the next query,
    and the next place.
    """
    seconds, most, n = stage.seconds, stage.batch, len(times)
    patience = len(free) if places else n
    starts: list[float] = []
    sizes: list[int] = []
    idle = 0  # queries in a row that found an idle replica
    long = -inf  # the latest end of a batch of several, or of one that waited: it may outlast later single ones
    while i < end:
        at, head = free[0], times[i]
        last = i + 1
        if at <= head:
            at = head
            idle += 1
        else:
            idle = 0
        if last < n and times[last] <= at:
            last = bisect_right(times, at, last, min(i + most, n))
            idle = 0
        done = at + seconds[last - i]
        if besides:
            done += besides[i]
        if not idle and done > long:
            long = done
        heapreplace(free, done)
        starts.append(at)
        sizes.append(last - i)
        i = last
        if idle >= patience and idle % 16 == 0 and at >= long:
            place = bisect_left(places, i, place)
            if place == len(places) or places[place] - i >= WORTH:
                break
    return starts, sizes, i, bisect_left(places, i, place)


def _side_by_side(arrivals: Floats, stage: StageConfiguration, hops: Floats | None) -> tuple[Floats, Floats]:
    """The same, where queries often wait: many parts of the sample are followed at once, a batch of each in a step.

    Each part begins a little early, with idle replicas. It agrees with the part before it from where both have the same batches for as long
    as a batch can take: from then on all that is still served is the same. A part that does not agree is followed again by itself.
    """
    n, k, most = len(arrivals), stage.replicas, stage.batch
    lengths = np.array(stage.seconds)
    early = max(256, 3 * k * most)
    parts = max(2, min(PARTS, n // (4 * early)))
    cuts = np.linspace(0, n, parts + 1).astype(np.int64)
    firsts = np.maximum(cuts[:-1] - early, 0)
    padded = np.append(arrivals, np.full(2 * most, inf))
    steps = _steps(padded, firsts, cuts[1:], k, lengths, hops)
    longest = lengths[-1] + (0.0 if hops is None else hops.max())
    begins, ends = np.empty(n), np.empty(n)
    times: list[float] = []
    besides: list[float] = []
    before = 0  # the first query that is not known yet
    free = np.full(k, -inf)
    for part, (first, cut) in enumerate(zip(firsts.tolist(), cuts[1:].tolist(), strict=True)):
        began, counts, kept = steps(part)
        begin, end = np.repeat(began, counts), np.repeat(_ends(began, counts, first, lengths, hops), counts)
        if part:
            same = before - first
            differs = np.flatnonzero((begin[:same] != begins[first:before]) | (end[:same] != ends[first:before]))
            since = first if not len(differs) else first + int(differs[-1]) + 1
            agree = since < before and begins[before - 1] - begins[since] >= longest
            if not agree:
                times = times or arrivals.tolist()
                besides = besides or ([] if hops is None else hops.tolist())
                heap = sorted(free.tolist())
                again, sizes, _, _ = _followed(times, before, cut, heap, stage, besides)
                began, counts, kept = np.array(again), np.array(sizes, np.int64), np.array(heap)
                first = before
                begin, end = np.repeat(began, counts), np.repeat(_ends(began, counts, first, lengths, hops), counts)
        last = first + len(begin)
        if last > before:
            begins[before:last], ends[before:last] = begin[before - first :], end[before - first :]
        before, free = max(before, last), kept
    return begins, ends


def _steps(
    times: Floats, firsts: Ranks, lasts: Ranks, k: int, lengths: Floats, hops: Floats | None
) -> Callable[[int], tuple[Floats, Ranks, Floats]]:
    """Follow all parts. Gives of each part the begins and sizes of its batches, and when each replica is free after them.

    The times at which replicas are free stay sorted: the end of the new batch goes to its place by one minimum and one maximum.
    """
    most = len(lengths) - 1
    halves = [1 << i for i in reversed(range((most - 1).bit_length()))]
    place, end = firsts.copy(), lasts
    free = np.full((k, len(firsts)), -inf)  # of each part, sorted
    rows = np.arange(len(firsts), dtype=np.int16)
    began: list[Floats] = []
    sizes: list[Ranks] = []
    who: list[NDArray[np.int16]] = []
    left = np.full((k, len(firsts)), -inf)
    while len(rows):
        at = np.maximum(free[0], times[place])
        last = place + 1
        for half in halves:  # binary search: the last query that is there, or so many
            last += half * (times[last + (half - 1)] <= at)
        if most & (most - 1):
            np.minimum(last, place + most, out=last)
        count = last - place
        done = at + lengths[count]
        if hops is not None:
            done += hops[place]
        later = free[1:]
        moved = np.empty_like(free)
        np.minimum(later, done, out=moved[:-1])
        moved[-1] = done
        np.maximum(moved[1:], later, out=moved[1:])
        free = moved
        began.append(at)
        sizes.append(count)
        who.append(rows)
        place = last
        going = place < end
        if not going.all():
            left[:, rows[~going]] = free[:, ~going]
            rows, place, end, free = rows[going], place[going], end[going], free[:, going]
    owner, all_began, all_sizes = np.concatenate(who), np.concatenate(began), np.concatenate(sizes)
    order = np.argsort(owner, kind="stable")
    edges = np.searchsorted(owner[order], np.arange(len(firsts) + 1))

    def of(part: int) -> tuple[Floats, Ranks, Floats]:
        mine = order[edges[part] : edges[part + 1]]
        return all_began[mine], all_sizes[mine], left[:, part]

    return of


def _by_deadline(order: Ranks, arrivals: Floats, begins: Floats, ends: Floats) -> Ranks:
    """Who takes which place. order: queries as they arrive; begins, ends: of places, in order. A place goes to the earliest deadline that waits.

    Only a query that has been overtaken, and those that it passes again while it waits, change places.
    """
    late = np.flatnonzero(order[1:] < np.maximum.accumulate(order)[:-1]) + 1
    if not len(late):
        return order
    lows = np.minimum(np.searchsorted(begins, arrivals[late], "left"), late)
    matters = (begins[lows] < begins[late]) | (ends[lows] != ends[late])  # else it is in the same batch
    late, lows = late[matters], lows[matters]
    if not len(late):
        return order
    starts = np.minimum.accumulate(lows[::-1])[::-1]  # ends rise: a block reaches back as far as a later one does
    fresh = np.append(True, starts[1:] > late[:-1])
    blocks = np.flatnonzero(fresh)
    lows, sizes = starts[blocks], late[np.append(blocks[1:], len(late)) - 1] + 1 - starts[blocks]
    firsts = np.cumsum(sizes) - sizes
    places = np.arange(int(sizes.sum())) + np.repeat(lows - firsts, sizes)  # of all blocks, one after the other
    taken = order.copy()
    taken[places] = _shared_out(
        order[places].tolist(), arrivals[places].tolist(), begins[places].tolist(), firsts.tolist(), sizes.tolist()
    )
    return taken


def _shared_out(
    queries: list[int], arrivals: list[float], begins: list[float], firsts: list[int], sizes: list[int]
) -> list[int]:
    """The same for blocks, each by itself, that begin at `firsts` and have `sizes` queries."""
    taken: list[int] = []
    for first, size in zip(firsts, sizes, strict=True):
        waiting: list[int] = []
        i, end = first, first + size
        for at in begins[first:end]:
            while i < end and arrivals[i] <= at:
                heappush(waiting, queries[i])
                i += 1
            taken.append(heappop(waiting))
    return taken
