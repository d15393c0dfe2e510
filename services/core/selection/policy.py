"""getVariant (INFaaS, section 4.1): which instance answers a query. The port, the paper's policy, and two baselines. A user's own class is
guarded in `services.core.policy`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec import UNSET, Struct

from bus.messages.catalog import VariantRecord
from bus.messages.events import OutcomeEvent
from bus.messages.public import Error
from services.core.cost import Goal, cost_per_1000, merit
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import INFINITE, AppView, Ask, Eligibility, VariantInstances
from services.core.selection.instances import CAUTION, MANY, OVERHEAD, SHUT, Instance
from services.core.selection.refusals import EXPIRED, full, loading, not_loaded, too_little_time, unsatisfiable
from services.core.selection.sampler import PACK_BELOW, SAMPLED


class LoadOrder(Struct, frozen=True, gc=False):
    """Load this variant on this worker. seconds: predicted time until it can answer."""

    record: VariantRecord
    worker: str
    seconds: float


class Decision(Struct, frozen=True, gc=False):
    """What to do with one query.

    instance: the id of the one that answers it. load: start this load in any case. refusal: the query ends with this error. With neither an
    instance nor a refusal, the query waits: for that load, or until something changes; then it is decided again.
    """

    instance: str | None = None
    load: LoadOrder | None = None
    refusal: Error | None = None


class SelectionPolicy(ABC):
    """Which instance answers a query: the paper's policy, the baselines, and a user's own class.

    name: recorded with each query. goal: what the view orders variants by. observe: called once for each query that this dispatcher took, or part
    of one (`parent`), that has ended, answered or not; None: nothing is learnt. failures: how often a user's own method failed, by method.
    """

    name: str
    goal: Goal = "cost"
    observe: Callable[[OutcomeEvent], None] | None = None
    failures: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def select(self, ask: Ask, now: float, view: ClusterView) -> Decision:
        """Decide for one query. now: Unix seconds.

        `view.apps[ask.app]` exists unless it was deleted while the query waited; its `eligibility(ask)` are the variants that meet the needs,
        with their instances. Nothing but what is remembered of searches is written to the view: who asks what a query would get leaves no trace.
        What a decision means for the next ones, `note` writes.
        """


def note(ask: Ask, decision: Decision, now: float, view: ClusterView) -> None:
    """Write to the view what this decision on a query means for the next ones. now: Unix seconds, as it was decided."""
    app = view.apps.get(ask.app)
    if app is None:
        return
    app.asked += 1
    if ask.priority > view.lowest_priority:
        view.lowest_priority = ask.priority
    refusal = decision.refusal
    if decision.load is not None:
        app.found_full(now, anew=True)
    elif refusal is not None and (
        refusal.code == "overloaded" or (refusal.code == "deadline" and refusal.retry_after_ms is UNSET)
    ):  # with what is loaded; where something is being loaded, a refusal for the deadline says when to ask again
        app.found_full(now, anew=False)


# Of a query that is decided again after its app was deleted.
GONE = Decision(
    refusal=Error(code="unknown_app", message="its app or model was deleted meanwhile: see infaas.list.apps")
)
# s for which instances must have been full before another variant is loaded on demand. The autoscalers, which compare costs, go first.
REORDER = 3.0
BUSY = 0.95  # utilisation of a device from which another variant there would only take capacity from the full ones
# Where accuracy is the goal: a query that must wait goes to an instance if that is predicted to take at most this share of the time left.
# Less accurate ones are asked before. Queues at the edge of their deadlines have small batches, and whatever goes slower makes them late.
EASE = 0.85
PACK_AHEAD = 0.2  # s of waiting work up to which `pack` fills a worker
NONE: list[Instance] = []


class InfaasPolicy(SelectionPolicy):
    """The paper's getVariant. It tries, in this order:

    1. Active instances whose predicted latency meets the deadline, cheapest variant first. Where accuracy is the goal, the most accurate
       variant goes first, and less accurate ones are used before anything is refused.
    2. A variant that is loading and will be in time.
    3. Overloaded and Interfered instances that are still in time. A small share of queries probes them before step 1.
    4. A variant that can be loaded, soonest first. The load starts even if this query cannot wait for it.
    5. A refusal that says why, and what comes nearest.

    dispatch: "spread" (the least loaded instance) or "pack" (the fullest worker that is still in time). probe_share: of queries, for step 3.
    on_demand: whether step 4 may load; otherwise only loaded variants are used. goal: the order of variants in the view.
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
        app = view.apps.get(ask.app)
        if app is None:
            return GONE
        eligible = app.eligibility(ask)
        slack = ask.deadline - now - OVERHEAD
        turn = app.asked
        if self._probe_every and (turn + 1) % self._probe_every == 0 and eligible.troubled:
            instance = self._within(eligible.troubled, ask, now, slack, turn, troubled=True)
            if instance is not None:
                return Decision(instance.id)
        instance = self._at_ease(eligible, ask, slack, turn) if app.goal == "accuracy" else None
        if instance is None:
            instance = self._within(eligible.first, ask, now, slack, turn)
        if instance is None and len(eligible.active) > len(eligible.first):
            instance = self._within(eligible.active, ask, now, slack, turn)
        if instance is not None:
            return Decision(instance.id)
        return self._beyond_active(ask, now, slack, view, app, eligible)

    def _within(
        self, groups: list[VariantInstances], ask: Ask, now: float, slack: float, turn: int, *, troubled: bool = False
    ) -> Instance | None:
        """The soonest instance of the first variant that has one that answers within `slack` seconds."""
        items, length = ask.items, ask.length
        for group in groups:
            best: Instance | None = None
            least = slack
            table = group.table if length is None else group.table.at(length)
            alone = table.by_size[items] if items <= table.max_batch else table.seconds(items)
            instances = group.troubled if troubled else group.active
            if len(instances) > MANY:
                best = group.samplers["troubled" if troubled else "active"].soonest(items, length, slack, now, turn)
                instances = NONE
            # This is Instance.predict, without the call: by calls, ten idle instances take twice as long. An idle instance's batch is the query
            # alone.
            for instance in instances:
                if instance.idle:
                    seconds = alone * instance.factor
                elif instance.scarce or length is not None or instance.rest + items > instance.most:
                    seconds = instance.predict(items, length, ask.deadline, now)
                else:
                    wait, under_way = instance.waiting_s, instance.free_at - now
                    if under_way > 0.0:
                        wait += under_way
                    if wait * CAUTION >= least:
                        continue
                    together = instance.rest + items
                    if wait:
                        together = min(together + int(wait * instance.served), instance.most)
                        seconds = CAUTION * (wait + instance.by_size[together] * instance.factor)
                    else:
                        seconds = instance.by_size[together] * instance.factor
                if seconds <= least:
                    best, least = instance, seconds
            if best is not None:
                return self._packed(group, ask, slack) or best if self._pack and not troubled else best
        return None

    def _at_ease(self, eligible: Eligibility, ask: Ask, slack: float, turn: int) -> Instance | None:
        """The soonest instance of the first variant that has one in time with little waiting, so that accurate variants serve all they can."""
        items, length, now = ask.items, ask.length, ask.deadline - slack - OVERHEAD
        calm = EASE * slack
        for group in eligible.active:
            best: Instance | None = None
            least = slack
            for instance in group.active if len(group.active) <= MANY else group.samplers["active"].some(MANY, turn):
                seconds = instance.predict(items, length, ask.deadline, now)
                if seconds <= least and (instance.idle or seconds <= calm):
                    best, least = instance, seconds
            if best is not None:
                return (self._packed(group, ask, slack) or best) if self._pack else best
        return None

    @staticmethod
    def _packed(group: VariantInstances, ask: Ask, slack: float) -> Instance | None:
        """The instance in time on the fullest worker below PACK_BELOW; the first by name among equals."""
        hardware = (group.record.hardware, group.record.simulated)
        best: Instance | None = None
        fullest = 0.0
        active, now = group.active, ask.deadline - slack - OVERHEAD
        if len(active) > MANY:
            active = [i for i in group.samplers["active"].fullest(now) if group.where.get(i) is active]
        for instance in active:
            used = instance.worker.fullness.get(hardware, 0.0)
            full = max(used, instance.busy) >= PACK_BELOW or instance.ahead > PACK_AHEAD
            if full or instance.predict(ask.items, ask.length, ask.deadline, now) > slack:
                continue
            if best is None or (-used, instance.worker.name) < (-fullest, best.worker.name):
                best, fullest = instance, used
        return best

    def _beyond_active(
        self, ask: Ask, now: float, slack: float, view: ClusterView, app: AppView, eligible: Eligibility
    ) -> Decision:
        soonest = INFINITE
        for group in eligible.loading:
            for instance in group.loading:
                seconds = max(0.0, instance.ready_at - now) + instance.predict(
                    ask.items, ask.length, ask.deadline, max(now, instance.ready_at)
                )
                if seconds <= slack:
                    return Decision(instance.id)
                soonest = min(soonest, seconds)
        late = self._within(eligible.troubled, ask, now, slack, app.asked, troubled=True)
        if late is not None:
            return Decision(late.id)
        load = None
        idle = not (eligible.active or eligible.troubled)
        if self._on_demand and not eligible.loading and (idle or app.full_for(now) >= REORDER):
            load = order_for(eligible, ask, now, view, spare_only=not idle)
            if load is not None:
                if load.seconds <= slack:
                    return Decision(load=load)
                soonest = min(soonest, load.seconds)
        if ask.priority < view.lowest_priority:
            ahead = _outranking(eligible, ask, slack, now)
            if ahead is not None:
                return Decision(ahead.id, load)
        return refuse(ask, slack, view, app, eligible, soonest, load)


