"""Where accuracy is the goal: what instances deliver of it, whether more is worth a swap, and what other workers might add. Pure.

Selection sends each query to the most accurate instance that is in time, so what instances deliver follows from their number alone
(`services.core.planning.flow`). The machines are taken as they are: swaps for accuracy never ask for new ones.
"""

from collections.abc import Iterator, Mapping
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from services.autoscaler.models.coverage import missing
from services.autoscaler.models.problem import Situation
from services.core.cost import merit
from services.core.digest import cores_of
from services.core.planning.flow import DeliveredAccuracy, deliver
from services.core.planning.plan import Plan
from services.core.planning.problem import CandidateVariant, PlanningProblem
from services.core.planning.program import Program, compile_program

GAIN = 0.002  # of mean accuracy: what a swap must bring
RESERVE = 1.5  # times slack: what those that stay must carry before an instance that serves nothing goes
ROOMY = 1.15  # times slack: what is planned must carry the load and this much more, so that a load that varies does not undo it


def roomy(problem: PlanningProblem) -> PlanningProblem:
    """What is asked of the solver: plans for accuracy leave some room, so that between two plans neither is given up for the other."""
    return replace(problem, slack=problem.slack * ROOMY) if problem.goal == "accuracy" else problem


class AccuracyGap(Struct, frozen=True):
    """A load that less accurate variants serve for want of room. demand: index; load: items/s; variants: better ones, best first."""

    demand: int
    load: float
    variants: tuple[str, ...]
    instances: int
    now: float
    best: float


class Accuracy:
    """What instances deliver of the loads of a situation: the mean accuracy over all that was asked for."""

    def __init__(self, seen: Situation) -> None:
        self._seen = seen
        self._program: Program = compile_program(seen.problem)
        self._need = sum(group.need for group in self._program.groups)

    def _served(self, counts: Mapping[str, int]) -> DeliveredAccuracy:
        return deliver(self._program, [counts.get(one.name, 0) for one in self._seen.problem.candidates])

    def of(self, counts: Mapping[str, int]) -> float:
        """With so many instances of each variant; what they cannot carry counts as 0."""
        return self._served(counts).worth / self._need if self._need > 0 else 0.0

    def running(self) -> dict[str, int]:
        """What there is, with what is being loaded."""
        return {one.name: one.running for one in self._seen.problem.candidates}

    def spares(self, one: CandidateVariant) -> bool:
        """Whether one instance of this variant may go.

        Either nothing is lost by it, and those that stay carry a good deal more than there is: what could serve less accurately
        is kept as long as the others might soon be full, so that a step of the load need not wait for a load. Or all that can
        answer, each query served by the most accurate, would take more cores than there are.
        """
        left = dict(self._seen.serving)
        left[one.name] = max(0, left[one.name] - 1)
        if self.crowded():
            return True
        problem = self._seen.problem
        if missing(problem.candidates, problem.demands, left, problem.slack * RESERVE):
            return False
        return self.of(left) >= self.of(self._seen.serving) - GAIN

    def fallbacks(self) -> set[str]:
        """For each class with load the variant of which one instance stays, or comes: of those that this worker can have the one
        that serves most. Queries that come while the accurate ones are busy go there instead of being refused.
        """
        found = set()
        for demand in self._seen.problem.demands:
            able = [one for one in self._seen.problem.candidates if one.name in self._seen.here and demand.accepts(one)]
            if demand.load > 0 and able:
                found.add(max(able, key=lambda one: (one.saturation_qps, -one.cost_per_s, one.name)).name)
        return found

    def crowded(self) -> bool:
        """Whether what can answer, at its load, takes more of this worker's cores than there are."""
        problem = self._seen.problem
        served = self._served(self._seen.serving)
        taken = dict.fromkeys(problem.time_shared, 0.0)
        for c, one in enumerate(problem.candidates):
            for name in taken.keys() & one.uses.keys():
                taken[name] += cores_of(self._seen.records[one.name]) * served.of(c) / one.saturation_qps
        return any(cores > problem.resources[name] * (1 + 1e-6) for name, cores in taken.items())

    def missed(self, plan: Plan) -> Iterator[AccuracyGap]:
        """What this plan has less accurate variants serve than might be."""
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
