"""The integer programme as rows and columns for HiGHS (scipy.optimize.milp)."""

from typing import Any

from services.core.planning.program import Group, Program, Supply

_SCALE = 1000.0  # rows are scaled to this, so that HiGHS's absolute tolerance of 1e-6 is a relative one of 1e-9
_SOLVED, _INFEASIBLE = 0, 2


class Unsolved(Exception):
    """No plan was found within the limits, nor a proof that there is none."""


class Model:
    """Columns: the supplies of use; then flows (shared candidate, group); then, if elastic, what groups are short of."""

    def __init__(self, program: Program, groups: dict[int, Group], *, elastic: bool = False) -> None:
        self._program, self._groups, self._elastic = program, groups, elastic
        self._supplies: list[Supply] = [
            one for pair in zip(program.running, program.fresh, strict=True) for one in pair if one.high > 0
        ]
        self._cost: list[float] = [0.0 if elastic else one.price for one in self._supplies]
        self._low: list[float] = [one.low for one in self._supplies]
        self._high: list[float] = [one.high for one in self._supplies]
        self._integers = len(self._supplies)
        self._at: list[tuple[int, int, float]] = []  # row, column, coefficient
        self._from: list[float] = []
        self._to: list[float] = []
        self._short: dict[
            int, tuple[int | None, int | None]
        ] = {}  # group: columns of its missing items/s and instances
        self._carry()
        self._fit()

    def run(self, options: dict[str, Any]) -> tuple[list[int], float, bool] | None:
        """Counts of all candidates, the gap, and whether it was closed; None when there is no solution."""
        if not self._cost:
            return None if any(low > 0 for low in self._from) else (self._counts([]), 0.0, True)
        result = self._milp(options)
        if result.status == _INFEASIBLE:
            return None
        if result.x is None:
            raise Unsolved(f"no plan within the limits: {result.message}")
        return self._counts(result.x), float(result.mip_gap or 0.0), result.status == _SOLVED

    def shortage(self, options: dict[str, Any]) -> dict[int, tuple[float, int]]:
        """The least that groups must go short of, as a sum of shares of what they need."""
        result = self._milp(options)
        if result.x is None:
            raise Unsolved(f"no plan within the limits: {result.message}")
        found = {}
        for g, (items, instances) in self._short.items():
            missing = float(result.x[items]) if items is not None else 0.0
            lacking = round(result.x[instances]) if instances is not None else 0
            if missing > 0 or lacking:
                found[g] = (max(0.0, missing), lacking)
        return found

    def _milp(self, options: dict[str, Any]) -> Any:
        import numpy as np  # noqa: PLC0415  (a process that only imports this module stays small)
        from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415
        from scipy.sparse import csr_array  # noqa: PLC0415

        cost = np.array(self._cost)
        integrality = np.zeros(len(cost))
        integrality[: self._integers] = 1
        for _, instances in self._short.values():
            if instances is not None:
                integrality[instances] = 1
        rows, columns, values = zip(*self._at, strict=True) if self._at else ((), (), ())
        matrix = csr_array((values, (rows, columns)), shape=(len(self._from), len(cost)))
        return milp(
            cost,
            integrality=integrality,
            bounds=Bounds(self._low, self._high),
            constraints=LinearConstraint(matrix, self._from, self._to) if self._from else None,
            options=options,
        )

    def _carry(self) -> None:
        """Each group's need; and what shared candidates can give to all their groups together."""
        program = self._program
        flows: dict[tuple[int, int], int] = {}
        for c in range(len(program.home)):
            homes = [g for g in program.home[c] if g in self._groups and self._groups[g].need > 0]
            if len(homes) > 1:
                row = self._row(-float("inf"), 0.0)
                scale = _SCALE / max(self._groups[g].need for g in homes)
                for g in homes:
                    flows[c, g] = column = self._column(0.0, self._groups[g].need)
                    self._at.append((row, column, scale))
                self._at += [(row, i, -one.rate * scale) for i, one in enumerate(self._supplies) if one.candidate == c]
        columns: dict[int, list[int]] = {}
        for i, one in enumerate(self._supplies):
            columns.setdefault(one.candidate, []).append(i)
        for g, group in self._groups.items():
            items = instances = None
            if group.need > 0:
                row = self._row(_SCALE, float("inf"))
                scale = _SCALE / group.need
                for c in group.candidates:
                    if (c, g) in flows:
                        self._at.append((row, flows[c, g], scale))
                    else:
                        self._at += [(row, i, self._supplies[i].rate * scale) for i in columns.get(c, ())]
                if self._elastic:
                    items = self._column(1.0 / group.need, group.need)
                    self._at.append((row, items, scale))
            if group.least > 0:
                row = self._row(float(group.least), float("inf"))
                self._at += [(row, i, 1.0) for c in group.candidates for i in columns.get(c, ())]
                if self._elastic:
                    instances = self._column(1.0 / group.least, group.least)
                    self._at.append((row, instances, 1.0))
            self._short[g] = (items, instances)

    def _fit(self) -> None:
        for row in range(len(self._program.rows)):
            at = self._row(-float("inf"), _SCALE * (1 + 1e-9))
            for i, one in enumerate(self._supplies):
                self._at += [(at, i, _SCALE * weight) for r, weight in one.weights if r == row]

    def _counts(self, x: Any) -> list[int]:
        counts = [0] * len(self._program.home)
        for one, n in zip(self._supplies, x, strict=False):
            counts[one.candidate] += round(n)
        return counts

    def _row(self, low: float, high: float) -> int:
        self._from.append(low)
        self._to.append(high)
        return len(self._from) - 1

    def _column(self, cost: float, high: float) -> int:
        self._cost.append(cost)
        self._low.append(0.0)
        self._high.append(high)
        return len(self._cost) - 1
