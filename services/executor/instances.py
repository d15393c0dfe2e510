"""The instances of one device: run within the device's cores, measured and reported. `loading` brings and takes them. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from bus.messages.catalog import BatchingRule, VariantRecord, named_metric
from bus.messages.fleet import AppSample, ExecutorReport, InstanceSample, Tier
from bus.messages.flow import Route
from bus.messages.jobs import OFFLINE
from bus.subjects import Subjects
from services.core.actor import After, Do, Effect, Publish
from services.core.cost import KNOWN_S, LatencyTable, remembered
from services.core.placement import Device
from services.core.selection.instances import TURNS
from services.core.settings import ExecutorSettings
from services.executor.batching import BatchingPolicy, BatchingRules, make_policy
from services.executor.commands import LoadedModel, MeasureProcess, ProcessUse, RunBatch
from services.executor.queue import EdfQueue, QueuedQuery


class BatchTally(Struct, eq=False):
    """What a device has computed of one variant since it started. sizes: number of batches by their items. seconds: computing them."""

    sizes: dict[int, int] = {}
    seconds: float = 0.0

    def add(self, items: int, seconds: float) -> None:
        """One batch."""
        self.sizes[items] = self.sizes.get(items, 0) + 1
        self.seconds += seconds


# -- one instance

FOLLOWS = (0.02, 0.2, 5.0)  # weight of one batch in the live factor, and the bounds of the factor
# The same where the batch size is learnt: then the deadlines must not be held by the profile either.
FOLLOWS_FAST = (0.2, 0.01, 100.0)
# A batch that waits for more begins so early that its first query is in time even if it takes that much longer.
CAUTION = 1.2
TIMER = 0.002  # s by which a timer may be late
NEW = 20  # batches after a change of `contexts` whose mean the live factor takes
SLO_RISES = 1.05  # a batch; so the shortest objective of late counts where queries ask for different ones


@dataclass(slots=True, eq=False)
class HeldInstance:
    """An instance that this executor holds. ready: its model can compute. running: batches that it computes now, at most `contexts`. leaving: it
    takes no new queries, as it is not to serve.

    tier: where its model is; None: nowhere yet. goal: where it is to be; None: it is unloaded once it is idle. moving: a load or a transfer
    is under way. model: what the last of them said.
    rule, policy: how batches are formed; None: by deadlines alone, up to the variant's largest batch. contexts: batches at a time, on one
    copy of the weights (Rafiqi, paper 001, section 4.0.3). one_at_a_time: why its model cannot compute more than one; empty: it can.
    """

    id: str
    record: VariantRecord
    price_per_s: float
    tally: BatchTally = field(default_factory=BatchTally)
    table: LatencyTable = field(init=False)
    queue: EdfQueue = field(init=False)
    target: tuple[str, str] = field(init=False)  # what its number is, and the unit
    metric: str = field(init=False)  # that answers name
    cores: list[int] = field(default_factory=list)  # as it was ordered
    ready: bool = False
    running: int = 0
    running_items: int = 0
    running_offline: int = 0  # items
    begun: int = 0  # the number of its last batch, of all on the device
    begun_at: float = 0.0
    waits_since: float = 0.0  # when its last batch began, or the first query came after that one found its queue empty
    free_at: float = 0.0  # when the first of its batches that run is predicted to end
    since: float = 0.0  # when it began to compute
    known_at: float = 0.0  # when its last batch ended, after which the live factor is forgotten
    computed: float = 0.0  # seconds that it computed before, since the last sample
    contexts: int = 1
    one_at_a_time: str = ""
    leaving: bool = False
    goal: Tier | None = "device"
    tier: Tier | None = None
    moving: bool = False
    model: LoadedModel | None = None
    rule: BatchingRule | None = None
    policy: BatchingPolicy | None = None
    # With what each has learnt: apps with rules may take turns.
    _policies: dict[BatchingRule, BatchingPolicy] = field(default_factory=dict)
    _new: int = 0
    # Since the last sample.
    _items: int = field(init=False)
    _offline: int = field(init=False)
    _batches: int = field(init=False)
    _busy: float = field(init=False)
    _predicted: float = field(init=False)
    _apps: dict[str, tuple[int, float]] = field(init=False)  # items and objective
    _payers: dict[str, dict[str, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.table = LatencyTable(self.record)
        self.target = self.record.signature.target
        self.metric = named_metric([self.record.metric])
        self.queue = EdfQueue(self.table, max(1, self.record.max_batch))
        self._reset()

    def _reset(self) -> None:
        self._items = 0
        self._offline = 0
        self._batches = 0
        self._busy = 0.0
        self._predicted = 0.0
        self._apps = {}
        self._payers = {}

    @property
    def queued(self) -> int:
        """Items that a query which comes now may have to wait for: those that wait or run, without waiting offline work."""
        return self.queue.items - self.queue.offline + self.running_items

    def comes_late(self, query: QueuedQuery, now: float) -> bool:
        """Whether this query, which comes now, would be late even as the first one after the batches that run."""
        if self.running < self.contexts:
            if not self.running and now - self.known_at > KNOWN_S:
                self.queue.factor = remembered(self.queue.factor, now - self.known_at)
                self.known_at = now - KNOWN_S
            return False
        takes = self.table.at(query.route.length).seconds(query.items) * self.queue.factor
        return max(now, self.free_at) + takes > query.route.deadline

    def measured(self, items: int, seconds: float, now: float, length: int | None = None) -> None:
        """One batch was computed. The live factor, which also corrects this queue's predictions, follows slowly."""
        predicted, self.known_at = self.table.at(length).seconds(items), now
        self._items += items
        self._batches += 1
        self.tally.add(items, seconds)
        self._busy += seconds
        self._predicted += predicted
        if predicted > 0:
            gain, low, high = FOLLOWS if self.policy is None or not self.policy.learns else FOLLOWS_FAST
            if self._new:  # batches take another time with another number of them at once
                gain, self._new = max(gain, 1.0 / (1 + NEW - self._new)), self._new - 1
            ratio = min(high, max(low, seconds / predicted))
            self.queue.factor += gain * (ratio - self.queue.factor)

    def head_for(self, goal: Tier | None) -> None:
        """Its model is to be there, or nowhere."""
        self.goal = goal
        self.leaving = goal != "device"

    def limit_contexts(self, one_at_a_time: str) -> None:
        """Its model is loaded. one_at_a_time: why it computes one batch at a time; empty: it takes several."""
        self.one_at_a_time = one_at_a_time
        self._use(self.rule.contexts if self.rule is not None else None)

    # -- the batching policy

    def follow(self, rules: BatchingRules, now: float) -> None:
        """Take the policy that the rules say for the next batch, and its limit."""
        first = self.queue.first
        rule = rules.rule_for(self.record, first.route.app if first is not None else None)
        self._use(rule.contexts if rule is not None else None)
        if rule is None:
            self.rule = self.policy = None
            self.queue.max_batch = self.table.max_batch
            return
        policy = self._policies.get(rule)
        if policy is None:
            policy = self._policies[rule] = make_policy(rule, self.record)
        self.rule, self.policy = rule, policy
        self.queue.max_batch = policy.limit(now)

    def _use(self, contexts: int | None) -> None:
        """Compute so many batches at a time; None: as many as the profile was measured with."""
        wanted = 1 if self.one_at_a_time else max(1, contexts or self.record.contexts)
        if wanted != self.contexts:
            self.contexts = self.queue.contexts = wanted
            self._new = NEW

    def rules_changed(self, rules: BatchingRules, now: float) -> None:
        """Forget what was learnt under rules that are gone, and follow the present ones."""
        present = set(rules.all())
        self._policies = {rule: policy for rule, policy in self._policies.items() if rule in present}
        self.follow(rules, now)

    def held_until(self, rules: BatchingRules, now: float) -> float:
        """The time until which the next batch waits for more queries, by the present rule; in the past: it begins.

        A full one begins, also one that runs alone. None waits so long that its first query would be late.
        """
        self.follow(rules, now)
        first, queue = self.queue.first, self.queue
        if self.policy is None or first is None or self.leaving:
            return 0.0
        until = self.policy.hold_until(now, queue.items)
        if until <= now or queue.items >= queue.max_batch or first.alone or first.route.policy == OFFLINE:
            return 0.0
        takes = self.table.at(first.route.length).seconds(queue.items) * queue.factor
        return min(until, first.route.deadline - CAUTION * takes - TIMER)

    def learn(self, queries: list[QueuedQuery], items: int, seconds: float, now: float) -> None:
        """Tell the policy what a batch took. Without an objective of the rule, a batch may take half of the shortest one of its queries:

        a query that comes just as a batch begins waits for that one, then for its own.
        """
        policy = self.policy
        if policy is None or self.rule is None or queries[0].route.policy == OFFLINE:
            return
        if self.rule.slo_ms is not None:
            policy.slo_s = self.rule.slo_ms / 1000.0
        elif policy.learns:
            shortest = min(query.route.deadline - query.route.arrived for query in queries) / 2.0
            policy.slo_s = min(shortest, SLO_RISES * policy.slo_s) if policy.slo_s else shortest
        policy.measured(items, seconds)
        self.queue.max_batch = policy.limit(now)

    def served(self, route: Route, items: int) -> None:
        """One query ended."""
        slo = route.deadline - route.arrived
        if route.policy == OFFLINE:  # it has time, and its deadline says nothing about the app's objective
            self._offline += items
            slo = 0.0
        if route.payer is not None:
            payers = self._payers.setdefault(route.app, {})
            payers[route.payer] = payers.get(route.payer, 0) + items
        known = self._apps.get(route.app, (0, slo))
        self._apps[route.app] = known[0] + items, known[1] or slo

    def _computing(self, now: float) -> float:
        """Seconds in which it computed at least one batch, since the last call."""
        if self.running:
            self.computed += now - self.since
            self.since = now
        computed, self.computed = self.computed, 0.0
        return computed

    def sample(self, now: float) -> InstanceSample:
        """What was measured since the last call."""
        oldest = self.queue.oldest()
        apps = [AppSample(app, items, slo) for app, (items, slo) in self._apps.items()]
        sample = InstanceSample(
            self.id,
            self.record.variant,
            self.queued - self.running_offline,
            now - oldest if oldest is not None else 0.0,
            self._items,
            self._batches,
            self._busy,
            self._predicted,
            apps,
            self._offline,
            self.rule.policy if self.rule is not None else "edf",
            self.queue.max_batch,
            contexts=self.contexts,
            tier="host" if self.tier == self.goal == "host" else "device",
            begun=self.begun_at,
            computed=self._computing(now),
            copied=self.model is not None and self.model.copied,
            payers=self._payers,
            levels=self.queue.levels,
        )
        self._reset()
        return sample


