"""The greedy solver: one app after the other, the cheapest of replicating, upgrading and their mixtures.

INFaaS (Romero et al., section 4.2.2) compares, for each running variant, the cost of replicating it with that of each variant that
meets the SLO and serves more, and takes the cheapest. Here the same comparison is made over everything that may answer the app's
demand, mixtures included (`cover.py`). Where resources do not suffice for everybody's cheapest choice, they get prices that
rise with what is overdrawn until the choices fit (Lagrangian relaxation), and a last pass spends what room is left.
"""

from collections.abc import Sequence
from operator import mul

from services.core.planning.conclude import conclude
from services.core.planning.packing import Packing
from services.core.planning.plan import Plan
from services.core.planning.problem import Problem
from services.core.planning.program import Program, compile_program

_CLOSE = 1.01  # to the bound: further rounds are not worth their time


class GreedySolver:
    """rounds: how often prices of overdrawn resources are changed at most. steps: of the search for one group."""

    name = "greedy"

    def __init__(self, *, rounds: int = 8, steps: int = 300) -> None:
        self._rounds, self._steps = rounds, steps

    def solve(self, problem: Problem) -> Plan:
        """A plan that keeps every constraint, usually near the cheapest; "infeasible" is no proof."""
        program = compile_program(problem)
        order = sorted(
            (g for g, group in enumerate(program.groups) if group.candidates),
            key=lambda g: (len(program.groups[g].candidates), -program.groups[g].need),
        )
        packing = self._pack(program, order)
        short = {g: packing.missing(g) for g in range(len(program.groups))}
        return conclude(
            program,
            packing.counts,
            solver=self.name,
            status="feasible",
            short={g: lack for g, lack in short.items() if lack != (0.0, 0)},
        )

    def _pack(self, program: Program, order: Sequence[int]) -> Packing:
        duals = [0.0] * len(program.rows)
        best: Packing | None = None
        step = 1.0
        for left in range(self._rounds, -1, -1):
            relaxed = Packing(program)
            for g in order:
                relaxed.place(g, duals=duals, bounded=False, steps=self._steps)
            bound = relaxed.cost() - sum(map(mul, duals, relaxed.room))  # no plan costs less
            trial = relaxed if relaxed.fits() else self._repaired(relaxed, order, duals)
            if not trial.complete():
                order = [*(g for g in order if not trial.placed[g]), *(g for g in order if trial.placed[g])]
                trial = self._built(program, order, duals)
            if trial.complete():
                if trial is not relaxed or any(map(program.shared, range(len(program.home)))) or any(duals):
                    self._improve(trial, order)
                if best is None or trial.cost() < best.cost():
                    best = trial
            if not left or (best is not None and best.cost() <= _CLOSE * bound):
                break
            scale = step * relaxed.cost()
            duals = [max(0.0, dual - scale * free) for dual, free in zip(duals, relaxed.room, strict=True)]
            step *= 0.5 if relaxed.fits() else 1.6
        return best or self._filled(trial, order, duals)

    def _built(self, program: Program, order: Sequence[int], duals: Sequence[float]) -> Packing:
        trial = Packing(program)
        for g in order:
            trial.place(g, duals=duals, bounded=True, steps=self._steps)
        return trial

    def _repaired(self, relaxed: Packing, order: Sequence[int], duals: Sequence[float]) -> Packing:
        """The same plan with groups moved, one after the other, to what there is room for."""
        trial = relaxed.copy()
        for g in sorted(order, key=trial.overdrawn):
            if trial.fits():
                break
            if trial.overdrawn(g) > 0:
                trial.take_back(g)
                trial.place(g, duals=duals, bounded=True, steps=self._steps)
        for g in order:
            if not trial.placed[g]:
                trial.place(g, duals=duals, bounded=True, steps=self._steps)
        return trial

    def _improve(self, trial: Packing, order: Sequence[int]) -> None:
        """Choose anew for one group after the other, at true prices, in the room that all others leave."""
        free = [0.0] * len(trial.room)
        for g in order:
            before, state = trial.cost(), trial.copy()
            trial.take_back(g)
            if not trial.place(g, duals=free, bounded=True, steps=self._steps) or trial.cost() > before:
                trial.become(state)

    def _filled(self, trial: Packing, order: Sequence[int], duals: Sequence[float]) -> Packing:
        for g in order:
            if not trial.placed[g]:
                trial.fill(g, duals)
        return trial
