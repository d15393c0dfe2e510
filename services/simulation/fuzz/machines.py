"""What holds of machines, orders and money: memory and cores within each device, replicas, epochs, and what is charged adds up."""

from collections import defaultdict

from bus.messages.events import CostEvent, OutcomeEvent, PipelineEvent, SelectionEvent
from bus.messages.scaling import LeaderRecord
from services.core.cost import price_per_hour
from services.simulation.fuzz.violations import Violations
from services.simulation.hardware import SimulatedDevice
from services.simulation.scenario.model import Scenario
from services.simulation.system import SimulatedSystem

_SHARE = 1e-6  # that sums of floats may differ by
_LEAST = 1e-12  # US$


class MachineChecks:
    """The machines of one run. system: whose they are."""

    def __init__(self, scenario: Scenario, system: SimulatedSystem, violations: Violations) -> None:
        self._system = system
        self._violations = violations
        joins = [fault for fault in scenario.faults if fault.kind == "worker-joins"]  # which nobody ordered
        self._most = {
            one.kind: max(one.start, one.maximum) + sum(fault.hardware in ("", one.kind) for fault in joins)
            for one in scenario.policies[0].machines
        }
        self._share = scenario.policies[0].settings.monitor.memory_share
        self._prices = scenario.prices
        self._rows: dict[
            tuple[str, str], tuple[float, float]
        ] = {}  # by worker and kind of device: the closing, and its rows' cost
        self._billed: defaultdict[str, float] = defaultdict(float)  # US$ by worker
        self._charged: defaultdict[str, float] = defaultdict(float)
        self._leader: LeaderRecord | None = None

    # -- at intervals

    def look(self, now: float) -> None:
        """At all devices."""
        kinds: defaultdict[str, int] = defaultdict(int)
        for worker, machine in self._system.machines.items():
            kinds[machine.spec.kind] += 1
            for name, device in machine.devices.items():
                self._device(f"{worker}/{name}", device, now)
        for kind, count in kinds.items():
            if count > self._most[kind]:
                self._violations.add(
                    "machines", now, f"{count} machines of kind {kind}, which may have {self._most[kind]}"
                )

    def _device(self, name: str, device: SimulatedDevice, now: float) -> None:
        used, room = device.memory_mb, self._share * device.spec.memory_mb
        if used > room * (1.0 + _SHARE):
            self._violations.add("memory", now, f"{name} holds {used:.0f} MB of {room:.0f}")
        computing = sum(cores for end, cores in device._open if end > now)
        if computing > device.spec.cores:
            self._violations.add("cores", now, f"{name} computes on {computing} cores of {device.spec.cores}")

    # -- what is recorded

    def cost(self, row: CostEvent, now: float) -> None:
        """A part of the bill of one device's period. The last row of a period is what nobody used."""
        key = row.worker, row.hardware
        at, cost = self._rows.get(key, (row.time, 0.0))
        cost = row.cost + (cost if at == row.time else 0.0)
        self._rows[key] = row.time, cost
        self._billed[row.worker] += row.cost
        if row.variant is not None or row.app is not None:
            return
        del self._rows[key]
        machine = self._system.machines.get(row.worker)
        devices = (
            [] if machine is None else [one.spec for one in machine.devices.values() if one.spec.kind == row.hardware]
        )
        if len(devices) != 1:
            return
        bill = row.seconds * price_per_hour(row.hardware, self._prices, devices[0].cores) / 3600.0
        if abs(cost - bill) > _SHARE * bill + _LEAST:
            words = f"{row.worker}'s {row.hardware} cost {bill:.6g} US$ in {row.seconds:.1f} s, its rows add up to {cost:.6g}"
            self._violations.add("bill", now, words)

    def charged(self, row: OutcomeEvent) -> None:
        """A query, or a part, that a worker computed."""
        if row.worker is not None and not row.cached:
            self._charged[row.worker] += row.cost

    def ended(self, now: float) -> None:
        for worker, charged in self._charged.items():
            billed = self._billed[worker]
            if worker in self._system.machines and charged > billed * 1.01 + _LEAST:
                words = f"queries paid {charged:.6g} US$ for {worker}, which cost {billed:.6g}"
                self._violations.add("bill", now, words)

    def replicas(self, event: PipelineEvent, now: float) -> None:
        """Other replicas of a vertex are wanted."""
        if event.action != "end" and event.to_replicas < 1:
            words = f"{event.pipeline}'s {event.vertex} is to have {event.to_replicas} replicas: {event.reason}"
            self._violations.add("replicas", now, words)

    # -- who leads

    def leads(self, record: LeaderRecord, now: float) -> None:
        """The bucket names this leader now."""
        before, self._leader = self._leader, record
        if before is not None and (
            record.epoch < before.epoch or (record.epoch == before.epoch and record.holder not in ("", before.holder))
        ):
            words = f"{record.holder} leads in epoch {record.epoch}, after {before.holder} in epoch {before.epoch}"
            self._violations.add("epoch", now, words)


class FeedbackChecks:
    """What feedback taught, against what clients sent."""

    def __init__(self, violations: Violations) -> None:
        self._violations = violations
        self._sent: dict[bytes, set[int]] = {}
        self._taught: defaultdict[tuple[bytes, str], int] = defaultdict(int)

    def sent(self, query: str, item: int) -> None:
        """A client sent feedback, perhaps again. query: the uid that its answer named."""
        self._sent.setdefault(bytes.fromhex(query), set()).add(item)

    def taught(self, event: SelectionEvent, now: float) -> None:
        """A feedback taught about a member."""
        times = self._taught[event.query, event.member] = self._taught[event.query, event.member] + 1
        items = len(self._sent.get(event.query, ()))
        if times > items:
            words = f"{event.app}: {items} feedbacks came for query {event.query.hex()}, {event.member} learnt {times} times"
            self._violations.add("feedback-once", now, words)
