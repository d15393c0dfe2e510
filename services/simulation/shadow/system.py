"""The simulated system on which a policy runs beside the real one: the same demand, catalogue and first machines. Pure.

It is the whole simulator: dispatchers, workers, autoscalers and controller are the services' own. Its clock follows the real one. Nothing
of it is connected to the bus.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from bus.codec import decode
from bus.messages.catalog import AppRecord, ModelRecord, VariantRecord
from bus.messages.events import Event, ScalingEvent
from bus.messages.fleet import DeviceStatus, EnsureLoaded, WorkerHeartbeat
from bus.messages.public import Answer, Refusal, Requirements
from bus.messages.scaling import DemandReport, PipelineArrivals
from bus.subjects import Subjects
from services.autoscaler.vms.rules import PricedKind
from services.core.actor import (
    NOTHING,
    Changed,
    Effect,
    Envelope,
    Handler,
    Inlet,
    Publish,
    Started,
    Synced,
    TableActor,
    Watch,
)
from services.core.catalog import variant_key
from services.core.cost import machine_price
from services.core.placement import Device
from services.core.settings import Settings
from services.simulation.clients import QueryTemplate
from services.simulation.kernel import Kernel
from services.simulation.scenario.machines import ALIKE_MB, labelled
from services.simulation.scenario.model import MachineSpec, PolicySpec, Scenario
from services.simulation.shadow.live import LiveSystem, simulated_entry
from services.simulation.system import SimulatedSystem

ORDERER = "shadow"
LEAD = 1.5  # s that the first machines need until they take orders
LOADED = 1.2  # s after their start at which the real system's instances are ordered
SETTLED = 0.1  # s from an action's event until it counts in the cost; orders pass through a bucket or two messages
MOST = 1000.0  # queries/s of a dispatcher's report; of more, several are sent as one
TEMPLATES = 4096  # kinds of query that are kept
# scaling policies that choose variants once; they begin with these instead of the system's
CHOSEN = ("static", "replicate")
INBOX = "_INBOX.s."
_NEEDS = ("latency_ms", "cost", "model", "version", "variant")  # of a report's row


class ShadowSpec(Struct, frozen=True, kw_only=True):
    """What runs. name: of the policy, with the settings that differ. base: of services/simulation/scenario/policies.py. kinds: of machine that may be started.

    prices: US$ per hour by kind of device. boot_s: of machines whose kind does not say it. slo_target: of all apps; None: their own.
    """

    name: str
    base: str
    settings: Settings
    kinds: Mapping[str, PricedKind]
    prices: Mapping[str, float]
    boot_s: float
    slo_target: float | None = None


class FleetObserver(TableActor):
    """An actor in the simulated system that folds its heartbeats and catalogue, as the real ones are folded."""

    def __init__(self, subjects: Subjects, seen: LiveSystem) -> None:
        self._seen = seen
        self._on: dict[type, Handler] = {
            WorkerHeartbeat: self._heartbeat,
            Changed: self._changed,
            Started: lambda _: NOTHING,
            Synced: lambda _: NOTHING,
        }
        self.inlets = (Inlet(subject=subjects.worker_heartbeat(), message=WorkerHeartbeat),)
        self.watches = (Watch(bucket=subjects.catalog_bucket),)

    def _heartbeat(self, envelope: Envelope) -> Iterable[Effect]:
        self._seen.heartbeat(envelope.message, envelope.now)
        return NOTHING

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        self._seen.changed(envelope.message.key, envelope.message.value)
        return NOTHING


class ShadowSystem:
    """items: those of queries that ended since `begins`. in_time, refused: of these.

    It begins with the real system's instances. A policy in CHOSEN begins with what it loads for `heard`, the demand before `begins`, by
    arrival. Loads before `begins` are instant.
    """

    def __init__(
        self,
        spec: ShadowSpec,
        live: LiveSystem,
        heard: Sequence[tuple[float, DemandReport]],
        begins: float,
        rng: np.random.Generator,
    ) -> None:
        self.items = self.in_time = self.refused = 0
        self.subjects = Subjects()
        self._spec = spec
        self._begins = begins
        self._rng = rng
        self._observed = LiveSystem()
        self._real = live.real_kinds(begins)
        self._events: list[ScalingEvent] = []
        self._templates: dict[tuple[object, ...], QueryTemplate] = {}
        self._open: dict[str, tuple[float, QueryTemplate, int]] = {}
        self._sent = 0
        workers = live.workers(begins)
        chooses = spec.settings.autoscaler.policy in CHOSEN
        first = min((at for at, _ in heard), default=begins) if chooses else begins
        self._kernel = Kernel(first - LEAD, self._recorded)
        self._kernel.received = self._received
        self._prices = {**spec.prices, **live.prices(begins)}
        machines = machines_of({one.worker: (one, live.devices(one, self._real)) for one in workers}, spec)
        scenario = Scenario(
            name=ORDERER, duration_s=1.0, seed=0, objective="cost", metrics_every_s=1.0, apps=(), models=(), variants=(),
            prices=self._prices, needs={}, policies=(), loads=(),
        )  # fmt: skip
        policy = PolicySpec(name=spec.name, base=spec.base, hardware=None, machines=machines, settings=spec.settings)
        self._system = SimulatedSystem(self._kernel, scenario, policy, begins, decided=lambda _: None)
        for key, value in live.entries():
            self.entry(key, value)
        self._kernel.enter("observer", FleetObserver(self.subjects, self._observed))
        self._system.build()
        if not chooses:
            self._kernel.at(LOADED, self._load, {one.worker: live.loaded(one) for one in workers})
            return
        for at, report in heard:
            self.offer(report, at)

    def _load(self, loaded: Mapping[str, Counter[str]]) -> None:
        for worker, variants in loaded.items():
            for variant, count in variants.items():
                value = self._kernel.get(self.subjects.catalog_bucket, variant_key(variant))
                if value is not None:
                    record = decode(VariantRecord, value)
                    order = EnsureLoaded(variant=record, at_least=count, orderer=ORDERER, reason="it runs there")
                    self._kernel.publish(self.subjects.worker(worker, "load"), order, self.subjects.loads(ORDERER))

    # -- what comes in

    def entry(self, key: str, value: bytes | None) -> None:
        """Apply an entry of the real system's catalogue."""
        bucket = self.subjects.catalog_bucket
        found = simulated_entry(key, value, self._real, self._spec.slo_target)
        if found is not None or self._kernel.get(bucket, key) is not None:
            self._kernel.put(bucket, key, found)

    def offer(self, report: DemandReport, at: float) -> None:
        """Send the report's queries, spread over as much time as it covers, from `at` on.

        Reports say how many items came, not in how many queries. Each item is a query, unless they are too many.
        """
        seconds = max(report.seconds, 0.1)
        size = ceil(sum(row.items + row.refused for row in report.rows) / (MOST * seconds))
        for row in report.rows:
            items = row.items + row.refused
            needs = Requirements(accuracy=row.accuracy or None, **{name: getattr(row, name) for name in _NEEDS})
            times = self._rng.random(ceil(items / size) if items else 0) * seconds
            for offset in times.tolist():
                count = min(size, items)
                query = self._template(row.app, needs, count), count
                self._kernel.at(max(0.0, at + offset - self._kernel.now), self._send, query)
                items -= count

    def arrived(self, report: PipelineArrivals) -> None:
        """Tell the simulated controller, which keeps the replicas of deployed plans, of the queries of a pipeline."""
        self._kernel.publish(self.subjects.pipeline("arrivals"), report)

    def _template(self, app: str, needs: Requirements, items: int) -> QueryTemplate:
        key = (app, needs, items)
        found = self._templates.get(key)
        if found is None:
            if len(self._templates) >= TEMPLATES:
                self._templates.clear()
            stated = replace(needs, metric=self._metric(app)) if needs.accuracy else needs
            found = self._templates[key] = QueryTemplate(app, stated, items, self.subjects)
        return found

    def _metric(self, app: str) -> str | None:
        """What the app's first model is measured by, in which demand states its accuracy. None: not known."""
        bucket = self.subjects.catalog_bucket
        record = self._kernel.get(bucket, f"app.{app}")
        links = {} if record is None else decode(AppRecord, record).links
        models = [self._kernel.get(bucket, f"model.{model}.{version}") for model, version in links.items()]
        return next((decode(ModelRecord, model).metric for model in models if model is not None), None)

    def _send(self, query: tuple[QueryTemplate, int]) -> None:
        template, items = query
        self._sent += 1
        inbox = f"{INBOX}{self._sent}"
        if self._kernel.now >= self._begins:
            self._open[inbox] = self._kernel.now, template, items
        self._kernel.publish(template.subject, template.head, inbox, template.body)

    def _received(self, reply: Publish) -> None:
        found = self._open.pop(reply.subject, None)
        if found is None:
            return
        sent, template, items = found
        self.items += items
        if type(reply.message) is Answer:
            self.in_time += items * (self._kernel.now - sent <= template.limit)
        elif type(reply.message) is Refusal:
            self.refused += items

    # -- what comes of it

    def advance(self, now: float, *, last: bool = False) -> list[ScalingEvent]:
        """Process everything that is due; returns what was scaled since the last call. Raises ActorHalted.

        The newest actions come with the next call, so that `cost_rate` is the one after them. last: there is no next call.
        """
        self._kernel.run(max(now, self._kernel.now))
        self._system.bill.advance(now)
        ready = [one for one in self._events if last or one.time <= now - SETTLED]
        self._events = self._events[len(ready) :]
        return ready

    def _recorded(self, _name: str, event: Event) -> None:
        if type(event) is ScalingEvent and self._kernel.now >= self._begins:
            self._events.append(event)

    @property
    def cost(self) -> float:
        """US$ of its machines since `begins`."""
        return self._system.bill.total

    @property
    def cost_rate(self) -> float:
        """US$ per hour of its machines now."""
        return 3600.0 * self._system.bill.rate

    @property
    def apps_cost_rate(self) -> float:
        """US$ per hour of its loaded instances that somebody needs."""
        return self._observed.apps_cost_rate(self._kernel.now)

    @property
    def machines(self) -> dict[str, int]:
        """How many machines run, by kind."""
        return dict(Counter(machine.spec.kind for machine in self._system.machines.values()))

    @property
    def instances(self) -> int:
        """How many instances are loaded, or being loaded."""
        return sum(
            len(device.residents) for machine in self._system.machines.values() for device in machine.devices.values()
        )


