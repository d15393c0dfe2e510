"""When a plan is carried out: at once where load is not carried, after T_v where it would only save, never with a dip. Pure.

INFaaS (Romero et al., section 4.2.2): scale up as soon as the headroom is below the slack; scale down, or to a cheaper variant,
only after the condition has held for T_v = max(load latency, a minimum) without a break. Changes are made before others are
broken: an instance goes only when those that can answer without it carry every class, whichever solver wants it gone.
Where accuracy is the goal the same holds: less of it at once where load is not carried, more of it after T_v.
"""

from collections.abc import Iterator, Mapping
from math import ceil, floor, inf
from typing import NamedTuple

from bus.messages.scaling import ClassDemand
from services.autoscaler.models.accuracy import GAIN, Accuracy, roomy
from services.autoscaler.models.coverage import missing
from services.autoscaler.models.problem import Situation
from services.core.planning.plan import Action, Plan
from services.core.planning.problem import CandidateVariant, PlanningProblem


class InstanceChange(NamedTuple):
    """This worker is to have so many instances of a variant. kind: as scaling events name actions."""

    variant: str
    instances: int
    kind: str
    reason: str


class CapacityRequest(NamedTuple):
    """What another worker should load. demand: index; variants: those that would do, best first; load: items/s."""

    demand: int
    why: str
    variants: tuple[str, ...]
    load: float
    instances: int
    reason: str


class ScalingDecision(NamedTuple):
    changes: tuple[InstanceChange, ...] = ()
    elsewhere: tuple[CapacityRequest, ...] = ()


class InfaasScaling:
    """The paper's way. hold_s: the least T_v. Remembers since when each change has been wanted without a break."""

    name = "infaas"

    def __init__(self, hold_s: float) -> None:
        self._hold = hold_s
        self._since: dict[tuple[str, str], float] = {}

    @property
    def waiting(self) -> bool:
        """Whether something is wanted that has not been wanted for long enough."""
        return bool(self._since)

    @staticmethod
    def short(now: Situation) -> dict[int, float]:
        """Items/s that each demand lacks, what is being loaded counted as there."""
        return _lacking(now.problem)

    @staticmethod
    def soon(now: Situation) -> dict[int, float]:
        """What they will lack when the load grows by what plans leave room for: the same where cost is the goal."""
        return _lacking(roomy(now.problem))

    def decide(self, seen: Situation, plan: Plan, now: float) -> ScalingDecision:
        """What to do of this plan now."""
        short = self.short(seen)
        outlook = _outlook(seen, plan, short, short or self.soon(seen))
        changes: list[InstanceChange] = []
        elsewhere: list[CapacityRequest] = []
        wanted: set[tuple[str, str]] = set()
        by_name = {one.name: one for one in seen.problem.candidates}
        for action in plan.actions:
            one, more = by_name[action.variant], action.delta > 0
            if more and outlook.pointless:
                continue
            key = (one.name, "more" if more else "fewer")
            wanted.add(key)
            held = now - self._since.setdefault(key, now)
            if more:
                if outlook.soon or held >= self._hold:
                    order = outlook.more(one, action, held)
                    if isinstance(order, InstanceChange):
                        changes.append(order)
                    else:
                        elsewhere.append(order)
            elif one.name in seen.here:
                if one.name in seen.offline and not short:  # a job's: it may stay as long as nobody lacks anything
                    self._since[key] = now
                elif held >= max(one.load_s, self._hold) and outlook.spares(one):
                    changes.append(outlook.fewer(one, held))
        self._since = {key: at for key, at in self._since.items() if key in wanted}
        if short:
            changes.extend(_bridging(changes, elsewhere, by_name, seen))
            elsewhere.extend(_unmet(seen, plan))
        if outlook.accuracy and not seen.alone:
            elsewhere.extend(_missed(outlook.accuracy, plan))
        changes.extend(_to_fall_back_on(outlook.kept, changes, by_name, seen))
        for change in changes:  # the next change of the same variant waits its own time
            self._since.pop((change.variant, "fewer"), None)
        return ScalingDecision(tuple(changes), tuple(elsewhere))


