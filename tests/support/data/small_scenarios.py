"""Small scenarios in which everything happens, built as a reader of files would, and what runs them."""

import json
import tomllib
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from bus.messages.catalog import (
    AppRecord,
    Ensemble,
    Profile,
    ProfileRow,
    Signature,
    TensorSpec,
    VariantRecord,
)
from bus.messages.events import Event
from bus.messages.public import Requirements
from services.core.placement import Device
from services.core.settings import Settings
from services.simulation.composites import SIGNATURE as NUMBERS
from services.simulation.report import MEASURED, RunReport
from services.simulation.run import Run
from services.simulation.scenario.model import FaultSpec, JobSpec, MachineSpec, PolicySpec, Scenario, WorkloadSpec
from services.simulation.scenario.read import read_scenario
from tests.support.data.events import model_record, variant_record

PRICES = {"cpu": 0.04, "gpu": 0.9}
SIGNATURE = Signature(
    inputs=[TensorSpec(name="x", datatype="BOOL", shape=[])],
    outputs=[TensorSpec(name="y", datatype="BOOL", shape=[])],
)
CPU = Device(name="cpu", kind="cpu", cores=4, memory_mb=4000.0, simulated=True)
GPU = Device(name="gpu", kind="gpu", cores=1, memory_mb=8000.0, simulated=True, address="gpu")


def variant(name: str, model: str, hardware: str, ms: float, **more: Any) -> VariantRecord:
    """A batch of n takes ms · (0.6 + 0.4 n) on a CPU, ms · (0.95 + 0.05 n) elsewhere. more: load_ms, memory_mb, fields."""
    slope = 0.4 if hardware == "cpu" else 0.05
    most = more.pop("max_batch", 8)
    rows = [
        ProfileRow(batch=n, p50_ms=ms * (1 - slope + slope * n), p99_ms=ms * (1 - slope + slope * n), cpu_ms=ms, wall_over_cpu=1.0)
        for n in (1, 2, 4, 8)
        if n <= most
    ]  # fmt: skip
    profile = Profile(
        rows=rows, load_ms=more.pop("load_ms", 700.0), memory_mb=more.pop("memory_mb", 300.0),
        saturation_qps=1000.0 * rows[-1].batch / rows[-1].p50_ms, provenance="synthetic",
    )  # fmt: skip
    given: dict[str, Any] = {
        "accuracy": 0.9,
        "agreement": None,
        "framework": "simulated",
        "artifact": "-",
        "format": "-",
    }
    stated = {"variant": name, "model": model, "hardware": hardware, "max_batch": most, "profile": profile}
    return variant_record(**(given | stated | {"signature": SIGNATURE, "simulated": True} | more))


VARIANTS = (
    variant("small-cpu", "small", "cpu", 17.3, accuracy=0.7, load_ms=410.0),
    variant("large-cpu", "large", "cpu", 61.7, accuracy=0.9, load_ms=930.0, memory_mb=700.0),
    variant("large-gpu", "large", "gpu", 7.9, accuracy=0.9, load_ms=1510.0, memory_mb=900.0),
)


def machine(kind: str = "mixed", *, devices: tuple[Device, ...] = (CPU, GPU), **more: Any) -> MachineSpec:
    fields = {"start": 2, "minimum": 2, "maximum": 2, "price_per_hour": 0.16 + 0.9 * (len(devices) - 1)} | more
    return MachineSpec(kind=kind, devices=devices, **fields)


def load(*rate: tuple[float, float], apps: tuple[str, ...] = ("a",), **more: Any) -> WorkloadSpec:
    return WorkloadSpec(apps=apps, shares=(1.0 / len(apps),) * len(apps), rate=rate, **more)


def settings(**sections: dict[str, Any]) -> Settings:
    """Defaults, but for these fields of these sections."""
    return msgspec.convert(sections, Settings)


def scenario(
    *loads: WorkloadSpec,
    duration_s: float,
    machines: tuple[MachineSpec, ...] = (),
    policy: Settings | None = None,
    variants: tuple[VariantRecord, ...] = VARIANTS,
    links: dict[str, tuple[str, ...]] | None = None,
    **more: Any,
) -> Scenario:
    """One policy, infaas. Apps: a (within 90 ms) and b (accurate) with all models, unless `links` names each app's models."""
    versions = {record.model: record.version for record in variants}
    models = tuple(
        model_record(model=model, format="-", source="-", validation="-", signature=SIGNATURE, created=0.0)
        for model in versions
    )
    linked = links or dict.fromkeys(("a", "b"), tuple(versions))
    apps = tuple(
        AppRecord(app=app, links={model: versions[model] for model in ours}, signature=SIGNATURE)
        for app, ours in linked.items()
    )
    spec = PolicySpec(
        name="infaas", base="infaas", hardware=None, machines=machines or (machine(),),
        settings=policy or settings(),
    )  # fmt: skip
    fields: dict[str, Any] = {
        "name": "test", "seed": 7, "objective": "cost", "metrics_every_s": 1.0, "prices": PRICES,
        "needs": {"a": Requirements(latency_ms=90.0), "b": Requirements(latency_ms=400.0, accuracy=0.85)},
        "interference": {"cpu": 1.0, "gpu": 1.5},
    }  # fmt: skip
    return Scenario(
        apps=apps, models=models, variants=variants, policies=(spec,), loads=loads, duration_s=duration_s,
        **(fields | more),
    )  # fmt: skip


