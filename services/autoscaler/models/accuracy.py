"""The goal "accuracy": what instances deliver of it, whether a swap is worth it, and what other workers might add. Pure.

Selection sends each query to the most accurate instance that is in time. So what instances deliver follows from their numbers
(`services.core.planning.flow`). Swaps for accuracy never ask for new machines.
"""

from collections.abc import Iterator, Mapping
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from services.autoscaler.models.coverage import shortfall
from services.autoscaler.models.problem import Situation
from services.core.cost import merit
from services.core.digest import cores_of
from services.core.planning.flow import DeliveredAccuracy, deliver
from services.core.planning.plan import Plan
from services.core.planning.problem import CandidateVariant, PlanningProblem
from services.core.planning.program import Program, compile_program

GAIN = 0.002  # of mean accuracy, that a swap must bring
RESERVE = 1.5  # times slack × load, that the others must carry before an unused instance is unloaded
HEADROOM = 1.15  # times slack × load, that a plan must carry, so that a varying load does not undo it


def with_headroom(problem: PlanningProblem) -> PlanningProblem:
    """The problem for the solver. Plans for accuracy keep some headroom, so that a varying load does not alternate between two plans."""
    return replace(problem, slack=problem.slack * HEADROOM) if problem.goal == "accuracy" else problem


class AccuracyGap(Struct, frozen=True):
    """A load that less accurate variants serve because room is short. demand: index. load: items/s. variants: better ones, best first.

    instances: of the first, that carry the load. now, best: mean accuracy of the load, as it is and at most.
    """

    demand: int
    load: float
    variants: tuple[str, ...]
    instances: int
    now: float
    best: float


class Accuracy:
    """The mean accuracy that instances deliver over all load of a situation."""

    def __init__(self, seen: Situation) -> None:
        self._seen = seen
        self._program: Program = compile_program(seen.problem)
        self._need = sum(group.need for group in self._program.groups)

    def _served(self, counts: Mapping[str, int]) -> DeliveredAccuracy:
        return deliver(self._program, [counts.get(one.name, 0) for one in self._seen.problem.candidates])

    def of(self, counts: Mapping[str, int]) -> float:
        """Mean accuracy with so many instances of each variant. Load that they cannot carry counts as 0."""
        return self._served(counts).worth / self._need if self._need > 0 else 0.0

    def running(self) -> dict[str, int]:
        """The present instances, with those that are loading."""
        return {one.name: one.running for one in self._seen.problem.candidates}

    def can_spare(self, one: CandidateVariant) -> bool:
        """Whether one instance of this variant may be unloaded.

        It may if no accuracy is lost and the others carry `RESERVE` times the load: a less accurate instance is kept while the others
        might soon be full, so that a step of the load need not wait for a load. It may also if cores are short.
        """
        left = dict(self._seen.serving)
        left[one.name] = max(0, left[one.name] - 1)
        if self.cores_short():
            return True
        problem = self._seen.problem
        if shortfall(problem.candidates, problem.demands, left, problem.slack * RESERVE):
            return False
        return self.of(left) >= self.of(self._seen.serving) - GAIN

    def fallbacks(self) -> set[str]:
        """For each class with load, the variant of which one instance is always kept: the one that serves most, of this worker's.

        It serves queries that come while the accurate instances are busy, which would be refused otherwise.
        """
        found = set()
        for demand in self._seen.problem.demands:
            able = [one for one in self._seen.problem.candidates if one.name in self._seen.here and demand.accepts(one)]
            if demand.load > 0 and able:
                found.add(max(able, key=lambda one: (one.saturation_qps, -one.cost_per_s, one.name)).name)
        return found

    def cores_short(self) -> bool:
        """Whether the instances that can answer need more cores for their load than this worker has."""
        problem = self._seen.problem
        served = self._served(self._seen.serving)
        taken = dict.fromkeys(problem.time_shared, 0.0)
        for c, one in enumerate(problem.candidates):
            for name in taken.keys() & one.uses.keys():
                taken[name] += cores_of(self._seen.records[one.name]) * served.of(c) / one.saturation_qps
        return any(cores > problem.resources[name] * (1 + 1e-6) for name, cores in taken.items())

    def gaps(self, plan: Plan) -> Iterator[AccuracyGap]:
        """The loads that this plan serves less accurately than other variants could."""
        problem = self._seen.problem
        served = self._served(plan.instances)
        for group, given in zip(self._program.groups, served.given, strict=True):
            able = sorted(
                (c for c in group.candidates if problem.candidates[c].most is None),
                key=lambda c: (-merit(problem.candidates[c].accuracy), problem.candidates[c].cost_per_s),
            )
            if not able or group.need <= 0:
                continue
            best = merit(problem.candidates[able[0]].accuracy)
            load = group.need - sum(x for c, x in given.items() if merit(problem.candidates[c].accuracy) > best - GAIN)
            now = sum(x * merit(problem.candidates[c].accuracy) for c, x in given.items()) / group.need
            better = [problem.candidates[c] for c in able if merit(problem.candidates[c].accuracy) > now + GAIN]
            if load > 0.01 * group.need and better and best > now + GAIN:
                count = max(1, ceil(load / better[0].saturation_qps - 1e-6))
                names = tuple(one.name for one in better)
                yield AccuracyGap(group.demands[0], load, names, count, now, merit(better[0].accuracy))
