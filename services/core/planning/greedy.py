"""Prices of resources that rise while more is chosen than there is, and settle by halving (Lagrangian relaxation)."""

from collections.abc import Sequence
from math import inf
from operator import mul
from typing import NamedTuple

from services.core.planning.packing import OfferCache, Packing
from services.core.planning.plan import Plan, conclude
from services.core.planning.problem import PlanningProblem
from services.core.planning.program import Program, compile_program

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


# -- The greedy solver: one app after the other, the cheapest of replicating, upgrading and their mixtures.

_CLOSE = 1.02  # to the bound: further rounds are not worth their time
_NEAR = -0.25  # overdrawn by no more than this, choices are worth moving until they fit
_WORSE = 1.1  # than the best so far: not worth improving
_TURNS = 6  # of packing from nothing, with those that found no room going first


class PackingResult(NamedTuple):
    """bound: what any plan costs at least, None when unknown. prices: of the rows, from which that follows."""

    packing: Packing
    bound: float | None
    prices: Sequence[float]


class GreedySolver:
    """rounds: how often prices of resources change at most. steps: of the search for one group."""

    name = "greedy"

    def __init__(self, *, rounds: int = 8, steps: int = 100) -> None:
        self._rounds, self._steps = rounds, steps

    def solve(self, problem: PlanningProblem) -> Plan:
        """A plan that keeps every constraint, usually near the cheapest. Its "infeasible" is no proof: none was found."""
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
        prices, shelf = Prices(len(program.rows)), OfferCache(program)
        best: Packing | None = None
        for left in range(self._rounds, -1, -1):
            chosen = Packing(program, shelf)
            for g in order:
                chosen.place(g, prices=prices.values, bounded=False, steps=self._steps)
            cost, room = chosen.cost(), chosen.room[:]  # as chosen: fitting may change it
            provable &= chosen.cheapest
            if provable and left == self._rounds and chosen.placed_all(order):
                return PackingResult(chosen, cost, prices.at_bound)
            if not left or min(room, default=0.0) > _NEAR:
                trial = self._fitted(chosen, order, prices.values)
                if trial.placed_all(order) and (best is None or trial.cost() < _WORSE * best.cost()):
                    self._improve(trial, order)
                    if best is None or trial.cost() < best.cost():
                        best = trial
            prices.settle(cost, room)
            if best is not None and (not any(prices.values) or (provable and best.cost() <= _CLOSE * prices.bound)):
                break
        if any(one.running for one in program.problem.candidates):
            best = self._or_as_it_is(best, Packing(program, shelf), order)
        if best is None:
            prices.rise(cost, room)
            best = self._squeezed(program, shelf, order, prices.values)
        return PackingResult(best, prices.bound if provable else None, prices.at_bound)

    def _or_as_it_is(self, best: Packing | None, present: Packing, order: Sequence[int]) -> Packing | None:
        """What runs, and what it lacks, where that costs no more: plans do not go back and forth."""
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

    def _fitted(self, chosen: Packing, order: Sequence[int], prices: Sequence[float]) -> Packing:
        """The same with groups moved, one after the other, to what there is room for."""
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

    def _squeezed(self, program: Program, shelf: OfferCache, order: Sequence[int], prices: Sequence[float]) -> Packing:
        """A packing from nothing that saves resources before money; the fullest found when not everybody has room."""
        for _ in range(_TURNS):
            trial = Packing(program, shelf)
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
        """Choose anew for one group after the other, at true prices, in the room that all others leave."""
        free = [0.0] * len(trial.room)
        for g in order:
            if trial.improvable(g):
                before, state = trial.cost(), trial.state(g)
                trial.take_back(g)
                if not trial.place(g, prices=free, bounded=True, steps=self._steps) or trial.cost() > before:
                    trial.restore(g, state)
