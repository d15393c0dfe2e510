"""Exact planning by patterns: every group that shares nothing with others takes one of its covers.

The programme in these terms has a much tighter relaxation than in instances (Dantzig and Wolfe, 1960; Gilmore and Gomory, 1961,
for cutting stock): within the gap that is left, few patterns of each group can be part of a cheapest plan. Its prices are found
by column generation; patterns near the bound at these prices are searched first, by `beam.py` and, where that is not
enough, by HiGHS; then wider ones, until what was found proves itself the cheapest.
"""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from services.core.planning.beam import choose
from services.core.planning.columns import Patterns, column, patterns
from services.core.planning.exact import Deadline
from services.core.planning.highs import Unsolved
from services.core.planning.program import Program, cost
from services.core.planning.relaxed import Relaxed, chosen, relaxed

if TYPE_CHECKING:
    from numpy import float64, intp
    from numpy.typing import NDArray

_EPS = 1e-9
_NARROW = 0.5  # of what a group costs on average: how far from the bound is looked first
_WIDER = 2.0  # where that has no plan
_POOR = 7.0  # times what is enough: too far from optimal to end there before the deadline
_FAR = 3.0  # times wider at most, to reach all that may be cheaper than a plan just found
_WIDEST = 0.5  # of the bound: where no plan is known, not farther than that
_WIDTHS = (100, 300)
_ROUNDS = 5  # of column generation
_WORTH = 0.1  # of the excess: what the bound must gain by a round for another one


class Cheapest(NamedTuple):
    """Counts of all candidates, None for those of the best plan known before. gap: relative, from the cheapest at most.

    proven: the gap is the one that was asked for. stopped: a limit ended the search; otherwise patterns were too many.
    """

    counts: list[int] | None
    gap: float
    proven: bool
    stopped: bool