# -- batches that run: each takes as many cores as its variant has threads, and an instance runs one for each context


def _last_begun(loaded: HeldInstance) -> float:
    """Offline work waits for all other."""
    return loaded.begun if loaded.queue.items > loaded.queue.offline else float("inf")


class BatchRuns:
    """The batches that run on a device. Those of a CPU take as many cores as their variant has threads; of other devices, one core each.

    A GPU has no cores of its own: under `executor.exclusive` it computes for one instance at a time, with all contexts of that instance.
    Otherwise the batches of all its instances overlap. `executor.order`: "edf", the instance with the most urgent query first, but before it
    those that have waited for TURNS rounds, in each of which every instance that waits has one batch; "lru", the one whose last batch began
    the longest ago (Rafiqi, paper 001, section 3.2). None overtakes an instance whose turn it is by age and that waits for more cores than
    are free: else one with many threads would starve.
    """

    def __init__(self, device: Device, settings: ExecutorSettings) -> None:
        self.running: dict[int, tuple[HeldInstance, RunBatch, int]] = {}
        self.starved = False  # an instance waits for cores
        self._held = False  # and none may overtake it
        self._aged = 0.0  # who has waited since then, or longer, goes first
        self._cores = max(1, device.cores)
        self._busy = 0
        self._gpu = device.kind == "gpu"
        self._overlap = self._gpu and not settings.exclusive
        self._inline_below = 0.0 if device.simulated else settings.inline_below_ms / 1000.0
        self._lru = settings.order == "lru"
        self._number = 0
        self._since = 0.0  # when it began to compute, or the last report, if that was later
        self._computed = 0.0

    @property
    def exclusive(self) -> bool:
        """Whether batches of several instances never overlap. On a CPU or chip, each has cores of its own."""
        return not self._overlap

    def computed(self, now: float) -> float:
        """Seconds in which at least one batch was computed, since the last call."""
        if self.running:
            self._computed += now - self._since
            self._since = now
        computed, self._computed = self._computed, 0.0
        return computed

    def ready(self, instances: Iterable[HeldInstance], now: float) -> list[HeldInstance]:
        """The instances that could begin a batch, in the order in which they may."""
        self.starved = self._held = False
        found = [one for one in instances if one.ready and one.running < one.contexts and len(one.queue)]
        if len(found) > 1:
            cores = sum(one.queue.seconds_of_next * self._needed(one) for one in found)
            self._aged = now - TURNS * cores / self._cores
            found.sort(key=_last_begun if self._lru else self._urgency)
        return found

    def _turn_is_due(self, loaded: HeldInstance) -> bool:
        """Whether it goes before the deadlines of others. Offline work waits for all other."""
        return self._lru or (loaded.waits_since <= self._aged and loaded.queue.items > loaded.queue.offline)

    def _urgency(self, loaded: HeldInstance) -> tuple[bool, float]:
        due = self._turn_is_due(loaded)
        return not due, loaded.waits_since if due else loaded.queue.most_urgent

    def _needed(self, loaded: HeldInstance) -> int:
        """Cores that one more batch takes. Of a GPU, the second context of an instance takes what the first one has."""
        if self._gpu:
            return 0 if self._overlap or loaded.running else 1
        return max(1, min(loaded.record.threads, self._cores))

    def has_room(self, loaded: HeldInstance) -> bool:
        """Whether enough cores are free for this instance. If not, `starved` is set."""
        if self._busy + self._needed(loaded) <= self._cores and not self._held:
            return True
        self.starved = True
        self._held = self._held or self._gpu or self._turn_is_due(loaded)
        return False

    def begin(self, loaded: HeldInstance, batch: list[QueuedQuery], now: float) -> Do:
        items = sum(query.items for query in batch)
        predicted = loaded.table.at(batch[0].route.length).seconds(items) * loaded.queue.factor
        self._number += 1
        inline = predicted < self._inline_below and loaded.contexts == 1 and not batch[0].route.alone
        if inline and any(query.route.fallback for query in batch):
            inline = False  # the default must be given in time even if this run takes far longer than any before
        run = RunBatch(loaded.id, batch, predicted, inline, loaded.contexts)
        if not self.running:
            self._since = now
        if not loaded.running:
            loaded.since = now
        self._busy += self._needed(loaded)
        loaded.free_at = min(loaded.free_at, now + predicted) if loaded.running else now + predicted
        loaded.running += 1
        loaded.begun, loaded.begun_at = self._number, now
        loaded.waits_since = now
        loaded.running_items += items
        if batch[0].route.policy == OFFLINE:
            loaded.running_offline += items
        self.running[self._number] = (loaded, run, items)
        return Do(self._number, run)

    def end(self, number: int, now: float) -> tuple[HeldInstance, RunBatch, int] | None:
        """Free the cores; returns the batch and its items. None if this batch does not run."""
        entry = self.running.pop(number, None)
        if entry is not None:
            loaded, run, items = entry
            if not self.running:
                self._computed += now - self._since
            loaded.running -= 1
            if not loaded.running:
                loaded.computed += now - loaded.since
            loaded.running_items -= items
            if run.queries[0].route.policy == OFFLINE:
                loaded.running_offline -= items
            self._busy -= self._needed(loaded)
        return entry


