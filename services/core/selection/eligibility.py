"""Which variants of an app may serve a query, and which of their instances can do so now.

`AppView` is the index of one app. Its static facts (accuracy, latency, load time, memory) are numpy columns, built when the catalogue
changes. What changes with every heartbeat is in small lists. `Eligibility` is the answer for one set of needs. It is made once and kept
until a state changes.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bus.messages.catalog import AppRecord, VariantRecord
from bus.messages.public import Requirements
from services.core.catalog import ContextLabels
from services.core.cost import Goal, LatencyTable, cost_per_1000, load_seconds, merit, open_axis
from services.core.demand import defaults, reaching
from services.core.release import Arm
from services.core.selection.instances import DEFAULT_PRIORITY, MANY, OVERHEAD, Instance
from services.core.selection.sampler import InstanceSampler

INFINITE = float("inf")
NO_WISH = Requirements()


class Ask(Struct, frozen=True, gc=False):
    """A query's needs, in SI units.

    items: how many. deadline: Unix seconds, the earlier of the latency objective and the absolute deadline. cost: US$ per 1,000 such queries.
    length: for models with an axis of varying length, the query's length rounded up to one that was measured. priority: 1 (highest) to 9.
    context, confidence: what apps of several models read. wish: needs that have no field here, since they are read as the query states them,
    for all its parts. arm: which version it gets in a release; None: there is none, or it names its version. labels: of its context, where they decide.
    """

    app: str
    items: int
    deadline: float
    latency_s: float = INFINITE
    accuracy: float = 0.0
    cost: float = INFINITE
    model: str | None = None
    version: str | None = None
    variant: str | None = None
    length: int | None = None
    priority: int = DEFAULT_PRIORITY
    context: str | None = None
    confidence: float | None = None
    wish: Requirements = NO_WISH
    arm: Arm | None = None
    labels: ContextLabels | None = None


Readiness = Literal["active", "loading", "troubled"]
RESOLUTION = 0.05  # s; load times that differ by less count as equal
LOADABLE = 16  # alternatives kept, in case workers refuse the best, or their CPUs are of another kind
FIRST = 8  # Active variants that a query looks at before it looks at all


class VariantInstances:
    """One variant of the app, with its instances by readiness. samplers: for these lists, used when they are long. warm: instances that
    are in host memory only and serve nobody.
    """

    __slots__ = ("active", "loading", "record", "samplers", "table", "troubled", "warm", "where")

    def __init__(self, record: VariantRecord) -> None:
        self.record = record
        self.table = LatencyTable(record)
        self.active: list[Instance] = []
        self.loading: list[Instance] = []
        self.troubled: list[Instance] = []
        self.warm: list[Instance] = []
        self.where: dict[Instance, list[Instance]] = {}
        self.samplers: dict[Readiness, InstanceSampler] = {
            "active": InstanceSampler(self.active), "loading": InstanceSampler(self.loading), "troubled": InstanceSampler(self.troubled)
        }  # fmt: skip

    @property
    def seconds_to_load(self) -> float:
        """Predicted seconds until one more instance serves: a Warm one where there is one."""
        return load_seconds(self.record, warm=bool(self.warm))

    @property
    def serving(self) -> "tuple[tuple[Readiness, list[Instance]], ...]":
        return ("active", self.active), ("troubled", self.troubled)

    def put(self, instance: "Instance", where: "list[Instance] | None") -> None:
        """Move an instance into this list, or out of all. In a list where it is already, it keeps its place."""
        before = self.where.get(instance)
        if before is where:
            return
        if before is not None:
            before.remove(instance)
            del self.where[instance]
        if where is not None:
            where.append(instance)
            self.where[instance] = where
        for sampler in self.samplers.values():
            if sampler.instances is before:
                instance.on_freed.remove(sampler.freed)
            elif sampler.instances is where:
                instance.on_freed.append(sampler.freed)
                sampler.freed(instance)


class RankedVariants:
    """The variants of an app that have an instance of one readiness, in the app's order, with their static facts."""

    def __init__(self, app: "AppView", mask: NDArray[np.bool_]) -> None:
        found = app.in_order(np.flatnonzero(mask))
        self.groups = [app.groups[i] for i in found.tolist()]
        self._app = app
        self._found = found
        self._serving = {new: mask[found] for new, mask in app.serving.items()}
        self._default = app.default[found]
        self._latency: dict[tuple[int, int | None], NDArray[np.float64]] = {}

    def eligible(self, ask: Ask) -> NDArray[np.intp]:
        """Indices in `groups` of the variants that meet accuracy, latency (inference alone, and the way to it), cost and pinned names, in the app's
        order; where cost is the goal, by what items cost in a query of so many.
        """
        if ask.variant is not None or ask.model is not None or ask.version is not None:
            mask = self._app.pinned(ask)[self._found]
        else:
            mask = self._serving[_new(ask)]
        if ask.accuracy > 0.0:
            mask = mask & self._app.accurate(ask)[self._found]
        elif ask.variant is None:
            mask = mask & self._default
        if ask.latency_s < INFINITE:
            key = (ask.items, ask.length)
            latency = self._latency.get(key)
            if latency is None:
                latency = self._app.latency(*key)[self._found]
                if len(self._latency) < 256:
                    self._latency[key] = latency
            mask = mask & (latency + self._app.way <= ask.latency_s)
        if ask.cost < INFINITE:
            mask = mask & (self._app.charge(ask.items, ask.length)[self._found] <= ask.cost)
        met = np.flatnonzero(mask)
        if ask.items > 1 and met.size > 1 and self._app.goal == "cost":
            met = met[np.argsort([self._app.cost_in(i, ask.items) for i in self._found[met].tolist()], kind="stable")]
        elif ask.labels is not None and self._app.goal == "accuracy":
            met = met[np.argsort([-merit(self._app.seen(ask)[i].accuracy) for i in self._found[met]], kind="stable")]
        return met


