"""A whole system on stage: dispatchers, monitors and executors as in production, models scripted by profile."""

import itertools
import random
import struct
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from bus.codec import decode, encode
from bus.messages.catalog import AppRecord, Profile, ProfileRow, VariantRecord
from bus.messages.fleet import EnsureLoaded, ExecutorExited
from bus.messages.flow import Execute, Payload, Route
from bus.messages.jobs import SYSTEM
from bus.messages.public import ObjectRef, Tensor
from bus.messages.quality import AppQuality
from bus.subjects import Subjects
from services.core import placement
from services.core.actor import Synced
from services.core.cost import LatencyTable
from services.core.placement import Device as MonitoredDevice
from services.core.selection.policy import InfaasPolicy, SelectionPolicy
from services.core.settings import Settings
from services.dispatcher.actor import make_dispatcher
from services.dispatcher.commands import (
    ContextWritten,
    DeleteResults,
    FetchTensors,
    FindKept,
    GatherOutputs,
    PutQuality,
    ReadContext,
    RunPolicy,
    StoredContext,
    WriteContext,
)
from services.dispatcher.metrics import DispatcherMetrics
from services.executor.actor import make_executor
from services.executor.commands import (
    BatchResult,
    FetchInputs,
    LoadedModel,
    LoadModel,
    MeasureProcess,
    ProcessUse,
    RunBatch,
    StoreOutputs,
    TransferModel,
    UnloadModel,
)
from services.monitor.actor import MonitorActor
from services.monitor.effects import MachineSample
from tests.support.data.events import change_of, floats, model_record, variant_record
from tests.support.simulated.virtual_time import Stage

M = TypeVar("M")
SIGNATURE = floats({"x": [2]}, {"y": [1]})
CPU = placement.Device(name="cpu", kind="cpu", cores=2, memory_mb=1000.0)
_named = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
PRICES = {"cpu": 0.048, "gpu": 3.06, "inferentia": 0.0905, "remote": 0.0}


def variant(name: str = "m-v1-ort-fp32-t1-b8", **changes: Any) -> VariantRecord:
    """A variant whose batch of n takes base_ms + per_item_ms * n."""
    base, per_item = changes.pop("base_ms", 2.0), changes.pop("per_item_ms", 0.5)
    load_ms = changes.pop("load_ms", 50.0)
    rows = [
        ProfileRow(batch=b, p50_ms=base + per_item * b, p99_ms=2 * base, cpu_ms=base, wall_over_cpu=1.0)
        for b in (1, 2, 4, 8)
    ]
    profile = Profile(rows=rows, load_ms=load_ms, memory_mb=50.0, saturation_qps=8000.0 / (base + 8 * per_item))
    given = {"variant": name, "model": "m", "max_batch": 8, "artifact": "a" * 64, "accuracy": 0.9, "profile": profile}
    return variant_record(**(given | {"signature": SIGNATURE} | changes))


def catalogue(*variants: VariantRecord, app: str = "app") -> list[Any]:
    """Records that link these variants' models to an app."""
    models = {
        (v.model, v.version): model_record(model=v.model, version=v.version, signature=SIGNATURE, created=1.0)
        for v in variants
    }
    links = {v.model: v.version for v in variants}
    return [*variants, *models.values(), AppRecord(app=app, links=links, signature=SIGNATURE)]


