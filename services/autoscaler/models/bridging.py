"""What serves until a slow load is done: quick instances beside those that run, where there is room. Pure.

The paper weighs loading latency in the choice (lambda), so a variant that takes seconds to load is still chosen when it is much
cheaper; meanwhile the load that made it necessary would be refused. Instances of what loads in a fraction of that time carry
it as far as they fit; once the slow one serves they are not needed any more and go like all others.
"""

from collections.abc import Mapping
from math import ceil, floor, inf

from services.autoscaler.models.coverage import missing
from services.autoscaler.models.situation import Situation
from services.core.planning.problem import Candidate

SLOW_S = 1.0  # a load that takes longer is bridged
QUICKER = 4.0  # by what loads so many times as fast


def bridges(seen: Situation, ordered: Mapping[str, int]) -> dict[str, int]:
    """Instances to add, by variant, until those that are `ordered` (instances more of a variant) are loaded."""
    problem = seen.problem
    by_name = {one.name: one for one in problem.candidates}
    slowest = max((by_name[name].load_s for name in ordered), default=0.0)
    if slowest < SLOW_S:
        return {}
    lacking = missing(problem.candidates, problem.demands, seen.serving, problem.slack)
    left = room(seen, ordered)
    found: dict[str, int] = {}
    for k, lack in lacking.items():
        quick = [
            one
            for one in problem.candidates
            if one.name in seen.here
            and one.name not in ordered
            and one.most is None
            and QUICKER * one.load_s <= slowest
            and problem.demands[k].accepts(one)
        ]
        for one in sorted(quick, key=lambda one: (one.cost_per_s / one.saturation_qps, one.name)):
            count = min(ceil(lack / one.saturation_qps - 1e-9), _fitting(one, left))
            if count <= 0:
                continue
            for pool, amount in _takes(one).items():
                left[pool] = left.get(pool, inf) - count * amount
            found[one.name] = found.get(one.name, 0) + count
            lack -= count * one.saturation_qps
            if lack <= 0:
                break
    return found


def _takes(one: Candidate) -> dict[str, float]:
    return {**one.uses, "": one.cost_per_s}


def room(seen: Situation, ordered: Mapping[str, int]) -> dict[str, float]:
    """What is left of each resource, and of the budget (""), beside all that runs and is ordered."""
    room = {**seen.problem.resources, "": seen.problem.budget_per_s}
    for one in seen.problem.candidates:
        count = one.running + ordered.get(one.name, 0)
        for pool, amount in _takes(one).items():
            room[pool] = room.get(pool, inf) - count * amount
    return room


def _fitting(one: Candidate, room: Mapping[str, float]) -> int:
    most = min((room.get(pool, inf) / amount for pool, amount in _takes(one).items() if amount > 0), default=0.0)
    return 0 if most < 1 else 10**6 if most == inf else floor(most + 1e-9)
