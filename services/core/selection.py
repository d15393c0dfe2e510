"""getVariant: which instance answers a query (INFaaS, section 4.1; the order of docs/architecture.md).

1 Active instances whose predicted latency meets the deadline, cheapest variant first, or most accurate first where accuracy
is the goal, so that it gives way to less accurate ones before anything is refused; 2 a variant that is loading or can be
loaded, soonest first, the load starting in any case; 3 troubled instances that would still be in time, and a small share of
probes; 4 a refusal that says why and what comes nearest.
"""

from typing import Protocol

import numpy as np

from bus.messages.catalog import VariantRecord
from bus.messages.public import Closest, Error
from services.core.appview import AppView
from services.core.ask import INFINITE, Ask, Decision, LoadOrder
from services.core.cluster import ClusterView, Instance
from services.core.crowd import MANY, PACK_BELOW
from services.core.goal import Goal
from services.core.plans import Group, Plan

OVERHEAD = 0.0005  # s; bus and dispatch, beside the model's own time
REORDER = 3.0  # s that instances must have been full before a load on demand beside them: the autoscalers, who weigh costs, first
BUSY = 0.95  # utilisation of a device from which another variant beside those that are full would only take from them
EASE = (
    0.45  # of a query's latency: work that may wait where accuracy is the goal, before less accurate ones are asked ...
)
EASE_MOST = 0.8  # ... and s; where more waits an instance soon counts as Overloaded (lifecycle.py) and takes nothing for a while
PACK_AHEAD = 0.2  # s of work waiting, up to which `pack` keeps filling a worker
NONE: list[Instance] = []


class SelectionPolicy(Protocol):
    """The port for choosing: the paper's policy, the baselines, or a user's own class by import path."""

    name: str

    def select(self, ask: Ask, now: float, view: ClusterView) -> Decision:
        """Decide for one query, now. `view.apps[ask.app]` exists."""
        ...


class InfaasPolicy:
    """The paper's getVariant. dispatch: "spread" (least loaded instance) or "pack" (fullest worker that is still in time).

    on_demand: load what no instance can serve; without it only what others have loaded is used. goal: by what the view orders
    variants; whoever makes the view reads it here.
    """

    name = "infaas"

    def __init__(
        self, *, dispatch: str = "spread", probe_share: float = 0.1, on_demand: bool = True, goal: Goal = "cost"
    ) -> None:
        self.goal = goal
        self._pack = dispatch == "pack"
        self._on_demand = on_demand
        self._probe_every = round(1 / probe_share) if probe_share > 0 else 0

    def select(self, ask: Ask, now: float, view: ClusterView) -> Decision:
        app = view.apps[ask.app]
        plan = app.plan(ask)
        slack = ask.deadline - now - OVERHEAD
        app.asked += 1
        if plan.troubled and self._probe_every and app.asked % self._probe_every == 0:
            instance = self._within(plan.troubled, ask, slack, troubled=True)
            if instance is not None:
                return Decision((instance.id,), reason="probe")
        instance = self._at_ease(plan, ask, slack) if self.goal == "accuracy" else None
        if instance is None:
            instance = self._within(plan.first, ask, slack)
        if instance is None and len(plan.active) > len(plan.first):
            instance = self._within(plan.active, ask, slack)
        if instance is not None:
            return Decision((instance.id,), reason="active")
        return self._beyond_active(ask, now, slack, view, app, plan)

    def _within(self, groups: list[Group], ask: Ask, slack: float, *, troubled: bool = False) -> Instance | None:
        """The first group, in the order of the goal, with an instance that would answer within `slack`."""
        items, length = ask.items, ask.length
        record: VariantRecord | None = None
        alone = 0.0
        for group in groups:
            best: Instance | None = None
            least = slack
            instances = group.troubled if troubled else group.active
            if len(instances) > MANY:
                crowd = group.crowds["troubled" if troubled else "active"]
                best = crowd.soonest(items, length, slack, ask.deadline - slack)
                instances = NONE
            # Instance.predict, with the batch's own time looked up once for all of one record.
            for instance in instances:
                if instance.record is not record:
                    record = instance.record
                    table = instance.table if length is None else instance.table.at(length)
                    alone = table.seconds(items)
                seconds = ((instance.own + instance.others) * instance.per_queued + alone) * instance.factor
                if seconds <= least:
                    best, least = instance, seconds
            if best is not None:
                return self._packed(group, ask, slack) or best if self._pack and not troubled else best
        return None

    def _at_ease(self, plan: Plan, ask: Ask, slack: float) -> Instance | None:
        """The first group's best instance in time that would not have much waiting: accurate ones are offered all they can do."""
        items, length = ask.items, ask.length
        most = min(EASE * ask.latency_s, EASE_MOST)
        for group in plan.active:
            best: Instance | None = None
            least = slack
            for instance in group.active if len(group.active) <= MANY else group.crowds["active"].some():
                waiting = instance.own + instance.others
                if waiting and (waiting + items) * instance.per_item * instance.factor > most:
                    continue
                seconds = instance.predict(items, length)
                if seconds <= least:
                    best, least = instance, seconds
            if best is not None:
                return (self._packed(group, ask, slack) or best) if self._pack else best
        return None

    @staticmethod
    def _packed(group: Group, ask: Ask, slack: float) -> Instance | None:
        """The instance in time on the fullest worker that is not yet full; the same one among equals, by name."""
        hardware = (group.record.hardware, group.record.simulated)
        best: Instance | None = None
        fullest = 0.0
        active = group.active
        if len(active) > MANY:
            active = [i for i in group.crowds["active"].fullest(ask.deadline - slack) if group.where.get(i) is active]
        for instance in active:
            used = instance.worker.fullness.get(hardware, 0.0)
            full = max(used, instance.busy) >= PACK_BELOW or instance.ahead > PACK_AHEAD
            if full or instance.predict(ask.items, ask.length) > slack:
                continue
            if best is None or (-used, instance.worker.name) < (-fullest, best.worker.name):
                best, fullest = instance, used
        return best

    def _beyond_active(
        self, ask: Ask, now: float, slack: float, view: ClusterView, app: AppView, plan: Plan
    ) -> Decision:
        soonest = INFINITE
        for group in plan.loading:
            for instance in group.loading if len(group.loading) <= MANY else group.crowds["loading"].some():
                seconds = max(0.0, instance.ready_at - now) + instance.predict(ask.items, ask.length)
                if seconds <= slack:
                    return Decision((instance.id,), reason="loading")
                soonest = min(soonest, seconds)
        load = None
        idle = not (plan.active or plan.troubled)
        if self._on_demand and not plan.loading and (idle or app.full_for(now) >= REORDER):
            load = order_for(plan, ask, now, view, spare_only=not idle)
            if load is not None:
                app.full_since = now
                if load.seconds <= slack:
                    return Decision(load=load, wait=True, reason="load on demand")
                soonest = min(soonest, load.seconds)
        late = self._within(plan.troubled, ask, slack, troubled=True)
        if late is not None:
            return Decision((late.id,), load=load, reason="troubled but in time")
        return refuse(ask, slack, app, plan, soonest, load)


