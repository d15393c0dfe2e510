"""The choice of one pattern for each group by HiGHS: its linear relaxation, and the choice itself."""

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from services.core.planning.columns import Patterns
from services.core.planning.exact import Deadline
from services.core.planning.highs import Unsolved

if TYPE_CHECKING:
    from numpy import float64, intp
    from numpy.typing import NDArray

_EPS = 1e-9
_DEAR = 10.0  # times what everything costs: what more of a row costs than there is
_TOLERANCE = 1e-7  # of room: less than this is not overdrawn
_SOLVED, _INFEASIBLE = 0, 2


class Relaxed(NamedTuple):
    """cost: of the patterns that may be mixed; no choice costs less. prices: of the rows. fits: the mixture does."""

    cost: float
    prices: "NDArray[float64]"
    fits: bool


class Chosen(NamedTuple):
    """rows: a pattern for each group, None when there is none. complete: no better one. bound: no choice costs less than this."""

    rows: "NDArray[intp] | None"
    complete: bool
    bound: float


def relaxed(near: Patterns, room: Sequence[float], scale: float, deadline: Deadline) -> Relaxed:
    """The cheapest mixture of patterns; where none fits, one that overdraws little. scale: about what a plan costs."""
    import numpy as np  # noqa: PLC0415
    from scipy.optimize import linprog  # noqa: PLC0415
    from scipy.sparse import coo_array  # noqa: PLC0415

    table, group = near.table, near.group
    rows, columns, groups = len(room), len(group), int(group[-1]) + 1
    dear = _DEAR * scale
    result = linprog(
        np.concatenate([table[:, 0], np.full(rows, dear)]),
        A_ub=np.hstack([table[:, 1:].T, -np.eye(rows)]),
        b_ub=np.array(room) + _EPS,
        A_eq=coo_array((np.ones(columns), (group, np.arange(columns))), shape=(groups, columns + rows)).tocsr(),
        b_eq=np.ones(groups),
        method="highs",
        options=deadline.bounding({}),
    )
    if result.x is None:
        raise Unsolved(f"no plan within the limits: {result.message}")
    fits = bool((result.x[columns:] <= _TOLERANCE).all())
    return Relaxed(float(result.fun), np.maximum(0.0, -result.ineqlin.marginals), fits)


def chosen(
    table: "NDArray[float64]",
    group: "NDArray[intp]",
    room: "NDArray[float64]",
    limit: float,
    options: dict[str, Any],
) -> Chosen:
    """The cheapest choice of one pattern for each group up to a limit."""
    import numpy as np  # noqa: PLC0415
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415
    from scipy.sparse import csr_array  # noqa: PLC0415

    constraints = [
        LinearConstraint(table[:, 1:].T, -np.inf, room + _EPS),
        LinearConstraint(csr_array((np.ones(len(group)), (group, np.arange(len(group))))), 1, 1),
    ]
    if limit < inf:
        constraints.append(LinearConstraint(table[:, :1].T / limit, -np.inf, 1.0))
    result = milp(
        table[:, 0], integrality=np.ones(len(table)), bounds=Bounds(0, 1), constraints=constraints, options=options
    )
    rows = None if result.x is None else np.flatnonzero(result.x > 0.5)
    bound = result.mip_dual_bound
    return Chosen(rows, result.status in (_SOLVED, _INFEASIBLE), 0.0 if bound is None else float(bound))