class Eligibility:
    """The variants that may serve one set of needs, in the app's order (`AppView.in_order`).

    first: the first few Active ones. Most queries look at these only, so everything else is computed when it is asked for.
    """

    __slots__ = ("_active", "_all", "_app", "_ask", "_loadable", "_loading", "_places", "_troubled", "first")

    def __init__(self, app: "AppView", ask: Ask) -> None:
        self._app = app
        self._ask = ask
        ranked = app.ranked("active")
        self._places = ranked.eligible(ask)
        self.first = [ranked.groups[i] for i in self._places[:FIRST].tolist()]
        self._active = self.first if len(self.first) == self._places.size else None
        self._loading: list[VariantInstances] | None = None
        self._troubled: list[VariantInstances] | None = None
        self._loadable: list[VariantInstances] | None = None
        self._all: NDArray[np.bool_] | None = None

    @property
    def any(self) -> bool:
        """Whether any variant at all, running or not, meets the needs."""
        return bool(self.first) or bool(self._meeting().any())

    def allows(self, variant: str) -> bool:
        """Whether this variant, running or not, meets the needs."""
        place = self._app.index.get(variant)
        return place is not None and bool(self._meeting()[place])

    def _meeting(self) -> NDArray[np.bool_]:
        if self._all is None:
            self._all = self._app.eligible(self._ask)
        return self._all

    @property
    def active(self) -> list[VariantInstances]:
        """Variants with an Active instance."""
        if self._active is None:
            groups = self._app.ranked("active").groups
            self._active = [groups[i] for i in self._places.tolist()]
        return self._active

    @property
    def loading(self) -> list[VariantInstances]:
        """Variants with an instance that is being loaded."""
        if self._loading is None:
            self._loading = self._in("loading")
        return self._loading

    @property
    def troubled(self) -> list[VariantInstances]:
        """Variants with an Overloaded or Interfered instance."""
        if self._troubled is None:
            self._troubled = self._in("troubled")
        return self._troubled

    @property
    def loadable(self) -> list[VariantInstances]:
        """The best few variants without an instance, soonest ready first."""
        if self._loadable is None:
            self._loadable = self._soonest()
        return self._loadable

    def _in(self, kind: Readiness) -> list[VariantInstances]:
        groups = self._app.ranked(kind).groups
        return [groups[i] for i in self._app.ranked(kind).eligible(self._ask).tolist()] if groups else []

    def _soonest(self) -> list[VariantInstances]:
        app = self._app
        idle = np.flatnonzero(self._meeting() & ~(app.has_active | app.has_loading | app.has_troubled))
        if not idle.size:
            return []
        # Load times are measured to some hundredths of a second. Among variants that are ready equally soon, the cheaper one goes first,
        # then the one with more throughput.
        ready = np.round((app.load_s[idle] + app.latency(self._ask.items, self._ask.length)[idle]) / RESOLUTION)
        best = np.lexsort((-app.saturation[idle], app.cost[idle], ready))[:LOADABLE]
        return [app.groups[i] for i in idle[best].tolist()]