def scaling() -> Scenario:
    """Load rises twentyfold and falls again: batches grow, instances come and go."""
    return scenario(
        load((0.0, 8.0), (4.0, 8.0), (7.0, 180.0), (11.0, 180.0), (12.0, 4.0)),
        load((0.0, 5.0), apps=("a", "b"), arrivals="gamma", cv=2.0),
        duration_s=20.0,
        policy=settings(autoscaler={"hold_s": 2.0}),
    )


def failing() -> Scenario:
    """A machine becomes slow and dies, the first loads on others fail, messages are late for a while."""
    return scenario(
        load((0.0, 30.0), (6.0, 30.0), (7.0, 120.0)),
        load((0.0, 9.0), apps=("b",)),
        duration_s=16.0,
        machines=(machine(start=3, minimum=3, maximum=3),),
        faults=(
            FaultSpec(kind="load-fails", at_s=6.9, until_s=8.7),
            FaultSpec(kind="device-slow", at_s=5.21, until_s=7.4, worker="mixed-0", factor=3.0),
            FaultSpec(kind="worker-dies", at_s=8.13, worker="mixed-0"),
            FaultSpec(kind="messages-delayed", at_s=13.0, until_s=14.0, delay_s=0.004),
        ),
    )


def several() -> Scenario:
    """Both models of app a answer together, from a cache where they can, and learn; one of them errs for a while."""
    given = scenario(
        load((0.0, 20.0), feedback=0.5, repeats=0.3, items=2, context="north"),
        load((0.0, 9.0), apps=("a", "b"), feedback=1.0),
        duration_s=8.0,
        faults=(FaultSpec(kind="model-errs", at_s=2.0, until_s=5.0, model="large"),),
    )
    selection = Ensemble(policy="exp4", contextual=True, cache_mb=1.0)
    a, *others = given.apps
    return replace(given, apps=(replace(a, selection=selection, signature=NUMBERS), *others))


def machines() -> Scenario:
    """More than one machine can do for a while: others boot, and go again when they have nothing to do."""
    return scenario(
        load((0.0, 10.0), (2.0, 260.0), (12.0, 260.0), (13.0, 3.0)),
        duration_s=34.0,
        machines=(machine("cpu", devices=(CPU,), start=1, minimum=1, maximum=3, boot_s=1.7),),
        policy=settings(machines={"idle_s": 5.0, "period_s": 1.0}, autoscaler={"hold_s": 2.0}),
    )


def dispatchers() -> Scenario:
    """Two dispatchers share the queries in turn."""
    return scenario(
        load((0.0, 60.0)),
        load((0.0, 12.0), apps=("b",)),
        duration_s=10.0,
        policy=settings(dispatcher={"count": 2}),
    )


def jobs() -> Scenario:
    """Two offline jobs beside queries that now and then need the workers for themselves, one of which dies with work aboard."""
    return scenario(
        load((0.0, 20.0), (4.0, 20.0), (4.1, 150.0), (8.0, 150.0), (8.1, 10.0)),
        duration_s=22.0,
        jobs=(JobSpec(app="b", at_s=1.0, inputs=400, model="large"), JobSpec(app="a", at_s=2.0, inputs=150)),
        faults=(FaultSpec(kind="worker-dies", at_s=9.57, worker="mixed-0"),),
    )


def processes() -> Scenario:
    """Processes stop, die and start again; connections are clogged and lost; loads, watches, clocks, leases and the catalogue fail."""
    given = scaling()
    spare = machine("spare", devices=(CPU,), start=0, minimum=0, maximum=2, boot_s=1.0)
    policy = given.policies[0]
    settings = replace(policy.settings, dispatcher=replace(policy.settings.dispatcher, count=2))
    faults = (
        FaultSpec(kind="query-resent", at_s=0.5, until_s=17.0, delay_s=0.05),
        FaultSpec(kind="link-clogged", at_s=1.0, until_s=2.3, process="mixed-0", direction="in"),
        FaultSpec(kind="watch-late", at_s=1.0, until_s=12.0, process="d-1", delay_s=0.7),
        FaultSpec(kind="change", at_s=1.5, until_s=3.0, what="model-deleted", model="small"),
        FaultSpec(kind="process-stopped", at_s=3.0, until_s=4.1, process="mixed-1"),
        FaultSpec(kind="link-lost", at_s=5.0, until_s=6.2, process="d-0"),
        FaultSpec(kind="events-twice", at_s=5.0, until_s=9.0, process="d-0"),
        FaultSpec(kind="ack-lost", at_s=5.0, until_s=9.0, process="d-1"),
        FaultSpec(kind="lease-late", at_s=6.0, until_s=11.0, process="vm-0"),
        FaultSpec(kind="load-slow", at_s=6.0, until_s=9.0, factor=3.0),
        FaultSpec(kind="process-dies", at_s=7.5, process="mixed-0/cpu", delay_s=0.2),
        FaultSpec(kind="worker-dies", at_s=9.0, worker="mixed-1"),
        FaultSpec(kind="worker-joins", at_s=9.5, hardware="spare"),
        FaultSpec(kind="process-dies", at_s=10.0, process="d-0", delay_s=0.4),
        FaultSpec(kind="clock-off", at_s=11.0, until_s=15.0, worker="mixed-0", delay_s=-5.0),
        FaultSpec(kind="worker-joins", at_s=12.0, hardware="mixed", worker="mixed-1"),
    )
    policies = (replace(policy, settings=settings, machines=(*policy.machines, spare)),)
    return replace(given, faults=faults, policies=policies)


