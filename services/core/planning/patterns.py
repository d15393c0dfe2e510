"""Exact planning by patterns: every group that shares nothing with others takes one of its covers.

The programme in these terms has a much tighter relaxation than in instances (Dantzig and Wolfe, 1960; Gilmore and Gomory, 1961,
for cutting stock): within the gap that is left, few patterns of each group can be part of a cheapest plan. Patterns near
the bound are searched first, by `beam.py` and, where that is not enough, by HiGHS; then wider ones, until what was found proves
itself the cheapest.
"""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from services.core.planning.beam import choose
from services.core.planning.cover import Offer, Search
from services.core.planning.covers import TooMany, covers
from services.core.planning.model import Unsolved
from services.core.planning.program import Program, Supply, cost, priced

if TYPE_CHECKING:
    from numpy import float64, intp
    from numpy.typing import NDArray

_EPS = 1e-9
_NARROW = 0.5  # of what a group costs on average: how far from the bound is looked first
_WIDER = 1.5
_WIDEST = 0.5  # of the bound: where no plan is known, not farther than that
_WIDTHS = (100, 300)
_MOST = 4000  # patterns of one group
_STEPS = 3000
_SHARE = 0.5  # of the time limit, for one run
_SOLVED, _INFEASIBLE = 0, 2


class Cheapest(NamedTuple):
    """Counts of all candidates, None for those of the best plan known before. gap: relative, from the cheapest at most.

    proven: the gap is the one that was asked for, or the search was ended by a limit.
    """

    counts: list[int] | None
    gap: float
    proven: bool


class _Group(NamedTuple):
    need: float
    supplies: tuple[Supply, ...]
    offers: tuple[Offer, ...]
    least: float  # cost of its cheapest cover at the prices


class PatternSearch:
    """prices: of the rows, whence the bound is. best: cost of the best plan known, infinite when none is.

    Raises Unsolved where this way does not lead anywhere: when groups share candidates or need instances whatever their load.
    """

    def __init__(self, program: Program, prices: Sequence[float], best: float, gap: float) -> None:
        if not program.rows or any(map(program.shared, range(len(program.home)))):
            raise Unsolved("nothing is scarce, or variants are shared")
        self._program, self._gap, self._best = program, gap, best
        self._stopped = False  # by a limit, before the search was complete
        self._held = [running.low + fresh.low for running, fresh in zip(program.running, program.fresh, strict=True)]
        self._held_cost = cost(program, self._held)
        self._room = [1.0] * len(program.rows)
        for one in (*program.running, *program.fresh):
            for row, weight in one.weights:
                self._room[row] -= one.low * weight
        self._groups = [found for g in range(len(program.groups)) if (found := self._group(g, prices)) is not None]
        if not self._groups:
            raise Unsolved("nothing needs to be carried")
        worth = sum(price * free for price, free in zip(prices, self._room, strict=True))
        self._bound = self._held_cost + sum(one.least for one in self._groups) - worth

    def run(self, options: dict[str, Any]) -> Cheapest:
        """The cheapest plan. options: limits, as HiGHS takes them; while a plan is known, each of its runs gets a share."""
        found: list[int] | None = None
        scale = max(_EPS, self._bound, 0.01 * self._best if self._best < inf else 0.0)
        farthest, least = _WIDEST * scale, self._bound
        excess = scale * _NARROW / len(self._groups)
        while True:
            excess = min(excess, self._best - self._bound)
            target = min(self._best, self._bound + excess)
            counts = self._within(excess, target, options if self._best == inf else _shared(options))
            if counts is not None and (reached := cost(self._program, counts)) < self._best:
                self._best, found = reached, counts
            if self._stopped and self._best == inf:
                raise Unsolved("no plan within the limits")
            if self._stopped:
                return Cheapest(found, max(self._gap, 1.0 - least / self._best), proven=False)
            if self._best <= target * (1 + _EPS):
                return Cheapest(found, self._gap, proven=True)
            if self._best == inf and excess >= farthest:
                raise Unsolved("no plan is near the bound")
            least = max(least, target)
            excess *= _WIDER

    def _group(self, g: int, prices: Sequence[float]) -> _Group | None:
        """What group g still needs beside what is held; None when that is nothing."""
        program, group = self._program, self._program.groups[g]
        if not group.candidates:
            return None
        held = [c for c in group.candidates if self._held[c]]
        need = group.need - sum(self._held[c] * program.fresh[c].rate for c in held)
        if group.least > max(1, sum(self._held[c] for c in held)) or (group.least and group.need <= 0):
            raise Unsolved("a demand has a least number of instances")
        if need <= _EPS * group.need:
            return None
        supplies = tuple(
            one for c in group.candidates for one in (program.running[c], program.fresh[c]) if one.high > one.low
        )
        offers = tuple(Offer(one.candidate, priced(one, prices), one.rate, one.high - one.low) for one in supplies)
        search = Search(need, offers, (), _STEPS)
        if search.run() is None or not search.finished:
            raise Unsolved("a group cannot be covered by what may run")
        return _Group(need, supplies, offers, search.cost)

    def _within(self, excess: float, target: float, options: dict[str, Any]) -> list[int] | None:
        """A plan of patterns that cost no more than so much beside their groups' cheapest; no dearer than the target if there is one."""
        import numpy as np  # noqa: PLC0415
        from scipy.optimize import linprog  # noqa: PLC0415

        found, patterns, group = self._patterns(excess)
        room, limit = np.array(self._room), target - self._held_cost
        limits = {key: value for key, value in options.items() if key == "time_limit"}
        relaxed = linprog(
            patterns[:, 0],
            A_ub=patterns[:, 1:].T,
            b_ub=room + _EPS,
            A_eq=_choice(group),
            b_eq=np.ones(len(self._groups)),
            method="highs",
            options=limits,
        )
        if relaxed.status == _INFEASIBLE:
            return None
        if relaxed.x is None:
            raise Unsolved(f"no plan within the limits: {relaxed.message}")
        if relaxed.fun > limit * (1 + _EPS):
            return None
        prices = -relaxed.ineqlin.marginals
        left = _usable(patterns, group, prices, limit - relaxed.fun)
        chosen: NDArray[intp] | None = None
        for width in _WIDTHS:
            closer = limit * (1 + _EPS) if chosen is None else limit - self._gap * target
            best = choose(patterns[left], group[left], room, prices, closer, width)
            if best.rows is not None:
                chosen, limit = left[best.rows], min(limit, best.cost)
                left = left[_usable(patterns[left], group[left], prices, limit - relaxed.fun)]
            if best.complete:
                break
        else:
            more, complete = _chosen(patterns[left], group[left], room, closer, options)
            self._stopped = not complete
            if more is not None and (chosen is None or patterns[left[more], 0].sum() < patterns[chosen, 0].sum()):
                chosen = left[more]
        return None if chosen is None else self._counts([found[row] for row in chosen], group[chosen])

    def _patterns(self, excess: float) -> "tuple[list[tuple[tuple[int, int], ...]], NDArray[float64], NDArray[intp]]":
        """Covers, what each costs and takes, and whose it is."""
        import numpy as np  # noqa: PLC0415

        rows = len(self._program.rows)
        found: list[tuple[tuple[int, int], ...]] = []
        blocks, owner = [], []
        for g, one in enumerate(self._groups):
            try:
                mine = covers(one.need, one.offers, one.least + excess + _EPS * abs(one.least), _MOST)
            except TooMany:
                raise Unsolved("there are too many ways to carry one load") from None
            block = np.zeros((len(mine), 1 + rows))
            for at, cover in enumerate(mine):
                line = block[at]
                for i, n in cover:
                    supply = one.supplies[i]
                    line[0] += n * supply.price
                    for row, weight in supply.weights:
                        line[1 + row] += n * weight
            kept = _undominated(block)
            found += [mine[at] for at in kept]
            blocks.append(block[kept])
            owner += [g] * len(kept)
        return found, np.concatenate(blocks), np.array(owner)

    def _counts(self, covers_: Sequence[tuple[tuple[int, int], ...]], owners: Any) -> list[int]:
        counts = self._held[:]
        for cover, g in zip(covers_, owners, strict=True):
            for i, n in cover:
                counts[self._groups[g].supplies[i].candidate] += n
        return counts


