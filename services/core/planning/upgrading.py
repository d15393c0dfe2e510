"""The greedy solver where accuracy is the goal: the cheapest plan that carries the load, upgraded as far as resources go.

Where everybody's most accurate choice does not fit, resources get prices that rise until the choices nearly do (`pricing.py`), so
that they go where they bring most accuracy; the rest is moved one by one. A last pass spends what room is left.
"""

from collections.abc import Sequence
from typing import Any

from services.core.planning.conclude import conclude
from services.core.planning.deal import Deal, tables
from services.core.planning.delivered import SAME, deliver, worth_of
from services.core.planning.greedy import GreedySolver
from services.core.planning.plan import Plan
from services.core.planning.pricing import Prices
from services.core.planning.problem import Problem
from services.core.planning.program import Program, compile_program

_ROUNDS = 14  # of prices
_SWEEPS = 4
_FIRST = 6  # groups that go before others for a trial
_SCALE = 0.05  # of the whole load times accuracy: the first price of a resource that is short by all there is


class Upgrading:
    """steps: of the search for the cheapest plan, for one group."""

    name = "greedy"

    def __init__(self, *, steps: int = 100) -> None:
        self._cheapest = GreedySolver(steps=steps)

    def solve(self, problem: Problem) -> Plan:
        """A plan that keeps every constraint, usually near the most accurate. Its "infeasible" is no proof: none was found."""
        return self.solve_program(compile_program(problem))

    def solve_program(self, program: Program) -> Plan:
        """The same, of a compiled problem."""
        facts = tables(program)
        groups = [g for g, group in enumerate(program.groups) if group.candidates]
        groups.sort(key=lambda g: (len(program.groups[g].candidates), -program.groups[g].need))
        started: list[Deal] = []
        prices = Prices(len(program.rows))
        priced = self._priced(program, facts, groups, prices)
        if priced is not None:
            started.append(priced)
        if priced is None or any(prices.values):
            cheapest = Deal(program, facts, SAME)
            cheapest.set(self._cheapest.pack(program).packing.counts)
            started.append(cheapest)
        if any(one.high for one in program.running):
            present = Deal(program, facts, SAME)
            present.set([one.high for one in program.running])
            if present.fits():
                started.append(present)
        best: Deal | None = None
        for deal in started:
            self._improve(program, deal, groups, prices)
            if best is None or worth_of(program, deal.counts).beats(worth_of(program, best.counts)):
                best = deal
        return self._concluded(program, best.counts if best is not None else facts.low)

    def _priced(self, program: Program, facts: Any, groups: Sequence[int], prices: Prices) -> Deal | None:
        """Everybody's best choice at prices at which they fit; None when none was found that do."""
        import numpy as np  # noqa: PLC0415

        scale = _SCALE * sum(group.need for group in program.groups)
        best: Deal | None = None
        for _ in range(_ROUNDS):
            deal = Deal(program, facts, SAME)
            now = np.array(prices.values)
            whole = not [g for g in groups if not deal.place(g, now, bounded=False)]
            room = deal.room.tolist()
            if not deal.fits():
                whole = self._moved(deal, groups, now) and whole
            if deal.fits() and whole:
                if best is None or worth_of(program, deal.counts).beats(worth_of(program, best.counts)):
                    best = deal
                if not any(prices.values) and min(room, default=0.0) >= 0:
                    return best
            prices.settle(scale, room)
        return best

    @staticmethod
    def _moved(deal: Deal, groups: Sequence[int], prices: Any) -> bool:
        """Move groups, one after the other, to what there is room for; whether all of them found some."""
        whole = True
        for g in sorted(groups, key=deal.overdrawn, reverse=True):
            if deal.fits():
                break
            if deal.overdrawn(g) > 0:
                deal.take_back(g)
                whole &= deal.place(g, prices, bounded=True)
        return whole

    def _improve(self, program: Program, deal: Deal, groups: Sequence[int], prices: Prices) -> None:
        """Choose anew for one group after the other, and for pairs, in the room that the others leave, while that is worth something."""
        import numpy as np  # noqa: PLC0415

        free, priced = np.zeros(len(program.rows)), np.array(prices.values)
        for now in (priced, *[free] * _SWEEPS):
            changed = False
            for g in groups:
                changed |= self._anew(deal, (g,), now)
            if now is free:
                if not changed:
                    changed = self._exchanged(program, deal, groups, (free, priced))
                deal.set(deal.counts)
                if not changed:
                    return

    @staticmethod
    def _anew(deal: Deal, groups: Sequence[int], prices: Any) -> bool:
        """Choose anew for these groups, the first one first; whether that was worth it."""
        before, kept = deal.serves(groups), deal.state(groups)
        for g in groups:
            deal.take_back(g)
        for g in groups:
            deal.place(g, prices, bounded=True)
        if deal.fits() and deal.serves(groups).beats(before):
            return True
        deal.restore(groups, kept)
        return False

    def _exchanged(self, program: Program, deal: Deal, groups: Sequence[int], prices: Sequence[Any]) -> bool:
        """Let those that have lost most go before another one each."""
        if not program.rows:
            return False
        lost = {g: program.groups[g].need * (1 - deal.serves((g,)).accuracy) for g in groups}
        first = sorted(groups, key=lambda g: -lost[g])[:_FIRST]
        return any([self._anew(deal, (g, h), now) for g in first for h in groups if h != g for now in prices])  # noqa: C419

    def _concluded(self, program: Program, counts: Sequence[int]) -> Plan:
        served = deliver(program, counts)
        short = {}
        for g, group in enumerate(program.groups):
            lack = group.need - sum(served.given[g].values())
            missing = max(0.0, lack) if lack > 1e-6 * group.need else 0.0
            instances = max(0, group.least - sum(counts[c] for c in group.candidates))
            if missing or instances:
                short[g] = (missing, instances)
        return conclude(program, counts, solver=self.name, status="feasible", short=short)


def better(program: Program, one: Plan, other: Plan) -> bool:
    """Whether the first of two plans is worth more."""
    names = [candidate.name for candidate in program.problem.candidates]
    ours, theirs = (worth_of(program, [plan.instances[name] for name in names]) for plan in (one, other))
    return ours.beats(theirs)