class _Outlook(NamedTuple):
    """What follows from a situation for every action of its plan.

    short, soon: items/s that demands lack now, and would once the load has grown. Where accuracy is the goal, else None and
    nothing: accuracy; kept: variants of which one stays to fall back on; before, after: what is delivered now and by the plan.
    """

    seen: Situation
    short: dict[int, float]
    soon: dict[int, float]
    accuracy: Accuracy | None
    kept: set[str]
    before: float
    after: float

    @property
    def pointless(self) -> bool:
        """Whether more instances would bring neither load nor accuracy worth mentioning."""
        return self.accuracy is not None and not self.soon and self.after < self.before + GAIN

    def more(self, one: CandidateVariant, action: Action, held: float) -> InstanceChange | CapacityRequest:
        """So many instances more, here or, of hardware that is not here, on another worker. held: s that they have been wanted."""
        seen = self.seen
        why = _why_more(seen, one, self.soon) if self.soon else f"cheaper than what runs, for {held:.0f} s"
        if self.accuracy:
            swap = f"{self.before:.4g} -> {self.after:.4g}"
            why = f"{why}; accuracy {swap}" if self.soon else f"more accurate: {swap}, for {held:.0f} s"
        if one.name in seen.here:
            return InstanceChange(one.name, one.running + action.delta, action.kind, why)
        k = next(k for k, demand in enumerate(seen.problem.demands) if demand.accepts(one))
        need, load = seen.problem.slack * seen.problem.demands[k].load, action.delta * one.saturation_qps
        cause = "accuracy" if self.accuracy and not self.short else "hardware"
        why = f"{action.kind}: {why}"
        return CapacityRequest(k, cause, (one.name,), min(load, need) if need > 0 else load, action.delta, why)

    def spares(self, one: CandidateVariant) -> bool:
        """Whether one instance of this variant may go without anybody noticing."""
        if one.name in self.kept and self.seen.serving[one.name] <= 1:
            return False
        return _carried_without(self.seen, one) and (self.accuracy is None or self.accuracy.spares(one))

    def fewer(self, one: CandidateVariant, held: float) -> InstanceChange:
        """One instance less. held: s that it has not been wanted."""
        why = f"not needed for {held:.0f} s: the others carry {_load(self.seen, one):.4g} items/s"
        if self.accuracy and self.accuracy.crowded():
            why = f"cores are short for {held:.0f} s: the others carry {_load(self.seen, one):.4g} items/s with them"
        return InstanceChange(one.name, one.running - 1, "unload", why)


def _outlook(seen: Situation, plan: Plan, short: dict[int, float], soon: dict[int, float]) -> _Outlook:
    if seen.problem.goal != "accuracy":
        return _Outlook(seen, short, soon, None, set(), 0.0, 0.0)
    accuracy = Accuracy(seen)
    before, after = accuracy.of(accuracy.running()), accuracy.of(plan.instances)
    return _Outlook(seen, short, soon, accuracy, accuracy.fallbacks(), before, after)


def _carried_without(seen: Situation, one: CandidateVariant) -> bool:
    """Whether those that can answer now carry every class without one instance of this variant.

    Of other workers' hardware only what is cheaper counts: two workers that relied on each other would both let go.
    """
    problem = seen.problem
    price = (one.cost_per_s, one.name)
    left = {
        other.name: seen.serving[other.name]
        for other in problem.candidates
        if other.name in seen.here or (other.cost_per_s, other.name) < price
    }
    left[one.name] = max(0, left[one.name] - 1)
    return not missing(problem.candidates, problem.demands, left, problem.slack)


def _lacking(problem: PlanningProblem) -> dict[int, float]:
    running = {one.name: one.running for one in problem.candidates}
    return missing(problem.candidates, problem.demands, running, problem.slack)


def _missed(accuracy: Accuracy, plan: Plan) -> Iterator[CapacityRequest]:
    """What other workers might serve more accurately, if they have room."""
    for one in accuracy.missed(plan):
        why = f"more accurate: {one.now:.4g} -> {one.best:.4g} for {one.load:.4g} items/s"
        yield CapacityRequest(one.demand, "accuracy", one.variants, one.load, one.instances, why)


def _bridging(
    changes: list[InstanceChange],
    elsewhere: list[CapacityRequest],
    by_name: dict[str, CandidateVariant],
    seen: Situation,
) -> Iterator[InstanceChange]:
    """Quick instances for as long as what was just ordered, here or of other workers, takes to load."""
    ordered = {c.variant: c.instances - by_name[c.variant].running for c in changes if c.kind != "unload"}
    ordered |= {one.variants[0]: one.instances for one in elsewhere if one.variants[0] not in ordered}
    slowest = max((by_name[name] for name in ordered), key=lambda one: one.load_s, default=None)
    for name, count in bridges(seen, ordered).items():
        one = by_name[name]
        why = f"serves until {slowest.name} is loaded, in {slowest.load_s:.1f} s" if slowest else ""
        yield InstanceChange(name, one.running + count, "replicate" if one.running else "load", why)


