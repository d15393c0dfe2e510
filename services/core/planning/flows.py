"""The programme whose goal is accuracy as rows and columns for HiGHS: how many instances, and who serves what.

    first      maximise Σ_v Σ_k x_vk · accuracy_v      subject to the rows of `program.py`
    then       minimise the cost of `program.py`       subject to the same, and what was reached within a tolerance

The demands' needs are what can be carried (`exact.py` finds that first where it is not all).
"""

from typing import Any, NamedTuple

from services.core.goal import merit
from services.core.planning.model import Unsolved
from services.core.planning.program import Group, Program, Supply

_SCALE = 1000.0  # as in model.py: HiGHS's absolute tolerances become relative ones
_SOLVED, _INFEASIBLE = 0, 2


class Reached(NamedTuple):
    """Counts of all candidates, Σ x · accuracy in units of the whole need, the gap, and whether it was closed."""

    counts: list[int]
    worth: float
    gap: float
    proven: bool


class FlowModel:
    """Columns: the supplies of use, then a flow for each candidate of each group, as a share of the group's need."""

    def __init__(self, program: Program, groups: dict[int, Group]) -> None:
        self._program = program
        self._supplies: list[Supply] = [
            one for pair in zip(program.running, program.fresh, strict=True) for one in pair if one.high > 0
        ]
        self._columns = len(self._supplies)
        self._flows: list[tuple[int, int]] = []  # candidate, group
        self._at: list[tuple[int, int, float]] = []
        self._from: list[float] = []
        self._to: list[float] = []
        self._groups = groups
        self.need = sum(group.need for group in groups.values())
        self._carry()
        self._fit()

    def most_accurate(self, options: dict[str, Any]) -> Reached | None:
        """The most accuracy that can be had; None when the needs cannot be carried."""
        return self._run([0.0] * len(self._supplies) + [-value for value in self._values()], options)

    def cheapest(self, worth: float, options: dict[str, Any]) -> Reached | None:
        """At least cost, with at least so much accuracy."""
        row = self._row(_SCALE * worth, float("inf"))
        self._at += [(row, len(self._supplies) + i, _SCALE * value) for i, value in enumerate(self._values())]
        return self._run([one.price for one in self._supplies] + [0.0] * len(self._flows), options)

    def _values(self) -> list[float]:
        candidates = self._program.problem.candidates
        whole = self.need or 1.0
        return [merit(candidates[c].accuracy) * self._groups[g].need / whole for c, g in self._flows]

    def _run(self, cost: list[float], options: dict[str, Any]) -> Reached | None:
        import numpy as np  # noqa: PLC0415  (a process that only imports this module stays small)
        from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415
        from scipy.sparse import csr_array  # noqa: PLC0415

        if not cost:
            return None if any(low > 0 for low in self._from) else Reached(self._counts([]), 0.0, 0.0, True)
        integers = len(self._supplies)
        integrality = np.zeros(len(cost))
        integrality[:integers] = 1
        low = [float(one.low) for one in self._supplies] + [0.0] * len(self._flows)
        high = [float(one.high) for one in self._supplies] + [1.0] * len(self._flows)
        rows, columns, values = zip(*self._at, strict=True) if self._at else ((), (), ())
        matrix = csr_array((values, (rows, columns)), shape=(len(self._from), len(cost)))
        result = milp(
            np.array(cost),
            integrality=integrality,
            bounds=Bounds(low, high),
            constraints=LinearConstraint(matrix, self._from, self._to) if self._from else None,
            options=options,
        )
        if result.status == _INFEASIBLE:
            return None
        if result.x is None:
            raise Unsolved(f"no plan within the limits: {result.message}")
        worth = sum(value * share for value, share in zip(self._values(), result.x[integers:], strict=True))
        return Reached(self._counts(result.x), float(worth), float(result.mip_gap or 0.0), result.status == _SOLVED)

    def _carry(self) -> None:
        by_candidate: dict[int, list[int]] = {}
        for i, one in enumerate(self._supplies):
            by_candidate.setdefault(one.candidate, []).append(i)
        served: dict[int, list[tuple[int, float]]] = {}
        for g, group in self._groups.items():
            if group.need > 0:
                row = self._row(_SCALE, _SCALE)
                for c in group.candidates:
                    if c in by_candidate:
                        column = self._columns
                        self._columns += 1
                        self._flows.append((c, g))
                        self._at.append((row, column, _SCALE))
                        served.setdefault(c, []).append((column, group.need))
            if group.least > 0:
                row = self._row(float(group.least), float("inf"))
                self._at += [(row, i, 1.0) for c in group.candidates for i in by_candidate.get(c, ())]
        for c, flows in served.items():
            row = self._row(-float("inf"), 0.0)
            scale = _SCALE / max(need for _, need in flows)
            self._at += [(row, column, scale * need) for column, need in flows]
            self._at += [(row, i, -scale * self._supplies[i].rate) for i in by_candidate[c]]

    def _fit(self) -> None:
        for r in range(len(self._program.rows)):
            row = self._row(-float("inf"), _SCALE * (1 + 1e-9))
            self._at += [
                (row, i, _SCALE * weight)
                for i, one in enumerate(self._supplies)
                for at, weight in one.weights
                if at == r
            ]

    def _counts(self, x: Any) -> list[int]:
        counts = [0] * len(self._program.home)
        for one, n in zip(self._supplies, x, strict=False):
            counts[one.candidate] += round(n)
        return counts

    def _row(self, low: float, high: float) -> int:
        self._from.append(low)
        self._to.append(high)
        return len(self._from) - 1