class Device:
    """The scripted edge of an executor: it answers x -> its first column, as slowly as the profile says.

    poison: ids of queries in whose batch the process dies; slow: factor on every batch; between: on the time from one batch to
    the next, as nobody measures it; spread: batches take up to this share more or less; broken: why it cannot load
    anything, loads: how often it tried. fails: models that fail. By model, or by model@version: says: what it answers (or by variant), late: factor on its batches. By model: wide: numbers
    an item instead of 1, refuses: why its inputs are wrong, boxes: items of each answer, which say their number. echoes: models that say what they were asked.
    """

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage = stage
        self.name = name
        self.slow = self.between = 1.0
        self.store_s = 0.001
        self.spread = 0.0
        self.broken = ""
        self.fails: set[str] = set()
        self.loads = 0
        self._luck = random.Random(name)
        self.poison: set[str] = set()
        self.says: dict[str, float] = {}
        self.late: dict[str, float] = {}
        self.wide: dict[str, int] = {}
        self.refuses: dict[str, str] = {}
        self.boxes: dict[str, int] = {}
        self.echoes: set[str] = set()
        self.batches: list[list[str | None]] = []
        self.objects: dict[str, dict[str, Any]] = {}
        self._tables: dict[str, LatencyTable] = {}
        self._models: dict[str, tuple[str, str, str]] = {}
        self.died = False

    def __call__(self, command: Any) -> tuple[float, Any]:
        match command:
            case LoadModel():
                self.loads += 1
                if self.broken:
                    return 0.01, RuntimeError(self.broken)
                self._tables[command.instance] = LatencyTable(command.variant)
                self._models[command.instance] = (
                    f"{command.variant.model}@{command.variant.version}",
                    command.variant.model,
                    command.variant.variant,
                )
                return command.variant.profile.load_ms / 1000.0, LoadedModel(1.0, 50.0, "scripted")
            case TransferModel():
                return 0.01, LoadedModel(10.0, 50.0, "scripted", tier=command.tier)
            case UnloadModel():
                return 0.001, None
            case MeasureProcess():
                return 0.0, ProcessUse(100.0)
            case FetchInputs():
                found = {ref.name: self.objects[ref.key][ref.tensor] for ref in command.refs}
                return 0.001, encode(_named(command.inputs) | found)
            case StoreOutputs():
                self.objects[command.key] = dict(command.outputs)
                return self.store_s, _ref(command.key, self.objects[command.key])
            case RunBatch():
                labels = [work.route.id for work in command.queries]
                self.batches.append(labels)
                if self.poison & {label for label in labels if label}:
                    self.died = True
                items = sum(work.items for work in command.queries)
                seconds = self._tables[command.instance].seconds(items) * self.slow
                seconds *= self._luck.uniform(1.0 - self.spread, 1.0 + self.spread)
                named, model, one = self._models[command.instance]
                seconds *= self.late.get(named, self.late.get(model, 1.0))
                width = self.wide.get(model, 1)
                said = struct.pack("<f", self.says.get(one, self.says.get(named, self.says.get(model, 0.0)))) * width
                outputs = [{"y": Tensor("FP32", [w.items, width], said * w.items)} for w in command.queries]
                if model in self.boxes:
                    count = self.boxes[model]
                    data = b"".join(struct.pack("<f", i) * width for i in range(count))
                    outputs = [{"y": Tensor("FP32", [w.items, count, width], data * w.items)} for w in command.queries]
                if model in self.echoes:
                    outputs = [
                        {"y": Tensor("FP32", [w.items, width], bytes(w.inputs.data))}  # type: ignore[union-attr]
                        for w in command.queries
                    ]
                size = sum(len(one["y"].data) for one in outputs)
                words: list[Any] = [
                    [int(self.says.get(one, self.says.get(named, self.says.get(model, 0.0))) > 0.5)] * w.items
                    for w in command.queries
                ]
                result = BatchResult(self.stage.now, self.stage.now + seconds, outputs, bytes=size, said=words)
                if model in self.refuses:
                    result = BatchResult(
                        result.started, result.finished, [], [self.refuses[model]] * len(labels), unfit=True
                    )
                if named in self.fails:
                    result = BatchResult(result.started, result.finished, [], ["it fails"] * len(labels))
                return seconds * self.between, result
        raise AssertionError(command)


def _ref(key: str, outputs: dict[str, Any]) -> ObjectRef:
    return ObjectRef(bucket="infaas-outputs", key=key, bytes=len(encode(outputs)))


