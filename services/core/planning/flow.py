"""How instances share the loads: whether they carry all of them, and what accuracy they deliver. Flows by shortest augmenting paths."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from services.core.cost import merit
from services.core.planning.program import Program, cost

_EPS = 1e-9


def spread(program: Program, counts: Sequence[int]) -> list[dict[int, float]] | None:
    """By group: items/s from each candidate, so that every group has what it needs. None when that is impossible.

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
            found = _path_to_spare(program, g, spare, given)
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
    """The candidates that each group, except the last, takes from the group after it."""
    return [c for _, c in path[:-1]]


def _path_to_spare(
    program: Program, g: int, spare: Sequence[float], given: Sequence[dict[int, float]]
) -> tuple[list[tuple[int, int]], int] | None:
    """Groups from g on, each with the candidate that it takes more from. The last candidate has something to spare."""
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


# -- What accuracy instances deliver, when each load goes to the most accurate instances that have something left, as selection sends it
#
# What a candidate serves counts the same for every group. So this is a flow with weights on one side only. Take the candidates in order
# of accuracy, and let each serve as much as it can without taking anything from those before it. That leads to the most accuracy (the
# greedy algorithm on a polymatroid; Edmonds, 1970), and carries as much load as can be carried.

SAME = 1e-4  # accuracies of plans that differ by less count as equal, and cost decides


class DeliveredAccuracy(NamedTuple):
    """given: by group, items/s from each candidate. carried: their sum. worth: their sum, each times its accuracy."""

    given: list[dict[int, float]]
    carried: float
    worth: float

    @property
    def accuracy(self) -> float:
        """The mean over what is carried. 0 when nothing is carried."""
        return self.worth / self.carried if self.carried > 0 else 0.0

    def of(self, candidate: int) -> float:
        """Items/s that this candidate serves."""
        return sum(given.get(candidate, 0.0) for given in self.given)


def deliver(program: Program, counts: Sequence[int]) -> DeliveredAccuracy:
    """What so many instances of each candidate deliver for the loads of the programme."""
    candidates = program.problem.candidates
    left = [group.need for group in program.groups]
    given: list[dict[int, float]] = [{} for _ in program.groups]
    carried = worth = 0.0
    order = sorted(
        (c for c, n in enumerate(counts) if n and program.home[c]), key=lambda c: -merit(candidates[c].accuracy)
    )
    for c in order:
        able = counts[c] * candidates[c].saturation_qps
        most = able
        while able > _EPS * most and (path := _path_to_need(program, c, left, given)):
            amount = _push(path, able, left, given)
            able -= amount
            carried += amount
            worth += amount * merit(candidates[c].accuracy)
    return DeliveredAccuracy(given, carried, worth)


class PlanValue(NamedTuple):
    """What a plan is worth, in order of importance: items/s carried, their mean accuracy, cost."""

    carried: float
    accuracy: float
    cost: float

    def beats(self, other: "PlanValue") -> bool:
        if abs(self.carried - other.carried) > 1e-6 * max(self.carried, other.carried):
            return self.carried > other.carried
        if abs(self.accuracy - other.accuracy) > SAME:
            return self.accuracy > other.accuracy
        return self.cost < other.cost


def value_of(program: Program, counts: Sequence[int]) -> PlanValue:
    """The value of a plan with so many instances of each candidate."""
    served = deliver(program, counts)
    return PlanValue(served.carried, served.accuracy, cost(program, counts))


def _path_to_need(
    program: Program, start: int, left: Sequence[float], given: Sequence[dict[int, float]]
) -> list[tuple[int, int]]:
    """Steps (candidate, group): each candidate takes its group over from the next one; the last group still lacks something. [] if none."""
    came: dict[
        int, tuple[int, int]
    ] = {}  # group: the candidate that would serve it, and the group that one leaves (-1: none)
    waiting = [(start, -1)]
    seen = {start}
    for c, leaves in waiting:
        for g in program.home[c]:
            if g in came:
                continue
            came[g] = (c, leaves)
            if left[g] > _EPS * program.groups[g].need:
                path = []
                at = g
                while at >= 0:
                    c, leaves = came[at]
                    path.append((c, at))
                    at = leaves
                return path[::-1]
            for other, amount in given[g].items():
                if other not in seen and amount > _EPS * program.groups[g].need:
                    seen.add(other)
                    waiting.append((other, g))
    return []


def _push(path: Sequence[tuple[int, int]], able: float, left: list[float], given: list[dict[int, float]]) -> float:
    """Send as much as possible along the path. Returns how much."""
    amount = min(able, left[path[-1][1]])
    for (_, g), (other, _) in pairwise(path):
        amount = min(amount, given[g][other])
    for i, (c, g) in enumerate(path):
        given[g][c] = given[g].get(c, 0.0) + amount
        if i + 1 < len(path):
            given[g][path[i + 1][0]] -= amount
    left[path[-1][1]] -= amount
    return amount
