"""The integer programme of `program.py` as rows and columns for HiGHS (scipy.optimize.milp): one model for each goal."""

from typing import Any, NamedTuple

from services.core.cost import merit
from services.core.planning.program import DemandGroup, InstanceSupply, Program

SCALE = 1000.0  # rows are scaled to this, so that HiGHS's absolute tolerance of 1e-6 is a relative one of 1e-9
SOLVED, INFEASIBLE = 0, 2
_ANY = float("inf")


class Unsolved(Exception):
    """HiGHS found no plan within the limits, and no proof that there is none."""


class MilpBuilder:
    """What both models have in common. The first columns are the supplies of use, in whole numbers. The cost of all columns is minimised."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.supplies: list[InstanceSupply] = [
            one for pair in zip(program.running, program.fresh, strict=True) for one in pair if one.high > 0
        ]
        self.cost: list[float] = [one.price for one in self.supplies]
        self._low: list[float] = [one.low for one in self.supplies]
        self._high: list[float] = [one.high for one in self.supplies]
        self._whole = list(range(len(self.supplies)))
        self._at: list[tuple[int, int, float]] = []  # row, column, coefficient
        self._from: list[float] = []
        self._to: list[float] = []
        self.of: dict[int, list[int]] = {}  # candidate: the columns of its supplies
        for i, one in enumerate(self.supplies):
            self.of.setdefault(one.candidate, []).append(i)

    def row(self, low: float = -_ANY, high: float = _ANY) -> int:
        """Add a row whose sum must lie between these. Returns its number."""
        self._from.append(low)
        self._to.append(high)
        return len(self._from) - 1

    def column(self, cost: float, high: float, *, whole: bool = False) -> int:
        """Add a column from 0 to `high`. Returns its number."""
        self.cost.append(cost)
        self._low.append(0.0)
        self._high.append(high)
        if whole:
            self._whole.append(len(self.cost) - 1)
        return len(self.cost) - 1

    def put(self, row: int, column: int, coefficient: float) -> None:
        """Set a coefficient. Call it once for each pair: several entries of one pair add up."""
        self._at.append((row, column, coefficient))

    def fit(self) -> None:
        """Add a row for each resource: all supplies together stay within it."""
        for r in range(len(self.program.rows)):
            row = self.row(high=SCALE * (1 + 1e-9))
            for i, one in enumerate(self.supplies):
                for at, weight in one.weights:
                    if at == r:
                        self.put(row, i, SCALE * weight)

    def met_by_nothing(self) -> bool:
        """Whether all rows hold without any column."""
        return not any(low > 0 for low in self._from)

    def solve(self, options: dict[str, Any]) -> Any:
        """Scipy's result. None when there is no solution. Raises Unsolved when none was found within the limits."""
        import numpy as np  # noqa: PLC0415  (a process that only imports this module stays small)
        from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415
        from scipy.sparse import csr_array  # noqa: PLC0415

        cost = np.array(self.cost)
        integrality = np.zeros(len(cost))
        integrality[self._whole] = 1
        rows, columns, values = zip(*self._at, strict=True) if self._at else ((), (), ())
        matrix = csr_array((values, (rows, columns)), shape=(len(self._from), len(cost)))
        result = milp(
            cost,
            integrality=integrality,
            bounds=Bounds(self._low, self._high),
            constraints=LinearConstraint(matrix, self._from, self._to) if self._from else None,
            options=options,
        )
        if result.status == INFEASIBLE:
            return None
        if result.x is None:
            raise Unsolved(f"no plan within the limits: {result.message}")
        return result

    def counts(self, x: Any) -> list[int]:
        """Instances of every candidate."""
        counts = [0] * len(self.program.home)
        for one, n in zip(self.supplies, x, strict=False):
            counts[one.candidate] += round(n)
        return counts