class ContextStore:
    """The scripted edge of all dispatchers of a fleet: the selection bucket, large tensors, and users' policies by what `policy` says."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.gathered: list[str] = []  # their keys
        self.lost = ""  # why nothing can be stored
        self.kept: list[Payload] = []
        self.stored: dict[str, StoredContext] = {}
        self.policy: Callable[[RunPolicy], tuple[float, Any]] | None = None
        self.put: Callable[[AppQuality], None] = lambda _: None  # what dispatchers put into the catalogue

    def __call__(self, command: Any) -> tuple[float, Any]:
        if isinstance(command, RunPolicy):
            assert self.policy is not None, command
            return self.policy(command)
        if isinstance(command, GatherOutputs):
            if self.lost:
                return 0.001, RuntimeError(self.lost)
            self.gathered.append(command.key)
            found = {ref.name: self.objects[ref.key][ref.tensor] for ref in command.refs}
            self.objects[command.key] = {**command.outputs, **found}
            return 0.001, _ref(command.key, self.objects[command.key])
        if isinstance(command, FetchTensors):
            return 0.001, {ref.name: encode(self.objects[ref.key][ref.tensor]) for ref in command.refs}
        if isinstance(command, FindKept):
            named = (one for one in self.kept if command.query in (None, one.query) and command.id in (None, one.id))
            return 0.001, next(named, None)
        if isinstance(command, DeleteResults):
            for key in command.keys:
                self.objects.pop(key, None)
            return 0.001, None
        if isinstance(command, PutQuality):
            self.put(decode(AppQuality, command.value))
            return 0.001, None
        present = self.stored.get(command.key, StoredContext(None, 0))
        match command:
            case ReadContext():
                return 0.001, present
            case WriteContext() if command.revision == present.revision:
                self.stored[command.key] = StoredContext(command.value, present.revision + 1)
                return 0.001, ContextWritten(present.revision + 1)
            case WriteContext():
                return 0.001, present
        raise AssertionError(command)


class Fleet:
    """Builds and breaks a system on a stage; collects what the client hears, by query id. how: the first worker's device does so."""

    def __init__(
        self,
        *variants: VariantRecord,
        dispatchers: int = 1,
        workers: int = 1,
        policy: SelectionPolicy | None = None,
        settings: Settings | None = None,
        kind: str = "cpu",
        arithmetic: str = "",
        **how: Any,
    ):
        self.stage = Stage()
        self.subjects = Subjects()
        self.records = catalogue(*(variants or (variant(),)))
        self.policy = policy
        self.settings = settings or Settings()
        self.kind = kind  # of each worker's one device
        self.arithmetic = arithmetic  # of that
        self.contexts = ContextStore()
        self.contexts.put = self.labelled
        self.devices: dict[str, Device] = {}
        self._uids = itertools.count()
        self._incarnations = itertools.count(1)
        self._ids = itertools.count()
        self.stage.listen("_INBOX.>")
        for n in range(workers):
            self.start_worker(f"w{n}")
        for n in range(dispatchers):
            self.start_dispatcher(f"d{n}")
        self.stage.run(1.0)
        if how:
            self.behave(**how)

    def after(self, seconds: float) -> None:
        """So much time passes after what was done; none: not even what is due now comes."""
        if seconds:
            self.stage.run(seconds)

    def start_dispatcher(self, name: str, seconds: float = 0.0) -> None:
        policy = self.policy or InfaasPolicy()
        new_uid = lambda: next(self._uids).to_bytes(16, "big")  # noqa: E731
        actor = make_dispatcher(self.settings, self.subjects, name, policy, PRICES, new_uid)
        self.stage.enter(name, actor, self.contexts)
        self.follow(name)
        self.after(seconds)

    def follow(self, name: str) -> None:
        """One that has just started hears of the whole catalogue."""
        for record in self.records:
            self.stage.send(name, change_of(record))
        self.stage.send(name, Synced("infaas-catalog"))

    def start_executor(self, worker: str, seconds: float = 0.0) -> None:
        device = self.devices[worker] = Device(self.stage, worker)
        device.objects = self.contexts.objects
        own = replace(CPU, name=self.kind, kind=self.kind)
        actor = make_executor(self.settings, self.subjects, worker, own, next(self._incarnations))
        self.stage.enter(f"{worker}/{self.kind}", actor, device)
        self.after(seconds)

    def behave(self, worker: str = "w0", **how: Any) -> None:
        """Its device does so from now on: attributes of Device."""
        for name, value in how.items():
            assert hasattr(self.devices[worker], name), name
            setattr(self.devices[worker], name, value)

    def running(self, worker: str) -> list[bytes]:
        """The uids of what its executor computes now."""
        runs = self.stage.members[f"{worker}/{self.kind}"].actor._runs.running.values()
        return [query.route.uid for _, run, _ in runs for query in run.queries]

    def end_executor(self, worker: str, running: list[bytes] | None = None, seconds: float = 0.0) -> None:
        """The executor ends, and its supervisor says so, with what it computed, None: nobody knows."""
        self.stage.kill(f"{worker}/{self.kind}")
        exited = ExecutorExited(worker=worker, device=self.kind, at=self.stage.now, reason="crashed", running=running)
        self.stage.publish(self.subjects.exited(worker, self.kind), exited, seconds=seconds)

    def kill_worker(self, worker: str, seconds: float = 0.0) -> None:
        """Its machine dies: nobody says anything."""
        self.stage.kill(f"{worker}/{self.kind}")
        self.stage.kill(worker, seconds)

    def order(
        self,
        record: VariantRecord,
        worker: str = "w0",
        *,
        app: str | None = "app",
        at_least: int = 1,
        seconds: float = 0.0,
    ) -> None:
        """Order so many instances of a variant, and give that some time."""
        order = EnsureLoaded(variant=record, app=app, at_least=at_least)
        self.stage.publish(self.subjects.worker(worker, "load"), order)
        self.stage.run(seconds)

    def start_worker(self, worker: str, seconds: float = 0.0) -> None:
        device = MonitoredDevice(  # room for five members
            name=self.kind, kind=self.kind, cores=4, memory_mb=4000.0, arithmetic=self.arithmetic
        )
        settings = self.settings.monitor
        actor = MonitorActor(worker, self.kind, [device], PRICES, self.subjects, next(self._incarnations), settings)
        self.stage.enter(worker, actor, lambda _: (0.0, MachineSample(utilisation=0.2, memory_used_mb=500.0)))
        self.follow(worker)
        self.start_executor(worker, seconds)

    def change(self, name: str = "app", *, seconds: float = 0.0, **fields: Any) -> None:
        """An app's record changes, and everybody who follows the catalogue hears of it."""
        [app] = [record for record in self.records if isinstance(record, AppRecord) and record.app == name]
        after = replace(app, **fields)
        self.records[self.records.index(app)] = after
        self.tell(after)
        self.after(seconds)

    def labelled(self, quality: AppQuality) -> None:
        """A dispatcher has put what labels say of an app into the catalogue."""
        self.records = [one for one in self.records if not isinstance(one, AppQuality) or one.app != quality.app]
        self.add(quality)

    def add(self, *records: Any) -> None:
        """Records come into the catalogue."""
        self.records += records
        for record in records:
            self.tell(record)

    def tell(self, after: Any) -> None:
        """Everybody who follows the catalogue hears of this record."""
        for name, member in self.stage.members.items():
            if member.actor.watches:
                self.stage.send(name, change_of(after))

    def ask(
        self, app: str = "app", *, id: str | None = None, items: int = 1, seconds: float = 0.0, **needs: Any
    ) -> str:
        """Send one query now, and let so much time pass; returns its id."""
        label = id or f"q{next(self._ids)}"
        inputs = Tensor("FP32", [items, 2], b"\0" * (8 * items))
        body = encode({"inputs": inputs, "id": label, **needs})
        self.stage.publish(self.subjects.query(app), body, f"_INBOX.test.{label}", seconds)
        return label

    def asks(self, count: int, app: str = "app", *, seconds: float = 0.0, **query: Any) -> list[str]:
        """Send so many now, and let so much time pass; their ids."""
        labels = [self.ask(app, **query) for _ in range(count)]
        self.after(seconds)
        return labels

    def replies(self, label: str) -> list[dict[str, Any]]:
        """Everything the client has heard about one query."""
        return [
            msgspec.msgpack.decode(body) for _, subject, body in self.stage.heard if subject == f"_INBOX.test.{label}"
        ]

    def reply(self, label: str, seconds: float = 0.0) -> dict[str, Any]:
        """The one reply to a query, after so much more time."""
        self.stage.run(seconds)
        found = self.replies(label)
        assert len(found) == 1, (label, found)
        return found[0]

    def timed(self, label: str, seconds: float = 5.0) -> tuple[float, dict[str, Any]]:
        """(seconds after now, the one reply)"""
        asked = self.stage.now
        reply = self.reply(label, seconds)
        [at] = [at - asked for at, subject, _ in self.stage.heard if subject == f"_INBOX.test.{label}"]
        return at, reply

    def each(self, labels: Iterable[str], seconds: float = 0.0) -> list[dict[str, Any]]:
        """The one reply to each of these queries, after so much more time."""
        self.stage.run(seconds)
        return [self.reply(label) for label in labels]

    def request(self, subject: str, message: Any) -> dict[str, Any]:
        """The reply to a request that is no query."""
        label = f"request-{len(self.stage.heard)}"
        self.stage.publish(subject, message, f"_INBOX.test.{label}")
        return self.reply(label, 0.1)

    def dispatcher(self, name: str = "d0") -> Any:
        return self.stage.members[name].actor

    def sent(self, kind: type[M], word: str) -> list[M]:
        """Messages on subjects, of those that are listened to, with this word in them."""
        return [decode(kind, body) for _, subject, body in self.stage.heard if word in subject]

    def copies(self) -> list[Route]:
        """The routes of queries' copies whose answers nobody gets, if it is listened to what executors are given."""
        return [one.route for one in self.sent(Execute, ".execute.") if one.route.payer == SYSTEM]

    def outcomes(self) -> list[Any]:
        return [event for kind, event in self.stage.records if kind == "outcome"]


def refused(reply: dict[str, Any], code: str, *words: str) -> dict[str, Any]:
    """Whether a query was refused with this code and a message that has these words; the error."""
    error = reply.get("error", {})
    assert error.get("code") == code, reply
    assert [word for word in words if word not in error["message"]] == [], error["message"]
    return error


def asked_for(fleet: Fleet, seconds: float, every: float = 0.005, **needs: Any) -> list[str]:
    """A query every so many seconds, for so long; the ids."""
    labels = []
    for _ in range(round(seconds / every)):
        labels.append(fleet.ask(**needs))
        fleet.stage.run(every)
    return labels


def metrics(fleet: Fleet, name: str = "d0") -> dict[tuple[str, ...], Any]:
    """A dispatcher's metrics now, by name and values of their labels."""
    found = DispatcherMetrics().families(fleet.dispatcher(name))
    return {(one.name, *labels.values()): value for one in found for labels, value in one.samples}
