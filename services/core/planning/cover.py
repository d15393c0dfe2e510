"""Carrying one load at least cost: which instances, by a short depth-first search.

Offers are tried cheapest throughput first, as many as carry the load and then fewer, and a branch ends when even the cheapest
throughput that is left would make it dearer than the best found (branch and bound of a covering knapsack). With one
variant on offer that is the paper's replication, with others its upgrade or downgrade; mixtures of them are the rest.
"""

from collections.abc import Sequence
from math import ceil, floor, inf
from typing import NamedTuple

_EPS = 1e-9


class Offer(NamedTuple):
    """Up to `most` instances of one kind. weights: (row, share) that each takes of the room."""

    candidate: int
    price: float
    rate: float
    most: int
    weights: tuple[tuple[int, float], ...] = ()


class Search:
    """The search for one load. need: items/s. room: what is left in each row. steps: how many branches to look at."""

    def __init__(self, need: float, offers: Sequence[Offer], room: Sequence[float], steps: int) -> None:
        self._offers = offers = sorted(offers, key=lambda one: (one.price / one.rate, one.price))
        self._ratio = [one.price / one.rate for one in offers] + [inf]
        self._left = [0.0] * (len(offers) + 1)  # what the offers from here on can carry, ignoring the room
        for i in range(len(offers) - 1, -1, -1):
            self._left[i] = self._left[i + 1] + offers[i].most * offers[i].rate
        self._need, self._room, self._steps = need, list(room), steps
        self._taken = [0] * len(offers)
        self.cost = inf
        self.counts: dict[int, int] | None = None
        self.finished = True  # what was found is the cheapest

    def run(self) -> dict[int, int] | None:
        """Instances to add by candidate, or None when nothing was found that carries the load in the room."""
        self._descend(0, self._need, 0.0)
        return self.counts

    def _descend(self, i: int, need: float, cost: float) -> None:
        if need <= _EPS * self._need:
            self._keep(cost)
            return
        if self._left[i] < need * (1 - _EPS) or cost + need * self._ratio[i] >= self.cost * (1 - _EPS):
            return
        self._steps -= 1
        if self._steps < 0:
            self.finished = False
            return
        offer, room, beyond = self._offers[i], self._room, self._ratio[i + 1]
        most = offer.most
        for row, weight in offer.weights:
            most = min(most, floor((room[row] + _EPS) / weight))
        n = max(0, min(most, ceil(need / offer.rate - _EPS)))
        while n >= 0:
            rest = need - n * offer.rate
            spent = cost + n * offer.price
            if rest > 0 and spent + rest * beyond >= self.cost * (1 - _EPS):
                return
            self._taken[i] = n
            for row, weight in offer.weights:
                room[row] -= n * weight
            self._descend(i + 1, rest, spent)
            for row, weight in offer.weights:
                room[row] += n * weight
            self._taken[i] = 0
            n -= 1

    def _keep(self, cost: float) -> None:
        if cost < self.cost:
            self.cost = cost
            self.counts = {}
            for offer, n in zip(self._offers, self._taken, strict=True):
                if n:
                    self.counts[offer.candidate] = self.counts.get(offer.candidate, 0) + n
