"""The scenarios of benches/decisions.py whose goal is accuracy: fixed devices, nine families of models, answers within 300 ms.

They are shaped as in Proteus (Ahmad et al., ASPLOS 2024, section 6): twenty CPUs, ten middling and ten large GPUs, and families whose
variants trade accuracy for speed. All numbers are this project's own round ones. Accuracy counts relative to the family's best.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benches.scoreboard.scenarios import SEED, TWITTER, Built, Case, Table, twitter

LATENCY_MS = 300.0
ALONE_MS = 200.0  # a device has no variant that takes longer for one item: a second query would be late
DAY = 5
EVERY = 3  # of the day's minutes, which pass in a second each
CALM_QPS = (60, 700)
QUIET, BURST = 150, 600  # queries/s of all apps together
GAMMA_QPS, GAMMA_CV = 300, 4.5

# Accuracy, and ms of an item on a CPU. All were invented; only their magnitudes are those of such networks.
FAMILIES: dict[str, Sequence[tuple[float, float]]] = {
    "resnet": ((0.90, 50), (0.94, 90), (0.97, 120), (0.99, 200), (1.0, 280)),
    "bert": ((0.86, 10), (0.92, 25), (0.96, 60), (0.98, 150), (0.99, 300), (1.0, 500)),
    "efficientnet": ((0.91, 40), (0.94, 60), (0.97, 120), (0.99, 280), (1.0, 600)),
    "yolo": ((0.70, 30), (0.82, 70), (0.93, 150), (0.98, 250), (1.0, 450)),
    "mobilenet": ((0.72, 4), (0.88, 8), (0.95, 14), (1.0, 20)),
    "densenet": ((0.95, 150), (0.97, 190), (0.99, 260), (1.0, 340)),
    "resnest": ((0.90, 70), (0.93, 100), (0.96, 150), (1.0, 550)),
    "gpt": ((0.88, 250), (0.95, 450), (1.0, 800)),
    "t5": ((0.78, 60), (0.90, 140), (0.96, 300), (1.0, 700)),
}
# Devices: how many, GB, US$ an hour; base in ms and in parts of the CPU's item; an item in parts of the CPU's; largest batch; GB/s of a load
DEVICES = {
    "host": (20, 6.0, 0.2, 1.0, 0.0, 1.0, 4, 1.0),
    "gpu": (10, 6.0, 0.7, 8.0, 0.05, 0.15, 16, 0.8),
    "biggpu": (10, 8.0, 2.0, 6.0, 0.03, 0.09, 32, 0.8),
}


def _variants() -> Iterator[Table]:
    for family, variants in FAMILIES.items():
        for i, (accuracy, item) in enumerate(variants):
            memory = round(0.8 + item / 160, 2)  # of one to three fit on a device, of the smallest more
            for kind, (_, _, price, base, base_part, part, batch, speed) in DEVICES.items():
                if base + item * (base_part + part) > ALONE_MS:
                    continue
                yield {
                    "app": family, "model": family, "name": f"{family}-{i}-{kind}", "hardware": kind,
                    "base_ms": round(base + base_part * item, 3), "per_item_ms": round(part * item, 3), "max_batch": batch,
                    "memory_gb": memory, "load_s": round(0.5 + memory / speed, 2), "accuracy": accuracy,
                    "cost_per_s": round(price / 3600, 8),
                }  # fmt: skip


def _workers(count: int) -> list[Table]:
    """The forty devices in so many machines: all alike, or of one device each."""

    def worker(kind: str, number: int, devices: dict[str, int]) -> Table:
        return {
            "kind": kind, "devices": devices, "resources": {f"{name}_memory_gb": DEVICES[name][1] for name in devices},
            "price_per_hour": round(sum(DEVICES[name][2] * n for name, n in devices.items()), 3),
            "start": number, "min": number, "max": number,
        }  # fmt: skip

    if count == sum(device[0] for device in DEVICES.values()):
        return [worker(name, device[0], {name: 1}) for name, device in DEVICES.items()]
    return [worker("mixed", count, {name: device[0] // count for name, device in DEVICES.items()})]


def _document(name: str, count: int, duration_s: float, loads: Sequence[Table]) -> Table:
    return {
        "scenario": {"name": name, "duration_s": duration_s, "seed": SEED, "objective": "accuracy"},
        "cost": {"meter": "worker"},
        "app": [{"name": family, "latency_ms": LATENCY_MS} for family in FAMILIES],
        "variant": list(_variants()),
        "worker": _workers(count),
        "load": list(loads),
    }


def _calm(name: str, count: int, traces: Path) -> Built:
    counts = twitter(traces, DAY)[::EVERY]
    load = {
        "apps": list(FAMILIES), "shares": "zipf", "arrivals": "trace", "file": "day.txt", "range_qps": list(CALM_QPS),
    }  # fmt: skip
    return Built(_document(name, count, len(counts), [load]), {"day.txt": [str(one) for one in counts]})


def _bursty(name: str, count: int) -> Built:
    """Bursts of rising length, with half a minute to a minute between them."""
    points, at = [[0.0, QUIET]], 0.0
    for length, gap in zip((15, 30, 45, 20, 60), (30, 60, 45, 30, 60), strict=True):
        points += [[at + gap, QUIET], [at + gap + 1, BURST], [at + gap + length, BURST], [at + gap + length + 1, QUIET]]
        at += gap + length + 1
    load = {"apps": list(FAMILIES), "shares": "zipf", "rate": points}
    return Built(_document(name, count, 420, [load]))


def _gamma(name: str, count: int) -> Built:
    """Each app's arrivals clump by themselves, all at the same rate."""
    rate = round(GAMMA_QPS / len(FAMILIES), 3)
    loads = [{"app": family, "arrivals": "gamma", "rate": rate, "cv": GAMMA_CV} for family in FAMILIES]
    return Built(_document(name, count, 300, loads))


def accuracy_cases() -> Iterator[Case]:
    """Three loads, on one, ten and forty workers."""
    for count in (1, 10, 40):
        name = f"accuracy-{count}"
        yield Case(f"{name}-calm", lambda traces, n=count, of=name: _calm(f"{of}-calm", n, traces), TWITTER)
        yield Case(f"{name}-bursty", lambda _, n=count, of=name: _bursty(f"{of}-bursty", n))
        yield Case(f"{name}-gamma", lambda _, n=count, of=name: _gamma(f"{of}-gamma", n))
