"""Executors of one simulated device each in virtual time, each with an instance or more, and clients that send to it directly."""

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import Raw

from bus.codec import encode
from bus.messages.catalog import BatchingRule, Profile, ProfileRow, VariantRecord
from bus.messages.fleet import DispatcherHeartbeat, ExecutorReport, LoadInstance
from bus.messages.flow import Execute, HandBack, Route
from bus.messages.public import Answer, Tensor
from bus.subjects import Subjects
from services.core.actor import Envelope, Inlet, Publish
from services.core.batching import batching_key
from services.core.placement import Device
from services.core.settings import Settings
from services.executor.actor import make_executor
from services.simulation.edges import SimulatedExecutorEdge
from services.simulation.hardware import SimulatedDevice
from services.simulation.kernel import Kernel
from services.simulation.scenario.catalogue import SIGNATURE
from tests.support.data.events import variant_record

BEGINS = 1_000_000.0
WORKER = "w"
DISPATCHER = "d"
HEARTBEAT = 0.5


def linear(base_ms: float, per_item_ms: float, most: int = 1024, **fields: Any) -> VariantRecord:
    """A variant whose batch of n takes base_ms + per_item_ms * n. fields: of the record."""
    rows = [
        ProfileRow(batch=n, p50_ms=base_ms + per_item_ms * n, p99_ms=base_ms + per_item_ms * n, cpu_ms=0.0, wall_over_cpu=1.0)
        for n in sorted({1, most})
    ]  # fmt: skip
    profile = Profile(rows=rows, load_ms=1.0, memory_mb=1.0, saturation_qps=1000.0 * most / rows[-1].p50_ms)
    given = {"variant": "v", "model": "m", "max_batch": most, "hardware": "gpu", "accuracy": None, "profile": profile}
    return variant_record(**(given | {"signature": SIGNATURE, "simulated": True} | fields))


class Answered(NamedTuple):
    """One answer. at, sent: seconds since the beginning. batch: items that were computed together."""

    at: float
    sent: float
    batch: int
    compute_ms: float
    instance: str


class Reports:
    """An actor that keeps what executors tell their monitor and the dispatchers."""

    def __init__(self, subjects: Subjects) -> None:
        self.inlets = (
            Inlet(subject=subjects.monitor(WORKER, "report"), message=ExecutorReport),
            Inlet(subject=subjects.resubmit(DISPATCHER), message=HandBack),
        )
        self.watches = ()
        self.last: dict[str, Any] = {}
        self.handed_back: list[HandBack] = []

    def handle(self, envelope: Envelope) -> tuple[()]:
        message = envelope.message
        if isinstance(message, ExecutorReport):
            self.last.update({sample.instance: sample for sample in message.samples})
        elif isinstance(message, HandBack):
            self.handed_back.append(message)
        return ()