SMALL: dict[str, Callable[[], Scenario]] = {
    "scaling": scaling, "failing": failing, "machines": machines, "dispatchers": dispatchers, "jobs": jobs,
    "several": several,
}  # fmt: skip


class Told(Run):
    """A run that keeps all its events, from the first machine on, as (who, event), and the ends of queries."""

    def __init__(self, given: Scenario, kernel: Callable[..., Any] | None = None, policy: int = 0) -> None:
        self.log: list[tuple[str, Event]] = []
        self.ends: list[tuple[float, str, Any]] = []
        chosen = given.policies[policy]
        super().__init__(given, chosen, RunReport.of(given, chosen), kernel)
        received = self.kernel.received

        def note(reply: Any) -> None:
            self.ends.append((self.kernel.now, reply.subject, reply.message))
            received(reply)

        self.kernel.received = note

    def _recorded(self, name: str, event: Event) -> None:
        self.log.append((name, event))
        super()._recorded(name, event)

    def result(self) -> dict[str, Any]:
        """Of the run, without figures of the wall's clock."""
        return {key: value for key, value in self().items() if key not in MEASURED}

    def rows(self) -> list[tuple[Any, ...]]:
        """The events, times to the microsecond, sorted where several happened at once."""
        return sorted(_row(name, event) for name, event in self.log)

    def counts(self) -> Counter[str]:
        """How many events there were of each kind."""
        return Counter(event.kind for _, event in self.log)


def _row(name: str, event: Event) -> tuple[Any, ...]:
    fields = {field: _plain(getattr(event, field)) for field in event.__struct_fields__}
    return fields["time"], name, event.kind, repr(sorted(fields.items()))


def _plain(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


# -- Scenario files for tests: a small sound one, and the same with single things changed.
SOUND: dict[str, Any] = tomllib.loads("""
[scenario]
name = "small"
duration_s = 60
policies = ["infaas"]
[[app]]
name = "faces"
latency_ms = 300
[[app]]
name = "cars"
latency_ms = 100
[[variant]]
app = "faces"
model = "resnet50"
name = "A"
hardware = "cpu"
latency_ms = 200
saturation_qps = 5
uses = { cpu_cores = 4 }
memory_gb = 1.0
accuracy = 0.7
[[variant]]
app = ["faces", "cars"]
model = "resnet50"
name = "B"
hardware = "gpu"
batch_latency_ms = { 1 = 15.0, 8 = 22.0 }
memory_gb = 1.3
accuracy = 0.7
[[worker]]
kind = "cpu"
devices = { cpu = 8 }
resources = { memory_gb = 32 }
price_per_hour = 0.4
start = 2
max = 4
[[worker]]
kind = "gpu"
devices = { gpu = 1 }
resources = { gpu_memory_gb = 16, cpu_cores = 8 }
price_per_hour = 3.06
start = 1
max = 3
[[load]]
app = "faces"
rate = [[0, 4], [60, 80]]
[[load]]
app = "cars"
rate = 10
""")


def changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    """The sound one with values put at paths as variant.0.latency_ms; `...` takes the key away. Lists end with what is put at their length."""
    tree = deepcopy(SOUND)
    for path, value in changes:
        *above, last = path.split(".")
        at: Any = tree
        for key in above:
            at = at[int(key)] if isinstance(at, list) else at.setdefault(key, {})
        if value is ...:
            del at[int(last) if isinstance(at, list) else last]
        elif isinstance(at, list) and int(last) == len(at):
            at.append(value)
        else:
            at[int(last) if isinstance(at, list) else last] = value
    return tree


def read(folder: Path, tree: dict[str, Any], **options: Any) -> Scenario:
    """What is read of such a file. tree: what TOML can say."""
    file = folder / "s.toml"
    file.write_text("".join(f"{key} = {written(value)}\n" for key, value in tree.items()))
    return read_scenario(file, **options)


def written(value: Any) -> str:
    """As TOML, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value) if isinstance(value, bool | str) else repr(value)
