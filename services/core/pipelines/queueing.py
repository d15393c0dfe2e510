"""One queue by deadline for all replicas of a vertex (InferLine, paper 004, section 3.6), simulated for a whole sample. Pure.

An idle replica takes the head of the queue at once, and with it as many as wait, up to the largest batch. When batches begin, and how many
queries are in each, does not depend on which queries they are. So both are found first for arrivals in order, with one iteration for each
batch; then places in batches are given out by deadline, where queries have overtaken each other. Two things save iterations:

- In batches of one that all take as long, begins follow from begins: the n-th query begins at max(its arrival, end of query n - k) with k
  replicas, which is a running maximum.
- Stretches of queries that all find an idle replica are left out.

All results are exact.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ranks = NDArray[np.int64]

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
    tight = np.zeros(
        n, np.bool_
    )  # those that would not, if all before them did, and those that come at once with another
    tight[k:] = arrivals[k:] < np.maximum.accumulate(ends)[:-k] if k < n else False
    tight[:-1] |= arrivals[1:] == arrivals[:-1]
    places: list[int] = np.flatnonzero(tight).tolist()
    times: list[float] = arrivals.tolist()
    besides: list[float] = [] if hops is None else hops.tolist()
    place = 0
    while place < len(places):
        first = places[place]
        free = [-inf] * max(0, k - first) + ends[max(0, first - k) : first].tolist()
        heapify(free)
        starts, dones, sizes, place = _followed(times, first, free, stage, besides, places, place)
        last = first + sum(sizes)
        begins[first:last], ends[first:last] = np.repeat(starts, sizes), np.repeat(dones, sizes)
    return begins, ends


def _followed(
    times: list[float],
    i: int,
    free: list[float],
    stage: StageConfiguration,
    besides: Sequence[float],
    places: Sequence[int],
    place: int,
) -> tuple[list[float], list[float], list[int], int]:
    """Follow batches from query i on, until the next of `places` is far and all replicas are idle.

    free: when each replica is; a heap. besides: `hops`, or nothing. Gives begins, ends and sizes of batches, and the next place.
    """
    seconds, most, n = stage.seconds, stage.batch, len(times)
    starts: list[float] = []
    dones: list[float] = []
    sizes: list[int] = []
    idle = 0  # queries in a row that found an idle replica
    long = -inf  # the latest end of a batch of several, or of one that waited: it may outlast later single ones
    while i < n:
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
        dones.append(done)
        sizes.append(last - i)
        i = last
        if idle >= len(free) and idle % 16 == 0 and at >= long:
            place = bisect_left(places, i, place)
            if place == len(places) or places[place] - i >= WORTH:
                break
    return starts, dones, sizes, bisect_left(places, i, place)


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