class BatchClients:
    """devices: each with its instance `i0`, `i1`, ... of the variant, and as many cores. slow: factor on every batch of a device."""

    def __init__(
        self,
        record: VariantRecord,
        devices: int = 1,
        *,
        kind: str = "gpu",
        cores: int = 1,
        settings: Settings | None = None,
    ) -> None:
        self.subjects = Subjects()
        self.kernel = Kernel(BEGINS, lambda *_: None)
        self.kernel.received = self._received
        self.answers: list[Answered] = []
        self.executors: list[Any] = []
        self.devices: list[SimulatedDevice] = []
        self.reports = Reports(self.subjects)
        self.kernel.enter("monitor", self.reports)
        self._sent: dict[str, tuple[float, str, Callable[[Any], None] | None]] = {}
        self._number = 0
        for n in range(devices):
            spec = Device(name=f"gpu{n}", kind=kind, cores=cores, memory_mb=1000.0, simulated=True)
            settings = settings or Settings()
            device = SimulatedDevice(spec, 0.0, settings.executor)
            executor = make_executor(settings, self.subjects, WORKER, spec, 1)
            edge = SimulatedExecutorEdge(self.kernel, device, lambda _: 0.001, lambda *_: None)
            self.kernel.enter(spec.name, executor, edge)
            self.devices.append(device)
            self.executors.append(executor)
            self._load(f"i{n}", record, n)
        self._beat()
        self.run(0.1)

    def _load(self, instance: str, record: VariantRecord, device: int) -> None:
        order = LoadInstance(instance=instance, variant=record)
        self.kernel.publish(self.subjects.executor(WORKER, f"gpu{device}", "load"), order)

    def beside(self, instance: str, record: VariantRecord, device: int = 0) -> None:
        """Load one more instance on a device."""
        self._load(instance, record, device)
        self.run(0.1)

    @property
    def now(self) -> float:
        return self.kernel.now - BEGINS

    def run(self, seconds: float) -> None:
        if seconds:
            self.kernel.run(self.kernel.now + seconds)

    def rule(self, scope: str, name: str, *, seconds: float = 0.0, **fields: Any) -> None:
        """Keep a rule as the registrar does. Without fields: remove it."""
        value = encode(BatchingRule(**fields)) if fields else None
        self.kernel.put(self.subjects.control_bucket, batching_key(scope, name), value)
        self.run(seconds)

    def send_many(self, count: int, *, seconds: float = 0.0, **how: Any) -> None:
        for _ in range(count):
            self.send(**how)
        self.run(seconds)

    def send(
        self, device: int = 0, *, app: str = "a", within: float = 10.0, items: int = 1, then: Callable[[Any], None] | None = None,
        instance: str = "", seconds: float = 0.0, **route: Any,
    ) -> None:  # fmt: skip
        """Send one query. within: seconds until its deadline. then: called with the answer or refusal. instance: by default that of the device."""
        self._number += 1
        inbox, now, instance = f"_INBOX.{self._number}", self.kernel.now, instance or f"i{device}"
        uid = self._number.to_bytes(16, "big")
        # Sent again: its dispatcher knows no other instance, so what may be late stays.
        head = Route(uid, 0, 1, inbox, now + within, now, DISPATCHER, instance, app, items, None, **route)
        body = Raw(encode({"inputs": Tensor("BOOL", [items], bytes(items))}))
        self._sent[inbox] = (now, instance, then)
        self.kernel.publish(self.subjects.execute(WORKER, f"gpu{device}"), Execute(head, body))
        self.run(seconds)

    def closed_loop(self, clients: int, device: int = 0, *, seconds: float = 0.0, **query: Any) -> None:
        """So many clients that each send the next query when the last one is answered."""

        def again(_: Any = None) -> None:
            self.send(device, then=again, **query)

        for _ in range(clients):
            again()
        self.run(seconds)

    def batches(self, since: float, device: int = 0, until: float = float("inf")) -> list[int]:
        """Items of the batches that were answered from then on, one entry a batch."""
        return [batch for batch, _ in self.timed_batches(since, device, until)]

    def timed_batches(self, since: float, device: int = 0, until: float = float("inf")) -> list[tuple[int, float]]:
        """(items, ms) of these batches."""
        found: dict[float, tuple[int, float]] = {}
        for one in self.answers:
            if one.instance == f"i{device}" and since <= one.at <= until:
                found[one.at] = (one.batch, one.compute_ms)
        return list(found.values())

    def _received(self, reply: Publish) -> None:
        sent, instance, then = self._sent.pop(reply.subject)
        if isinstance(reply.message, Answer):
            message = reply.message
            at = self.kernel.now - BEGINS
            self.answers.append(Answered(at, sent - BEGINS, message.batch, message.compute_ms, instance))
        if then is not None:
            then(reply.message)

    def _beat(self, _: Any = None) -> None:
        heartbeat = DispatcherHeartbeat(dispatcher=DISPATCHER, incarnation=1, at=self.kernel.now)
        self.kernel.publish(self.subjects.dispatcher_heartbeat(), heartbeat)
        self.kernel.at(HEARTBEAT, self._beat)