class PatternSearch:
    """prices: of the rows, whence the bound is. best: cost of the best plan known, infinite when none is.

    deadline: when to end without a good plan. last: when to end with one; None for the same. soon: when one will do that may be
    `enough` (relative) dearer than the cheapest; None for never.
    Raises Unsolved where this way does not lead anywhere: when groups share candidates or need instances whatever their load.
    """

    def __init__(
        self,
        program: Program,
        prices: Sequence[float],
        best: float,
        gap: float,
        *,
        deadline: Deadline | None = None,
        soon: Deadline | None = None,
        last: Deadline | None = None,
        enough: float = 0.01,
    ) -> None:
        if not program.rows or any(map(program.shared, range(len(program.home)))):
            raise Unsolved("nothing is scarce, or variants are shared")
        self._program, self._gap, self._best = program, gap, best
        self._deadline, self._enough = deadline or Deadline(), max(gap, enough)
        self._soon, self._last = soon, last
        self._found: list[int] | None = None
        self._stopped = False  # by a limit, before the search was complete
        self._held = [running.low + fresh.low for running, fresh in zip(program.running, program.fresh, strict=True)]
        self._held_cost = cost(program, self._held)
        self._room = [1.0] * len(program.rows)
        for one in (*program.running, *program.fresh):
            for row, weight in one.weights:
                self._room[row] -= one.low * weight
        self._columns = [
            found for g in range(len(program.groups)) if (found := column(program, g, self._held)) is not None
        ]
        if not self._columns:
            raise Unsolved("nothing needs to be carried")
        self._least = self._bound = -inf
        if not self._rebased(prices):
            raise Unsolved("a group cannot be covered by what may run")

    def run(self, options: dict[str, Any]) -> Cheapest:
        """The cheapest plan. options: limits of HiGHS; not its time limit, nor its gap."""
        scale = max(_EPS, self._bound, 0.01 * self._best if self._best < inf else 0.0)
        excess, rounds = scale * _NARROW / len(self._columns), _ROUNDS
        seen: tuple[float, float] | None = None
        try:
            while not self._settled():
                excess = min(excess, self._best - self._bound)
                if seen != (self._bound, excess):
                    seen = (self._bound, excess)
                    near = patterns(self._columns, len(self._room), excess, self._end())
                    loose = relaxed(near, self._room, scale, self._deadline)
                if rounds and self._gained(loose, _WORTH * excess):
                    rounds -= 1
                    continue
                before = self._best
                if loose.fits:
                    self._within(near, loose, excess, options)
                else:
                    self._least = max(self._least, min(self._best, self._bound + excess))
                self._stopped |= self._best == inf and excess >= _WIDEST * scale
                nearer = self._best < before and self._best - self._bound <= _FAR * excess
                excess = self._best - self._bound if nearer else excess * _WIDER
        except Unsolved:
            if self._best == inf:
                raise
        gap = max(0.0, 1.0 - self._least / self._best) if self._best > 0 else 0.0
        proven = self._near_enough(self._gap)
        return Cheapest(self._found, self._gap if proven else gap, proven, stopped=self._limited())

    def _settled(self) -> bool:
        """Whether the best plan known is near enough to the cheapest, or there is no time to find out."""
        if self._stopped or self._end().passed():
            if self._best == inf:
                raise Unsolved("no plan within the limits")
            return True
        return self._best < inf and self._near_enough(self._enough if self._hurried() else self._gap)

    def _limited(self) -> bool:
        """Whether time is what ends the search, and not the plan."""
        hurried = self._hurried() and self._near_enough(self._enough)
        return self._stopped or hurried or self._end().passed()

    def _hurried(self) -> bool:
        return self._soon is not None and self._soon.passed()

    def _near_enough(self, gap: float) -> bool:
        return self._best * (1 - gap) <= self._least + _EPS * abs(self._least)

    def _rebased(self, prices: Sequence[float], worth: float = 0.0) -> bool:
        """Look from these prices on, if the bound that they give is higher by this."""
        moved = []
        for one in self._columns:
            at = one.at(prices)
            if at is None:
                return False
            moved.append(at)
        value = sum(price * free for price, free in zip(prices, self._room, strict=True))
        bound = self._held_cost + sum(one.least for one in moved) - value
        if bound < self._bound + worth:
            return False
        self._columns, self._bound = moved, bound
        self._least = max(self._least, bound)
        return True

    def _gained(self, loose: Relaxed, worth: float) -> bool:
        """Whether the prices of the relaxation are better; not where it is as low as the bound already."""
        if self._held_cost + loose.cost < self._bound + worth:
            return False
        return self._rebased(loose.prices.tolist(), worth)

    def _within(self, near: Patterns, loose: Relaxed, excess: float, options: dict[str, Any]) -> None:
        """Look for a plan of these patterns that is cheaper than the best known, and for how cheap one of them can be.

        Roughly at first: that shows where to look closer, and is what is wanted when time is short.
        """
        covering = self._best - self._bound <= excess * (1 + _EPS)
        rough = self._hurried() or (not self._near_enough(self._enough) and (self._soon is not None or not covering))
        goal, room = self._enough if rough else self._gap, self._free()
        complete, lowest = False, self._held_cost + loose.cost
        left = _usable(near, loose, self._closer(goal))
        for width in _WIDTHS:
            if complete or not left.size:
                break
            found = choose(near.table[left], near.group[left], room, loose.prices, self._closer(goal), width)
            complete = found.complete
            if found.rows is not None:
                self._took(near, left[found.rows])
                left = _usable(near, loose, self._closer(goal))
        if not complete and left.size:
            until = self._until()
            options = until.bounding(options | {"mip_rel_gap": goal})
            told = chosen(near.table[left], near.group[left], room, self._closer(goal), options)
            if told.rows is not None:
                self._took(near, left[told.rows])
            complete, lowest = told.complete, max(lowest, self._held_cost + told.bound)
            final = self._soon is None or until is self._deadline or "node_limit" in options
            self._stopped = final and not complete
        if complete or not left.size:
            lowest = max(lowest, self._best * (1 - goal) if self._best < inf else inf)
        self._least = max(self._least, min(self._best, self._bound + excess, lowest))

    def _end(self) -> Deadline:
        """With a plan sooner than without one."""
        if self._last is None or self._best == inf:
            return self._deadline
        return self._last if self._soon is None or self._near_enough(_POOR * self._enough) else self._deadline

    def _until(self) -> Deadline:
        """How long one run of HiGHS may take: it cannot go on where it stopped, so a first plan gets more time."""
        if self._soon is None or self._last is None:
            return self._end()
        if self._best < inf:
            return self._end() if self._soon.passed() else self._soon
        return self._deadline if self._last.passed() else self._last

    def _closer(self, goal: float) -> float:
        """What patterns may cost that are worth looking for."""
        return self._best * (1 - goal) - self._held_cost

    def _took(self, near: Patterns, rows: "NDArray[intp]") -> bool:
        """The plan of these patterns, as the best known if it is."""
        counts = self._held[:]
        for row in rows:
            for i, n in near.covers[row]:
                counts[self._columns[near.group[row]].supplies[i].candidate] += n
        reached = cost(self._program, counts)
        if reached >= self._best:
            return False
        self._best, self._found = reached, counts
        return True

    def _free(self) -> "NDArray[float64]":
        import numpy as np  # noqa: PLC0415

        return np.array(self._room)


def _usable(near: Patterns, loose: Relaxed, limit: float) -> "NDArray[intp]":
    """Patterns of which a choice may cost no more than the limit.

    At the relaxation's prices, each is dearer than its group's cheapest by so much.
    """
    import numpy as np  # noqa: PLC0415

    excess = limit - loose.cost
    if excess == inf:
        return np.arange(len(near.group))
    if excess < -_EPS * abs(limit):
        return np.zeros(0, dtype=np.intp)
    price = near.table[:, 0] + near.table[:, 1:] @ loose.prices
    first = np.searchsorted(near.group, np.arange(int(near.group[-1]) + 1))
    regret = price - np.minimum.reduceat(price, first)[near.group]
    return np.flatnonzero(regret <= excess + _EPS * abs(float(price.max())))