def order_for(plan: Plan, ask: Ask, now: float, view: ClusterView, *, spare_only: bool = False) -> LoadOrder | None:
    """The eligible variant that would be ready soonest, on the least utilised worker of its hardware.

    spare_only: not where the device has nothing left, since there it would only take from those that serve already.
    """
    for group in plan.loadable:
        if view.not_before.get(group.record.variant, 0.0) > now:
            continue
        shut = frozenset(view.quarantines(group.record.variant))
        worker = view.least_utilised(group.record.hardware, shut, simulated=group.record.simulated)
        if worker is None or (spare_only and _is_busy(view, worker, group.record)):
            continue
        return LoadOrder(group.record, worker, group.seconds_to_load + group.table.at(ask.length).seconds(ask.items))
    return None


def _is_busy(view: ClusterView, worker: str, record: VariantRecord) -> bool:
    used = view.workers[worker].utilisation(record.hardware, simulated=record.simulated)
    return used is not None and used >= BUSY


def refuse(ask: Ask, slack: float, app: AppView, plan: Plan, soonest: float, load: LoadOrder | None) -> Decision:
    """The end of the search: nobody can serve this in time. soonest: seconds until a load under way would be ready."""
    if not plan.any:
        return Decision(refusal=unsatisfiable(ask, app), load=load, reason="unsatisfiable")
    if soonest < INFINITE:
        text = "a variant that meets the requirements is being loaded and cannot answer in time: ask again"
        error = Error(code="deadline", message=text, retry_after_ms=round(soonest * 1000.0, 3))
        return Decision(refusal=error, load=load, reason="loading, too late for this one")
    lists = ((g.crowds[kind], found) for g in (*plan.active, *plan.troubled) for kind, found in g.serving)
    waiting = [
        i.predict(ask.items, ask.length)
        for crowd, found in lists
        for i in (found if len(found) <= MANY else crowd.some())
    ]
    if not waiting:
        return Decision(stranded=True, reason="no worker is there to serve it")
    excess = max(0.0, min(waiting) - max(slack, 0.0))
    if slack <= 0:
        text = "the deadline passed before the query could be dispatched: allow more time"
        return Decision(refusal=Error(code="deadline", message=text), reason="expired")
    text = "all instances that meet the requirements are full: ask again later, or loosen the requirements"
    error = Error(code="overloaded", message=text, retry_after_ms=round(excess * 1000.0, 3))
    return Decision(refusal=error, load=load, reason="full")


def unsatisfiable(ask: Ask, app: AppView) -> Error:
    """No variant could ever do it: name the one that comes nearest (least sum of relative misses)."""
    allowed = app.pinned(ask)
    if not allowed.any():
        what = ask.variant or f"{ask.model or '*'} version {ask.version or '*'}"
        return Error(
            code="unknown_model", message=f"app {ask.app!r} has no model or variant {what!r}: see infaas variants"
        )
    latency = app.latency(ask.items, ask.length)
    with np.errstate(divide="ignore", invalid="ignore"):
        miss = np.maximum(0.0, ask.accuracy - app.accuracy) / max(ask.accuracy, 1e-9)
        if ask.latency_s < INFINITE:
            miss = miss + np.maximum(0.0, latency - ask.latency_s) / max(ask.latency_s, 1e-9)
        if ask.cost < INFINITE:
            miss = miss + np.maximum(0.0, app.cost - ask.cost) / max(ask.cost, 1e-12)
    nearest = int(np.argmin(np.where(allowed, miss, INFINITE)))
    record = app.records[nearest]
    closest = Closest(
        model=record.model,
        variant=record.variant,
        accuracy=record.accuracy,
        latency_ms=float(latency[nearest]) * 1000.0,
        cost=float(app.cost[nearest]),
    )
    text = f"no variant of app {ask.app!r} meets latency, accuracy and cost together: the closest is named"
    return Error(code="unsatisfiable", message=text, closest=closest)
