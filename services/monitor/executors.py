"""What executors tell their monitor: what they have loaded, lost, moved and measured, and that they live. Pure."""

from collections import Counter
from collections.abc import Mapping

from bus.messages.fleet import (
    ExecutorExited,
    ExecutorReport,
    InstanceFailed,
    InstanceLoaded,
    InstanceMoved,
    InstanceSample,
    InstanceUnloaded,
)
from services.core.lifecycle import COUNTED
from services.monitor.devices import MonitoredDevice
from services.monitor.effects import Journal
from services.monitor.instances import MonitoredInstance, busy_by_app
from services.monitor.loading import InstanceTable, WorkerOrders
from services.monitor.mitigation import Migrations
from services.monitor.policy import Knobs

UNLISTED = 2  # reports in a row without an instance after which its executor has lost it
REORDER = 4  # reports in a row without an instance that should be loading after which the order is repeated


class ExecutorEvents:
    """heard: devices whose executor has listed its instances since the catalogue is known."""

    def __init__(
        self,
        devices: Mapping[str, MonitoredDevice],
        loads: InstanceTable,
        moves: Migrations,
        orders: WorkerOrders,
        journal: Journal,
        knobs: Knobs,
    ) -> None:
        self.synced = False
        self.heard: set[str] = set()
        self._devices = devices
        self._loads = loads
        self._moves = moves
        self._orders = orders
        self._journal = journal
        self._knobs = knobs

    # -- instances

    def loaded(self, fact: InstanceLoaded) -> None:
        instance = self._told_of(fact)
        if instance is None:
            return
        if instance.state == "Unloading":
            # Released while it was loading: say it again, now that there is something to go.
            self._journal.order_unload(instance.id, instance.device)
        if instance.state != "Loading":
            return
        now = self._journal.now
        instance.memory_mb = max(instance.memory_mb, fact.memory_mb)
        instance.last_used = now
        self._loads.failures.succeeded(fact.variant)
        why = f"loaded in {fact.load_ms:.0f} ms; {fact.proof}"
        self._journal.states(instance, instance.move("Active", why, now))
        self._moves.serves(instance)

    def failed(self, fact: InstanceFailed) -> None:
        instance = self._told_of(fact)
        if instance is not None:
            self._loads.failed(instance, fact.reason)
            self._loads.gone(instance, fact.reason)

    def unloaded(self, fact: InstanceUnloaded) -> None:
        instance = self._told_of(fact)
        if instance is not None:
            self._loads.gone(instance, "unloaded")

    def moved(self, fact: InstanceMoved) -> None:
        instance = self._told_of(fact)
        if instance is not None:
            self._moves.moved(instance, fact)

    def _told_of(
        self, fact: InstanceLoaded | InstanceFailed | InstanceUnloaded | InstanceMoved
    ) -> MonitoredInstance | None:
        device = self._devices.get(fact.device)
        if device is None or not self._meet(device, fact.incarnation):
            return None
        return self._loads.instances.get(fact.instance)

    # -- reports

    def report(self, report: ExecutorReport) -> None:
        device = self._devices.get(report.device)
        if device is None or not self._meet(device, report.incarnation):
            return
        found = []
        for sample in report.samples:
            instance = self._loads.instances.get(sample.instance)
            if instance is None:
                instance = self._loads.adopt(device, sample, synced=self.synced)
            if instance is not None:
                found.append((instance, sample))
        siblings = Counter(one.record.variant for one in self._loads.instances.values() if one.state in COUNTED)
        for instance, sample in found:
            self._take(device, instance, sample, report.seconds, siblings[instance.record.variant])
        if self.synced:
            self.heard.add(report.device)
        self._miss(device, {sample.instance for sample in report.samples})

    def _miss(self, device: MonitoredDevice, listed: set[str]) -> None:
        """What an executor should have and does not list: words were lost, or its actor was started again."""
        for instance in list(device.instances.values()):
            if instance.id in listed or (instance.state == "Loading" and instance.ordered is None):
                instance.unlisted = 0
                continue
            instance.unlisted += 1
            if instance.state == "Loading":
                if instance.unlisted % REORDER == 0:
                    self._loads.order(instance)
            elif instance.unlisted >= UNLISTED:
                self._loads.lost(instance, "the executor no longer has it")

    def _take(
        self,
        device: MonitoredDevice,
        instance: MonitoredInstance,
        sample: InstanceSample,
        seconds: float,
        siblings: int,
    ) -> None:
        """One instance's part of a report. siblings: instances of its variant here, itself included."""
        now = self._journal.now
        self._journal.states(instance, instance.observe(sample, seconds, now))
        if sample.apps:
            device.meter.used(instance.id, busy_by_app(sample))
            self._loads.used.update([app.app for app in sample.apps if app.items > 0])
        self._journal.states(instance, instance.judge(self._knobs.thresholds, siblings, now))

    # -- executors that come and go

    def look_for_the_silent(self) -> None:
        """Executors that say nothing any more, and loads that nobody answered."""
        now = self._journal.now
        for device in self._devices.values():
            if device.alive and now - device.seen > self._knobs.failure_timeout_s:
                device.fell_silent(now)
                self._journal.worker_state("Failed", f"the executor of {device.spec.name} is silent")
        for instance in list(self._loads.instances.values()):
            if instance.state != "Loading" or instance.ordered is None:
                continue
            patience = self._knobs.load_timeout_s + instance.record.profile.load_ms / 100.0
            if now - instance.ordered > patience:
                reason = f"the executor did not answer the load order within {patience:.0f} s"
                self._journal.order_unload(instance.id, instance.device)
                self._loads.failed(instance, reason)
                self._loads.gone(instance, reason)

    def _meet(self, device: MonitoredDevice, incarnation: int) -> bool:
        """Something was heard of this executor process; False when it is one that has ended."""
        if incarnation == device.dead:
            return False
        now, journal = self._journal.now, self._journal
        if device.incarnation is not None and incarnation != device.incarnation:
            self._loads.lose(device, "the executor died: another one has taken its place")
        if device.incarnation is None:
            device.incarnation, device.met = incarnation, now
        if device.spoke(now):
            journal.told = False
            if all(other.alive for other in self._devices.values()):
                journal.worker_state(self._orders.rest, f"the executor of {device.spec.name} runs")
            self._loads.order_waiting(device)
        return True

    def exited(self, fact: ExecutorExited) -> None:
        device = self._devices.get(fact.device)
        if device is None or device.incarnation is None or fact.at < device.met:
            return
        self._loads.lose(device, f"the executor died: {fact.reason}")
        self._journal.worker_state("Failed", f"the executor of {fact.device} died: {fact.reason}")
