"""When a plan is carried out: at once if load is not carried, after T_v if it only saves, never with a dip. Pure.

INFaaS (Romero et al., section 4.2.2) scales up as soon as the headroom is below the slack. It scales down, or to a cheaper variant,
only after the reason has waited for T_v = max(load latency, a minimum) without a break. Make before break: an instance is unloaded
only if those that can answer without it carry every class, whatever the plan says. For the goal "accuracy": less of it at once if
load is not carried, more of it after T_v.

A load that takes long is bridged. The paper weighs loading latency in the choice (lambda), so a variant that loads for seconds is
still chosen if it is much cheaper. Meanwhile the load that made it necessary would be refused. So instances that load in a fraction
of that time are added as far as they fit. Once the slow one serves they are not needed any more and are unloaded like all others.
"""

from collections.abc import Iterator, Mapping
from math import ceil, floor, inf
from typing import NamedTuple

from bus.messages.scaling import ClassDemand
from services.autoscaler.models.accuracy import GAIN, Accuracy, with_headroom
from services.autoscaler.models.coverage import shortfall
from services.autoscaler.models.problem import Situation
from services.core.planning.plan import Action, Plan, actions
from services.core.planning.problem import CandidateVariant, PlanningProblem

SLOW_S = 1.0  # s: a load that takes longer is bridged
QUICKER = 4.0  # by variants that load so many times as fast


class InstanceChange(NamedTuple):
    """How many instances of a variant this worker is to have. kind: the action of the scaling event."""

    variant: str
    instances: int
    kind: str
    reason: str


class CapacityRequest(NamedTuple):
    """What another worker should load. demand: index. variants: suitable ones, best first. load: items/s."""

    demand: int
    why: str
    variants: tuple[str, ...]
    load: float
    instances: int
    reason: str


class ScalingDecision(NamedTuple):
    changes: tuple[InstanceChange, ...] = ()
    requests: tuple[CapacityRequest, ...] = ()


class InfaasScaling:
    """The paper's policy. hold_s: the least T_v. It remembers since when each change has been planned without a break."""

    name = "infaas"

    def __init__(self, hold_s: float) -> None:
        self._hold = hold_s
        self._since: dict[tuple[str, str], float] = {}

    @property
    def waiting(self) -> bool:
        """Whether a change is planned that has not been planned for long enough."""
        return bool(self._since)

    @staticmethod
    def short(now: Situation) -> dict[int, float]:
        """Items/s that each demand lacks. Loading instances count as loaded."""
        return _lacking(now.problem)

    @staticmethod
    def soon(now: Situation) -> dict[int, float]:
        """The same if the load grows by the headroom of plans. For the goal "cost" there is no such headroom."""
        return _lacking(with_headroom(now.problem))

    def decide(self, seen: Situation, plan: Plan, now: float) -> ScalingDecision:
        """The changes of this plan that are made now."""
        short = self.short(seen)
        context = _plan_context(seen, plan, short, short or self.soon(seen))
        changes: list[InstanceChange] = []
        requests: list[CapacityRequest] = []
        planned: set[tuple[str, str]] = set()
        by_name = {one.name: one for one in seen.problem.candidates}
        for action in plan.actions:
            one, more = by_name[action.variant], action.delta > 0
            if more and context.pointless:
                continue
            key = (one.name, "more" if more else "fewer")
            planned.add(key)
            waited = now - self._since.setdefault(key, now)
            if more:
                if context.soon or waited >= self._hold:
                    order = context.more(one, action, waited)
                    if isinstance(order, InstanceChange):
                        changes.append(order)
                    else:
                        requests.append(order)
            elif one.name in seen.here:
                if one.name in seen.offline and not short:  # a job uses it: it stays as long as no load lacks capacity
                    self._since[key] = now
                elif waited >= max(one.load_s, self._hold) and context.can_spare(one):
                    changes.append(context.fewer(one, waited))
        self._since = {key: at for key, at in self._since.items() if key in planned}
        if short:
            changes.extend(_bridging(changes, requests, by_name, seen))
            requests.extend(_unmet_requests(seen, plan))
        if context.accuracy and not seen.alone:
            requests.extend(_accuracy_requests(context.accuracy, plan))
        changes.extend(_to_fall_back_on(context.kept, changes, by_name, seen))
        for change in changes:  # the next change of this variant waits for its own T_v
            self._since.pop((change.variant, "fewer"), None)
        return ScalingDecision(tuple(changes), tuple(requests))


