"""The integer programme of `program.py` for HiGHS."""

from typing import Any

from services.core.planning.program import Group, Program
from services.core.planning.tableau import SCALE, SOLVED, Tableau, Unsolved


class Model:
    """Columns: the supplies of use; then flows (shared candidate, group); then, if elastic, what groups are short of."""

    def __init__(self, program: Program, groups: dict[int, Group], *, elastic: bool = False) -> None:
        self._program, self._groups, self._elastic = program, groups, elastic
        self._tableau = Tableau(program)
        if elastic:
            self._tableau.cost = [0.0] * len(self._tableau.cost)
        # Group: columns of its missing items/s and instances.
        self._short: dict[int, tuple[int | None, int | None]] = {}
        self._carry()
        self._tableau.fit()

    def run(self, options: dict[str, Any]) -> tuple[list[int], float, bool] | None:
        """Counts of all candidates, the gap, and whether it was closed; None when there is no solution."""
        tableau = self._tableau
        if not tableau.cost:
            return (tableau.counts([]), 0.0, True) if tableau.met_by_nothing() else None
        result = tableau.solve(options)
        if result is None:
            return None
        return tableau.counts(result.x), float(result.mip_gap or 0.0), result.status == SOLVED

    def shortage(self, options: dict[str, Any]) -> dict[int, tuple[float, int]]:
        """The least that groups must go short of, as a sum of shares of what they need."""
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
        """Each group's need; and what shared candidates can give to all their groups together."""
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
