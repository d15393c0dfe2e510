"""Which instances carry one load at least cost: a short depth-first search.

It tries the offer with the cheapest throughput first, with as many instances as carry the load, then with fewer. A branch ends when even
the cheapest throughput that is left would make it dearer than the best found (branch and bound of a covering knapsack). With one
variant on offer, this is the paper's replication. With others, it is an upgrade, a downgrade or a mixture.
"""

from collections.abc import Sequence
from math import ceil, floor, inf
from typing import NamedTuple

_EPS = 1e-9


class Offer(NamedTuple):
    """Up to `most` instances at one price. weights: (row, share of it) that each takes. fresh: they do not run yet."""

    candidate: int
    price: float
    rate: float
    most: int
    weights: tuple[tuple[int, float], ...] = ()
    fresh: bool = True


class SortedOffers(NamedTuple):
    """Offers by the price of their throughput, cheapest first. ratio: these prices. left: what this offer and all later ones can carry."""

    offers: Sequence[Offer]
    ratio: list[float]
    left: list[float]


def sorted_offers(offers: Sequence[Offer], *, in_order: bool = False) -> SortedOffers:
    """Sort these offers. in_order: they are sorted already."""
    if not in_order:
        offers = sorted(offers, key=_by_throughput)
    ratio = [one.price / one.rate for one in offers]
    ratio.append(inf)
    able = 0.0
    left = [able]
    for one in reversed(offers):
        able += one.most * one.rate
        left.append(able)
    left.reverse()
    return SortedOffers(offers, ratio, left)


def _by_throughput(one: Offer) -> tuple[float, float]:
    return one.price / one.rate, one.price


class CoverSearch:
    """The search for one load. need: items/s. room: what is left of each row, () for no limit. steps: how many branches to look at.

    After `run`: cost, counts (instances by candidate), and finished: whether they are known to be the cheapest.
    """

    def __init__(self, need: float, offers: SortedOffers | Sequence[Offer], room: Sequence[float], steps: int) -> None:
        self._offers = offers if isinstance(offers, SortedOffers) else sorted_offers(offers)
        self._need, self._room, self._steps = need, room, steps
        self.cost = inf
        self.counts: dict[int, int] | None = None
        self.finished = True

    def run(self) -> dict[int, int] | None:
        """Instances to add, by candidate. None when no way was found to carry the load in the room."""
        offers, ratio, left = self._offers
        steps, cheapest = self._steps, inf
        room = list(self._room)
        taken, needs, costs = [0] * len(offers), [0.0] * len(offers), [0.0] * len(offers)
        found: list[int] | None = None
        enough, less = _EPS * self._need, 1 - _EPS
        i, need, cost = 0, self._need, 0.0
        while True:
            if need <= enough:
                if cost < cheapest:
                    cheapest, found = cost, taken[:]
            elif left[i] >= need * less and cost + need * ratio[i] < cheapest * less:
                steps -= 1
                if steps < 0:
                    break
                _, price, rate, most, weights, _ = offers[i]
                n = ceil(need / rate - _EPS)
                if n > most:
                    n = most
                if room:
                    for row, weight in weights:
                        fitting = floor((room[row] + _EPS) / weight)
                        if n > fitting:
                            n = max(0, fitting)
                    for row, weight in weights:
                        room[row] -= n * weight
                needs[i], costs[i], taken[i] = need, cost, n
                need, cost, i = need - n * rate, cost + n * price, i + 1
                continue
            while i > 0:  # back to where one instance less may lead to something cheaper
                i -= 1
                n = taken[i]
                if n:
                    _, price, rate, _, weights, _ = offers[i]
                    n -= 1
                    need, cost = needs[i] - n * rate, costs[i] + n * price
                    hopeful = need <= 0 or cost + need * ratio[i + 1] < cheapest * less
                    freed = 1 if hopeful else n + 1
                    if room:
                        for row, weight in weights:
                            room[row] += freed * weight
                    taken[i] = n if hopeful else 0
                    if hopeful:
                        i += 1
                        break
            else:
                break
        self.finished, self.cost = steps >= 0, cheapest
        if found is not None:
            self.counts = counts = dict[int, int]()
            for one, n in zip(offers, found, strict=True):
                if n:
                    counts[one.candidate] = counts.get(one.candidate, 0) + n
        return self.counts