def decision_of(seen: Situation, wanted: Mapping[str, int], policy: str) -> ScalingDecision:
    """What a user's own policy wants, within the bounds of the candidates. wanted: instances by variant; others stay as they are.

    What has no room here is asked of the controller, as what needs hardware of others. An instance is unloaded only when what was ordered
    and asked for in its place can answer.
    """
    problem = seen.problem
    counts = {one.name: _bounded(one, wanted.get(one.name, one.running)) for one in problem.candidates}
    found = actions(problem, list(counts.values()))
    left = room(seen, {})
    changes, requests = [], []
    coming: set[str] = set()  # apps for which instances come
    for one in problem.candidates:
        here, missing = one.name in seen.here, max(0, counts[one.name] - one.running)
        fits = min(missing, _fitting(one, left)) if here else 0
        left = {pool: amount - fits * _takes(one).get(pool, 0.0) for pool, amount in left.items()}
        if seen.serving[one.name] < (min(one.running, counts[one.name]) + fits if here else counts[one.name]):
            coming.update(one.apps)
        if not missing:
            continue
        kind = next(action.kind for action in found if action.variant == one.name)
        reason = f"{policy} wants {counts[one.name]} where {one.running} are"
        if fits:
            changes.append(InstanceChange(one.name, one.running + fits, kind, reason))
        if fits < missing:
            k = next(k for k, demand in enumerate(problem.demands) if demand.app in one.apps)
            names = (one.name, *(seen.absent[k] if here and seen.absent else ()))
            load, why = (missing - fits) * one.saturation_qps, "full" if here else "hardware"
            requests.append(CapacityRequest(k, why, names, load, missing - fits, f"{kind}: {reason}"))
    for one in problem.candidates:
        if one.name in seen.here and counts[one.name] < one.running and not coming.intersection(one.apps):
            reason = f"{policy} wants {counts[one.name]} where {one.running} are"
            changes.append(InstanceChange(one.name, counts[one.name], "unload", reason))
    return ScalingDecision(tuple(changes), tuple(requests))


def _bounded(one: CandidateVariant, count: int) -> int:
    return max(one.least, count if one.most is None else min(count, one.most))


