"""Patterns of groups: the ways to carry each one's load, at prices of the resources, of which a plan takes one for each group."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from services.core.planning.cover import CoverSearch, Offer
from services.core.planning.covers import TooMany, covers
from services.core.planning.exact import Deadline
from services.core.planning.highs import Unsolved
from services.core.planning.program import InstanceSupply, Program, priced

if TYPE_CHECKING:
    from numpy import float64, intp
    from numpy.typing import NDArray

_EPS = 1e-9
_MOST = 4000  # patterns of one group
_STEPS = 3000


class Column(NamedTuple):
    """What a group still needs beside what is held, and its supplies. offers, least: as of the prices; the cheapest cover costs `least`."""

    need: float
    supplies: tuple[InstanceSupply, ...]
    offers: tuple[Offer, ...]
    least: float

    def table(self, rows: int) -> "NDArray[float64]":
        """Of each supply: the price of an instance, then what it takes of each row."""
        import numpy as np  # noqa: PLC0415

        table = np.zeros((len(self.supplies), 1 + rows))
        for line, supply in zip(table, self.supplies, strict=True):
            line[0] = supply.price
            for row, weight in supply.weights:
                line[1 + row] = weight
        return table

    def at(self, prices: Sequence[float]) -> "Column | None":
        """The same where rows have these prices; None when the search for the cheapest cover takes too long."""
        offers = tuple(Offer(one.candidate, priced(one, prices), one.rate, one.high - one.low) for one in self.supplies)
        search = CoverSearch(self.need, offers, (), _STEPS)
        search.run()
        return (
            self._replace(offers=offers, least=search.cost) if search.finished and search.counts is not None else None
        )


def column(program: Program, g: int, held: Sequence[int]) -> Column | None:
    """Of group g, without prices yet; None when it needs nothing. held: instances by candidate, that stay whatever is planned."""
    group = program.groups[g]
    if not group.candidates:
        return None
    mine = [c for c in group.candidates if held[c]]
    need = group.need - sum(held[c] * program.fresh[c].rate for c in mine)
    if group.least > max(1, sum(held[c] for c in mine)) or (group.least and group.need <= 0):
        raise Unsolved("a demand has a least number of instances")
    if need <= _EPS * group.need:
        return None
    supplies = tuple(
        one for c in group.candidates for one in (program.running[c], program.fresh[c]) if one.high > one.low
    )
    return Column(need, supplies, (), 0.0)


class Patterns(NamedTuple):
    """covers: (supply of the group, instances) of each pattern. table: its cost without prices, then what it takes of each row.

    group: whose it is, 0 and up without gaps.
    """

    covers: "list[tuple[tuple[int, int], ...]]"
    table: "NDArray[float64]"
    group: "NDArray[intp]"


def patterns(columns: Sequence[Column], rows: int, excess: float, deadline: Deadline) -> Patterns:
    """All that cost, at the columns' prices, no more than so much beside their groups' cheapest. Raises Unsolved for too many."""
    import numpy as np  # noqa: PLC0415

    found: list[tuple[tuple[int, int], ...]] = []
    blocks, owner = [], []
    for g, one in enumerate(columns):
        if deadline.passed():
            raise Unsolved("no plan within the limits")
        try:
            mine = covers(one.need, one.offers, one.least + excess + _EPS * abs(one.least), _MOST)
        except TooMany:
            raise Unsolved("there are too many ways to carry one load") from None
        counts = np.zeros((len(mine), len(one.supplies)))
        at, which, many = zip(*((at, i, n) for at, cover in enumerate(mine) for i, n in cover), strict=True)
        counts[at, which] = many
        block = counts @ one.table(rows)
        kept = undominated(block) if len(block) > 1 else [0]
        found += [mine[at] for at in kept]
        blocks.append(block[kept])
        owner += [g] * len(kept)
    return Patterns(found, np.concatenate(blocks), np.array(owner))


def undominated(block: "NDArray[float64]") -> "NDArray[intp]":
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
