"""The leader's plan for all workers: which machines there should be, and which instances each worker should have. Pure.

Two plans are made together. The first is for the time at which a new machine would work. It says how many machines of each kind to have.
The second is for the time at which a new instance would serve. It says what the machines that work now should have loaded. What the second
plan does not need becomes reclaimable: it goes on serving until its place is needed. What deployed pipelines need is reserved in both; what is
missing of it is ordered without waiting for a plan.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import inf

from msgspec import Struct, field
from msgspec.structs import replace

from bus.messages.catalog import VariantRecord
from bus.messages.events import AppObjective
from bus.messages.fleet import LoadReply, PlannedBy, Release
from bus.messages.scaling import AskForHistory, DemandReport, ObjectiveReport
from bus.subjects import Subjects
from services.autoscaler.vms.commands import ControllerEffects, FleetSolved, Turn
from services.autoscaler.vms.fleet import Fleet, FleetWorker
from services.autoscaler.vms.placement import Room, assign, hardware_of, place_more
from services.autoscaler.vms.problem import ClassNeeds, FleetProblems, FleetSnapshot, Reservation
from services.autoscaler.vms.rules import HardwareNeed, hardware_name
from services.core.actor import Do, Effect, Publish, Record
from services.core.catalog import Catalog, target_of
from services.core.cost import load_seconds
from services.core.demand import Band, band
from services.core.lifecycle import COUNTED, SERVING
from services.core.planning.problem import FleetPlan
from services.core.policy import ScalingPolicy
from services.core.settings import AutoscalerSettings

SOLVE_S = 5.0  # s that both solutions may take
EXPIRES_S = 20.0  # s after which a plan does not count any more
KEEP_S = 10.0  # s for which a plan is kept unless a class needs more
CHANGED = 0.1  # relative growth of a class's need that counts
FALLEN = 1.3  # factor by which a class's need falls so that a new plan may save something
BARRED_S = 5.0  # s for which a variant that a worker has refused is not ordered there again
RECLAIM_S = 15.0  # s for which an instance must be too much before it becomes reclaimable without need
CALM_S = 300.0  # s for which one that was too much and was needed again is not marked: the mark would come off again
AMPLE = 3.0  # headroom from which an app gets no more idle devices
RECORD_S = 10.0  # s between two records of objectives
SETTLE_S = 3.0  # s between a load order and its instance in the heartbeats, beside its load time


class FleetPlanner(Struct, eq=False):
    """It acts only in turns in which its controller leads. wanted_machines: by kind, as the last plan has it. expected: items/s for those.

    policy: says how many instances there are; None: the programme does. objectives: of all apps, as of the last plan. lacking: by
    variant, how many reserved instances find no room, and why.
    """

    subjects: Subjects
    fleet: Fleet
    catalog: Catalog
    effects: ControllerEffects
    problems: FleetProblems
    settings: AutoscalerSettings
    policy: ScalingPolicy | None = None
    wanted_machines: dict[str, int] = {}
    expected: float = 0.0
    objectives: list[AppObjective] = []
    lacking: Mapping[str, tuple[int, str]] = {}
    _solving: FleetSnapshot | None = None
    # When, and for which needs.
    _planned: tuple[float, Mapping[Band, float]] = field(default_factory=lambda: (-inf, {}))
    _fleet_then: tuple[object, ...] = ()
    _reserved_then: Mapping[str, Reservation] = {}
    _wanted: dict[str, dict[str, int]] = {}  # by worker: instances by variant
    # By worker and variant: instances that were ordered, and until when the order is not repeated.
    _ordered: dict[tuple[str, str], tuple[int, float]] = {}
    _replies: dict[str, tuple[str, str]] = {}  # by subject: worker and variant
    _unneeded: dict[tuple[str, str], float] = {}  # worker, variant: since when there are too many instances
    _marked: set[tuple[str, str]] = set()  # those of these that have been marked
    _back: dict[tuple[str, str], float] = {}  # worker, variant: when instances that were too much were needed again
    _demanded: dict[str, int] = {}  # by variant: instances of the last plan beside reserved ones
    _calm: set[str] = set()  # variants of which too many instances go at once
    _refusals: dict[str, str] = {}  # by variant: what the last worker said that took none
    _recorded: float = -inf

    # -- what is heard

    def take(self, report: DemandReport, turn: Turn) -> bool:
        """Add a report. True if a new plan is due at once: a class needs more than the plan is for, or the plan is old."""
        self.problems.demand.take(report, turn.now)
        self.problems.demand.tick(turn.now)
        at, needs = self._planned
        if turn.now - at >= KEEP_S:
            return True
        return any(rate > max(needs.get(band(load.needs), 0.0), 1.0) for load, rate in self.problems.demand.surges())

    def replied(self, subject: str, reply: LoadReply | None, now: float) -> None:
        """A worker has answered an order; None: it has not."""
        order = self._replies.pop(subject, None)
        if order is not None and (reply is None or reply.reason):
            self.problems.barred = {one: until for one, until in self.problems.barred.items() if until > now}
            self.problems.barred[order] = now + BARRED_S
            self._refusals = {of: why for of, why in self._refusals.items() if self.problems.catalog.variant(of)}
            self._refusals[order[1]] = f"{order[0]}: {reply.reason if reply is not None else 'no answer'}"
            self._ordered.pop(order, None)

    def forget(self) -> None:
        """A new epoch begins."""
        self._solving, self._planned = None, (-inf, {})
        self._ordered.clear()
        self._replies.clear()
        self.wanted_machines = {}

    def current(self, now: float) -> bool:
        """Whether there is a plan that counts."""
        return now - self._planned[0] <= EXPIRES_S

    # -- reserved instances

    def reserve(self, reserved: Mapping[str, Reservation], leaving: Collection[str], turn: Turn) -> list[Effect]:
        """Keep so many instances for pipelines from now on, by variant.

        Orders those that are missing on workers that stay, beside what the last plan has for demand. `lacking` says what finds no room.
        """
        before = {name: one.replicas for name, one in self.problems.reserved.items()}
        now = {name: one.replicas for name, one in reserved.items()}
        self._calm = {name for name in self._calm if now.get(name, 0) <= before.get(name, 0)}
        self._calm |= {name for name, count in before.items() if now.get(name, 0) < count}
        self.problems.reserved, self.lacking = reserved, {}
        if not reserved:
            return []
        workers = [one for one in self.fleet.ready(turn.now) if one.name not in leaving]
        records = {record.variant: record for record in self.catalog.variants}
        wanted = {name: one.replicas + self._demanded.get(name, 0) for name, one in reserved.items() if name in records}
        ordered = {key: count for key, (count, until) in self._ordered.items() if turn.now < until}
        places, short = place_more(
            workers, wanted, ordered, records, self.problems.share, lambda w, r: self._barred(w, r, turn.now)
        )
        self.lacking = {name: (count, self._obstacle(records[name], workers)) for name, count in short.items()}
        found: list[Effect] = []
        for (worker, variant), count in places.items():
            one = reserved[variant]
            why = f"{one.replicas} are kept for {', '.join(one.pipelines)}"
            found += self._load(worker, records[variant], count, one.pipelines[0], why, turn)
        return found

    def _obstacle(self, record: VariantRecord, workers: Iterable[FleetWorker]) -> str:
        """Why no worker takes one more."""
        name = hardware_name(hardware_of(record))
        if not any(
            (device.kind, device.simulated) == hardware_of(record) for each in workers for device in each.devices
        ):
            return f"no worker has {name}"
        refused = self._refusals.get(record.variant)
        return f"no worker has room on {name} for {record.variant}" + (f" ({refused})" if refused else "")

    def surplus(self, variant: str, count: int, turn: Turn) -> list[Effect]:
        """Give up so many instances of this variant, the least busy ones. Only where no plan says what all workers should have."""
        least = self.problems.reserved[variant].replicas if variant in self.problems.reserved else 0
        held = sorted(
            ((one.load, worker.name, worker) for worker in self.fleet.ready(turn.now) for one in worker.of(variant)),
            key=lambda each: each[:2],
        )
        going = Counter(name for _, name, _ in held[: max(0, min(count, len(held) - least))])
        return [
            self._release(
                self.fleet.workers[name], variant, len(self.fleet.workers[name].of(variant)) - number, None, turn
            )
            for name, number in sorted(going.items())
        ]

    def machine_needs(self) -> list[HardwareNeed]:
        """What reserved instances that find no room ask for."""
        return [
            HardwareNeed(
                hardware=hardware_of(record), reason=f"{count} of {name} are kept for pipelines; {why}", record=record
            )
            for name, (count, why) in self.lacking.items()
            if (record := self.catalog.variant(name)) is not None
        ]

    def kept_only_on(self, worker: str, now: float) -> dict[str, str]:
        """Pipeline to a variant of which the other workers serve fewer instances than are reserved, and this one has some."""
        here = self.fleet.workers.get(worker)
        rest = [one for one in self.fleet.ready(now) if one is not here]
        return {
            one.pipelines[0]: name
            for name, one in self.problems.reserved.items()
            if here is not None and here.of(name) and self.fleet.serving([name], rest) < one.replicas
        }

    def _barred(self, worker: FleetWorker, record: VariantRecord, now: float) -> bool:
        quarantined = worker.heartbeat is not None and record.variant in worker.heartbeat.quarantined
        return quarantined or now < self.problems.barred.get((worker.name, record.variant), 0.0)

    # -- problems

    def plan(self, turn: Turn, leaving: Collection[str], *, at_once: bool = False) -> list[Effect]:
        """Have a new plan made, if one is due. leaving: workers that are being removed."""
        self.problems.demand.tick(turn.now)
        found = self._ask_for_history(turn)
        if self._solving is not None:
            return found
        seen = self.problems.snapshot(turn.now, leaving)
        if seen is None or not (at_once or self._due(seen, turn.now)):
            return found
        wanted = self.policy.scale(self.problems.for_policy(seen), turn.now) if self.policy is not None else None
        if wanted is not None:
            seen = replace(seen, problem=seen.problem.wanting(wanted), wanted=wanted)
        self._solving = seen
        return [*found, Do(("plan", str(turn.epoch)), seen.problem, SOLVE_S)]

    def _ask_for_history(self, turn: Turn) -> list[Effect]:
        reply = self.subjects.controller(f"history.{self.effects.name}")
        ask = self.subjects.recorder("demand")
        return [Publish(ask, AskForHistory(app=app), reply) for app in self.problems.demand.unknown(turn.now)]

    def _due(self, seen: FleetSnapshot, now: float) -> bool:
        at, before = self._planned
        if now - at >= KEEP_S or before.keys() != seen.needs.keys() or self._reserved_then != seen.reserved:
            return True
        if any(need > (1 + CHANGED) * before[of] or FALLEN * need < before[of] for of, need in seen.needs.items()):
            return True
        return self._fleet_then != self._state(now)

    def _state(self, now: float) -> tuple[object, ...]:
        """What the plan was made for, of the fleet: workers that are ready, and instances that serve."""

        def instances(worker: FleetWorker) -> tuple[tuple[str, bool], ...]:
            return tuple(sorted((i.variant, i.state == "Loading") for i in worker.instances if i.state != "Warm"))

        ready = sorted(self.fleet.ready(now), key=lambda worker: worker.name)
        return tuple((worker.name, instances(worker)) for worker in ready)

    # -- plans

    def solved(self, result: FleetSolved, turn: Turn) -> list[Effect]:
        """Carry the plans out: orders to workers; `wanted_machines` says how many machines there should be."""
        seen, self._solving = self._solving, None
        if seen is None:
            return []
        self._planned = turn.now, seen.needs
        self._fleet_then = self._state(turn.now)
        by = PlannedBy("ilp", result.milliseconds, result.present.objective)
        self._reserved_then = seen.reserved
        stale = seen.reserved != self.problems.reserved
        found = self._orders(seen, result.present, by, turn, kept=self.problems.reserved if stale else ())
        found = found or self._fill(seen, by, turn)
        self.expected = sum(one.later for one in seen.classes)
        self.wanted_machines = {}
        if seen.problem.growth is not None and result.growth is not None:
            for pool, count in zip(seen.problem.growth.pools, result.growth.machines, strict=True):
                self.wanted_machines[pool.name] = self.wanted_machines.get(pool.name, 0) + count
        found += self._report(seen, result, turn)
        return [*found, *self.plan(turn, seen.leaving, at_once=True)] if stale else found

    def _report(self, seen: FleetSnapshot, result: FleetSolved, turn: Turn) -> list[Effect]:
        """The objectives of all apps: to all who listen, and now and then for the record."""
        instances: dict[str, int] = {}
        for one, count in zip(seen.problem.present.variants, result.present.instances, strict=True):
            instances[one.name] = instances.get(one.name, 0) + count
        apps = self.objectives = list(self._objectives(seen, turn.now))
        report = ObjectiveReport(
            at=turn.now, epoch=turn.epoch, apps=apps, machines=self.wanted_machines, instances=instances
        )
        found: list[Effect] = [Publish(self.subjects.controller("objectives"), report)]
        if turn.now - self._recorded >= RECORD_S:
            self._recorded = turn.now
            found += [Record(one) for one in apps]
        return found

    def _objectives(self, seen: FleetSnapshot, now: float) -> Iterable[AppObjective]:
        """What each app wants and gets. Its capacity is what the instances that serve carry in time, as a multiple of the forecast."""
        problem = seen.problem.present
        serving = [
            sum(one.state in SERVING for worker in seen.pools[v.pool] for one in worker.held(v.name))
            for v in problem.variants
        ]
        for app in sorted({one.app for one in seen.classes}):
            ours = [one for one in seen.classes if one.app == app]
            whole: dict[int, float] = {}  # instances of each variant that would carry the app alone
            for need in problem.needs:
                if need.name == app:
                    for v, takes in need.options.items():
                        whole[v] = whole.get(v, 0.0) + sum(takes)
            forecast = sum(one.soon for one in ours)
            covered = sum(serving[v] / count for v, count in whole.items() if count > 0)
            reached = self.problems.demand.reached.get(app)
            yield AppObjective(
                time=now,
                app=app,
                slo_target=target_of(self.catalog.app(app), self.settings.slo_target),
                reached=reached.share if reached is not None else None,
                load=sum(one.load.rate for one in ours),
                forecast=forecast,
                capacity=covered * forecast,
                headroom=covered if forecast > 0 else None,
            )

    def not_solved(self) -> None:
        """The solver failed, or took too long."""
        self._solving = None

    def settled(self, worker: str, now: float) -> bool:
        """Whether all instances that the plan wants on the other workers serve."""
        for name, wanted in self._wanted.items():
            known = self.fleet.workers.get(name)
            if name == worker or known is None or not known.alive(now):
                continue
            for variant, count in wanted.items():
                if sum(one.state in SERVING for one in known.held(variant)) < count:
                    return False
        return True

    def weight(self, worker: str) -> tuple[int, float]:
        """What a worker has to do by the plan: instances that are needed there, and items/s that it serves."""
        known = self.fleet.workers.get(worker)
        load = sum(one.load for one in known.instances) if known is not None else 0.0
        return sum(self._wanted.get(worker, {}).values()), load

    def _orders(
        self, seen: FleetSnapshot, plan: FleetPlan, by: PlannedBy, turn: Turn, kept: Collection[str]
    ) -> list[Effect]:
        """kept: variants of which more may be reserved than the plan knows."""
        found: list[Effect] = []
        self._wanted = {}
        self._demanded = self._beside_reserved(seen, plan)
        unneeded: dict[tuple[str, str], float] = {}
        marked = set[tuple[str, str]]()
        known = self.catalog.variant
        self._back = {key: at for key, at in self._back.items() if turn.now - at < CALM_S and known(key[1])}
        self._ordered = {key: order for key, order in self._ordered.items() if turn.now < order[1]}
        records = {record.variant: record for record in seen.records}
        for p, group in enumerate(seen.pools):
            counts = {
                one.name: (count, spare)
                for one, count, spare in zip(seen.problem.present.variants, plan.instances, plan.spares, strict=True)
                if one.pool == p
            }
            # On a machine that is paid anyway it serves on, and is needed again without a load: so it may be marked at once.
            paid = seen.problem.present.pools[p].spares and seen.problem.present.goal == "cost"
            there = [worker for worker in group if self.fleet.workers.get(worker.name) is worker]  # others went
            used = {
                one.name: min(1.0, busy / count)
                for one, count, busy in zip(seen.problem.present.variants, plan.instances, plan.busy, strict=True)
                if one.pool == p and count
            }
            placed = assign(
                there, counts, records, self.problems.share, lambda w, r: self._barred(w, r, turn.now), used
            )
            for worker, wanted in placed.items():
                self._wanted[worker.name] = {variant: claimed + spare for variant, (claimed, spare) in wanted.items()}
                releases: list[Effect] = []
                loads: list[Effect] = []
                waiting: dict[str, Effect] = {}
                for variant in sorted(counts):
                    count, spare = wanted.get(variant, (0, 0))
                    held, claimed = len(worker.held(variant)), len(worker.of(variant))
                    key = worker.name, variant
                    waited = key in self._unneeded and key not in self._marked
                    if count > claimed < held or (count == claimed and waited):
                        self._back[key] = turn.now
                    if count + spare > held or count > claimed:
                        most = count + spare if count + spare > held else count
                        loads += self._planned_load(worker, records[variant], most, seen, by, turn)
                    elif count < claimed and variant not in kept:
                        since = unneeded[key] = self._unneeded.get(key, turn.now)
                        order = self._release(worker, variant, count, by, turn)
                        comes_back = key in self._back and not self.problems.instances_billed
                        over = not comes_back and (paid or turn.now - since >= self._hold(records[variant]))
                        if over or variant in self._calm:
                            releases.append(order)
                            marked.add(key)
                        else:
                            waiting[variant] = order
                # What is needed no longer stays as it is for a while, unless others need the room now.
                full = self._full(worker, self._wanted[worker.name], records) if loads and waiting else ()
                releases += [order for variant, order in waiting.items() if hardware_of(records[variant]) in full]
                found += [*releases, *loads]
        self._unneeded, self._marked = unneeded, marked
        self._calm = set() if not kept else self._calm
        return found

    @staticmethod
    def _beside_reserved(seen: FleetSnapshot, plan: FleetPlan) -> dict[str, int]:
        """By variant that is reserved: the instances that the plan has beside these, for demand."""
        found: Counter[str] = Counter()
        for one, count in zip(seen.problem.present.variants, plan.instances, strict=True):
            found[one.name] += count
        return {name: max(0, found[name] - one.replicas) for name, one in seen.reserved.items()}

    def _fill(self, seen: FleetSnapshot, by: PlannedBy, turn: Turn) -> list[Effect]:
        """A device that is paid anyway and idle gets an instance for the app with the least headroom, which stands by there."""
        problem = seen.problem.present
        loading = any(one.state == "Loading" for group in seen.pools for worker in group for one in worker.instances)
        if problem.goal == "accuracy" or problem.wanted or loading:
            return []
        apps = {one.app: one.headroom for one in self._objectives(seen, turn.now) if one.headroom is not None}
        poor = min(apps, key=lambda app: (apps[app], app), default="")
        if not poor or apps[poor] >= AMPLE:
            return []
        whole = {v: sum(takes) for need in problem.needs if need.name == poor for v, takes in need.options.items()}
        best: tuple[float, str, FleetWorker, int] | None = None
        for v, takes in whole.items():
            one = problem.variants[v]
            for worker in seen.pools[one.pool] if problem.pools[one.pool].spares and one.limit is None else ():
                used = {status.device for status in worker.instances if status.state != "Warm"}
                kinds = {(d.kind, d.simulated) for d in worker.devices if d.device not in used}
                record = next(record for record in seen.records if record.variant == one.name)
                row = (takes, worker.name, worker, v)
                if hardware_of(record) in kinds and (best is None or row[:2] < best[:2]):
                    best = row
        if best is None:
            return []
        record = next(record for record in seen.records if record.variant == problem.variants[best[3]].name)
        why = f"a device is idle, and {poor} carries only {apps[poor]:.3g} times its forecast"
        worker = best[2]
        load = self._load(worker, record, len(worker.held(record.variant)) + 1, poor, why, turn, by)
        mark = self._release(worker, record.variant, len(worker.of(record.variant)), by, turn)
        return [*load, mark] if load else []

    def _full(
        self, worker: FleetWorker, wanted: Mapping[str, int], records: Mapping[str, VariantRecord]
    ) -> Collection[tuple[str, bool]]:
        """The kinds of device on which what is wanted has no room beside all that is loaded."""
        room = Room(worker, self.problems.share)
        for one in worker.instances:
            if one.state in COUNTED and one.variant in records:
                room.take(records[one.variant], one.device)
        found = set()
        for variant, count in wanted.items():
            record = records[variant]
            for _ in range(count - len(worker.held(variant))):
                if not room.fits(record):
                    found.add(hardware_of(record))
                room.take(record)
        return found

    def _hold(self, record: VariantRecord) -> float:
        """Seconds for which an instance must be too much: as long as another one would take to load (ski rental)."""
        least = self.settings.hold_s if self.problems.instances_billed else RECLAIM_S
        return max(least, load_seconds(record))

    def _release(self, worker: FleetWorker, variant: str, keep: int, by: PlannedBy | None, turn: Turn) -> Effect:
        self._ordered.pop((worker.name, variant), None)
        order = Release(
            variant=variant,
            keep=keep,
            orderer=self.effects.name,
            reason=f"the plan needs {keep} here",
            epoch=turn.epoch,
            planned=by,
            reclaim=not self.problems.instances_billed,
        )
        return self.effects.send(worker.name, "release", order)

    def _planned_load(
        self, worker: FleetWorker, record: VariantRecord, count: int, seen: FleetSnapshot, by: PlannedBy, turn: Turn
    ) -> list[Effect]:
        ours = [one for one in seen.classes if one.takes(record)]
        reserved = seen.reserved.get(record.variant)
        pipelines = reserved.pipelines if reserved is not None else ()
        why = f"for {sum(one.soon for one in ours):.4g} items/s of {_apps(ours)}" if ours or not pipelines else ""
        kept = f"{reserved.replicas} are kept for {', '.join(pipelines)}" if reserved is not None else ""
        if self.policy is not None and record.variant in seen.wanted:
            why = f"{self.policy.name} wants {seen.wanted[record.variant]} in all"
        apps = (*pipelines, *(one.app for one in ours), None)
        return self._load(
            worker,
            record,
            count,
            apps[0],
            f"the plan wants {count} here, {'; '.join(filter(None, (why, kept)))}",
            turn,
            by,
        )

    def _load(
        self,
        worker: FleetWorker,
        record: VariantRecord,
        count: int,
        app: str | None,
        why: str,
        turn: Turn,
        by: PlannedBy | None = None,
    ) -> list[Effect]:
        key = (worker.name, record.variant)
        if self._ordered.get(key, (0, 0.0))[0] >= count or turn.now < self.problems.barred.get(key, 0.0):
            return []
        self._ordered[key] = count, turn.now + load_seconds(record) + SETTLE_S
        subject = self.effects.reply_subject()
        self._replies[subject] = key
        return [self.effects.load(worker.name, record, count, app, why, turn, subject, by)]


def _apps(classes: Iterable[ClassNeeds]) -> str:
    return ", ".join(sorted({one.app for one in classes})) or "no app"