class _PlanContext(NamedTuple):
    """What a situation and its plan mean for each of the plan's actions.

    short, soon: items/s that demands lack now, and if the load grows. Only for the goal "accuracy": accuracy; kept: variants of
    which one instance is always kept; before, after: the mean accuracy now and by the plan.
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
        """Whether more instances would carry no more load and bring no accuracy worth mentioning."""
        return self.accuracy is not None and not self.soon and self.after < self.before + GAIN

    def more(self, one: CandidateVariant, action: Action, waited: float) -> InstanceChange | CapacityRequest:
        """More instances: here, or on another worker if the hardware is not here. waited: seconds for which they have been planned."""
        seen = self.seen
        why = _why_more(seen, one, self.soon) if self.soon else f"cheaper than what runs, for {waited:.0f} s"
        if self.accuracy:
            swap = f"{self.before:.4g} -> {self.after:.4g}"
            why = f"{why}; accuracy {swap}" if self.soon else f"more accurate: {swap}, for {waited:.0f} s"
        if one.name in seen.here:
            return InstanceChange(one.name, one.running + action.delta, action.kind, why)
        k = next(k for k, demand in enumerate(seen.problem.demands) if demand.accepts(one))
        need, load = seen.problem.slack * seen.problem.demands[k].load, action.delta * one.saturation_qps
        cause = "accuracy" if self.accuracy and not self.short else "hardware"
        why = f"{action.kind}: {why}"
        return CapacityRequest(k, cause, (one.name,), min(load, need) if need > 0 else load, action.delta, why)

    def can_spare(self, one: CandidateVariant) -> bool:
        """Whether one instance of this variant may be unloaded without loss."""
        if one.name in self.kept and self.seen.serving[one.name] <= 1:
            return False
        return _carried_without(self.seen, one) and (self.accuracy is None or self.accuracy.can_spare(one))

    def fewer(self, one: CandidateVariant, waited: float) -> InstanceChange:
        """One instance less. waited: seconds for which the plan has been without it."""
        why = f"not needed for {waited:.0f} s: the others carry {_load(self.seen, one):.4g} items/s"
        if self.accuracy and self.accuracy.cores_short():
            why = f"cores are short for {waited:.0f} s: the others carry {_load(self.seen, one):.4g} items/s with them"
        return InstanceChange(one.name, one.running - 1, "unload", why)


def _plan_context(seen: Situation, plan: Plan, short: dict[int, float], soon: dict[int, float]) -> _PlanContext:
    if seen.problem.goal != "accuracy":
        return _PlanContext(seen, short, soon, None, set(), 0.0, 0.0)
    accuracy = Accuracy(seen)
    before, after = accuracy.of(accuracy.running()), accuracy.of(plan.instances)
    return _PlanContext(seen, short, soon, accuracy, accuracy.fallbacks(), before, after)


def _carried_without(seen: Situation, one: CandidateVariant) -> bool:
    """Whether the instances that can answer now carry every class without one instance of this variant.

    A worker relies on another worker's capacity only if it is cheaper. Otherwise both might unload.
    """
    problem = seen.problem
    price = (one.cost_per_s, one.name)
    left = {
        other.name: seen.serving[other.name]
        for other in problem.candidates
        if other.name in seen.here or (other.cost_per_s, other.name) < price
    }
    left[one.name] = max(0, left[one.name] - 1)
    return not shortfall(problem.candidates, problem.demands, left, problem.slack)


def _lacking(problem: PlanningProblem) -> dict[int, float]:
    running = {one.name: one.running for one in problem.candidates}
    return shortfall(problem.candidates, problem.demands, running, problem.slack)


def _accuracy_requests(accuracy: Accuracy, plan: Plan) -> Iterator[CapacityRequest]:
    """Loads that other workers could serve more accurately if they have room."""
    for one in accuracy.gaps(plan):
        why = f"more accurate: {one.now:.4g} -> {one.best:.4g} for {one.load:.4g} items/s"
        yield CapacityRequest(one.demand, "accuracy", one.variants, one.load, one.instances, why)


def _bridging(
    changes: list[InstanceChange],
    requests: list[CapacityRequest],
    by_name: dict[str, CandidateVariant],
    seen: Situation,
) -> Iterator[InstanceChange]:
    """Instances that load fast, until what was just ordered here or requested of other workers is loaded."""
    ordered = {c.variant: c.instances - by_name[c.variant].running for c in changes if c.kind != "unload"}
    ordered |= {one.variants[0]: one.instances for one in requests if one.variants[0] not in ordered}
    slowest = max((by_name[name] for name in ordered), key=lambda one: one.load_s, default=None)
    for name, count in bridges(seen, ordered).items():
        one = by_name[name]
        why = f"serves until {slowest.name} is loaded, in {slowest.load_s:.1f} s" if slowest else ""
        yield InstanceChange(name, one.running + count, "replicate" if one.running else "load", why)


def _to_fall_back_on(
    kept: set[str], changes: list[InstanceChange], by_name: dict[str, CandidateVariant], seen: Situation
) -> Iterator[InstanceChange]:
    """One instance of each of these variants, if memory and budget allow. It uses cores only while it serves."""
    ordered = {c.variant: c.instances - by_name[c.variant].running for c in changes if c.kind != "unload"}
    free = room(seen, ordered)
    for name in sorted(kept - ordered.keys()):
        one = by_name[name]
        takes = {pool: amount for pool, amount in one.uses.items() if pool not in seen.problem.time_shared}
        fits = all(free.get(pool, inf) >= amount for pool, amount in (*takes.items(), ("", one.cost_per_s)))
        if not one.running and one.most is None and fits:
            yield InstanceChange(name, 1, "load", "to fall back on while what is more accurate is full")


def _why_more(seen: Situation, one: CandidateVariant, short: dict[int, float]) -> str:
    problem = with_headroom(seen.problem)
    for k, lack in short.items():
        demand = problem.demands[k]
        if demand.accepts(one):
            needs = seen.classes[k]
            of = f"{seen.apps[k]}{described(needs.needs) if needs is not None else ''}"
            if demand.load <= 0:
                return f"{of} must have {demand.least} instances"
            carried, wanted = max(0.0, problem.slack * demand.load - lack), demand.load
            if carried < wanted:
                return f"can carry {carried:.3g} of {wanted:.4g} items/s of {of}"
            spare = 100.0 * (problem.slack - 1.0)
            return f"can carry {carried:.4g} items/s of {of}: less than {wanted:.4g} with {spare:.3g} % to spare"
    return "other classes need what served this one"


def described(needs: ClassDemand) -> str:
    """The needs of a class in words, such as " (<= 50 ms, accuracy >= 0.9)"; empty: it has none."""
    return f" ({', '.join(parts)})" if (parts := list(_parts(needs))) else ""


def _parts(needs: ClassDemand) -> Iterator[str]:
    if needs.latency_ms is not None:
        yield f"<= {needs.latency_ms:g} ms"
    if needs.accuracy > 0:
        yield f"accuracy >= {needs.accuracy:g}"
    if needs.cost is not None:
        yield f"<= US$ {1000 * needs.cost:.6g} per million answers"
    for name in (needs.model, needs.version, needs.variant):
        if name is not None:
            yield name


def _load(seen: Situation, one: CandidateVariant) -> float:
    return sum(demand.load for demand in seen.problem.demands if demand.accepts(one))


def _unmet_requests(seen: Situation, plan: Plan) -> Iterator[CapacityRequest]:
    """What the plan could not carry, because the worker is full. The controller may place it or add machines."""
    for one in plan.unmet:
        demand = seen.problem.demands[one.demand]
        able = [c for c in seen.problem.candidates if demand.accepts(c) and c.most is None]
        able.sort(key=lambda c: c.cost_per_s / c.saturation_qps)
        names = (*(c.name for c in able), *(seen.absent[one.demand] if seen.absent else ()))
        if names:
            count = max(1, round(one.missing / able[0].saturation_qps + 0.499) if able else 1, one.instances)
            yield CapacityRequest(one.demand, "full", names, one.missing, count, one.reason)


# -- instances that serve until a slow load is done


def bridges(seen: Situation, ordered: Mapping[str, int]) -> dict[str, int]:
    """By variant, instances to add until the ordered ones are loaded. ordered: additional instances, by variant."""
    problem = seen.problem
    by_name = {one.name: one for one in problem.candidates}
    slowest = max((by_name[name].load_s for name in ordered), default=0.0)
    if slowest < SLOW_S:
        return {}
    lacking = shortfall(problem.candidates, problem.demands, seen.serving, problem.slack)
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
    """What running and ordered instances leave of each resource, and of the budget ("")."""
    room = {**seen.problem.resources, "": seen.problem.budget_per_s}
    for one in seen.problem.candidates:
        count = one.running + ordered.get(one.name, 0)
        for pool, amount in _takes(one).items():
            room[pool] = room.get(pool, inf) - count * amount
    return room


def _fitting(one: CandidateVariant, room: Mapping[str, float]) -> int:
    most = min((room.get(pool, inf) / amount for pool, amount in _takes(one).items() if amount > 0), default=0.0)
    return 0 if most < 1 else 10**6 if most == inf else floor(most + 1e-9)
