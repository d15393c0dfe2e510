"""Whether so many instances carry the demands, if each item goes to a variant that may answer it: a maximum flow. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence

from services.core.planning.problem import CandidateVariant, RequirementClass

TOLERANCE = 1e-9


def shortfall(
    candidates: Sequence[CandidateVariant], demands: Sequence[RequirementClass], counts: Mapping[str, int], slack: float
) -> dict[int, float]:
    """By index of demand: items/s that so many instances of each candidate lack to carry slack × load. Carried demands are left out.

    A candidate's throughput is shared among the demands that it may answer (Σ_k x_vk <= Q_v N_v). If not all can be carried, it is
    arbitrary which demand is short. A demand with fewer instances than its `least` lacks its whole load.
    """
    able = accepted(candidates, demands)
    left = [one.saturation_qps * counts.get(one.name, 0) for one in candidates]
    need = [slack * demand.load for demand in demands]
    flow: list[dict[int, float]] = [{} for _ in demands]
    for k in sorted(range(len(demands)), key=lambda k: len(able[k])):
        while need[k] > TOLERANCE * slack * demands[k].load and _augment(k, able, left, need, flow):
            pass
    short = {k: lack for k, lack in enumerate(need) if lack > 1e-6 * slack * demands[k].load}
    for k, demand in enumerate(demands):
        if sum(counts.get(candidates[c].name, 0) for c in able[k]) < demand.least:
            short[k] = max(short.get(k, 0.0), demand.load)
    return short


def accepted(candidates: Sequence[CandidateVariant], demands: Sequence[RequirementClass]) -> list[list[int]]:
    """By demand, the indices of the candidates that may answer it."""
    by_app: dict[str, list[int]] = {}
    for c, one in enumerate(candidates):
        for app in one.apps:
            by_app.setdefault(app, []).append(c)
    return [[c for c in by_app.get(demand.app, ()) if demand.accepts(candidates[c])] for demand in demands]


def _augment(
    start: int, able: list[list[int]], left: list[float], need: list[float], flow: list[dict[int, float]]
) -> bool:
    """Find room for some of one demand by a shortest augmenting path, which moves others aside. False: there is none."""
    # By candidate: the demand that takes it, and the candidate that this demand leaves.
    came: dict[int, tuple[int, int | None]] = {}
    queue: deque[tuple[int, int | None]] = deque([(start, None)])
    seen = {start}
    while queue:
        k, leaving = queue.popleft()
        for c in able[k]:
            if c in came:
                continue
            came[c] = (k, leaving)
            if left[c] > 0:
                _push(c, came, left, need, flow, start)
                return True
            for other, given in enumerate(flow):
                if other not in seen and given.get(c, 0.0) > 0:
                    seen.add(other)
                    queue.append((other, c))
    return False


def _push(
    end: int,
    came: dict[int, tuple[int, int | None]],
    left: list[float],
    need: list[float],
    flow: list[dict[int, float]],
    start: int,
) -> None:
    amount, c = min(left[end], need[start]), end
    while True:
        k, leaving = came[c]
        if leaving is None:
            break
        amount, c = min(amount, flow[k][leaving]), leaving
    left[end] -= amount
    need[start] -= amount
    c = end
    while True:
        k, leaving = came[c]
        flow[k][c] = flow[k].get(c, 0.0) + amount
        if leaving is None:
            return
        flow[k][leaving] -= amount
        c = leaving
