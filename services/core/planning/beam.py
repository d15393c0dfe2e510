"""One pattern for each group, at least cost, within the room: group after group, keeping the most promising beginnings.

A beginning is left out when even a lower bound on what it leads to is above the limit: the room still free is given prices, and
all groups to come their cheapest patterns at these prices (Lagrangian relaxation), for several sets of prices at once. When
none was left out for lack of space, the search was complete: dynamic programming over groups.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from numpy import float64, intp
    from numpy.typing import NDArray

_EPS = 1e-9
_TOGETHER = (1.0, 0.0, 0.5, 2.0, 5.0)  # the prices given, times these
_ALONE = (3.0, 0.3)  # and one row's alone, times these


class Best(NamedTuple):
    """rows: the patterns chosen, one for each group; None when none was found. complete: no better one within the limit."""

    cost: float
    rows: "NDArray[intp] | None"
    complete: bool


def choose(
    patterns: "NDArray[float64]",
    group: "NDArray[intp]",
    room: "NDArray[float64]",
    prices: "NDArray[float64]",
    limit: float,
    width: int,
) -> Best:
    """Of patterns (cost, then what each takes of every row) the cheapest choice of one for each group, up to a limit.

    group: of each pattern, 0 and up without gaps. prices: of the rows, near those at which nothing is overdrawn. width: how
    many beginnings to keep.
    """
    import numpy as np  # noqa: PLC0415

    rates = np.array([prices * factor for factor in _TOGETHER] + _singly(prices)).T
    members = [np.flatnonzero(group == g) for g in range(int(group.max()) + 1)]
    members.sort(key=lambda of: float(np.ptp(patterns[of, 0])), reverse=True)
    lean = _coming(np.array([patterns[of, 1:].min(axis=0) for of in members]))
    bounds = _coming(np.array([(patterns[of, :1] + patterns[of, 1:] @ rates).min(axis=0) for of in members]))
    worth = room @ rates
    begun = np.zeros((1, patterns.shape[1]))
    back: list[tuple[NDArray[intp], NDArray[intp]]] = []
    complete = True
    for of, takes, costs in zip(members, lean, bounds, strict=True):
        joined = (begun[:, None, :] + patterns[of][None, :, :]).reshape(-1, patterns.shape[1])
        bound = (joined[:, :1] + joined[:, 1:] @ rates + (costs - worth)).max(axis=1)
        kept = np.flatnonzero((bound <= limit) & (joined[:, 1:] <= room + _EPS - takes).all(axis=1))
        if len(kept) > width:
            kept = kept[np.argpartition(bound[kept], width)[:width]]
            complete = False
        if not len(kept):
            return Best(limit, None, complete)
        begun = joined[kept]
        back.append((kept // len(of), of[kept % len(of)]))
    at = int(begun[:, 0].argmin())
    cost, rows = float(begun[at, 0]), []
    for before, row in reversed(back):
        rows.append(row[at])
        at = int(before[at])
    return Best(cost, np.array(rows), complete)


def _singly(prices: "NDArray[float64]") -> "list[NDArray[float64]]":
    changed = []
    for row in range(len(prices)):
        for factor in _ALONE:
            changed.append(prices.copy())
            changed[-1][row] *= factor
    return changed


def _coming(of_groups: "NDArray[float64]") -> "NDArray[float64]":
    """For each group the sum over all groups after it."""
    return of_groups[::-1].cumsum(axis=0)[::-1] - of_groups