def _outranking(eligible: Eligibility, ask: Ask, slack: float, now: float) -> Instance | None:
    """The soonest instance that answers within `slack` seconds if the queries of lower priority that wait there give way."""
    best: Instance | None = None
    least = slack
    for group in (*eligible.active, *eligible.troubled, *eligible.loading):
        for instances in (group.active, group.troubled, group.loading):
            for instance in instances:
                gives_way = instance.outranked(ask.priority)
                if gives_way and instance.waiting_s != SHUT:
                    loaded = max(0.0, instance.ready_at - now) if instance.state == "Loading" else 0.0
                    seconds = loaded + instance.predict(ask.items, ask.length, ask.deadline, now + loaded, gives_way)
                    if seconds <= least:
                        best, least = instance, seconds
    return best


def order_for(
    eligible: Eligibility, ask: Ask, now: float, view: ClusterView, *, spare_only: bool = False
) -> LoadOrder | None:
    """An order to load the eligible variant that is ready soonest, on the least utilised worker of its hardware. None when there is none.

    A variant that is Warm is loaded where it is Warm. A worker that has refused it a moment ago is not asked. spare_only: not on a busy device, where it would only take capacity from instances that serve already.
    """
    for group in eligible.loadable:
        shut = view.closed_to(group.record.variant, now)
        worker = view.warmest(group.warm, shut) if group.warm else None
        if worker is None:
            worker = view.least_utilised(group.record.hardware, shut, simulated=group.record.simulated)
        if worker is None or (spare_only and _is_busy(view, worker, group.record)):
            continue
        return LoadOrder(group.record, worker, group.seconds_to_load + group.table.at(ask.length).seconds(ask.items))
    return None


