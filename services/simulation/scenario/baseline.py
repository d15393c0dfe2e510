"""What the developer of a static system would have chosen: stated in [baseline], else by the static system's own rule.

The rule is `chosen` of services/core/policy.py, applied once to each app's peak. This module adds what the
rule does not know: the policy's kinds of device (those at time 0 first), the capacity of its machines, and the fastest variant for an
app whose needs no variant meets.
"""

from collections.abc import Mapping, Sequence
from math import inf

from bus.messages.catalog import VariantRecord
from bus.messages.public import Requirements
from services.core.cost import HANDLING_MS, PER_CORE, LatencyTable, instance_price_per_s, load_seconds
from services.core.placement import Amount, Device, cores_needed, misfit, short_of, total
from services.core.planning.capacity import throughput
from services.core.planning.problem import CandidateVariant, RequirementClass
from services.core.policy import chosen
from services.core.settings import MonitorSettings, StaticVariant
from services.simulation.scenario.model import MachineSpec, PolicySpec, WorkloadSpec
from services.simulation.workload import peak_rate


class DeviceCapacity:
    """What a policy's machines can hold, taken one instance after the other. fixed: the machines at time 0; else as many as may run."""

    def __init__(self, machines: Sequence[MachineSpec], monitor: MonitorSettings, *, fixed: bool) -> None:
        self._share = monitor.memory_share
        self._devices: dict[str, list[Device]] = {}
        self._free: dict[str, list[Amount]] = {}
        self._turn: dict[str, int] = {}
        for machine in machines:
            for device in machine.devices * (machine.start if fixed else machine.maximum):
                self._devices.setdefault(device.kind, []).append(device)
                self._free.setdefault(device.kind, []).append(total(device, self._share, monitor.cores_overcommit))

    def device(self, record: VariantRecord) -> Device | None:
        """The first device that could hold the variant if it were empty."""
        return next(
            (one for one in self._devices.get(record.hardware, ()) if not misfit(record, one, self._share)), None
        )

    def parallel(self, record: VariantRecord) -> int:
        """How many instances can compute at a time on all devices, at least 1. More would not serve more."""
        able = (one for one in self._devices.get(record.hardware, ()) if not misfit(record, one, self._share))
        return max(1, sum(one.cores // max(1, record.threads) if one.kind in PER_CORE else 1 for one in able))

    def take(self, record: VariantRecord, count: int) -> bool:
        """Take capacity for `count` instances, device after device in turn. False if not all fit; those that fit stay taken."""
        devices, free = self._devices.get(record.hardware, []), self._free.get(record.hardware, [])
        need = Amount(record.profile.memory_mb, cores_needed(record))
        for _ in range(count):
            start = self._turn.get(record.hardware, 0)
            for step in range(len(devices)):
                at = (start + step) % len(devices)
                if short_of(need, free[at]).none and not misfit(record, devices[at], self._share):
                    free[at] -= need
                    self._turn[record.hardware] = at + 1
                    break
            else:
                return False
        return True


class Peaks:
    """The peak load of each app: items/s by needs."""

    def __init__(self, loads: Sequence[WorkloadSpec], needs: Mapping[str, Requirements], duration_s: float) -> None:
        self._of: dict[str, dict[Requirements, float]] = {}
        for load in loads:
            peak = peak_rate(load, duration_s)
            for app, share in zip(load.apps, load.shares, strict=True):
                asked = load.needs or needs[app]
                of = self._of.setdefault(app, {})
                of[asked] = of.get(asked, 0.0) + peak * share * load.items

    def demands(self, app: str, needs: Requirements) -> list[RequirementClass]:
        """An app's peak demands. needs: for an app without load, so that it gets a choice, too."""
        return [
            RequirementClass(
                app=app,
                load=max(load, 1e-3),
                latency_ms=inf if asked.latency_ms is None else asked.latency_ms,
                accuracy=asked.accuracy or 0.0,
                cost=inf if asked.cost is None else asked.cost,
            )
            for asked, load in (self._of.get(app) or {needs: 0.0}).items()
        ]


class StaticChoice:
    """What the developer of a static system would have chosen for this policy. prices: US$ per hour by kind of device."""

    def __init__(self, policy: PolicySpec, prices: Mapping[str, float], peaks: Peaks) -> None:
        self._policy, self._prices, self._peaks = policy, prices, peaks
        self._capacity = DeviceCapacity(policy.machines, policy.settings.monitor, fixed=policy.base == "static")

    def of(
        self,
        given: Mapping[str, StaticVariant],
        serving: Mapping[str, Sequence[VariantRecord]],
        needs: Mapping[str, Requirements],
    ) -> dict[str, StaticVariant]:
        """The choice for each app that a variant on the policy's hardware serves. given: stated choices, which stay."""
        capacity, hardware = self._capacity, self._policy.hardware
        there = {device.kind for spec in self._policy.machines if spec.start for device in spec.devices}
        found: dict[str, StaticVariant] = {}
        rest: dict[str, tuple[VariantRecord, int]] = {}
        for app, records in serving.items():
            by_name = {one.variant: one for one in records}
            if app in given:
                found[app] = given[app]
                capacity.take(by_name[given[app].variant], given[app].instances)
                continue
            able = [one for one in records if hardware is None or one.hardware in hardware]
            fitting = [one for one in able if capacity.device(one) is not None]
            fitting = [one for one in fitting if one.hardware in there] or fitting
            if fitting or able:
                rest[app] = self._first(app, fitting or able, self._peaks.demands(app, needs[app]))
                found[app] = StaticVariant(variant=rest[app][0].variant)
        # Each app in turn gets one more, up to its need and the capacity, so that no app takes everything.
        growing = {app: (record, min(count, capacity.parallel(record))) for app, (record, count) in rest.items()}
        while growing:
            for app, (record, count) in list(growing.items()):
                if found[app].instances >= count or not capacity.take(record, 1):
                    del growing[app]
                else:
                    found[app] = StaticVariant(variant=record.variant, instances=found[app].instances + 1)
        return found

    def _first(
        self, app: str, records: Sequence[VariantRecord], demands: list[RequirementClass]
    ) -> tuple[VariantRecord, int]:
        """The variant and the number of instances for the peak: the best that fits, else the best. One instance's capacity is taken."""
        left = list(records)
        best: tuple[VariantRecord, int] | None = None
        while left:
            record, count = self._best(app, left, demands)
            best = best or (record, count)
            if self._capacity.take(record, 1):
                return record, count
            left.remove(record)
        assert best is not None  # there is at least one record
        return best

    def _best(
        self, app: str, records: Sequence[VariantRecord], demands: list[RequirementClass]
    ) -> tuple[VariantRecord, int]:
        limit_s = min(demand.latency_ms for demand in demands) / 1000.0
        candidates = tuple(self._candidate(app, one, limit_s) for one in records)
        named, slack = {one.variant: one for one in records}, self._policy.settings.autoscaler.slack
        found = chosen(candidates, demands, slack)
        if found is not None:
            return named[found.variant], found.instances
        fastest = min(candidates, key=lambda one: (one.latency_ms, one.name))
        found = chosen((fastest,), [RequirementClass(app=one.app, load=one.load) for one in demands], slack)
        return named[fastest.name], 1 if found is None else found.instances

    def _candidate(self, app: str, record: VariantRecord, limit_s: float) -> CandidateVariant:
        """A variant as the leader describes it to a policy (services/autoscaler/vms/problem.py)."""
        table, device = LatencyTable(record), self._capacity.device(record)
        alone_ms = table.seconds(1) * 1000.0
        cores, memory_mb = (1, 0.0) if device is None else (device.cores, device.memory_mb)
        price = instance_price_per_s(record, self._prices, cores, memory_mb)
        return CandidateVariant(
            name=record.variant,
            apps=(app,),
            model=record.model,
            hardware=record.hardware,
            latency_ms=alone_ms,
            saturation_qps=throughput(table, limit_s),
            cost_per_s=price,
            load_s=load_seconds(record),
            accuracy=record.accuracy,
            cost_per_1000=price * (alone_ms + HANDLING_MS),
        )
