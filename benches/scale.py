"""Synthetic clusters of any size for benches/simulation.py: workers of 12 cores, apps with one model of four variants.

Service times are those of models on a CPU core (0.1 to 0.3 s). Each worker has at least ten instances, which carry twice its 20
queries/s. So 1,000 workers have 10,000 instances for 20,000 queries/s.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from services.simulation.scenario.model import Scenario
from services.simulation.scenario.read import derive

APPS = 10
PER_WORKER = 20.0  # queries/s
CORES, MEMORY_GB = 12, 32
# threads, ms of one item, accuracy: the first is what a developer would choose
KINDS: tuple[tuple[int, float, float], ...] = ((1, 175.0, 0.75), (2, 95.0, 0.75), (1, 210.0, 0.77), (1, 300.0, 0.80))
RAMP = 0.2  # of the duration, in which the load rises from
LOW = 0.2  # of its peak


def fleet(
    workers: int,
    seconds: float,
    *,
    policy: str = "infaas",
    apps: int = APPS,
    kinds: Sequence[tuple[int, float, float]] = KINDS,
    per_worker: float = PER_WORKER,
    max_batch: int = 4,
) -> Scenario:
    """A cluster of so many workers under so many queries/s a worker on average. policy: "infaas" or "static".

    Each app must have its part of ten instances a worker, so that a run begins with a cluster at work; under "infaas" the load
    rises for a fifth of the time, and what is needed beyond is loaded and unloaded.
    """
    names = [f"a{n}" for n in range(apps)]
    each = max(1, round(APPS * workers / apps))  # ten instances a worker, whatever the number of apps
    mean = per_worker * workers
    peak = mean / (1 - RAMP * (1 - LOW) / 2)
    content: dict[str, Any] = {
        "scenario": {"name": f"{workers} workers", "duration_s": seconds, "policies": [policy]},
        "app": [{"name": name, "latency_ms": 1500.0, "accuracy": 0.74} for name in names],
        "variant": [
            {
                "app": name, "model": f"m{n}", "name": f"m{n}-{i}", "hardware": "cpu", "uses": {"cpu_cores": threads}, "accuracy": accuracy,
                "base_ms": 0.1 * item_ms * (1 + 0.02 * n), "per_item_ms": 0.9 * item_ms * (1 + 0.02 * n), "max_batch": max_batch,
                "load_s": 1.0, "memory_gb": 0.8,
            }
            for n, name in enumerate(names)
            for i, (threads, item_ms, accuracy) in enumerate(kinds)
        ],
        "worker": [
            {
                "kind": "cpu", "devices": {"cpu": CORES}, "resources": {"memory_gb": MEMORY_GB}, "price_per_hour": 0.05 * CORES,
                "start": workers, "min": workers, "max": workers,
            }
        ],
        "load": [{"apps": names, "shares": [1.0 / apps] * apps, "rate": mean if policy == "static" else [[0.0, LOW * peak], [RAMP * seconds, peak]]}],
        "baseline": {name: {"variant": f"m{n}-0", "instances": each} for n, name in enumerate(names)},
    }  # fmt: skip
    found = derive(content, Path("scale"))
    return replace(found, apps=tuple(replace(app, min_instances=each) for app in found.apps))


def loop(rate: float, seconds: float) -> Scenario:
    """One worker, one quick variant, no scaling: what is left is the way of a query from dispatcher to executor and back."""
    kinds = ((1, 2.0, 0.75),)
    return fleet(1, seconds, policy="static", apps=1, kinds=kinds, per_worker=rate, max_batch=16)
