"""What executors tell their monitor: what they have loaded, lost, moved and measured, and that they are alive. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from bus.messages.fleet import (
    ExecutorExited,
    ExecutorReport,
    InstanceFailed,
    InstanceLoaded,
    InstanceMoved,
    InstanceSample,
    InstanceUnloaded,
    UnloadInstance,
)
from services.core.actor import Effect
from services.core.lifecycle import SERVING, Thresholds
from services.core.settings import MonitorSettings
from services.monitor.devices import MonitoredDevice
from services.monitor.effects import MonitorEffects
from services.monitor.instances import MonitoredInstance, busy_by_payer
from services.monitor.loading import InstanceTable
from services.monitor.mitigation import Migrations
from services.monitor.orders import WorkerOrders
from services.monitor.policy import thresholds_of

UNLISTED = 2  # reports in a row without an instance after which its executor has lost it
REORDER = 4  # reports in a row without an instance that should be loading after which the order is repeated
LOAD_TIMEOUT_S = 30.0  # s, beside ten times the profiled load time, in which an executor must answer a load order

InstanceMessage = InstanceLoaded | InstanceFailed | InstanceUnloaded | InstanceMoved


@dataclass(slots=True, eq=False)
class ExecutorEvents:
    """Handles the messages of a worker's executors, and their silence.

    failure_timeout_s: an executor that says nothing for so long counts as failed. synced: the whole catalogue is known.
    """

    devices: Mapping[str, MonitoredDevice]
    table: InstanceTable
    migrations: Migrations
    orders: WorkerOrders
    effects: MonitorEffects
    settings: MonitorSettings
    failure_timeout_s: float
    synced: bool = False
    _checked: float = 0.0
    _limits: Thresholds = field(init=False)

    def __post_init__(self) -> None:
        self._limits = thresholds_of(self.settings)

    # -- instances

    def loaded(self, message: InstanceLoaded, now: float) -> list[Effect]:
        instance, found = self._instance_of(message, now)
        if instance is None:
            return found
        instance.met = True
        if instance.state == "Unloading" and instance.goes is None:
            # Released while it was loading: the order is repeated, now that it can be obeyed.
            return [*found, self.effects.order(instance.device, UnloadInstance(instance=instance.id))]
        if instance.state == "Loading" and message.tier in (instance.goes, "device"):
            self.table.failures.succeeded(message.variant)
        if message.tier == "host":
            instance.host_mb = max(instance.host_mb or 0.0, message.memory_mb)
            why = f"in host memory after {message.load_ms:.0f} ms; {message.proof}"
            return found + self._in_host(instance, why, now)
        if instance.state in SERVING or instance.copied:
            return found + self.table.host.copy_is(instance, message.copied, now)
        if instance.state not in ("Loading", "Warm"):
            return found
        instance.memory_mb = max(instance.memory_mb, message.memory_mb)
        why = f"loaded in {message.load_ms:.0f} ms; {message.proof}"
        return (
            found + self._on_device(instance, why, now, copied=message.copied) + self.migrations.serves(instance, now)
        )

    def _in_host(self, instance: MonitoredInstance, why: str, now: float) -> list[Effect]:
        """Its executor has it in host memory: as ordered by this monitor, or by one before it."""
        if instance.state == "Loading" and instance.goes == "device":
            return []  # an earlier word
        found: list[Effect] = []
        if instance.state in SERVING:
            found = self.effects.state_changes(instance, instance.move("Unloading", why, now), now)
        return found if instance.state == "Warm" else found + self.table.became_warm(instance, why, now)

    def _on_device(self, instance: MonitoredInstance, why: str, now: float, *, copied: bool) -> list[Effect]:
        found: list[Effect] = []
        if instance.state == "Warm":  # promoted by an order of an earlier monitor
            found = self.effects.state_changes(instance, instance.move("Loading", why, now), now)
            self.table.occupy(instance, now)
        return found + self.table.became_active(instance, why, now, copied=copied)

    def failed(self, message: InstanceFailed, now: float) -> list[Effect]:
        instance, found = self._instance_of(message, now)
        if instance is not None:
            found += self.table.failed(instance, message.reason, now)
            found += self.table.gone(instance, message.reason, now)
        return found

    def unloaded(self, message: InstanceUnloaded, now: float) -> list[Effect]:
        instance, found = self._instance_of(message, now)
        if instance is None:
            return found
        why = "unloaded" if instance.goes is None else "unloaded: its backend cannot keep it in host memory"
        wanted = instance.wanted
        found += self.table.gone(instance, why, now)
        if wanted:
            found += self.table.load_again(instance, self.devices[instance.device], wanted, now)[1]
        return found

    def moved(self, message: InstanceMoved, now: float) -> list[Effect]:
        instance, found = self._instance_of(message, now)
        return found if instance is None else found + self.migrations.moved(instance, message, now)

    def _instance_of(self, message: InstanceMessage, now: float) -> tuple[MonitoredInstance | None, list[Effect]]:
        """The instance that a message is about, if there is one; and what hearing its executor brings about."""
        device = self.devices.get(message.device)
        if device is None or message.incarnation == device.dead:
            return None, []
        found = self._heard(device, message.incarnation, now)
        return self.table.instances.get(message.instance), found

    # -- reports

    def report(self, report: ExecutorReport, now: float) -> list[Effect]:
        device = self.devices.get(report.device)
        if device is None or report.incarnation == device.dead:
            return []
        found = self._heard(device, report.incarnation, now)
        device.reported(report.cpu_s, now)
        device.exclusive = report.exclusive
        device.computed = min(1.0, report.computed / report.seconds) if report.seconds > 0 else 0.0
        sampled = []
        for sample in report.samples:
            instance = self.table.instances.get(sample.instance)
            if instance is None:
                instance, adopted = self.table.adopt(device, sample, now, synced=self.synced)
                found += adopted
            if instance is not None:
                sampled.append((instance, sample))
        siblings = Counter(one.record.variant for one in self.table.instances.values() if one.counts)
        for instance, sample in sampled:
            found += self._sampled(device, instance, sample, report.seconds, siblings[instance.record.variant], now)
        if not device.listed and (self.synced or not report.samples):
            device.listed = True
            found += self.table.order_waiting(device, now)
        found += self._unlisted(device, report, now)
        return found + self.orders.preload(device, now) if self.synced else found

    def _unlisted(self, device: MonitoredDevice, report: ExecutorReport, now: float) -> list[Effect]:
        """Instances that an executor should have and does not list: a message was lost, or its actor was started again. A report from before the order
        says nothing.
        """
        found: list[Effect] = []
        listed = {sample.instance for sample in report.samples}
        for instance in list(device.instances.values()):
            if instance.ordered is not None and report.at < instance.ordered:
                continue
            if instance.id in listed or (instance.state == "Loading" and instance.ordered is None):
                instance.unlisted = 0
                continue
            instance.unlisted += 1
            if instance.state == "Loading":
                if instance.unlisted % REORDER == 0:
                    found.append(self.table.order(instance))
            elif instance.state == "Unloading" and not instance.met:  # both orders may be on their way
                if instance.unlisted % REORDER == 0:
                    found.append(self.effects.order(instance.device, UnloadInstance(instance=instance.id)))
            elif instance.unlisted >= UNLISTED:
                found += self.table.lost(instance, "the executor no longer has it", now)
        return found

    def _sampled(
        self,
        device: MonitoredDevice,
        instance: MonitoredInstance,
        sample: InstanceSample,
        seconds: float,
        siblings: int,
        now: float,
    ) -> list[Effect]:
        """One instance's part of a report. siblings: instances of its variant on this worker, itself included."""
        instance.met = True
        found = self.effects.state_changes(instance, instance.observe(sample, seconds, now), now)
        if sample.items > 0:
            self.table.uses.used(instance.record.variant, instance.last_used)
        if sample.tier == "host" and instance.state in SERVING:
            found += self._in_host(instance, "the executor has it in host memory", now)
        elif sample.tier == "device" and instance.state == "Warm":
            found += self._on_device(instance, "the executor has it on the device", now, copied=sample.copied)
        elif instance.state in SERVING or instance.copied:
            found += self.table.host.copy_is(instance, sample.copied, now)
        if sample.apps:
            device.meter.used(instance.id, busy_by_payer(sample))
            planned = self.table.catalog.planned.get(instance.record.variant, ())
            device.meter.used(instance.id, dict.fromkeys(planned, 0.0))  # idle, it is there for the pipelines
            self.table.used.update([app.app for app in sample.apps if app.items > 0])
        return found + self.effects.state_changes(instance, instance.judge(self._limits, siblings, now), now)

    # -- executors that start, fall silent and end

    def check_silence(self, now: float) -> list[Effect]:
        """Executors that say nothing any more, and load orders that were not answered in time."""
        found: list[Effect] = []
        gap, self._checked = now - self._checked, now
        for device in self.devices.values():
            if gap > 2.0 * self.settings.heartbeat_s:
                device.seen = max(device.seen, now - self.settings.heartbeat_s)  # the silence was this process's own
            if device.alive and now - device.seen > self.failure_timeout_s:
                device.became_silent(now)
                found += self.effects.worker_state("Failed", f"the executor of {device.spec.name} is silent", now)
        for instance in list(self.table.instances.values()):
            if instance.state != "Loading" or instance.ordered is None:
                continue
            timeout = LOAD_TIMEOUT_S + instance.record.profile.load_ms / 100.0
            if now - instance.ordered > timeout:
                reason = f"the executor did not answer the load order within {timeout:.0f} s"
                found.append(self.effects.order(instance.device, UnloadInstance(instance=instance.id)))
                found += self.table.failed(instance, reason, now)
                found += self.table.gone(instance, reason, now)
        return found

    def _heard(self, device: MonitoredDevice, incarnation: int, now: float) -> list[Effect]:
        """A message came from this executor process, which is not one that has ended."""
        found: list[Effect] = []
        if device.incarnation is not None and incarnation != device.incarnation:
            why = "the executor died: another one has taken its place"
            found += self.table.executor_ended(device, why, now)
        if device.incarnation is None:
            device.incarnation, device.met = incarnation, now
        if device.heard(now):
            self.effects.heartbeat_due = True
            if all(other.alive for other in self.devices.values()):
                why = f"the executor of {device.spec.name} runs"
                if device.ended:  # it was heard no more before somebody ended it
                    why, device.ended = f"{why}; the last one died: {device.ended}", ""
                found += self.effects.worker_state(self.orders.usual_state, why, now)
            found += self.table.order_waiting(device, now)
        return found

    def exited(self, message: ExecutorExited, now: float) -> list[Effect]:
        device = self.devices.get(message.device)
        if device is None or device.incarnation is None or message.at < device.met:
            return []
        if message.succeeded:
            return self.effects.worker_note(f"the executor of {message.device} was replaced: {message.reason}", now)
        why = f"the executor died: {message.reason}"
        device.ended = message.reason
        found = self.table.executor_ended(device, why, now)
        event = f"the executor of {message.device} died: {message.reason}"
        return found + self.effects.worker_state("Failed", event, now)
