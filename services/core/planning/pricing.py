"""Prices of resources that rise while more is chosen than there is, and settle by halving (Lagrangian relaxation)."""

from collections.abc import Sequence
from math import inf
from operator import mul

_OVERDRAWN = -1e-9
_GROWTH = 4.0  # while a price is still too low and no sufficient one is known
_STEEP = 10.0  # total costs: beside prices like these nothing else counts


class Prices:
    """values: what the whole of each row costs, in units of the objective. bound: no plan can cost less than this.

    at_bound: the prices that say so.
    """

    def __init__(self, rows: int) -> None:
        self.values = [0.0] * rows
        self.bound = 0.0
        self.at_bound: Sequence[float] = tuple(self.values)
        self._low, self._high = [0.0] * rows, [inf] * rows

    def settle(self, cost: float, room: Sequence[float]) -> None:
        """Learn from the best choices at these prices: their cost without them, and the room they leave in each row."""
        bound = cost - sum(map(mul, self.values, room))
        if bound > self.bound:
            self.bound, self.at_bound = bound, tuple(self.values)
        for row, free in enumerate(room):
            price = self.values[row]
            if free < _OVERDRAWN:
                self._low[row] = price
            elif price > 0:
                self._high[row] = price
            else:
                continue
            if self._high[row] < inf:
                self.values[row] = (self._low[row] + self._high[row]) / 2
            else:
                self.values[row] = max(_GROWTH * price, -free * cost)

    def rise(self, cost: float, room: Sequence[float]) -> None:
        """Make all rows so dear that only what they have matters, the most overdrawn ones dearest."""
        self.values = [_STEEP * cost * (1.0 + max(0.0, -free)) for free in room]
