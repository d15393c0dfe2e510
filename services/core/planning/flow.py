"""Whether instances carry all loads when they share them as well as can be: a maximum flow by shortest augmenting paths."""

from collections.abc import Sequence

from services.core.planning.program import Program

_EPS = 1e-9


def spread(program: Program, counts: Sequence[int]) -> list[dict[int, float]] | None:
    """By group: items/s from each candidate, so that every group has what it needs; None when that cannot be.

    counts: of all candidates. Groups that nobody can carry are left out. A group that finds nothing to spare takes from a group
    that finds something elsewhere (Edmonds and Karp, 1972).
    """
    spare = [n * supply.rate for n, supply in zip(counts, program.fresh, strict=True)]
    given: list[dict[int, float]] = [{} for _ in program.groups]
    for g, group in enumerate(program.groups):
        left = group.need
        if not group.candidates:
            continue
        while left > _EPS * group.need:
            found = _path(program, g, spare, given)
            if found is None:
                return None
            path, end = found
            amount = min(left, spare[end])
            for taker, c in zip(path[1:], _through(path), strict=True):
                amount = min(amount, given[taker[0]][c])
            spare[end] -= amount
            for h, c in path:
                given[h][c] = given[h].get(c, 0.0) + amount
            for taker, c in zip(path[1:], _through(path), strict=True):
                given[taker[0]][c] -= amount
            left -= amount
    return given


def _through(path: Sequence[tuple[int, int]]) -> list[int]:
    """What each group but the last takes from the one after it."""
    return [c for _, c in path[:-1]]


def _path(
    program: Program, g: int, spare: Sequence[float], given: Sequence[dict[int, float]]
) -> tuple[list[tuple[int, int]], int] | None:
    """Groups from g on, each with the candidate that it takes more from; at the end one that has something to spare."""
    before: dict[int, tuple[int, int]] = {}
    queue = [g]
    for h in queue:
        enough = _EPS * program.groups[h].need
        for c in program.groups[h].candidates:
            if spare[c] > enough:
                path = [(h, c)]
                while path[0][0] != g:
                    path.insert(0, before[path[0][0]])
                return path, c
        for c in program.groups[h].candidates:
            for k in program.home[c]:
                if k != g and k not in before and given[k].get(c, 0.0) > enough:
                    before[k] = (h, c)
                    queue.append(k)
    return None
