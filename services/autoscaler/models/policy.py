"""When a plan is carried out: at once where load is not carried, after T_v where it would only save, never with a dip. Pure.

INFaaS (Romero et al., section 4.2.2): scale up as soon as the headroom is below the slack; scale down, or to a cheaper variant,
only after the condition has held for T_v = max(load latency, a minimum) without a break. Changes are made before others are
broken: an instance goes only when those that can answer without it carry every class, whichever solver wants it gone.
Where accuracy is the goal the same holds: less of it at once where load is not carried, more of it after T_v.
"""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from bus.messages.scaling import ClassDemand
from services.autoscaler.models.accuracy import GAIN, Accuracy, roomy
from services.autoscaler.models.bridging import bridges, room
from services.autoscaler.models.coverage import missing
from services.autoscaler.models.situation import Situation
from services.core.planning.plan import Plan
from services.core.planning.problem import Candidate, Problem


class Change(NamedTuple):
    """This worker is to have so many instances of a variant. kind: as scaling events name actions."""

    variant: str
    instances: int
    kind: str
    reason: str


class Elsewhere(NamedTuple):
    """What another worker should load. demand: index; variants: those that would do, best first; load: items/s."""

    demand: int
    why: str
    variants: tuple[str, ...]
    load: float
    instances: int
    reason: str


