"""Scenarios of many kinds, drawn by Hypothesis or by a generator of random numbers."""

from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import strategies as st

from bus.messages.public import Requirements
from services.core.placement import Device
from services.simulation.scenario.model import CostSpec, FaultSpec, MachineSpec, Scenario, WorkloadSpec
from tests.support.data.small_scenarios import CPU, GPU, PRICES, load, machine, scenario, settings, variant

CHIP = Device(name="inferentia", kind="inferentia", cores=4, memory_mb=2500.0, simulated=True, address="inferentia")
KINDS: dict[str, tuple[Device, ...]] = {"cpu": (CPU,), "gpu": (GPU, CPU), "chip": (CHIP, CPU)}
SPEED = {"cpu": 1.0, "gpu": 0.08, "inferentia": 0.2}  # ms against a CPU's

Draw = Callable[[list[Any]], Any]  # picks one


def varied(pick: Draw, *, duration_s: float = 6.0, most_apps: int = 3) -> Scenario:
    """Apps with models of several sizes on up to three kinds of machine, changing loads, faults, other settings."""
    apps = [f"app{number}" for number in range(pick(list(range(1, most_apps + 1))))]
    kinds = pick([("cpu",), ("cpu", "gpu"), ("cpu", "gpu", "chip"), ("gpu", "chip")])
    hardware = sorted({device.kind for kind in kinds for device in KINDS[kind]})
    variants, links = [], {}
    for app in apps:
        links[app] = tuple(f"{app}-{size}" for size in pick([("s",), ("m",), ("s", "m"), ("s", "m", "l")]))
        for model in links[app]:
            for kind in hardware:
                ms = {"s": 12.0, "m": 45.0, "l": 130.0}[model[-1]] * SPEED[kind] * pick([0.7, 1.0, 1.3])
                variants.append(
                    variant(
                        f"{model}-{kind}", model, kind, ms,
                        accuracy={"s": 0.6, "m": 0.75, "l": 0.85}[model[-1]],
                        load_ms=pick([90.0, 700.0, 2300.0]), memory_mb=pick([150.0, 600.0, 1400.0]),
                        max_batch=pick([1, 4, 8]), threads=pick([1, 1, 2]) if kind == "cpu" else 1,
                    )
                )  # fmt: skip
    needs = {
        app: Requirements(latency_ms=pick([None, 60.0, 200.0, 900.0]), accuracy=pick([0.0, 0.0, 0.7, 0.99]))
        for app in apps
    }
    return scenario(
        *(_load(pick, app, duration_s) for app in apps),
        duration_s=duration_s,
        machines=tuple(_machine(pick, kind) for kind in kinds),
        variants=tuple(variants),
        links=links,
        needs=needs,
        prices=PRICES | {"inferentia": 0.09},
        faults=tuple(_fault(pick, duration_s) for _ in range(pick([0, 1, 3]))),
        interference=dict.fromkeys(hardware, pick([0.0, 1.0, 4.0])),
        cost=CostSpec(meter=pick(["worker", "memory"]), per_gb_s={"cpu": 1e-5, "gpu": 1e-4}),
        seed=pick(list(range(5))),
        policy=settings(
            dispatcher={
                "count": pick([1, 2]),
                "policy": pick(["infaas", "infaas", "round-robin", "brute-force"]),
                "max_queue": pick([100_000, 30]),
            },
            autoscaler={
                "policy": pick(["infaas", "infaas", "off", "replicate"]),
                "hold_s": 1.0,
            },
            machines={"idle_s": pick([1.0, 100.0]), "period_s": 0.5},
            executor={"exclusive": pick([True, False]), "sharing": pick([1.0, 0.3])},
        ),
    )


def _machine(pick: Draw, kind: str) -> MachineSpec:
    start = pick([1, 1, 2])
    return machine(
        kind, devices=KINDS[kind], start=start, minimum=pick([0, start]), maximum=start + pick([0, 2]),
        boot_s=pick([0.0, 1.3]),
    )  # fmt: skip


def _load(pick: Draw, app: str, duration_s: float) -> WorkloadSpec:
    low, high = pick([0.0, 3.0, 20.0]), pick([10.0, 60.0, 150.0])
    shape = pick([(low, high, low), (high, low, high), (high, high, high)])
    rate = tuple(zip((0.0, duration_s / 2, duration_s), shape, strict=True))
    return load(*rate, apps=(app,), arrivals=pick(["poisson", "uniform", "gamma"]), cv=3.0, items=pick([1, 1, 1, 3]))


def _fault(pick: Draw, duration_s: float) -> FaultSpec:
    begin = pick([0.3, 1.7, 3.1])
    return FaultSpec(
        kind=pick(["worker-dies", "device-slow", "load-fails", "messages-delayed"]),
        at_s=begin,
        until_s=pick([begin + 1.1, duration_s + 100.0]),
        factor=pick([1.5, 20.0]),
        delay_s=pick([0.001, 0.05]),
    )


@st.composite
def scenarios(draw: st.DrawFn, **more: Any) -> Scenario:
    return varied(lambda options: draw(st.sampled_from(options)), **more)


def chosen(seed: int, **more: Any) -> Scenario:
    """The same one for the same seed."""
    return varied(Random(seed).choice, **more)