def _to_fall_back_on(
    kept: set[str], changes: list[InstanceChange], by_name: dict[str, CandidateVariant], seen: Situation
) -> Iterator[InstanceChange]:
    """One instance of each of these, where there is room: cores are shared, and it uses them only while it serves."""
    ordered = {c.variant: c.instances - by_name[c.variant].running for c in changes if c.kind != "unload"}
    free = room(seen, ordered)
    for name in sorted(kept - ordered.keys()):
        one = by_name[name]
        takes = {pool: amount for pool, amount in one.uses.items() if pool not in seen.problem.time_shared}
        fits = all(free.get(pool, inf) >= amount for pool, amount in (*takes.items(), ("", one.cost_per_s)))
        if not one.running and one.most is None and fits:
            yield InstanceChange(name, 1, "load", "to fall back on while what is more accurate is full")


def _why_more(seen: Situation, one: CandidateVariant, short: dict[int, float]) -> str:
    problem = roomy(seen.problem)
    for k, lack in short.items():
        demand = problem.demands[k]
        if demand.accepts(one):
            needs = seen.classes[k]
            of = f"{seen.apps[k]}{told(needs.needs) if needs is not None else ''}"
            if demand.load <= 0:
                return f"{of} must have {demand.least} instances"
            headroom = max(0.0, problem.slack * demand.load - lack) / demand.load
            return f"headroom {headroom:.2f} < {problem.slack:.4g} for {demand.load:.4g} items/s of {of}"
    return "other classes need what served this one"


def told(needs: ClassDemand) -> str:
    """A class in words, such as " (<= 50 ms, accuracy >= 0.9)"."""
    return f" ({', '.join(parts)})" if (parts := list(_parts(needs))) else ""


def _parts(needs: ClassDemand) -> Iterator[str]:
    if needs.latency_ms is not None:
        yield f"<= {needs.latency_ms:g} ms"
    if needs.accuracy > 0:
        yield f"accuracy >= {needs.accuracy:g}"
    if needs.cost is not None:
        yield f"<= {needs.cost:g} US$ per 1,000"
    for name in (needs.model, needs.version, needs.variant):
        if name is not None:
            yield name


def _load(seen: Situation, one: CandidateVariant) -> float:
    return sum(demand.load for demand in seen.problem.demands if demand.accepts(one))


def _unmet(seen: Situation, plan: Plan) -> Iterator[CapacityRequest]:
    """What the plan could not carry: the worker is full, so the controller is asked. It may add machines that nobody has yet."""
    for one in plan.unmet:
        demand = seen.problem.demands[one.demand]
        able = [c for c in seen.problem.candidates if demand.accepts(c) and c.most is None]
        able.sort(key=lambda c: c.cost_per_s / c.saturation_qps)
        names = (*(c.name for c in able), *(seen.absent[one.demand] if seen.absent else ()))
        if names:
            count = max(1, round(one.missing / able[0].saturation_qps + 0.499) if able else 1, one.instances)
            yield CapacityRequest(one.demand, "full", names, one.missing, count, one.reason)


# -- What serves until a slow load is done: quick instances beside those that run, where there is room. Pure.

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


def _takes(one: CandidateVariant) -> dict[str, float]:
    return {**one.uses, "": one.cost_per_s}


def room(seen: Situation, ordered: Mapping[str, int]) -> dict[str, float]:
    """What is left of each resource, and of the budget (""), beside all that runs and is ordered."""
    room = {**seen.problem.resources, "": seen.problem.budget_per_s}
    for one in seen.problem.candidates:
        count = one.running + ordered.get(one.name, 0)
        for pool, amount in _takes(one).items():
            room[pool] = room.get(pool, inf) - count * amount
    return room


def _fitting(one: CandidateVariant, room: Mapping[str, float]) -> int:
    most = min((room.get(pool, inf) / amount for pool, amount in _takes(one).items() if amount > 0), default=0.0)
    return 0 if most < 1 else 10**6 if most == inf else floor(most + 1e-9)
