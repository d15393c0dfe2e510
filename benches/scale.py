"""Synthetic clusters of any size for benches/simulation.py: workers of 12 cores, apps with one model of four variants.

Service times are those of models on a CPU core (0.1 to 0.3 s). Each worker has at least ten instances, which carry twice its 20
queries/s. So 1,000 workers have 10,000 instances for 20,000 queries/s.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from bus.messages.catalog import AppRecord, ModelRecord, Profile, ProfileRow, Signature, VariantRecord
from bus.messages.public import Requirements
from services.core.placement import Device
from services.core.settings import AutoscalerSettings, Settings, StaticVariant
from services.simulation.scenario.model import MachineSpec, PolicySpec, Scenario, WorkloadSpec

SIGNATURE = Signature(inputs=[], outputs=[])
APPS = 10
PER_WORKER = 20.0  # queries/s
CORES, MEMORY_MB = 12, 32_000.0
# threads, ms of one item, accuracy: the first is what a developer would choose
KINDS: tuple[tuple[int, float, float], ...] = ((1, 175.0, 0.75), (2, 95.0, 0.75), (1, 210.0, 0.77), (1, 300.0, 0.80))
RAMP = 0.2  # of the duration, in which the load rises from
LOW = 0.2  # of its peak


def record(model: str, number: int, threads: int, item_ms: float, accuracy: float, most: int = 4) -> VariantRecord:
    """A variant whose batch of n takes item_ms · (0.1 + 0.9 n)."""
    batches = [n for n in (1, 2, 4, 8, 16) if n <= most]
    times = {n: item_ms * (0.1 + 0.9 * n) for n in batches}
    rows = [ProfileRow(batch=n, p50_ms=ms, p99_ms=ms, cpu_ms=ms, wall_over_cpu=1.0) for n, ms in times.items()]
    return VariantRecord(
        variant=f"{model}-v1-synthetic-fp32-t{threads}-k{number}",
        model=model,
        version="1",
        framework="synthetic",
        precision="fp32",
        threads=threads,
        max_batch=most,
        hardware="cpu",
        artifact="a" * 64,
        format="synthetic",
        accuracy=accuracy,
        agreement=1.0,
        profile=Profile(
            rows=rows,
            load_ms=1000.0,
            memory_mb=800.0,
            saturation_qps=max(1000.0 * n / ms for n, ms in times.items()),
            provenance="synthetic",
        ),
        signature=SIGNATURE,
    )


def fleet(
    workers: int,
    seconds: float,
    *,
    policy: str = "infaas",
    apps: int = APPS,
    kinds: Sequence[tuple[int, float, float]] = KINDS,
    per_worker: float = PER_WORKER,
) -> Scenario:
    """A cluster of so many workers under so many queries/s a worker on average. policy: "infaas" or "static".

    Each app must have its part of ten instances a worker, so that a run begins with a cluster at work; under "infaas" the load
    rises for a fifth of the time, and what is needed beyond is loaded and unloaded.
    """
    names = [f"m{n}" for n in range(apps)]
    variants = tuple(
        record(name, i, threads, item_ms * (1 + 0.02 * n), accuracy)
        for n, name in enumerate(names)
        for i, (threads, item_ms, accuracy) in enumerate(kinds)
    )
    each = max(1, round(APPS * workers / apps))  # ten instances a worker, whatever the number of apps
    choice = {f"a{n}": StaticVariant(variant=variants[n * len(kinds)].variant, instances=each) for n in range(apps)}
    machines = MachineSpec(
        kind="cpu",
        devices=(Device(name="cpu", kind="cpu", cores=CORES, memory_mb=MEMORY_MB),),
        price_per_hour=0.05 * CORES,
        start=workers,
        minimum=workers,
        maximum=workers,
    )
    static = policy == "static"
    settings = Settings(
        autoscaler=AutoscalerSettings(policy="static" if static else "infaas", choice=choice if static else {})
    )
    mean = per_worker * workers
    peak = mean / (1 - RAMP * (1 - LOW) / 2)
    rate = ((0.0, mean),) if static else ((0.0, LOW * peak), (RAMP * seconds, peak))
    return Scenario(
        name=f"{workers} workers",
        duration_s=seconds,
        seed=1,
        objective="cost",
        metrics_every_s=2.0,
        apps=tuple(
            AppRecord(app=f"a{n}", links={name: "1"}, min_instances=each)
            for n, name in enumerate(names)
        ),
        models=tuple(
            ModelRecord(
                model=name, version="1", task=None, metric="top1", format="onnx", source="-", validation="-",
                signature=SIGNATURE, created=1.0, registration="-",
            )
            for name in names
        ),
        variants=variants,
        prices={"cpu": 0.05},
        needs={f"a{n}": Requirements(latency_ms=1500.0, accuracy=0.74) for n in range(apps)},
        policies=(
            PolicySpec(
                name=policy,
                base=policy,
                hardware=None,
                machines=(machines,),
                settings=settings,
            ),
        ),
        loads=(WorkloadSpec(apps=tuple(choice), shares=(1.0 / apps,) * apps, rate=rate),),
    )  # fmt: skip


def loop(rate: float, seconds: float) -> Scenario:
    """One worker, one quick variant, no scaling: what is left is the way of a query from dispatcher to executor and back."""
    found = fleet(1, seconds, policy="static", apps=1, kinds=((1, 2.0, 0.75),), per_worker=rate)
    quick = record("m0", 0, 1, 2.0, 0.75, most=16)
    spec = found.policies[0]
    choice = {"a0": StaticVariant(variant=quick.variant, instances=APPS)}
    settings = replace(spec.settings, autoscaler=replace(spec.settings.autoscaler, choice=choice))
    return replace(found, variants=(quick,), policies=(replace(spec, settings=settings),))