class Decision(NamedTuple):
    changes: tuple[Change, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()


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

    def decide(self, seen: Situation, plan: Plan, now: float) -> Decision:
        """What to do of this plan now."""
        short = self.short(seen)
        soon = short or self.soon(seen)
        changes: list[Change] = []
        elsewhere: list[Elsewhere] = []
        wanted: set[tuple[str, str]] = set()
        by_name = {one.name: one for one in seen.problem.candidates}
        accuracy = Accuracy(seen) if seen.problem.goal == "accuracy" else None
        kept = accuracy.fallbacks() if accuracy else set()
        before, after = (accuracy.of(accuracy.running()), accuracy.of(plan.instances)) if accuracy else (0.0, 0.0)
        for action in plan.actions:
            one = by_name[action.variant]
            key = (action.variant, "more" if action.delta > 0 else "fewer")
            if action.delta > 0 and accuracy and not soon and after < before + GAIN:
                continue
            wanted.add(key)
            since = self._since.setdefault(key, now)
            if action.delta > 0:
                if not soon and now - since < self._hold:
                    continue
                why = _why_more(seen, one, soon) if soon else f"cheaper than what runs, for {now - since:.0f} s"
                if accuracy:
                    swap = f"{before:.4g} -> {after:.4g}"
                    why = f"{why}; accuracy {swap}" if soon else f"more accurate: {swap}, for {now - since:.0f} s"
                if action.variant in seen.here:
                    changes.append(Change(action.variant, one.running + action.delta, action.kind, why))
                else:
                    k = next(k for k, demand in enumerate(seen.problem.demands) if demand.accepts(one))
                    need = seen.problem.slack * seen.problem.demands[k].load
                    load = (
                        min(action.delta * one.saturation_qps, need) if need > 0 else action.delta * one.saturation_qps
                    )
                    cause = "accuracy" if accuracy and not short else "hardware"
                    elsewhere.append(Elsewhere(k, cause, (one.name,), load, action.delta, f"{action.kind}: {why}"))
            elif action.variant in seen.here:
                if one.name in seen.offline and not short:  # a job's: it may stay as long as nobody lacks anything
                    self._since[key] = now
                    continue
                held = now - since
                if one.name in kept and seen.serving[one.name] <= 1:
                    continue
                if held < max(one.load_s, self._hold) or not self._spared(seen, one):
                    continue
                if accuracy is None or accuracy.spares(one):
                    why = f"not needed for {held:.0f} s: the others carry {_load(seen, one):.4g} items/s"
                    if accuracy and accuracy.crowded():
                        why = f"cores are short for {held:.0f} s: the others carry {_load(seen, one):.4g} items/s with them"
                    changes.append(Change(action.variant, one.running - 1, "unload", why))
        self._since = {key: at for key, at in self._since.items() if key in wanted}
        if short:
            changes.extend(_bridging(changes, elsewhere, by_name, seen))
            elsewhere.extend(_unmet(seen, plan))
        if accuracy and not seen.alone:
            elsewhere.extend(_missed(accuracy, plan))
        changes.extend(_to_fall_back_on(kept, changes, by_name, seen))
        for change in changes:  # the next change of the same variant waits its own time
            self._since.pop((change.variant, "fewer"), None)
        return Decision(tuple(changes), tuple(elsewhere))

    @staticmethod
    def _spared(seen: Situation, one: Candidate) -> bool:
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


def _lacking(problem: Problem) -> dict[int, float]:
    running = {one.name: one.running for one in problem.candidates}
    return missing(problem.candidates, problem.demands, running, problem.slack)


def _missed(accuracy: Accuracy, plan: Plan) -> Iterator[Elsewhere]:
    """What other workers might serve more accurately, if they have room."""
    for one in accuracy.missed(plan):
        why = f"more accurate: {one.now:.4g} -> {one.best:.4g} for {one.load:.4g} items/s"
        yield Elsewhere(one.demand, "accuracy", one.variants, one.load, one.instances, why)


def _bridging(
    changes: list[Change], elsewhere: list[Elsewhere], by_name: dict[str, Candidate], seen: Situation
) -> Iterator[Change]:
    """Quick instances for as long as what was just ordered, here or of other workers, takes to load."""
    ordered = {c.variant: c.instances - by_name[c.variant].running for c in changes if c.kind != "unload"}
    ordered |= {one.variants[0]: one.instances for one in elsewhere if one.variants[0] not in ordered}
    slowest = max((by_name[name] for name in ordered), key=lambda one: one.load_s, default=None)
    for name, count in bridges(seen, ordered).items():
        one = by_name[name]
        why = f"serves until {slowest.name} is loaded, in {slowest.load_s:.1f} s" if slowest else ""
        yield Change(name, one.running + count, "replicate" if one.running else "load", why)


def _to_fall_back_on(
    kept: set[str], changes: list[Change], by_name: dict[str, Candidate], seen: Situation
) -> Iterator[Change]:
    """One instance of each of these, where there is room: cores are shared, and it uses them only while it serves."""
    ordered = {c.variant: c.instances - by_name[c.variant].running for c in changes if c.kind != "unload"}
    free = room(seen, ordered)
    for name in sorted(kept - ordered.keys()):
        one = by_name[name]
        takes = {pool: amount for pool, amount in one.uses.items() if pool not in seen.problem.time_shared}
        fits = all(free.get(pool, inf) >= amount for pool, amount in (*takes.items(), ("", one.cost_per_s)))
        if not one.running and one.most is None and fits:
            yield Change(name, 1, "load", "to fall back on while what is more accurate is full")


def _why_more(seen: Situation, one: Candidate, short: dict[int, float]) -> str:
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


def _load(seen: Situation, one: Candidate) -> float:
    return sum(demand.load for demand in seen.problem.demands if demand.accepts(one))


def _unmet(seen: Situation, plan: Plan) -> Iterator[Elsewhere]:
    """What the plan could not carry: the worker is full, so the controller is asked. It may add machines that nobody has yet."""
    for one in plan.unmet:
        demand = seen.problem.demands[one.demand]
        able = [c for c in seen.problem.candidates if demand.accepts(c) and c.most is None]
        able.sort(key=lambda c: c.cost_per_s / c.saturation_qps)
        names = (*(c.name for c in able), *(seen.absent[one.demand] if seen.absent else ()))
        if names:
            count = max(1, round(one.missing / able[0].saturation_qps + 0.499) if able else 1, one.instances)
            yield Elsewhere(one.demand, "full", names, one.missing, count, one.reason)
