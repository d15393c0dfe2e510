"""All ways to carry one load that are cheap enough to be of use, each with no instance too many."""

from collections.abc import Sequence
from math import ceil, inf

from services.core.planning.cover import Offer

_EPS = 1e-9


class TooMany(Exception):
    """More covers than anybody wants to look at."""


def covers(need: float, offers: Sequence[Offer], limit: float, most: int) -> list[tuple[tuple[int, int], ...]]:
    """Covers that cost no more than `limit`, as (index of an offer, instances of it); raises TooMany beyond `most`.

    Depth first, cheapest throughput first: a branch ends where even that would make it dearer than the limit. A cover that
    stays one without one of its instances is left out: what it costs and takes is never less.
    """
    order = sorted(range(len(offers)), key=lambda i: offers[i].price / offers[i].rate)
    ratio = [offers[i].price / offers[i].rate for i in order] + [inf]
    left = [0.0] * (len(order) + 1)  # what the offers from here on can carry
    for at in range(len(order) - 1, -1, -1):
        left[at] = left[at + 1] + offers[order[at]].most * offers[order[at]].rate
    found: list[tuple[tuple[int, int], ...]] = []
    enough = _EPS * need

    def descend(at: int, rest: float, cost: float, slowest: float, taken: tuple[tuple[int, int], ...]) -> None:
        if rest <= enough:
            if -rest < slowest - enough:
                if len(found) >= most:
                    raise TooMany
                found.append(taken)
            return
        offer, beyond = offers[order[at]], ratio[at + 1]
        for n in range(max(0, min(offer.most, ceil((rest - enough) / offer.rate))), -1, -1):
            more, spent = rest - n * offer.rate, cost + n * offer.price
            if more <= enough:
                if spent > limit:
                    continue
            elif spent + more * beyond > limit or left[at + 1] < more - enough:
                return
            descend(
                at + 1,
                more,
                spent,
                min(slowest, offer.rate) if n else slowest,
                (*taken, (order[at], n)) if n else taken,
            )

    if left[0] >= need - enough and need * ratio[0] <= limit:
        descend(0, need, 0.0, inf, ())
    return found