CALM = 0.5  # s after which instances no longer count as full, if no query found them full
MOST_KEPT = 4096  # sets of needs kept; clients mostly repeat a few


class AppView:
    """The index of one app. goal: the order of its variants, cheapest first or most accurate first, as it is where answers have to be
    accurate in the mean: the plan has loaded as much of each variant as that needs.
    """

    def __init__(
        self,
        app: AppRecord,
        records: tuple[VariantRecord, ...],
        price: Callable[[VariantRecord], float],
        goal: Goal = "cost",
    ) -> None:
        self.app = app
        self.goal: Goal = "accuracy" if app.accuracy_mean or app.worth else goal
        self.records = records
        # A version that is not linked serves only queries that name it.
        self.current: NDArray[np.bool_] = np.array([app.links.items() >= set(r.versions) for r in records], dtype=bool)
        # By whether a query gets the new version of a release.
        released = np.array([app.released.items() >= set(r.versions) for r in records], dtype=bool)
        self.serving: dict[bool, NDArray[np.bool_]] = {False: self.current, True: released}
        self.groups = [VariantInstances(record) for record in records]
        self.index = {record.variant: i for i, record in enumerate(records)}
        self.open_axis = open_axis(app.signature)
        self.lengths = sorted({row.length for r in records for row in r.profile.rows if row.length is not None})
        count = len(records)
        self.accuracy = _accuracies(records)
        self.live = any(r.truth is not None or r.remeasured for r in records)  # its process may say another accuracy
        self.left = any(r.registered not in (None, r.accuracy) for r in records)  # a live accuracy counts
        current = [r for r, serves in zip(records, self.current.tolist(), strict=True) if serves]
        self.metrics = frozenset(r.metric for r in current or records)
        # Which ones serve queries that state no accuracy.
        self.default: NDArray[np.bool_] = np.array(defaults(records, app), dtype=bool)
        self._merit: NDArray[np.float64] = np.array([merit(r.accuracy) for r in records], dtype=np.float64)
        self.load_s: NDArray[np.float64] = np.array([g.seconds_to_load for g in self.groups], dtype=np.float64)
        self.saturation: NDArray[np.float64] = np.array([r.profile.saturation_qps for r in records], dtype=np.float64)
        self.cost: NDArray[np.float64] = np.zeros(count)
        self.batch: list[int] = [1] * count
        self._placed = [0] * count
        self._latency: dict[tuple[int, int | None], NDArray[np.float64]] = {}
        self.has_active: NDArray[np.bool_] = np.zeros(count, dtype=bool)
        self.has_loading: NDArray[np.bool_] = np.zeros(count, dtype=bool)
        self.has_troubled: NDArray[np.bool_] = np.zeros(count, dtype=bool)
        self._has_warm = [False] * count
        self._eligibilities: dict[tuple[object, ...], Eligibility] = {}
        self._ranked: dict[Readiness, RankedVariants] = {}
        self._full_since = self._full_at = float("-inf")
        self.asked = 0  # queries on which was decided: what goes in turn goes by it
        self._price: NDArray[np.float64] = np.zeros(count)
        self._charged: dict[tuple[int, int | None], NDArray[np.float64]] = {}
        self.way = OVERHEAD  # s of a query beside computing, as `ClusterView` measures it
        self.reprice(price)

    def measured_by(self, wish: Requirements) -> frozenset[str]:
        """The metrics of the variants that a query may get: of those that serve now, or that it names."""
        if wish.model is wish.version is wish.variant is None:
            return self.metrics
        found = self.pinned(Ask("", 1, 0.0, model=wish.model, version=wish.version, variant=wish.variant))
        return frozenset(self.records[i].metric for i in np.flatnonzero(found)) or self.metrics

    def full_for(self, now: float) -> float:
        """Seconds for which queries have found its Active instances full."""
        return now - self._full_since if now - self._full_at <= CALM else 0.0

    def found_full(self, now: float, *, anew: bool) -> None:
        """A query has found its Active instances full. anew: the time counts from now."""
        if anew or now - self._full_at > CALM:
            self._full_since = now
        self._full_at = now

    def cost_in(self, variant: int, items: int) -> float:
        """US$ per 1,000 items where a query of so many comes: it fills batches by itself that are larger than the usual ones."""
        most = self.groups[variant].table.max_batch
        if min(items, most) <= self.batch[variant]:
            return float(self.cost[variant])
        return cost_per_1000(self.records[variant], float(self._price[variant]), min(items, most))

    def set_way(self, seconds: float) -> None:
        self.way = seconds
        self._changed()

    def reprice(self, price: Callable[[VariantRecord], float]) -> None:
        """Price all variants again: devices have become known."""
        for i, record in enumerate(self.records):
            if (now := price(record)) != self._price[i]:
                self._price[i], self.cost[i] = now, cost_per_1000(record, now, self.batch[i])
                self._changed()

    def in_order(self, found: NDArray[np.intp]) -> NDArray[np.intp]:
        """These variants (indices) in the order in which a query looks at them: by the goal, then by cost."""
        if found.size < 2:
            return found
        if self.goal == "cost":
            return found[np.argsort(self.cost[found], kind="stable")]
        return found[np.lexsort((self.cost[found], -self._merit[found]))]

    def latency(self, items: int, length: int | None = None) -> NDArray[np.float64]:
        """Inference latency in s of a batch of so many items, by variant."""
        column = self._latency.get((items, length))
        if column is None:
            columns = [g.table.at(length).seconds(items) + g.table.tail_s for g in self.groups]
            column = np.array(columns, dtype=np.float64)
            if len(self._latency) < 256:
                self._latency[items, length] = column
        return column

    def charge(self, items: int, length: int | None = None) -> NDArray[np.float64]:
        """What a query of so many items is predicted to be charged at most, by variant, in US$ per 1,000 such queries: what `Ask.cost` limits."""
        column = self._charged.get((items, length))
        if column is None:
            seconds = [group.table.at(length).charged_seconds(items) for group in self.groups]
            column = np.array(seconds, dtype=np.float64)
            if len(self._charged) < 256:
                self._charged[items, length] = column
        return 1000.0 * self._price * column

    def offered_charge(self, variant: int, items: int, length: int | None = None) -> float:
        """The same of one variant, with what a batch takes longer after a pause, as it finds nothing in the caches: what is offered leaves room for it."""
        return float(self.charge(items, length)[variant] + 1000.0 * self._price[variant] * OVERHEAD)

    # -- instances

    def place(self, instance: "Instance") -> None:
        """Put an instance into the list that its state for this app belongs to."""
        i = self.index[instance.record.variant]
        group = self.groups[i]
        state = instance.state
        if state not in ("Inactive", "Unloading", "Warm"):
            state = instance.state_for(self.app.app)
        if state == "Active" or (state == "Overloaded" and self.goal == "accuracy"):
            # Accurate instances are full on purpose. What they predict says whether a query is in time there.
            group.put(instance, group.active)
        elif state == "Loading":
            group.put(instance, group.loading)
        elif state in ("Overloaded", "Interfered"):
            group.put(instance, group.troubled)
        elif state == "Warm" or (state == "Unloading" and instance.ready_at > 0):
            group.put(instance, group.warm)
        else:
            group.put(instance, None)
        batch = instance.batch if len(group.active) <= MANY else self._usual_batch(i)
        if batch != self.batch[i] or instance.price_per_s != self._price[i]:
            self.batch[i], self._price[i] = batch, instance.price_per_s
            self.cost[i] = cost_per_1000(group.record, instance.price_per_s, batch)
            self._changed()
        self._refresh(i)

    def _usual_batch(self, i: int) -> int:
        """The usual batch of many instances. Some of them always change theirs, so it is computed now and then."""
        active = self.groups[i].active
        self._placed[i] = (self._placed[i] + 1) % len(active)
        return self.batch[i] if self._placed[i] else usual(instance.batch for instance in active)

    def unplace(self, instance: "Instance") -> None:
        i = self.index.get(instance.record.variant)
        if i is not None:
            self.groups[i].put(instance, None)
            self._refresh(i)

    def _refresh(self, i: int) -> None:
        """Note whether there is any instance of each readiness. Eligibility changes only with that."""
        group = self.groups[i]
        for has, instances in (
            (self.has_active, group.active),
            (self.has_loading, group.loading),
            (self.has_troubled, group.troubled),
        ):
            if has[i] != bool(instances):
                has[i] = bool(instances)
                self._changed()
        if self._has_warm[i] != bool(group.warm):
            self._has_warm[i], self.load_s[i] = bool(group.warm), group.seconds_to_load
            self._changed()

    def _changed(self) -> None:
        self._eligibilities.clear()
        self._ranked.clear()

    def ranked(self, state: Readiness) -> RankedVariants:
        """The variants with an instance in this state."""
        ranked = self._ranked.get(state)
        if ranked is None:
            mask = {"active": self.has_active, "loading": self.has_loading, "troubled": self.has_troubled}[state]
            ranked = self._ranked[state] = RankedVariants(self, mask)
        return ranked

    # -- eligibility

    def eligibility(self, ask: Ask) -> Eligibility:
        """The variants that may serve these needs. Kept until something changes."""
        of_version = ask.model, ask.version, ask.variant, _new(ask)
        key = ask.latency_s, ask.accuracy, ask.cost, ask.items, ask.length, ask.labels, of_version
        found = self._eligibilities.get(key)
        if found is None:
            found = Eligibility(self, ask)
            if len(self._eligibilities) >= MOST_KEPT:
                self._eligibilities.clear()
            self._eligibilities[key] = found
        return found

    def eligible(self, ask: Ask) -> NDArray[np.bool_]:
        """Which variants meet accuracy, latency (inference alone, and the way to it), cost and what was pinned."""
        return self.accurate(ask) & self.able(ask)

    def able(self, ask: Ask) -> NDArray[np.bool_]:
        """Which variants meet all of it but the accuracy."""
        mask: NDArray[np.bool_] = self.latency(ask.items, ask.length) + self.way <= ask.latency_s
        if ask.cost < INFINITE:
            mask &= self.charge(ask.items, ask.length) <= ask.cost
        if ask.variant is not None or ask.model is not None or ask.version is not None:
            mask &= self.pinned(ask)
        else:
            mask &= self.serving[_new(ask)]
        return mask

    def promised(self, ask: Ask) -> NDArray[np.bool_]:
        """Which of those were registered with the query's accuracy, where another one counts now for some variant."""
        if ask.accuracy == 0.0 or not (self.left or ask.labels):
            return np.zeros(len(self.records), dtype=bool)
        return self.able(ask) & np.array(
            [(r.registered or 0.0) >= ask.accuracy for r in self.seen(ask)], dtype=np.bool_
        )

    def accurate(self, ask: Ask) -> NDArray[np.bool_]:
        """Which variants meet the query's accuracy. Without one, those that answer as their model does (`services.core.demand`), or the named one."""
        if ask.accuracy > 0.0 and (self.left or ask.labels):
            return reaching(self.seen(ask), ask.accuracy, self.app, self.able(ask))
        if ask.accuracy > 0.0:
            return np.asarray(self.accuracy >= ask.accuracy)
        return self.default.copy() if ask.variant is None else np.ones(len(self.records), dtype=bool)

    def seen(self, ask: Ask) -> tuple[VariantRecord, ...]:
        """Its variants as labels show them in the query's context."""
        return self.records if ask.labels is None else ask.labels.seen(self.records, self.app.quality_act)

    def accuracies(self, ask: Ask) -> NDArray[np.float64]:
        """Their accuracy; 1 where none was measured."""
        return self.accuracy if ask.labels is None else _accuracies(self.seen(ask))

    def pinned(self, ask: Ask) -> NDArray[np.bool_]:
        """Which variants the query's model, version and variant allow."""
        if ask.variant is not None:
            mask = np.zeros(len(self.records), dtype=bool)
            i = self.index.get(ask.variant)
            if i is not None and ask.model in (None, self.records[i].model):
                mask[i] = ask.version in (None, self.records[i].version)
            return mask
        mask = np.array([ask.model in (None, r.model) and r.cascade is None for r in self.records], dtype=np.bool_)
        if ask.version is None:
            mask &= self.serving[_new(ask)]
        else:
            mask &= np.array([ask.version == r.version for r in self.records], dtype=np.bool_)
        return mask


def _accuracies(records: Iterable[VariantRecord]) -> NDArray[np.float64]:
    return np.array([1.0 if r.accuracy is None else r.accuracy for r in records], dtype=np.float64)


def _new(ask: Ask) -> bool:
    return ask.arm is not None and ask.arm.new


def usual(batches: Iterable[int]) -> int:
    """The most frequent batch size; among equally frequent ones, the smallest."""
    return min(Counter(batches).items(), key=lambda item: (-item[1], item[0]))[0]
