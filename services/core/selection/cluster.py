"""The cluster as a dispatcher sees it: workers, instances, and for each app what can serve it.

The sources are heartbeats, `done` batches and the dispatcher's own assignments. Most heartbeats only refresh numbers. A change of
state moves one instance between the lists of the apps that its variant serves.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import nsmallest

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.catalog import AppRecord, VariantRecord
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from services.core.cost import Goal, instance_price_per_s, load_seconds
from services.core.demand import as_registered
from services.core.placement import adds_alike
from services.core.selection.eligibility import INFINITE, AppView, Ask
from services.core.selection.instances import MANY, OVERHEAD, WAY, Instance, SharedCores, Worker

WAY_S = 10.0  # s over which the least way is taken
WAY_STEP = 0.00025  # s
FEW = 8  # least used workers remembered, of many
LOAD_AGAIN = 5.0  # s before a worker that could not load a variant is asked to load it again
FORGOTTEN_S = 60.0  # s without a query after which a machine that was waited for is waited for anew


class RefusedLoad(Struct, frozen=True):
    """A worker did not load a variant. until: it is not asked again before. lasting: it never will, as long as all is as it is."""

    reason: str
    until: float
    lasting: bool = False


class ClusterView:
    """All workers, instances and apps. Call `set_app`/`drop_app` when the catalogue changes, `heartbeat` when one comes."""

    def __init__(
        self, prices: Mapping[str, float], goal: Goal = "cost", boots: Mapping[tuple[str, bool], float] = {}
    ) -> None:
        self.prices = prices
        self._boots = dict(boots)  # by kind of device: as MachineSettings.boots says, then as the last machine took
        # Of these: since when queries wait for one, and when the last one asked.
        self._awaited: dict[tuple[str, bool], tuple[float, float]] = {}
        self._goal = goal
        self.workers: dict[str, Worker] = {}
        self.instances: dict[str, Instance] = {}
        self.apps: dict[str, AppView] = {}
        self.records: dict[str, VariantRecord] = {}
        self.by_variant: dict[str, dict[str, Instance]] = {}
        self.lowest_priority = 1  # the largest number that a query had, here or of another dispatcher
        self.gone: dict[str, tuple[str, float]] = {}  # by kind of device: the worker that had one last, until when
        self.heard = 0.0  # when the last heartbeat came
        self.way = (
            OVERHEAD  # s of a query beside computing: the least of those that came lately, as far as that is no load
        )
        self._least, self._way_since = INFINITE, 0.0
        self._refusals: dict[str, dict[str, RefusedLoad]] = {}  # by variant and worker
        self._serving: dict[str, list[AppView]] = {}  # by variant
        self._unknown: dict[str, WorkerHeartbeat] = {}
        self._quarantining: dict[str, Worker] = {}
        self._heartbeats = 0  # how many have come
        # least used workers, and after which heartbeat
        self._idlest: dict[tuple[str, bool], tuple[int, list[str]]] = {}

    # -- catalogue

    def set_app(self, app: AppRecord, records: Iterable[VariantRecord], key: str = "") -> None:
        """Set an app's variants. key: the name by which queries find it, if that is not its own."""
        view = AppView(app, tuple(records), self.nominal_price_per_s, self._goal)
        view.way = self.way
        self.drop_app(key or app.app)
        self.apps[key or app.app] = view
        for record in view.records:
            self.records[record.variant] = as_registered(record)
            self._serving.setdefault(record.variant, []).append(view)
            for instance in self.by_variant.get(record.variant, {}).values():
                view.place(instance)
        for heartbeat in list(self._unknown.values()):
            self.heartbeat(heartbeat, heartbeat.at)

    def production(self, ask: Ask, variant: str) -> tuple[float, str] | None:
        """The accuracy of a variant in an app in production, for a query with these needs, where it has left the registered one."""
        view = self.apps.get(ask.app)
        return None if not view or not (view.live or ask.labels) else view.seen(ask)[view.index[variant]].production

    def took(self, way: float) -> None:
        """A query was away for so many seconds beside computing. All queries wait at times; the least says what none can do without."""
        self._least = min(self._least, way)

    def _measure_way(self, now: float) -> None:
        """In steps, so that indices of apps stay. Where no query came, nothing is known any more; what is longer than a busy machine may need is load."""
        least = OVERHEAD if self._least == INFINITE else WAY_STEP * (self._least // WAY_STEP)
        way = min(max(OVERHEAD, least), OVERHEAD + WAY)
        self._least, self._way_since = INFINITE, now
        if way != self.way:
            self.way = way
            for app in self.apps.values():
                app.set_way(way)

    def drop_app(self, app: str) -> None:
        view = self.apps.pop(app, None)
        if view is not None:
            for record in view.records:
                self._serving[record.variant].remove(view)
                for instance in self.by_variant.get(record.variant, {}).values():
                    view.unplace(instance)
                self._forget(record.variant)

    def _forget(self, variant: str) -> None:
        """Keep nothing of a variant that no app has and of which nothing is loaded: they come and go for years."""
        if not self._serving.get(variant) and not self.by_variant.get(variant):
            for kept in (self.records, self.by_variant, self._serving, self._refusals):
                kept.pop(variant, None)

    def nominal_price_per_s(self, record: VariantRecord) -> float:
        """Price of one instance on the first living device of its kind, or on a device of its own size when there is none."""
        for worker in self.workers.values():
            for device in worker.devices.values():
                if device.kind == record.hardware and device.simulated == record.simulated:
                    return instance_price_per_s(record, self.prices, device.cores, device.memory_mb)
        return instance_price_per_s(record, self.prices, max(record.threads, 1), max(record.profile.memory_mb, 1.0))

    # -- fleet

    @property
    def missing(self) -> str:
        """What there must be for any query to be answered, in words; empty when it is there."""
        living = any(device.alive for worker in self.workers.values() for device in worker.devices.values())
        return "" if living else "a living executor"

    def heartbeat(self, heartbeat: WorkerHeartbeat, now: float) -> bool:
        """Take one heartbeat over. Returns whether the set of instances, or any state, changed."""
        worker = self.workers.get(heartbeat.worker)
        if worker is None:
            worker = self.workers[heartbeat.worker] = Worker(heartbeat.worker, heartbeat.hardware)
            first = True
        else:
            first = False
        worker.incarnation, worker.seen, worker.skew = heartbeat.incarnation, now, now - heartbeat.at
        self.heard = now
        if now > self._way_since + WAY_S:
            self._measure_way(now)
        alive_before = {name for name, device in worker.devices.items() if device.alive}
        worker.kind = heartbeat.kind or heartbeat.hardware
        worker.draining = heartbeat.draining or heartbeat.leaving
        worker.quarantined = heartbeat.quarantined
        self._heartbeats += 1
        if heartbeat.quarantined:
            self._quarantining[worker.name] = worker
        elif self._quarantining:
            self._quarantining.pop(worker.name, None)
        for device in heartbeat.devices:
            before = worker.devices.get(device.device)
            if not device.alive or (before is not None and before.incarnation != device.incarnation):
                self.lose_device(heartbeat.worker, device.device)  # its executor is not the one that took the queries
        known = worker.devices.keys() == {device.device for device in heartbeat.devices}
        worker.devices = {device.device: device for device in heartbeat.devices}
        if heartbeat.leaving:
            self._goes(worker)
        elif self.gone or self._awaited:
            for device in heartbeat.devices:
                self.gone.pop(device.kind, None)
                kind = device.kind, device.simulated
                if device.alive and kind in self._awaited:
                    self._boots[kind] = now - self._awaited.pop(kind)[0]
        changed = first or alive_before != {name for name, device in worker.devices.items() if device.alive}
        if not known:
            for view in self.apps.values():
                view.reprice(self.nominal_price_per_s)
        listed = set()
        unknown = False
        for status in heartbeat.instances:
            record = self.records.get(status.variant)
            where = worker.devices.get(status.device)
            if record is None or where is None:
                unknown = True
                continue
            if not where.alive:
                continue
            listed.add(status.instance)
            changed |= self._update(worker, where, status, record, now)
        for gone in [i for i in worker.instances if i not in listed]:
            self.remove(gone)
            changed = True
        worker.was_alive = worker.was_alive or any(device.alive for device in heartbeat.devices)
        worker.measure_fullness()
        if unknown:
            self._unknown[heartbeat.worker] = heartbeat
        else:
            self._unknown.pop(heartbeat.worker, None)
        return changed

    def _update(
        self, worker: Worker, device: DeviceStatus, status: InstanceStatus, record: VariantRecord, now: float
    ) -> bool:
        instance = self.instances.get(status.instance)
        fresh = instance is None
        if instance is None:
            instance = Instance(status, record, worker, device)
            instance.price_per_s = instance_price_per_s(record, self.prices, device.cores, device.memory_mb)
            instance.cores = worker.cores.setdefault(device.device, instance.cores)
            self.instances[instance.id] = worker.instances[instance.id] = instance
            self.by_variant.setdefault(record.variant, {})[instance.id] = instance
        before = instance.status
        instance.status = status
        warm = status.state == "Warm"
        if fresh or warm != (before.state == "Warm"):
            if not warm:
                instance.cores.add(instance, device)
            elif not fresh:
                instance.cores.remove(instance)
        instance.factor = status.factor
        instance.served = status.load
        instance.busy = busy_share(status)
        instance.ready_at = status.ready_at
        instance.limit_batches(status.batch_limit, status.contexts)
        instance.observe_queue(status.queued, now)
        if not instance.own:  # else its executor says it with the next batch
            self._observe_levels(instance, status.levels)
        batch = _power_of_two(status.mean_batch)
        state = "Inactive" if worker.draining else status.state
        moved = fresh or state != instance.state or batch != instance.batch or before.app_states != status.app_states
        instance.state, instance.batch = state, batch
        if moved:
            self._place(instance)
        return moved

    def _place(self, instance: Instance) -> None:
        for view in self._serving.get(instance.record.variant, ()):
            view.place(instance)

    def remove(self, instance_id: str) -> Instance | None:
        """Forget one instance."""
        instance = self.instances.pop(instance_id, None)
        if instance is None:
            return None
        instance.worker.instances.pop(instance_id, None)
        if instance.status.state != "Warm":  # a Warm one has no cores
            instance.cores.remove(instance)
        instance.cores = SharedCores()  # queries that were sent there may still come back
        self.by_variant.get(instance.record.variant, {}).pop(instance_id, None)
        for view in self._serving.get(instance.record.variant, ()):
            view.unplace(instance)
        self._forget(instance.record.variant)
        return instance

    def lose_device(self, worker_name: str, device: str) -> list[Instance]:
        """A device's executor is gone: remove its instances until a heartbeat lists them again."""
        worker = self.workers.get(worker_name)
        if worker is None:
            return []
        if (status := worker.devices.get(device)) is not None:
            worker.devices[device] = replace(status, alive=False)
        lost = [i for i in worker.instances.values() if i.device == device]
        for instance in lost:
            self.remove(instance.id)
        return lost

    def lose_worker(self, name: str) -> list[Instance]:
        """A worker's heartbeats have stopped: remove everything on it until one comes again."""
        worker = self.workers.get(name)
        if worker is None:
            return []
        lost = list(worker.instances.values())
        for instance in lost:
            self.remove(instance.id)
        del self.workers[name]
        self._goes(worker)
        self._unknown.pop(name, None)
        self._quarantining.pop(name, None)
        for refused in self._refusals.values():
            refused.pop(name, None)
        return lost

    def _goes(self, worker: Worker) -> None:
        self.gone |= {device.kind: (worker.name, worker.seen) for device in worker.devices.values()}

    def quarantines(self, variant: str) -> dict[str, str]:
        """The workers that will not load this variant until it is released, and why."""
        found = self._quarantining
        return {w.name: w.quarantined[variant] for w in found.values() if variant in w.quarantined} if found else {}

    def load_refused(self, variant: str, worker: str, refused: RefusedLoad) -> None:
        """This worker has not loaded the variant."""
        self._refusals.setdefault(variant, {})[worker] = refused

    def load_accepted(self, variant: str, worker: str) -> None:
        """This worker loads the variant, or has it."""
        if variant in self._refusals:
            self._refusals[variant].pop(worker, None)

    def refusals(self, variant: str) -> dict[str, RefusedLoad]:
        """The workers that have not loaded this variant when they were asked last, and why."""
        return self._refusals.get(variant, {})

    def closed_to(self, variant: str, now: float) -> frozenset[str]:
        """The workers that are not to be asked to load this variant now."""
        record = self.records.get(variant)
        shut = frozenset(self.quarantines(variant))
        if record is not None:
            shut = shut.union(self.adding_otherwise(record))
        refused = self._refusals.get(variant)
        return shut if not refused else shut.union(name for name, one in refused.items() if one.until > now)

    def able(self, record: VariantRecord) -> Iterator[str]:
        """The workers with a living device of this variant's kind, real or simulated as it is."""
        others = self.adding_otherwise(record)
        return (
            worker.name
            for worker in self.workers.values()
            if not worker.draining
            and worker.name not in others
            and worker.utilisation(record.hardware, simulated=record.simulated) is not None
        )

    def starts(self, record: VariantRecord) -> bool:
        """Whether a machine that this variant runs on may be started by the system."""
        return (record.hardware, record.simulated) in self._boots

    def comes(self, record: VariantRecord, now: float, *, waits: bool) -> float:
        """Seconds until a machine that this variant runs on may have come, where none has such a device. waits: a query waits for one, from now on or
        already. Nobody knows it where none may be started, or where it takes longer than the last one did.
        """
        kind = record.hardware, record.simulated
        boot = self._boots.get(kind)
        if boot is None or any(
            worker.utilisation(kind[0], simulated=kind[1]) is not None for worker in self.workers.values()
        ):
            return LOAD_AGAIN
        since, last = self._awaited.get(kind, (now, now))
        if now - last > max(FORGOTTEN_S, boot):
            since = now
        if waits:
            self._awaited[kind] = since, now
        left = since + boot - now
        return left + load_seconds(record) if left > 0 else LOAD_AGAIN

    def adding_otherwise(self, record: VariantRecord) -> dict[str, str]:
        """The workers whose CPU adds small integers otherwise than the one that the variant was measured on, and how."""
        if not record.arithmetic:
            return {}
        return {
            worker.name: device.arithmetic
            for worker in self.workers.values()
            for device in worker.devices.values()
            if device.kind == record.hardware and not adds_alike(record, device.arithmetic)
        }

    def told(self, instance: Instance, levels: Mapping[int, int]) -> None:
        """Its executor has ended queries there. levels: items that wait, by priority."""
        instance.cores.quiet = 0
        if levels:
            self._observe_levels(instance, levels)

    def _observe_levels(self, instance: Instance, levels: Mapping[int, int]) -> None:
        if levels:
            instance.observe_levels(levels)
            self.lowest_priority = max(self.lowest_priority, *levels)

    def had_no_time(self, ask: Ask, now: float) -> None:
        """No instance could answer this query in time: those where others give way to it leave time for the next one, if it is enough for one."""
        app = self.apps.get(ask.app)
        if app is None or ask.priority >= self.lowest_priority:
            return
        left = ask.deadline - now
        eligible = app.eligibility(ask)
        for group in (*eligible.active, *eligible.troubled):
            for instance in (*group.active, *group.troubled):
                if instance.alone_s(ask.items, ask.length) <= left and instance.outranked(ask.priority):
                    instance.no_time = ask.priority, left
                    instance.highest = min(instance.highest, ask.priority)

    @staticmethod
    def warmest(instances: Iterable[Instance], exclude: Collection[str] = ()) -> str | None:
        """Of the workers where these Warm instances are, the one whose device is used least. None when none of them takes loads."""
        able = [
            (one.worker.devices[one.device].utilisation, one.worker.name)
            for one in instances
            if not one.worker.draining and one.worker.name not in exclude and one.device in one.worker.devices
        ]
        return min(able)[1] if able else None

    def least_utilised(
        self, kind: str, exclude: frozenset[str] = frozenset(), *, simulated: bool = False
    ) -> str | None:
        """The living worker whose device of this kind, real or simulated, is used least; the first by name among equals.

        None when there is none. With more than MANY workers, the answer is up to a sixteenth of a second old.
        """
        if len(self.workers) <= MANY:
            return next(self._by_use(kind, exclude, simulated=simulated, most=1), None)
        at, names = self._idlest.get((kind, simulated), (0, []))
        if not names or self._heartbeats - at > len(self.workers) // 8:  # a sixteenth of a second
            names = list(self._by_use(kind, frozenset(), simulated=simulated, most=FEW))
            self._idlest[kind, simulated] = self._heartbeats, names
        for name in names:
            worker = self.workers.get(name)
            if worker is not None and not worker.draining and name not in exclude:
                return name
        return next(self._by_use(kind, exclude, simulated=simulated, most=1), None)

    def _by_use(self, kind: str, exclude: frozenset[str], *, simulated: bool, most: int) -> Iterator[str]:
        found = [
            (used, worker.name)
            for worker in self.workers.values()
            if not worker.draining
            and worker.name not in exclude
            and (used := worker.utilisation(kind, simulated=simulated)) is not None
        ]
        return (name for _, name in nsmallest(most, found))


def busy_share(status: InstanceStatus) -> float:
    """Share of the time that an instance computes: batches a second times seconds a batch."""
    return status.load / status.mean_batch * status.latency_ms / 1000.0 if status.mean_batch > 0 else 0.0


def _power_of_two(batch: float) -> int:
    """The batch size rounded down to a power of two. Mean batches change all the time; prices and eligibility only when they double or halve."""
    return 1 << max(0, round(batch).bit_length() - 1) if batch >= 1 else 1
