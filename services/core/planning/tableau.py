"""A programme as rows and columns for HiGHS (scipy.optimize.milp): what all our programmes have in common."""

from typing import Any

from services.core.planning.program import Program, Supply

SCALE = 1000.0  # rows are scaled to this, so that HiGHS's absolute tolerance of 1e-6 is a relative one of 1e-9
SOLVED, INFEASIBLE = 0, 2
_ANY = float("inf")


class Unsolved(Exception):
    """No plan was found within the limits, nor a proof that there is none."""


class Tableau:
    """The first columns are the supplies of use, in whole numbers; others follow. To be minimised: the cost of the columns."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.supplies: list[Supply] = [
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
        """A new one, whose sum must lie between these; returns its number."""
        self._from.append(low)
        self._to.append(high)
        return len(self._from) - 1

    def column(self, cost: float, high: float, *, whole: bool = False) -> int:
        """A new one from 0 to `high`; returns its number."""
        self.cost.append(cost)
        self._low.append(0.0)
        self._high.append(high)
        if whole:
            self._whole.append(len(self.cost) - 1)
        return len(self.cost) - 1

    def put(self, row: int, column: int, coefficient: float) -> None:
        """Once for each pair: entries of one add up."""
        self._at.append((row, column, coefficient))

    def fit(self) -> None:
        """What all supplies take together stays within every resource."""
        for r in range(len(self.program.rows)):
            row = self.row(high=SCALE * (1 + 1e-9))
            for i, one in enumerate(self.supplies):
                for at, weight in one.weights:
                    if at == r:
                        self.put(row, i, SCALE * weight)

    def met_by_nothing(self) -> bool:
        """Whether all rows hold where there is no column at all."""
        return not any(low > 0 for low in self._from)

    def solve(self, options: dict[str, Any]) -> Any:
        """Scipy's result; None where there is no solution. Raises Unsolved where none was found within the limits."""
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