def _is_busy(view: ClusterView, worker: str, record: VariantRecord) -> bool:
    used = view.workers[worker].utilisation(record.hardware, simulated=record.simulated)
    return used is not None and used >= BUSY


def refuse(
    ask: Ask,
    slack: float,
    view: ClusterView,
    app: AppView,
    eligible: Eligibility,
    soonest: float,
    load: LoadOrder | None,
) -> Decision:
    """The decision when no instance can serve this in time: a refusal, or to wait where there is no instance. soonest: seconds until a load under way is ready."""
    now = ask.deadline - slack - OVERHEAD
    if not eligible.any:
        return Decision(None, load, unsatisfiable(ask, app, view))
    if soonest < INFINITE and not_loaded(ask, view, now) is None:
        return Decision(None, load, loading(soonest))
    soonest, alone, found = INFINITE, INFINITE, False
    for group in (*eligible.active, *eligible.troubled):
        for kind, instances in group.serving:
            for instance in instances if len(instances) <= MANY else group.samplers[kind].some(SAMPLED, app.asked):
                found = True
                alone = min(alone, instance.alone_s(ask.items, ask.length))
                if CAUTION * instance.waiting_s < soonest:
                    soonest = min(soonest, instance.predict(ask.items, ask.length, ask.deadline, now))
    if not found:
        return Decision(load=load)
    if slack <= 0:
        return Decision(refusal=EXPIRED)
    return Decision(None, load, too_little_time(slack, alone) if alone > slack else full(max(0.0, soonest - slack)))