class CostModel:
    """The programme whose goal is least cost.

    Columns: the supplies of use; then a flow for each group of a shared candidate; then, if elastic, what each group lacks.
    """

    def __init__(self, program: Program, groups: dict[int, DemandGroup], *, elastic: bool = False) -> None:
        self._program, self._groups, self._elastic = program, groups, elastic
        self._tableau = MilpBuilder(program)
        if elastic:
            self._tableau.cost = [0.0] * len(self._tableau.cost)
        # By group: the columns of its missing items/s and instances.
        self._short: dict[int, tuple[int | None, int | None]] = {}
        self._carry()
        self._tableau.fit()

    def run(self, options: dict[str, Any]) -> tuple[list[int], float, bool] | None:
        """Counts of all candidates, the relative gap, and whether HiGHS closed it. None when there is no solution."""
        tableau = self._tableau
        if not tableau.cost:
            return (tableau.counts([]), 0.0, True) if tableau.met_by_nothing() else None
        result = tableau.solve(options)
        if result is None:
            return None
        return tableau.counts(result.x), float(result.mip_gap or 0.0), result.status == SOLVED

    def shortage(self, options: dict[str, Any]) -> dict[int, tuple[float, int]]:
        """By group: the items/s and instances that it must lack, so that the sum of the lacking shares is least."""
        result = self._tableau.solve(options)
        if result is None:
            raise Unsolved("the solver contradicts itself about what can be carried")
        found = {}
        for g, (items, instances) in self._short.items():
            missing = float(result.x[items]) if items is not None else 0.0
            lacking = round(result.x[instances]) if instances is not None else 0
            if missing > 0 or lacking:
                found[g] = (max(0.0, missing), lacking)
        return found

    def _carry(self) -> None:
        """Add rows for each group's need, and for what a shared candidate can give to all its groups together."""
        program, tableau = self._program, self._tableau
        flows: dict[tuple[int, int], int] = {}
        for c in range(len(program.home)):
            homes = [g for g in program.home[c] if g in self._groups and self._groups[g].need > 0]
            if len(homes) > 1:
                row = tableau.row(high=0.0)
                scale = SCALE / max(self._groups[g].need for g in homes)
                for g in homes:
                    flows[c, g] = column = tableau.column(0.0, self._groups[g].need)
                    tableau.put(row, column, scale)
                for i in tableau.of.get(c, ()):
                    tableau.put(row, i, -tableau.supplies[i].rate * scale)
        for g, group in self._groups.items():
            items = instances = None
            if group.need > 0:
                row = tableau.row(low=SCALE)
                scale = SCALE / group.need
                for c in group.candidates:
                    if (c, g) in flows:
                        tableau.put(row, flows[c, g], scale)
                    else:
                        for i in tableau.of.get(c, ()):
                            tableau.put(row, i, tableau.supplies[i].rate * scale)
                if self._elastic:
                    items = tableau.column(1.0 / group.need, group.need)
                    tableau.put(row, items, scale)
            if group.least > 0:
                row = tableau.row(low=float(group.least))
                for c in group.candidates:
                    for i in tableau.of.get(c, ()):
                        tableau.put(row, i, 1.0)
                if self._elastic:
                    instances = tableau.column(1.0 / group.least, group.least, whole=True)
                    tableau.put(row, instances, 1.0)
            self._short[g] = (items, instances)


class AccuracyResult(NamedTuple):
    """Counts of all candidates; worth: Σ x · accuracy as a share of the whole need; the gap, and whether HiGHS closed it."""

    counts: list[int]
    worth: float
    gap: float
    proven: bool


class AccuracyModel:
    """The programme whose goal is accuracy, solved in two runs:

        first      maximise Σ_v Σ_k x_vk · accuracy_v      subject to the rows of `program.py`
        then       minimise the cost of `program.py`       subject to the same, and the accuracy reached, within a tolerance

    All needs can be carried: where that is not so, `exact.py` reduces them first. Columns: the supplies of use; then a flow for each
    candidate of each group, as a share of the group's need.
    """

    def __init__(self, program: Program, groups: dict[int, DemandGroup]) -> None:
        self._groups = groups
        self._tableau = MilpBuilder(program)
        self._prices = list(self._tableau.cost)
        self._values: list[float] = []  # of each flow
        self._carry(sum(group.need for group in groups.values()) or 1.0)
        self._tableau.fit()

    def most_accurate(self, options: dict[str, Any]) -> AccuracyResult | None:
        """The most accuracy that can be reached. None when the needs cannot be carried."""
        return self._run([0.0] * len(self._prices) + [-value for value in self._values], options)

    def cheapest(self, worth: float, options: dict[str, Any]) -> AccuracyResult | None:
        """The least cost with at least this accuracy."""
        row = self._tableau.row(low=SCALE * worth)
        for i, value in enumerate(self._values):
            self._tableau.put(row, len(self._prices) + i, SCALE * value)
        return self._run(self._prices + [0.0] * len(self._values), options)

    def _run(self, cost: list[float], options: dict[str, Any]) -> AccuracyResult | None:
        tableau = self._tableau
        if not cost:
            return AccuracyResult(tableau.counts([]), 0.0, 0.0, True) if tableau.met_by_nothing() else None
        tableau.cost = cost
        result = tableau.solve(options)
        if result is None:
            return None
        shares = result.x[len(self._prices) :]
        worth = sum(value * share for value, share in zip(self._values, shares, strict=True))
        return AccuracyResult(
            tableau.counts(result.x), float(worth), float(result.mip_gap or 0.0), result.status == SOLVED
        )

    def _carry(self, whole: float) -> None:
        """Add rows for each group's need, and for what a candidate can give to all its groups together. whole: items/s of all groups."""
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
