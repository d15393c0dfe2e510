"""A twin of InfAdapter's experiment (Salmani et al., EuroMLSys 2023) for benches/decisions.py: five ResNets on up to twenty cores, 750 ms.

Accuracies, loads and latencies are those of the paper's table, an instance being one core and 1 GB that answers one item at a time. The loads
are this project's own: a recorded burst, steps that were made up, and a recorded calm hour.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benches.scoreboard.scenarios import DAY_S, SEED, TWITTER, Built, Case, Table, seconds

LATENCY_MS = 750.0
DURATION_S = 1200
# Accuracy, s of a load, ms of an item on one core.
RESNETS = {
    "resnet18": (0.6976, 6.4, 43.0),
    "resnet34": (0.7331, 6.8, 79.4),
    "resnet50": (0.7613, 6.8, 104.4),
    "resnet101": (0.7737, 7.8, 193.0),
    "resnet152": (0.7831, 8.5, 277.5),
}
FLOOR, MEAN = 0.733, 0.73
BURST_DAY, BURST_AT, BURST_QPS = 7, 55_100, (40.0, 260.0)
CALM_DAY, CALM_AT, CALM_QPS = 1, 29_400, (95.0, 140.0)
STEPS = (
    [0, 90], [150, 95], [170, 150], [540, 165], [560, 265], [620, 250], [650, 80], [760, 55], [775, 180], [810, 170], [830, 60],
    [1000, 50], [1010, 120], [1060, 110], [1075, 45], [1200, 60],
)  # fmt: skip
LOADS = ("burst", "steps", "calm")


def _load(load: str, traces: Path) -> tuple[Table, dict[str, Sequence[str]]]:
    if load == "steps":
        return {"app": "images", "rate": [list(point) for point in STEPS]}, {}
    day, at, qps = (BURST_DAY, BURST_AT, BURST_QPS) if load == "burst" else (CALM_DAY, CALM_AT, CALM_QPS)
    counts = seconds(traces)[(day - 1) * DAY_S + at :][:DURATION_S]
    return (
        {"app": "images", "arrivals": "trace", "file": "load.txt", "range_qps": list(qps)},
        {"load.txt": [str(count) for count in counts]},
    )


def _build(name: str, load: str, cores: int, traces: Path, *, goal: str = "accuracy", **needs: float) -> Built:
    """cores: one machine has them, where accuracy is the goal; else there are so many machines of one core, of which all but one may go."""
    stream, files = _load(load, traces)
    of_machine = cores if goal == "accuracy" else 1
    count = cores // of_machine
    document: Table = {
        "scenario": {"name": name, "duration_s": DURATION_S, "seed": SEED, "objective": goal},
        "cost": {"meter": "worker"},
        "app": [{"name": "images", "latency_ms": LATENCY_MS, **needs}],
        "variant": [
            {
                "app": "images", "model": model, "name": model, "hardware": "cpu", "uses": {"cpu_cores": 1}, "memory_gb": 1.0,
                "accuracy": accuracy, "load_s": load_s, "base_ms": 0.0, "per_item_ms": item, "max_batch": 1,
            }
            for model, (accuracy, load_s, item) in RESNETS.items()
        ],
        "worker": [
            {
                "kind": "cores", "devices": {"cpu": of_machine}, "resources": {"memory_gb": float(of_machine)},
                "price_per_hour": float(of_machine), "boot_s": 0.0, "start": max(1, count // 2), "min": 1, "max": count,
            }
        ],
        "load": [stream],
    }  # fmt: skip
    return Built(document, files)


def resnet_cases() -> Iterator[Case]:
    """Least cost at a floor, and the most accuracy on fixed cores."""

    def case(name: str, load: str, cores: int, goal: str = "accuracy", **needs: float) -> Case:
        return Case(
            name,
            lambda traces: _build(name, load, cores, traces, goal=goal, **needs),
            None if load == "steps" else TWITTER,
        )

    for load in ("burst", "steps"):
        yield case(f"resnets-{load}-floor", load, 20, "cost", accuracy=FLOOR)
        yield case(f"resnets-{load}-mean", load, 20, "cost", accuracy_mean=MEAN)
        for cores in (20, 14, 11):
            yield case(f"resnets-{load}-{cores}", load, cores)
    yield case("resnets-calm-14", "calm", 14)
    yield case("resnets-calm-floor", "calm", 20, "cost", accuracy=0.761)