# -- Baselines. on_demand: load what no instance can serve; otherwise only loaded variants are used, as by `InfaasPolicy`.


class RoundRobin(SelectionPolicy):
    """Instances that meet the needs, in turn. It ignores load, cost and trouble."""

    name = "round-robin"

    def __init__(self, *, on_demand: bool = True, **_: object) -> None:
        self._on_demand = on_demand

    def select(self, ask: Ask, now: float, view: ClusterView) -> Decision:
        app = view.apps.get(ask.app)
        if app is None:
            return GONE
        eligible = app.eligibility(ask)
        serving = [*eligible.active, *eligible.troubled]
        instances = [i for group in serving for i in (*group.active, *group.troubled)]
        if instances:
            return Decision(instances[app.asked % len(instances)].id)
        for group in eligible.loading:
            return Decision(group.loading[0].id)
        load = order_for(eligible, ask, now, view) if self._on_demand else None
        if load is not None:
            return Decision(load=load)
        return refuse(ask, ask.deadline - now - OVERHEAD, view, app, eligible, INFINITE, None)


class BruteForce(SelectionPolicy):
    """For Active variants the same choice as the paper's policy, but it looks at every variant for each query (the paper's Table 7)."""

    name = "brute-force"

    def __init__(self, *, on_demand: bool = True, goal: Goal = "cost", **_: object) -> None:
        self._on_demand = on_demand
        self.goal = goal

    def select(self, ask: Ask, now: float, view: ClusterView) -> Decision:
        app = view.apps.get(ask.app)
        if app is None:
            return GONE
        slack = ask.deadline - now - OVERHEAD
        best: tuple[tuple[float, float], Instance] | None = None
        soonest: tuple[float, VariantInstances] | None = None
        possible, accurate = False, app.accurate(ask)
        for i, group in enumerate(app.groups):
            record = app.seen(ask)[i]
            if not self._allowed(ask, group, current=bool(app.serving[ask.arm is not None and ask.arm.new][i])):
                continue
            alone = group.table.at(ask.length).seconds(ask.items)
            price = next((x.price_per_s for x in group.active), view.nominal_price_per_s(record))
            cost = cost_per_1000(record, price, max(app.batch[i], min(ask.items, record.max_batch)))
            charged = 1000.0 * price * group.table.at(ask.length).charged_seconds(ask.items)
            if not accurate[i] or alone > ask.latency_s or charged > ask.cost:
                continue
            possible = True
            rank = (-merit(record.accuracy) if app.goal == "accuracy" else 0.0, cost)
            for instance in group.active:
                if instance.predict(ask.items, ask.length, ask.deadline, now) <= slack and (
                    best is None or rank < best[0]
                ):
                    best = (rank, instance)
            if not (group.active or group.loading or group.troubled):
                ready = group.seconds_to_load + alone
                if soonest is None or ready < soonest[0]:
                    soonest = (ready, group)
        if best is not None:
            return Decision(best[1].id)
        eligible = app.eligibility(ask)
        for group in eligible.loading:
            return Decision(group.loading[0].id)
        wanted = self._on_demand and possible and soonest is not None
        load = order_for(eligible, ask, now, view) if wanted else None
        if load is not None and load.seconds <= slack:
            return Decision(load=load)
        return refuse(ask, slack, view, app, eligible, INFINITE if load is None else load.seconds, load)

    @staticmethod
    def _allowed(ask: Ask, group: VariantInstances, *, current: bool) -> bool:
        record = group.record
        if ask.variant is not None and ask.variant != record.variant:
            return False
        if ask.model not in (None, record.model) or ask.version not in (None, record.version):
            return False
        return current or ask.version is not None or ask.variant is not None
