"""The running system, folded from what it publishes: its workers, catalogue, prices, cost, outcomes and scaling actions. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import floor

from msgspec import Struct, field
from msgspec.structs import replace

from bus.codec import BadMessage, decode, encode
from bus.messages.catalog import AppRecord, ModelRecord, VariantRecord
from bus.messages.events import ScalingEvent
from bus.messages.fleet import DeviceStatus, WorkerHeartbeat
from bus.messages.scaling import ClassDemand, DemandReport, PipelineArrivals
from services.core.catalog import Catalog
from services.core.cost import PER_CORE, UnknownPrice, instance_price_per_s, machine_price
from services.core.lifecycle import COUNTED
from services.core.pipelines.envelope import BIN_S
from services.core.pipelines.graph import PipelineGraph
from services.simulation.scenario.catalogue import SIGNATURE

SILENT = 5.0  # s without a heartbeat after which a worker does not count
_RECORDS: dict[str, type[AppRecord | ModelRecord | VariantRecord]] = {
    "app": AppRecord,
    "model": ModelRecord,
    "variant": VariantRecord,
}
OFFLINE = "offline"  # policy of offline work's outcomes


class LiveOutcome(Struct, frozen=True, gc=False):
    """What counts of an OutcomeEvent."""

    outcome: str
    items: int = 1
    policy: str | None = None
    parent: bytes | None = None


class LiveOutcomes(Struct, frozen=True, gc=False):
    """The body of `infaas.event.outcome`, as far as it counts."""

    rows: list[LiveOutcome]


class LiveScaling(Struct, frozen=True, gc=False):
    """The body of `infaas.event.scaling`."""

    rows: list[ScalingEvent]


class LiveSystem(Struct, eq=False):
    """items: those of online queries that ended. in_time: those of them that were answered in time. actions: by kind."""

    items: int = 0
    in_time: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    catalog: Catalog = field(default_factory=Catalog)
    _entries: dict[str, bytes] = {}
    _heartbeats: dict[str, tuple[float, WorkerHeartbeat]] = {}

    # -- fold

    def changed(self, key: str, value: bytes | None) -> None:
        """Apply one entry of the catalogue's bucket."""
        self.catalog.apply(key, value)
        if value is None:
            self._entries.pop(key, None)
        else:
            self._entries[key] = value

    def heartbeat(self, heartbeat: WorkerHeartbeat, now: float) -> None:
        self._heartbeats[heartbeat.worker] = now, heartbeat

    def ended(self, outcomes: LiveOutcomes) -> None:
        for one in outcomes.rows:
            if one.policy != OFFLINE and one.parent is None and one.outcome != "cancelled":
                self.items += one.items
                self.in_time += one.items * (one.outcome == "ok")

    def scaled(self, scaling: LiveScaling) -> None:
        self.actions.update(one.action for one in scaling.rows if one.count)

    # -- what there is

    def workers(self, now: float) -> list[WorkerHeartbeat]:
        """The last heartbeats of the workers that run, by name."""
        found = (one for at, one in self._heartbeats.values() if now - at <= SILENT and not one.leaving)
        return sorted(found, key=lambda one: one.worker)

    def real_kinds(self, now: float) -> set[str]:
        """The kinds of device that are real on some worker."""
        return {device.kind for one in self.workers(now) for device in one.devices if not device.simulated}

    def devices(self, heartbeat: WorkerHeartbeat, real: set[str]) -> list[DeviceStatus]:
        """A worker's devices without simulated ones of kinds that are real. real: those kinds."""
        return [device for device in heartbeat.devices if not device.simulated or device.kind not in real]

    def prices(self, now: float) -> dict[str, float]:
        """US$ per hour by kind of device; of a core where cores are priced."""
        return {
            device.kind: device.price_per_hour / (max(1, device.cores) if device.kind in PER_CORE else 1)
            for one in self.workers(now)
            for device in one.devices
        }

    def loaded(self, heartbeat: WorkerHeartbeat) -> Counter[str]:
        """A worker's instances that serve or will serve soon, by variant."""
        return Counter(one.variant for one in heartbeat.instances if one.state in COUNTED)

    def cost_rate(self, now: float) -> float:
        """US$ per hour of the workers that run."""
        return sum(machine_price(one.devices) for one in self.workers(now))

    def apps_cost_rate(self, now: float) -> float:
        """US$ per hour of their loaded instances that somebody needs. Reclaimable ones are idle."""
        prices = self.prices(now)
        total = 0.0
        for worker in self.workers(now):
            devices = {device.device: device for device in worker.devices}
            for instance in worker.instances:
                record, device = self.catalog.variant(instance.variant), devices.get(instance.device)
                if record is None or device is None or instance.reclaimable or instance.state not in COUNTED:
                    continue
                with suppress(UnknownPrice):
                    total += 3600.0 * instance_price_per_s(record, prices, device.cores, device.memory_mb)
        return total

    def entries(self) -> Iterable[tuple[str, bytes]]:
        """The catalogue's entries."""
        return self._entries.items()


def visits_of(report: PipelineArrivals, catalog: Catalog, draw: Callable[[], float]) -> DemandReport:
    """The demand of a pipeline's queries for the apps of its planned stages, of which dispatchers report the arrivals alone.

    draw: numbers in [0, 1), by which visits are rounded.
    """
    record = catalog.app(report.pipeline)
    rows = []
    if record is not None and record.pipeline is not None and record.plan is not None:
        graph, stages, whole = PipelineGraph(record.pipeline), record.plan.vertices, record.latency_ms
        takes = {name: stages[name].service_ms if name in stages else 0.0 for name in graph.order}
        before, behind = graph.before(takes), graph.behind(takes)
        for name, stage in stages.items():
            vertex = graph.vertices.get(name)
            items = floor(sum(report.counts) * stage.scale + draw())
            if vertex is None or not items:
                continue
            share = None
            if whole is not None:
                path = before[name] + takes[name] + behind[name]
                share = max(whole - before[name] - behind[name], whole * takes[name] / path if path else whole)
            rows.append(ClassDemand(vertex.app, "", items, share, vertex.accuracy or 0.0))
    return DemandReport(dispatcher=report.dispatcher, at=report.start, seconds=len(report.counts) * BIN_S, rows=rows)


def simulated_entry(key: str, value: bytes | None, real: set[str], slo_target: float | None = None) -> bytes | None:
    """An entry of the catalogue as a simulated system takes it: variants simulated, inputs of one byte an item, no default output, no
    selection, since the demand has what each of several models is asked.

    None for what it does not have: unreadable records, and simulated variants of kinds in `real`. slo_target: that of all apps; None:
    their own.
    """
    kind = key.partition(".")[0]
    if value is None or kind not in _RECORDS:
        return None
    try:
        record = decode(_RECORDS[kind], value)
    except BadMessage:
        return None
    if isinstance(record, AppRecord):
        target = record.slo_target if slo_target is None else slo_target
        return encode(replace(record, signature=SIGNATURE, default_output=None, slo_target=target, selection=None))
    if isinstance(record, VariantRecord):
        if record.simulated and record.hardware in real:
            return None
        return encode(replace(record, signature=SIGNATURE, simulated=True))
    return encode(replace(record, signature=SIGNATURE))