# -- reports to the monitor: twice a second what each instance did since the last time

REPORT = 0.5  # s


class ReportDue(Struct, frozen=True):
    """Timer: report to the monitor."""


class MonitorReporter:
    """What this executor tells of itself and of its instances."""

    def __init__(self, worker: str, device: str, incarnation: int, subjects: Subjects) -> None:
        self._used = ProcessUse(0.0)
        self._worker = worker
        self._device = device
        self._incarnation = incarnation
        self._subject = subjects.monitor(worker, "report")
        self._reported = 0.0

    def start(self, now: float, delay: float = 0.0) -> tuple[Effect, ...]:
        """The first report is due after `delay` seconds."""
        self._reported = now
        return (After("report", delay, ReportDue()),)

    def measured(self, used: ProcessUse) -> None:
        """For the next report: what this process uses."""
        self._used = used

    def gap(self, now: float) -> float:
        """Seconds since the last report; a new one is being made."""
        gap = now - self._reported if self._reported else REPORT
        self._reported = now
        return gap

    def report(
        self, now: float, seconds: float, instances: Iterable[HeldInstance], runs: BatchRuns
    ) -> tuple[Effect, ...]:
        """The report, the order to measure this process for the next one, and the timer."""
        report = ExecutorReport(
            exclusive=runs.exclusive,
            computed=runs.computed(now),
            worker=self._worker,
            device=self._device,
            incarnation=self._incarnation,
            at=now,
            seconds=seconds,
            samples=[loaded.sample(now) for loaded in instances],
            memory_mb=self._used.memory_mb,
            cpu_s=self._used.cpu_s,
        )
        return (
            Publish(self._subject, report),
            Do(("process", ""), MeasureProcess()),
            After("report", REPORT, ReportDue()),
        )
