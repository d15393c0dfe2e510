"""Baselines beside the paper's policy: round-robin over what meets the needs, and brute force over every variant.

on_demand: load what no instance can serve; without it only what others have loaded is used, as with `InfaasPolicy`.
"""

from services.core.ask import INFINITE, Ask, Decision
from services.core.cluster import ClusterView, Instance
from services.core.cost import cost_per_1000
from services.core.goal import Goal, merit
from services.core.plans import Group
from services.core.selection import OVERHEAD, order_for, refuse


class RoundRobin:
    """Active instances that meet the needs, in turn; no account is taken of load, cost order or trouble."""

    name = "round-robin"

    def __init__(self, *, on_demand: bool = True) -> None:
        self._turn = 0
        self._on_demand = on_demand

    def select(self, ask: Ask, now: float, view: ClusterView) -> Decision:
        app = view.apps[ask.app]
        plan = app.plan(ask)
        serving = [*plan.active, *plan.troubled]
        instances = [i for group in serving for i in (*group.active, *group.troubled)]
        if instances:
            self._turn += 1
            return Decision((instances[self._turn % len(instances)].id,), reason="its turn")
        for group in plan.loading:
            return Decision((group.loading[0].id,), reason="loading")
        load = order_for(plan, ask, now, view) if self._on_demand else None
        if load is not None:
            return Decision(load=load, wait=True, reason="load on demand")
        return refuse(ask, ask.deadline - now - OVERHEAD, app, plan, INFINITE, None)


class BruteForce:
    """The same choice as the paper's policy for Active variants, by looking at every variant afresh (its Table 7's rival)."""

    name = "brute-force"

    def __init__(self, *, on_demand: bool = True, goal: Goal = "cost") -> None:
        self._on_demand = on_demand
        self.goal = goal

    def select(self, ask: Ask, now: float, view: ClusterView) -> Decision:
        app = view.apps[ask.app]
        slack = ask.deadline - now - OVERHEAD
        best: tuple[tuple[float, float], Instance] | None = None
        soonest: tuple[float, Group] | None = None
        possible = False
        for i, group in enumerate(app.groups):
            record = group.record
            if not self._allowed(ask, group, current=bool(app.current[i])):
                continue
            alone = group.table.at(ask.length).seconds(ask.items)
            price = next((x.price_per_s for x in group.active), view.nominal_price_per_s(record))
            cost = cost_per_1000(record, price, app.batch[i])
            if (
                (record.accuracy if record.accuracy is not None else 1.0) < ask.accuracy
                or alone > ask.latency_s
                or cost > ask.cost
            ):
                continue
            possible = True
            rank = (-merit(record.accuracy) if self.goal == "accuracy" else 0.0, cost)
            for instance in group.active:
                if instance.predict(ask.items, ask.length) <= slack and (best is None or rank < best[0]):
                    best = (rank, instance)
            if not (group.active or group.loading or group.troubled):
                ready = group.seconds_to_load + alone
                if soonest is None or ready < soonest[0]:
                    soonest = (ready, group)
        if best is not None:
            return Decision(
                (best[1].id,), reason=f"{'most accurate' if self.goal == 'accuracy' else 'cheapest'} of all"
            )
        plan = app.plan(ask)
        for group in plan.loading:
            return Decision((group.loading[0].id,), reason="loading")
        wanted = self._on_demand and possible and soonest is not None
        load = order_for(plan, ask, now, view) if wanted else None
        if load is not None and load.seconds <= slack:
            return Decision(load=load, wait=True, reason="load on demand")
        return refuse(ask, slack, app, plan, INFINITE if load is None else load.seconds, load)

    @staticmethod
    def _allowed(ask: Ask, group: Group, *, current: bool) -> bool:
        record = group.record
        if ask.variant is not None and ask.variant != record.variant:
            return False
        if ask.model not in (None, record.model) or ask.version not in (None, record.version):
            return False
        return current or ask.version is not None or ask.variant is not None
