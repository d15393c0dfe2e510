"""The greedy solver: it takes one group of demands after the other, and chooses the cheapest of replicating, upgrading and mixtures of both.

INFaaS (Romero et al., section 4.2.2) compares, for each running variant, the cost of replicating it with that of each variant that
meets the SLO and serves more, and takes the cheapest. This solver makes the same comparison over everything that may answer the app's
demand, mixtures included (`cover.py`). Where resources do not suffice for all groups' cheapest choices, resources get prices until the
choices nearly fit. What still does not fit is moved, group by group. A last pass spends the room that is left.
"""

from collections.abc import Sequence
from math import inf
from operator import mul
from typing import NamedTuple

from services.core.planning.packing import OfferCache, Packing
from services.core.planning.plan import Plan, conclude
from services.core.planning.problem import PlanningProblem
from services.core.planning.program import Program, compile_program

_OVERDRAWN = -1e-9
_GROWTH = 4.0  # factor by which a price rises as long as it is too low and no sufficient one is known
_STEEP = 10.0  # times the total cost: at such prices only resources count
_CLOSE = 1.02  # times the bound: further rounds are not worth their time
_NEAR = -0.25  # room: choices that overdraw no row by more are worth moving until they fit
_WORSE = 1.1  # times the cost of the best plan so far: a dearer one is not worth improving
_TURNS = 6  # attempts to build a plan from nothing; groups that found no room go first in the next one


class Prices:
    """Prices of resources. They rise while more is chosen than there is, and settle by halving (Lagrangian relaxation).

    values: the price of the whole of each row, in units of the objective. bound: no plan costs less than this.
    """

    def __init__(self, rows: int) -> None:
        self.values = [0.0] * rows
        self.bound = 0.0
        self._low, self._high = [0.0] * rows, [inf] * rows

    def settle(self, cost: float, room: Sequence[float]) -> None:
        """Change the prices after the best choices at them. cost: of these choices, without prices. room: what they leave of each row."""
        self.bound = max(self.bound, cost - sum(map(mul, self.values, room)))
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
        """Make all rows so dear that only resources count, the most overdrawn rows dearest."""
        self.values = [_STEEP * cost * (1.0 + max(0.0, -free)) for free in room]


class PackingResult(NamedTuple):
    """bound: no plan costs less than this; None when unknown."""

    packing: Packing
    bound: float | None


class GreedySolver:
    """rounds: how often the prices of resources may change. steps: how many branches the search for one group looks at."""

    name = "greedy"

    def __init__(self, *, rounds: int = 8, steps: int = 100) -> None:
        self._rounds, self._steps = rounds, steps

    def solve(self, problem: PlanningProblem) -> Plan:
        """A plan that keeps every constraint, usually near the cheapest. Its "infeasible" is no proof, only says that none was found."""
        program = compile_program(problem)
        return self.concluded(program, self.pack(program))

    def concluded(self, program: Program, packed: PackingResult) -> Plan:
        """The plan that a packing is."""
        packing, bound = packed.packing, packed.bound
        cost = packing.cost()
        short = {g: packing.missing(g) for g in range(len(program.groups))}
        return conclude(
            program,
            packing.counts,
            solver=self.name,
            status="feasible",
            short={g: lack for g, lack in short.items() if lack != (0.0, 0)},
            gap=None if bound is None else max(0.0, 1.0 - bound / cost) if cost > 0 else 0.0,
        )

    def pack(self, program: Program) -> PackingResult:
        """The best packing found."""
        order = sorted(
            (g for g, group in enumerate(program.groups) if group.candidates),
            key=lambda g: (len(program.groups[g].candidates), -program.groups[g].need),
        )
        provable = not any(map(program.shared, range(len(program.home))))
        prices, cache = Prices(len(program.rows)), OfferCache(program)
        best: Packing | None = None
        for left in range(self._rounds, -1, -1):
            chosen = Packing(program, cache)
            for g in order:
                chosen.place(g, prices=prices.values, bounded=False, steps=self._steps)
            cost, room = chosen.cost(), chosen.room[:]  # before fitting changes it
            provable &= chosen.cheapest
            if provable and left == self._rounds and chosen.placed_all(order):
                return PackingResult(chosen, cost)
            if not left or min(room, default=0.0) > _NEAR:
                trial = self._fit(chosen, order, prices.values)
                if trial.placed_all(order) and (best is None or trial.cost() < _WORSE * best.cost()):
                    self._improve(trial, order)
                    if best is None or trial.cost() < best.cost():
                        best = trial
            prices.settle(cost, room)
            if best is not None and (not any(prices.values) or (provable and best.cost() <= _CLOSE * prices.bound)):
                break
        if any(one.running for one in program.problem.candidates):
            best = self._or_running(best, Packing(program, cache), order)
        if best is None:
            prices.rise(cost, room)
            best = self._from_nothing(program, cache, order, prices.values)
        return PackingResult(best, prices.bound if provable else None)

    def _or_running(self, best: Packing | None, present: Packing, order: Sequence[int]) -> Packing | None:
        """What runs, and what it lacks, if that costs no more than the best. So plans do not go back and forth."""
        present.keep_running()
        free = [0.0] * len(present.room)
        for g in (g for g in order if not present.placed[g]):
            present.take_back(g)
            if not present.place(g, prices=free, bounded=True, steps=self._steps):
                return best
        if not present.fits() or (best is not None and present.cost() > best.cost()):
            return best
        self._improve(present, order)
        return present

    def _fit(self, chosen: Packing, order: Sequence[int], prices: Sequence[float]) -> Packing:
        """A copy in which groups are moved, one after the other, to where there is room."""
        if chosen.fits():
            return chosen
        trial = chosen.copy()
        moved = []
        for g in sorted(order, key=trial.overdrawn):
            if trial.fits():
                break
            if trial.overdrawn(g) > 0:
                trial.take_back(g)
                if not trial.place(g, prices=prices, bounded=True, steps=self._steps):
                    moved.append(g)
        for g in moved:
            trial.place(g, prices=prices, bounded=True, steps=self._steps)
        return trial

    def _from_nothing(
        self, program: Program, cache: OfferCache, order: Sequence[int], prices: Sequence[float]
    ) -> Packing:
        """A packing from nothing that saves resources before money. When not every group has room, the fullest packing found."""
        for _ in range(_TURNS):
            trial = Packing(program, cache)
            left_out = [g for g in order if not trial.place(g, prices=prices, bounded=True, steps=self._steps)]
            if not left_out:
                self._improve(trial, order)
                break
            order = [*left_out, *(g for g in order if trial.placed[g])]
        for g in order:
            if not trial.placed[g]:
                trial.fill(g, prices)
        return trial

    def _improve(self, trial: Packing, order: Sequence[int]) -> None:
        """Choose again for one group after the other, without prices of resources, in the room that all others leave."""
        free = [0.0] * len(trial.room)
        for g in order:
            if trial.improvable(g):
                before, state = trial.cost(), trial.state(g)
                trial.take_back(g)
                if not trial.place(g, prices=free, bounded=True, steps=self._steps) or trial.cost() > before:
                    trial.restore(g, state)
