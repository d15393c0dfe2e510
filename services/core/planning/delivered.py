"""What accuracy instances deliver when each load goes to the most accurate ones that have something left, as selection sends it.

What a candidate serves counts the same whichever group it is for, so this is a flow with weights on one side only: candidates in
order of accuracy, each as much as it can without taking from those before it, lead to the most that can be reached (the greedy
algorithm on a polymatroid; Edmonds, 1970), and carry as much load as can be carried.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from services.core.goal import merit
from services.core.planning.program import Program, cost

SAME = 1e-4  # of accuracy: plans that are closer count as equally accurate, and cost decides
_EPS = 1e-9


class Delivered(NamedTuple):
    """given: by group, items/s from each candidate. carried: all of them. worth: the same, times accuracy."""

    given: list[dict[int, float]]
    carried: float
    worth: float

    @property
    def accuracy(self) -> float:
        """The mean over what is carried; 0 when nothing is."""
        return self.worth / self.carried if self.carried > 0 else 0.0

    def of(self, candidate: int) -> float:
        """Items/s that this one serves."""
        return sum(given.get(candidate, 0.0) for given in self.given)


def deliver(program: Program, counts: Sequence[int]) -> Delivered:
    """So many instances of each candidate, and the loads of the programme."""
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
        while able > _EPS * most and (path := _path(program, c, left, given)):
            amount = _push(path, able, left, given)
            able -= amount
            carried += amount
            worth += amount * merit(candidates[c].accuracy)
    return Delivered(given, carried, worth)


class Worth(NamedTuple):
    """What a plan is worth, in order of importance: items/s carried, their mean accuracy, cost."""

    carried: float
    accuracy: float
    cost: float

    def beats(self, other: "Worth") -> bool:
        if abs(self.carried - other.carried) > 1e-6 * max(self.carried, other.carried):
            return self.carried > other.carried
        if abs(self.accuracy - other.accuracy) > SAME:
            return self.accuracy > other.accuracy
        return self.cost < other.cost


def worth_of(program: Program, counts: Sequence[int]) -> Worth:
    """Of a plan with so many instances."""
    served = deliver(program, counts)
    return Worth(served.carried, served.accuracy, cost(program, counts))


def _path(
    program: Program, start: int, left: Sequence[float], given: Sequence[dict[int, float]]
) -> list[tuple[int, int]]:
    """(candidate, group) steps: each takes the group's place from the next candidate, until a group lacks something; [] if none."""
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
    """As much as goes along the path."""
    amount = min(able, left[path[-1][1]])
    for (_, g), (other, _) in pairwise(path):
        amount = min(amount, given[g][other])
    for i, (c, g) in enumerate(path):
        given[g][c] = given[g].get(c, 0.0) + amount
        if i + 1 < len(path):
            given[g][path[i + 1][0]] -= amount
    left[path[-1][1]] -= amount
    return amount
