"""A worker on virtual time: drives the monitor's actor, keeps its timers, and plays the executor as contrarily as asked."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from bus.messages.catalog import AppRecord, Profile, ProfileRow, Signature, VariantRecord
from bus.messages.events import Event
from bus.messages.fleet import (
    AppSample,
    DemoteInstance,
    EnsureLoaded,
    ExecutorReport,
    InstanceFailed,
    InstanceLoaded,
    InstanceSample,
    InstanceStatus,
    InstanceUnloaded,
    LoadInstance,
    State,
    UnloadInstance,
    WorkerHeartbeat,
)
from bus.subjects import Subjects
from services.core.actor import After, Cancel, Changed, Do, Done, Envelope, Publish, Record, Started, Stopping, Synced
from services.core.placement import Device
from services.core.settings import MonitorSettings
from services.monitor.actor import MonitorActor
from services.monitor.effects import MachineSample
from tests.support.data.events import variant_record

S = Subjects()
PRICES = {"cpu": 0.048, "gpu": 3.06, "inferentia": 0.0905}
CPU = Device(name="cpu", kind="cpu", cores=2, memory_mb=1000.0)
E = TypeVar("E", bound=Event)
Items = dict[str, int]


def variant(
    name: str = "v", *, memory_mb: float = 100.0, saturation: float = 100.0, host_mb: float | None = None, **fields: Any
) -> VariantRecord:
    """A variant of model "m-<name>" that takes 10 ms for one item and 80 ms for eight. host_mb: None: it cannot be Warm."""
    rows = [
        ProfileRow(batch=batch, p50_ms=10.0 * batch, p99_ms=12.0 * batch, cpu_ms=10.0, wall_over_cpu=1.0)
        for batch in (1, 8)
    ]
    profile = Profile(rows=rows, load_ms=200.0, memory_mb=memory_mb, saturation_qps=saturation)
    if host_mb is not None:
        profile = replace(profile, init_ms=110.0, transfer_ms=90.0, host_mb=host_mb)
    nothing = Signature(inputs=[], outputs=[])
    given = {"model": f"m-{name}", "max_batch": 8, "accuracy": 0.9, "profile": profile, "signature": nothing}
    return variant_record(variant=name, **(given | fields))


class World:
    """One monitor, its executor process, and everything that either has said so far."""

    def __init__(
        self,
        devices: Sequence[Device] = (CPU,),
        *,
        executor: int | None = 1,
        settings: MonitorSettings | None = None,
        startup_s: float = 0.0,
        keeps: VariantRecord | None = None,
    ) -> None:
        self.now = 1000.0
        self.device = devices[0].name
        self.executor = executor  # incarnation of the process that runs, None: there is none
        self.loaded: dict[str, str] = {}  # instance -> variant, on the executor's device
        self.warm: dict[str, str] = {}  # instance -> variant, in host memory
        self.copied: dict[str, str] = {}  # instance -> variant, in host memory and on the device
        self.published: list[tuple[str, Any]] = []
        self.events: list[Event] = []
        self.timers: dict[Any, tuple[float, Any]] = {}
        self.machine = MachineSample(utilisation=0.3, memory_used_mb=500.0)
        self.actor = MonitorActor(
            "w1", "cpu", devices, PRICES, S, incarnation=7, settings=settings, startup_s=startup_s, keeps=keeps
        )
        self.tell(Started())
        self.advance(0.0)
        if executor is not None:
            self.report()

    # -- driving

    def tell(self, message: Any, reply: str = "") -> list[Any]:
        """Hand one message to the actor; returns what it published."""
        before = len(self.published)
        self._perform(self.actor.handle(Envelope(self.now, message, "", reply)))
        return [published for _, published in self.published[before:]]

    def _perform(self, effects: Iterable[Any]) -> None:
        for effect in effects:
            match effect:
                case Publish():
                    assert msgspec.msgpack.encode(effect.message)
                    self.published.append((effect.subject, effect.message))
                case Record():
                    self.events.append(effect.event)
                case After():
                    self.timers[effect.key] = (self.now + effect.delay, effect.message)
                case Cancel():
                    self.timers.pop(effect.key, None)
                case Do():
                    self.tell(Done(effect.id, self.machine))
                case _:
                    raise AssertionError(effect)

    def advance(self, seconds: float, *, reporting: bool = False) -> None:
        """Let time pass; the executor reports every half second if asked to."""
        end = self.now + seconds
        next_report = self.now + 0.5
        while True:
            due = min(self.timers.values(), key=lambda timer: timer[0], default=None)
            at = min(due[0] if due is not None else end, next_report if reporting else end)
            if at > end:
                break
            self.now = max(self.now, at)
            if due is not None and due[0] <= self.now:
                key = next(key for key, timer in self.timers.items() if timer is due)
                del self.timers[key]
                self.tell(due[1])
            elif reporting and at == next_report:
                next_report += 0.5
                self.report()
            else:
                break
        self.now = max(self.now, end)

    # -- the executor's part

    @property
    def orders(self) -> list[LoadInstance | UnloadInstance | DemoteInstance]:
        """What the executor has not carried out yet."""
        return [m for _, m in self.published if isinstance(m, LoadInstance | UnloadInstance | DemoteInstance)]

    def obey(self, *, memory_mb: float = 0.0, fail: str = "", only: int | None = None, times: int = 1) -> None:
        """The executor carries out every order since the last time. only: this one of them. times: also what follows from that."""
        for _ in range(times):
            orders = self.orders if only is None else [self.orders[only]]
            self.published = [entry for entry in self.published if entry[1] not in orders]
            for order in orders:
                if self.executor is not None:
                    self._obey(order, self.executor, memory_mb, fail)

    def _obey(
        self, order: LoadInstance | UnloadInstance | DemoteInstance, executor: int, memory_mb: float, fail: str
    ) -> None:
        facts: dict[str, Any] = {"instance": order.instance, "device": self.device, "incarnation": executor}
        name = self.loaded.get(order.instance) or self.warm.get(order.instance)
        match order:
            case UnloadInstance(tier="host"):
                if self.copied.pop(order.instance, None) is not None:
                    self.tell(InstanceLoaded(variant=name or "", load_ms=0.0, memory_mb=0.0, proof="here", **facts))
            case UnloadInstance():
                if name is not None:
                    self._forget(order.instance)
                    self.tell(InstanceUnloaded(variant=name, **facts))
            case DemoteInstance():
                if name is not None:
                    self._forget(order.instance)
                    self.warm[order.instance] = name
                    self.tell(
                        InstanceLoaded(variant=name, load_ms=1.0, memory_mb=0.0, proof="host", tier="host", **facts)
                    )
            case LoadInstance() if fail:
                self._forget(order.instance)
                self.tell(InstanceFailed(variant=order.variant.variant, reason=fail, **facts))
            case LoadInstance():
                comes = order.instance in self.warm and order.tier == "device"
                took = 200.0 if not comes else 90.0
                self._forget(order.instance)
                where = self.loaded if order.tier == "device" else self.warm
                name = where[order.instance] = order.variant.variant
                if comes:
                    self.copied[order.instance] = name
                facts |= {"variant": name, "tier": order.tier, "copied": comes}
                self.tell(InstanceLoaded(load_ms=took, memory_mb=memory_mb, proof="here", **facts))

    def _forget(self, instance: str) -> None:
        self.loaded.pop(instance, None)
        self.warm.pop(instance, None)
        self.copied.pop(instance, None)

    def report(
        self,
        served: dict[str, Items] | None = None,
        *,
        queued: Items | None = None,
        waits: bool = True,
        slower: float = 1.0,
        slo_s: float = 30.0,
        device: str = "",
        cpu_s: float | None = None,
    ) -> None:
        """Report half a second in which these instances served so many items by app, one by one. waits: part of what is queued does. cpu_s: of the
        executor's process.
        """
        assert self.executor is not None
        samples = []
        for instance, name in (*self.loaded.items(), *self.warm.items()):
            apps = (served or {}).get(instance, {})
            items = sum(apps.values())
            samples.append(
                InstanceSample(
                    instance=instance,
                    variant=name,
                    queued=(queued or {}).get(instance, 0),
                    oldest_wait=0.01 if waits and (queued or {}).get(instance, 0) else 0.0,
                    items=items,
                    batches=items,
                    busy=items * 0.01 * slower,
                    predicted=items * 0.01,
                    apps=[AppSample(app, n, slo_s) for app, n in apps.items()],
                    tier="host" if instance in self.warm else "device",
                    copied=instance in self.copied,
                    begun=self.now if items else 0.0,
                )
            )
        self.hear(samples, device or self.device, cpu_s=cpu_s)

    def hear(self, samples: list[InstanceSample], device: str, **fields: Any) -> None:
        """An executor's report of half a second."""
        given = {"incarnation": self.executor, "seconds": 0.5, "memory_mb": 50.0, "at": self.now}
        self.tell(ExecutorReport(worker="w1", device=device, samples=samples, **(given | fields)))

    # -- shorthands

    def serve(self, served: dict[str, Items] | None = None, times: int = 2, **how: Any) -> None:
        """So many half seconds in which the executor's instances serve this, and it reports it."""
        for _ in range(times):
            self.advance(0.5)
            self.report(served, **how)

    def said(self, kind: type) -> list[Any]:
        """What the actor has published of this type."""
        return [message for _, message in self.published if isinstance(message, kind)]

    def ask(self, order: Any) -> Any:
        """Give an order; returns the reply."""
        self.tell(order, reply="_INBOX.1")
        return [message for subject, message in self.published if subject == "_INBOX.1"][-1]

    def ensure(self, record: VariantRecord, at_least: int = 1, app: str | None = "faces", orderer: str = "d1") -> Any:
        """Order a load; returns the reply."""
        return self.ask(
            EnsureLoaded(variant=record, at_least=at_least, app=app, orderer=orderer, reason="a query needs it")
        )

    def load(self, record: VariantRecord, app: str | None = "faces") -> str:
        """Order a load and let the executor do it; returns the instance."""
        instance: str = self.ensure(record, app=app).instances[-1]
        self.obey()
        return instance

    def catalogue(self, *records: VariantRecord, apps: Iterable[AppRecord] = (), synced: bool = True) -> None:
        entries = [(f"variant.{r.variant}", msgspec.msgpack.encode(r)) for r in records]
        entries += [(f"app.{a.app}", msgspec.msgpack.encode(a)) for a in apps]
        for key, value in entries:
            self.tell(Changed(S.catalog_bucket, key, value))
        if synced:
            self.tell(Synced(S.catalog_bucket))

    def stop(self) -> None:
        self.tell(Stopping(5.0))

    @property
    def beat(self) -> WorkerHeartbeat:
        """The last heartbeat."""
        beats = [m for subject, m in self.published if subject == S.worker_heartbeat("w1")]
        assert all(isinstance(beat, WorkerHeartbeat) for beat in beats)
        last: WorkerHeartbeat = beats[-1]
        return last

    def told(self) -> dict[str, InstanceStatus]:
        """The instances of the last heartbeat, by name."""
        return {status.instance: status for status in self.beat.instances}

    def states(self) -> dict[str, State]:
        return {name: status.state for name, status in self.told().items()}

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]
