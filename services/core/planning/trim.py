"""Leaving out what no cheap plan can use, so that the exact solver has less to search (Lagrangian variable fixing)."""

from collections.abc import Sequence
from math import floor, inf

from services.core.planning.cover import CoverSearch, Offer
from services.core.planning.program import DemandGroup, Program, priced

_EPS = 1e-9


def trimmed(program: Program, prices: Sequence[float], excess: float, steps: int = 300) -> Program:
    """The programme without the instances that no plan within `excess` of the bound at these prices can have.

    At prices of the rows, a plan costs at least what all groups' cheapest covers cost together, less the prices. If one group
    departs from its own by having m instances of a supply, it pays for them and for the rest at its cheapest throughput.
    Only for groups that share no candidate; those with held or least instances are left as they are.
    """
    running, fresh = list(program.running), list(program.fresh)
    for group in program.groups:
        supplies = [one for c in group.candidates for one in (running[c], fresh[c]) if one.high]
        if group.least or group.need <= 0 or any(one.low for one in supplies):
            continue
        offers = [Offer(one.candidate, priced(one, prices), one.rate, one.high) for one in supplies]
        search = CoverSearch(group.need, offers, (), steps)
        search.run()
        if not search.finished or search.counts is None:
            continue
        cheapest = min(offer.price / offer.rate for offer in offers)
        for one, offer in zip(supplies, offers, strict=True):
            most = _most(group, offer, cheapest, search.cost + excess)
            if 0 < most <= 2 and not _usable(group, offer, offers, search.cost + excess, steps):
                most = 0
            if most < one.high:
                side = fresh if one is fresh[one.candidate] else running
                side[one.candidate] = one._replace(high=most)
    return program._replace(running=tuple(running), fresh=tuple(fresh))


def _usable(group: DemandGroup, offer: Offer, offers: Sequence[Offer], limit: float, steps: int) -> bool:
    """Whether a cover with one of this offer may cost no more than the limit."""
    rest = group.need - offer.rate
    if rest <= 0:
        return True
    search = CoverSearch(rest, offers, (), steps)
    search.run()
    return not search.finished or offer.price + search.cost <= limit + _EPS * abs(limit)


def _most(group: DemandGroup, offer: Offer, cheapest: float, limit: float) -> int:
    """How many of this offer a cover of the group may have that costs no more than the limit."""
    limit += _EPS * abs(limit)
    dearer = offer.price - offer.rate * cheapest
    most = inf if dearer <= 0 else (limit - group.need * cheapest) / dearer
    if most * offer.rate > group.need:  # the rest is nothing: each further one adds its whole price
        most = limit / offer.price if offer.price > 0 else inf
    return offer.most if most >= offer.most else max(0, floor(most))