def _undominated(block: "NDArray[float64]") -> "NDArray[intp]":
    """Rows that are not in every column at least another's."""
    import numpy as np  # noqa: PLC0415

    order = np.lexsort(block.T[::-1])
    lines = block[order]
    kept = []
    while len(order):
        kept.append(order[0])
        others = ~(lines >= lines[0] - _EPS * np.abs(lines[0])).all(axis=1)
        order, lines = order[others], lines[others]
    return np.array(kept)


def _usable(
    patterns: "NDArray[float64]", group: "NDArray[intp]", prices: "NDArray[float64]", excess: float
) -> "NDArray[intp]":
    """Patterns that cost at these prices no more than so much beside their groups' cheapest."""
    import numpy as np  # noqa: PLC0415

    price = patterns[:, 0] + patterns[:, 1:] @ prices
    first = np.searchsorted(group, np.arange(int(group[-1]) + 1))
    regret = price - np.minimum.reduceat(price, first)[group]
    return np.flatnonzero(regret <= excess + _EPS * abs(float(price.max())))


def _choice(group: "NDArray[intp]") -> Any:
    """One row a group: ones where its patterns are."""
    import numpy as np  # noqa: PLC0415
    from scipy.sparse import csr_array  # noqa: PLC0415

    return csr_array((np.ones(len(group)), (group, np.arange(len(group)))))


def _chosen(
    patterns: "NDArray[float64]",
    group: "NDArray[intp]",
    room: "NDArray[float64]",
    limit: float,
    options: dict[str, Any],
) -> "tuple[NDArray[intp] | None, bool]":
    """The cheapest choice of one pattern for each group up to a limit, by HiGHS, None when there is none; and whether it could end."""
    import numpy as np  # noqa: PLC0415
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415

    result = milp(
        patterns[:, 0],
        integrality=np.ones(len(patterns)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(patterns[:, 1:].T, -np.inf, room + _EPS),
            LinearConstraint(patterns[:, :1].T / limit, -np.inf, 1.0),
            LinearConstraint(_choice(group), 1, 1),
        ],
        options=options,
    )
    rows = None if result.x is None else np.flatnonzero(result.x > 0.5)
    return rows, result.status in (_SOLVED, _INFEASIBLE)


def _shared(options: dict[str, Any]) -> dict[str, Any]:
    return options | {key: value * _SHARE for key, value in options.items() if key == "time_limit"}
