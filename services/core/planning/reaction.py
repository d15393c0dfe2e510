"""The paper's greedy reaction to load that what runs cannot carry: replicate it, or upgrade to one other variant. Pure.

INFaaS (Romero et al., section 4.2.2): once the load takes more than what the running instances carry less a slack, the
model-autoscaler compares the cost of more instances of what runs with that of each other variant that meets the needs, for what is
missing, and takes the
cheapest that fits. A model-autoscaler reacts so between two plans of the leader, and `infaas plan --policy greedy` plans so.
"""

from collections.abc import Sequence
from math import ceil, inf
from typing import NamedTuple

from services.core.planning.problem import ROUNDING, CandidateVariant, PlanningProblem


class Reaction(NamedTuple):
    """added: new instances by variant. lacking: by demand (index), items/s that are not carried even with them."""

    added: dict[str, int]
    lacking: dict[int, float]


def lacking(problem: PlanningProblem) -> dict[int, float]:
    """By demand (index): items/s that the running instances lack for slack x its load. Demands that are carried are left out."""
    return _Search(problem, may_add=False).run().lacking


def react(problem: PlanningProblem) -> Reaction:
    """The instances to add. What runs stays: only a plan for all knows what can be spared."""
    return _Search(problem, may_add=True).run()


class _Search:
    """Demand after demand, those with the fewest candidates first; each takes from what the ones before it have left."""

    def __init__(self, problem: PlanningProblem, *, may_add: bool) -> None:
        self._problem = problem
        self._may_add = may_add
        self._added: dict[str, int] = {}
        self._spare = {one.name: one.saturation_qps * one.running for one in problem.candidates}
        self._left = problem.limits()
        for one in problem.candidates:
            self._use(one, one.running)

    def run(self) -> Reaction:
        able, missing = self._problem.accepted(), {}
        for k in sorted(range(len(able)), key=lambda k: len(able[k])):
            load = self._problem.slack * self._problem.demands[k].load
            need = self._serve(able[k], load * (1 - ROUNDING))
            while need > 0 and self._may_add and self._add(able[k], need):
                need = self._serve(able[k], need)
            if need > 0:
                missing[k] = need
        return Reaction(self._added, missing)

    def _serve(self, able: Sequence[CandidateVariant], need: float) -> float:
        """What the present instances leave of a need, items/s."""
        for one in able:
            given = min(need, self._spare[one.name])
            self._spare[one.name] -= given
            need -= given
        return need

    def _add(self, able: Sequence[CandidateVariant], need: float) -> bool:
        """Add instances of one variant: the cheapest of which enough fit, else of the one that carries most. False: none fits."""
        best: tuple[tuple[float, ...], str] | None = None
        chosen: tuple[CandidateVariant, int] | None = None
        for one in able:
            wanted = ceil(need / one.saturation_qps - ROUNDING)
            count = min(wanted, self._fitting(one))
            if count <= 0:
                continue
            price = count * self._problem.fresh_price(one)
            short = max(0.0, need - count * one.saturation_qps) if count < wanted else 0.0
            key = ((short, price, -one.running), one.name)
            if best is None or key < best:
                best, chosen = key, (one, count)
        if chosen is None:
            return False
        one, count = chosen
        self._use(one, count)
        self._added[one.name] = self._added.get(one.name, 0) + count
        self._spare[one.name] += count * one.saturation_qps
        return True

    def _fitting(self, one: CandidateVariant) -> int:
        room = inf if one.most is None else one.most - one.running - self._added.get(one.name, 0)
        for name, left in self._left.items():
            if one.takes(name) > 0:
                room = min(room, (left * (1 + ROUNDING) + ROUNDING) // one.takes(name))
        return int(max(0.0, min(room, 1e6)))

    def _use(self, one: CandidateVariant, count: int) -> None:
        for name in self._left:
            self._left[name] -= count * one.takes(name)