# -- kinds of machine


def machines_of(
    workers: Mapping[str, tuple[WorkerHeartbeat, Sequence[DeviceStatus]]], spec: ShadowSpec
) -> tuple[MachineSpec, ...]:
    """Kinds of machine: those that run, under their names, and those that the settings allow.

    workers: heartbeat and devices of each. Workers of one kind with other devices than most of it are a kind of their own, of which
    no more can be started.
    """
    shapes: dict[tuple[str, object], list[str]] = defaultdict(list)
    for name, (heartbeat, devices) in sorted(workers.items()):
        shape = tuple((one.device, one.kind, one.cores, round(one.memory_mb / ALIKE_MB)) for one in devices)
        if shape:
            shapes[heartbeat.kind or heartbeat.hardware, shape].append(name)
    ordered = sorted(shapes.items(), key=lambda one: -len(one[1]))
    groups = labelled((kind, names) for (kind, _), names in ordered)
    found = []
    for label, names in groups.items():
        devices = workers[names[0]][1]
        known = spec.kinds.get(label)
        count = len(names)
        found.append(
            MachineSpec(
                kind=label,
                devices=tuple(_simulated(one.device, one) for one in devices),
                price_per_hour=machine_price(devices),
                boot_s=known.boot_s if known is not None and known.boot_s else spec.boot_s,
                start=count,
                minimum=known.minimum if known is not None else count,
                maximum=max(known.maximum, count) if known is not None else count,
                workers=tuple(names),
            )
        )
    for name, one in spec.kinds.items():
        if name not in groups and one.maximum:
            found.append(
                MachineSpec(
                    kind=name,
                    devices=tuple(_simulated(device.name, device) for device in one.devices),
                    price_per_hour=one.price_per_hour,
                    boot_s=one.boot_s or spec.boot_s,
                    minimum=one.minimum,
                    maximum=one.maximum,
                )
            )
    return tuple(found)


def _simulated(name: str, of: Device | DeviceStatus) -> Device:
    return Device(name=name, kind=of.kind, cores=of.cores, memory_mb=of.memory_mb, simulated=True)
