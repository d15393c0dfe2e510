"""All ways to carry one load that are cheap enough to be of use, each with no instance too many."""

from collections.abc import Sequence
from math import ceil, inf

from services.core.planning.cover import Offer, SortedOffers, sorted_offers

_EPS = 1e-9


class TooMany(Exception):
    """More covers than anybody wants to look at."""


def covers(need: float, offers: Sequence[Offer], limit: float, most: int) -> list[tuple[tuple[int, int], ...]]:
    """Covers that cost no more than `limit`, as (index of an offer, instances of it); raises TooMany beyond `most`.

    Depth first, cheapest throughput first: a branch ends where even that would make it dearer than the limit. A cover that
    stays one without one of its instances is left out: what it costs and takes is never less.
    """
    listed = sorted(range(len(offers)), key=lambda i: offers[i].price / offers[i].rate)
    search = _Covers(need, sorted_offers([offers[i] for i in listed], in_order=True), limit, most)
    search.descend(0, need, 0.0, inf, ())
    return [tuple((listed[at], n) for at, n in one) for one in search.found]


class _Covers:
    def __init__(self, need: float, menu: SortedOffers, limit: float, most: int) -> None:
        self._offers, self._ratio, self._left = menu
        self._enough, self._limit, self._most = _EPS * need, limit, most
        self.found: list[tuple[tuple[int, int], ...]] = []

    def descend(self, at: int, rest: float, cost: float, slowest: float, taken: tuple[tuple[int, int], ...]) -> None:
        """From the offer at this place on, with so much left to carry. slowest: rate, of what was taken so far."""
        enough, limit = self._enough, self._limit
        if rest <= enough:
            if -rest < slowest - enough and cost <= limit:
                if len(self.found) >= self._most:
                    raise TooMany
                self.found.append(taken)
            return
        if self._left[at] < rest - enough or cost + rest * self._ratio[at] > limit:
            return
        _, price, rate, most, _, _ = self._offers[at]
        beyond = self._ratio[at + 1]
        for n in range(max(0, min(most, ceil((rest - enough) / rate))), -1, -1):
            more, spent = rest - n * rate, cost + n * price
            if more > enough and spent + more * beyond > limit:
                return
            self.descend(at + 1, more, spent, min(slowest, rate) if n else slowest, (*taken, (at, n)) if n else taken)
