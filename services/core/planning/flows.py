"""The programme whose goal is accuracy for HiGHS: how many instances, and who serves what.

    first      maximise Σ_v Σ_k x_vk · accuracy_v      subject to the rows of `program.py`
    then       minimise the cost of `program.py`       subject to the same, and what was reached within a tolerance

The demands' needs are what can be carried (`exact.py` finds that first where it is not all).
"""

from typing import Any, NamedTuple

from services.core.goal import merit
from services.core.planning.program import Group, Program
from services.core.planning.tableau import SCALE, SOLVED, Tableau


class Reached(NamedTuple):
    """Counts of all candidates, Σ x · accuracy in units of the whole need, the gap, and whether it was closed."""

    counts: list[int]
    worth: float
    gap: float
    proven: bool


class FlowModel:
    """Columns: the supplies of use, then a flow for each candidate of each group, as a share of the group's need."""

    def __init__(self, program: Program, groups: dict[int, Group]) -> None:
        self._groups = groups
        self._tableau = Tableau(program)
        self._prices = list(self._tableau.cost)
        self._values: list[float] = []  # of each flow
        self._carry(sum(group.need for group in groups.values()) or 1.0)
        self._tableau.fit()

    def most_accurate(self, options: dict[str, Any]) -> Reached | None:
        """The most accuracy that can be had; None when the needs cannot be carried."""
        return self._run([0.0] * len(self._prices) + [-value for value in self._values], options)

    def cheapest(self, worth: float, options: dict[str, Any]) -> Reached | None:
        """At least cost, with at least so much accuracy."""
        row = self._tableau.row(low=SCALE * worth)
        for i, value in enumerate(self._values):
            self._tableau.put(row, len(self._prices) + i, SCALE * value)
        return self._run(self._prices + [0.0] * len(self._values), options)

    def _run(self, cost: list[float], options: dict[str, Any]) -> Reached | None:
        tableau = self._tableau
        if not cost:
            return Reached(tableau.counts([]), 0.0, 0.0, True) if tableau.met_by_nothing() else None
        tableau.cost = cost
        result = tableau.solve(options)
        if result is None:
            return None
        shares = result.x[len(self._prices) :]
        worth = sum(value * share for value, share in zip(self._values, shares, strict=True))
        return Reached(tableau.counts(result.x), float(worth), float(result.mip_gap or 0.0), result.status == SOLVED)

    def _carry(self, whole: float) -> None:
        """Each group's need; and what candidates can give to all their groups together. whole: items/s of all groups."""
        tableau, candidates = self._tableau, self._tableau.program.problem.candidates
        served: dict[int, list[tuple[int, float]]] = {}
        for group in self._groups.values():
            if group.need > 0:
                row = tableau.row(SCALE, SCALE)
                for c in group.candidates:
                    if c in tableau.of:
                        column = tableau.column(0.0, 1.0)
                        self._values.append(merit(candidates[c].accuracy) * group.need / whole)
                        tableau.put(row, column, SCALE)
                        served.setdefault(c, []).append((column, group.need))
            if group.least > 0:
                row = tableau.row(low=float(group.least))
                for c in group.candidates:
                    for i in tableau.of.get(c, ()):
                        tableau.put(row, i, 1.0)
        for c, flows in served.items():
            row = tableau.row(high=0.0)
            scale = SCALE / max(need for _, need in flows)
            for column, need in flows:
                tableau.put(row, column, scale * need)
            for i in tableau.of[c]:
                tableau.put(row, i, -scale * tableau.supplies[i].rate)
