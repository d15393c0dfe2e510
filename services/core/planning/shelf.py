"""What a programme offers each of its groups, sorted once for each set of prices: a solver asks for it again and again."""

from collections.abc import Sequence

from services.core.planning.cover import Menu, Offer, menu
from services.core.planning.program import Program


class Shelf:
    """Offers of whole supplies by group. own_first: candidates of each group, those that it shares with few others first."""

    def __init__(self, program: Program) -> None:
        self._menus: dict[tuple[int, tuple[float, ...]], Menu] = {}
        self.own_first = [sorted(group.candidates, key=lambda c: len(program.home[c])) for group in program.groups]
        self._supplies = [
            [
                Offer(c, one.price, one.rate, one.high, one.weights, fresh)
                for c in group.candidates
                for fresh, one in ((False, program.running[c]), (True, program.fresh[c]))
                if one.high > 0
            ]
            for group in program.groups
        ]

    def menu(self, g: int, prices: Sequence[float]) -> Menu:
        """All that group g may use, as if nothing was taken yet, where rows have prices; not to be changed."""
        key = (g, tuple(prices))
        found = self._menus.get(key)
        if found is None:
            found = self._menus[key] = menu([_at(one, prices) for one in self._supplies[g]])
        return found


def _at(offer: Offer, prices: Sequence[float]) -> Offer:
    candidate, price, rate, most, weights, fresh = offer
    for row, weight in weights:
        price += prices[row] * weight
    return Offer(candidate, price, rate, most, weights, fresh)
