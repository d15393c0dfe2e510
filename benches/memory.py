"""What is thrown out: the rule of `monitor.cache` beside the least recently used, and beside who knows the future.

python benches/memory.py [--traces FOLDER]

Models share room for a quarter of them. Each query of one that is not there loads it: what counts is the mean load time that a query waits. The
loads are made up, but for `twitter`, whose models each follow a recorded day of their own, and `azure`, whose models are a recorded hour's
queries by the length of their context. `alike`: models of one size and load time; else sizes of 50 MB to 2 GB, and load times in proportion,
times a factor. Who knows the future throws out what is used last again (Belady's bound where all are alike), over load time and size.
"""

import csv
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from statistics import geometric_mean

import numpy as np
import rig
from msgspec.structs import replace
from numpy.typing import NDArray

from benches.scoreboard.scenarios import AZURE, TRACES, TWITTER, seconds
from services.core.cost import load_seconds
from services.core.placement import Amount
from services.monitor.instances import MonitoredInstance
from services.monitor.policy import Uses, share_of
from tests.support.simulated.monitored_worker import variant

HOURS_S = 6 * 3600.0
MODELS = 40
MOST = 25_000  # queries of a load
Times = NDArray[np.float64]


def shares(count: int = MODELS) -> Times:
    """Zipf's law."""
    weights = 1.0 / np.arange(1, count + 1)
    return weights / weights.sum()


def poisson(rng: np.random.Generator, rate: float, begins: float = 0.0, ends: float = HOURS_S) -> Times:
    return np.sort(rng.uniform(begins, ends, rng.poisson(rate * (ends - begins))))


def drifting(rng: np.random.Generator) -> Iterator[Times]:
    """Which models are asked for changes twice an hour."""
    edges = np.linspace(0.0, HOURS_S, 13)
    rates = np.array([rng.permutation(shares()) for _ in edges[1:]])
    for rate in rates.T:
        yield np.concatenate([poisson(rng, r, a, b) for r, a, b in zip(rate, edges, edges[1:], strict=False)])


def sessions(rng: np.random.Generator) -> Iterator[Times]:
    """A minute of two queries a second, then a pause of five to fifty."""
    for _ in range(MODELS):
        at, pause, found = rng.exponential(600.0), rng.uniform(300.0, 3000.0), [np.zeros(0)]
        while at < HOURS_S:
            takes = rng.exponential(60.0)
            found.append(poisson(rng, 2.0, at, min(HOURS_S, at + takes)))
            at += takes + rng.exponential(pause)
        yield np.concatenate(found)


def clocked(rng: np.random.Generator) -> Iterator[Times]:
    """Every second model is asked at fixed times, of one to fifteen minutes; the others at random."""
    for n in range(MODELS):
        period = rng.choice([60.0, 300.0, 600.0, 900.0])
        times = rng.uniform(0.0, period) + period * np.arange(int(HOURS_S / period))
        yield np.sort(times + rng.normal(0.0, 1.0, len(times))) if n % 2 else poisson(rng, 1.0 / rng.uniform(20, 2000))


def scanned(rng: np.random.Generator) -> Iterator[Times]:
    """Every two minutes a model comes that nobody asks for again."""
    yield from (poisson(rng, rate) for rate in shares(MODELS // 2) * 0.5)
    yield from (np.array([at]) for at in np.arange(100.0, HOURS_S, 120.0))


def twitter(rng: np.random.Generator, traces: Path) -> Iterator[Times]:
    days = np.array(seconds(traces), float).reshape(7, 1440, 60).sum(axis=2)
    for n, share in enumerate(shares()):
        day = np.roll(days[n % 7] / days[n % 7].mean(), rng.integers(1440))
        yield np.concatenate([poisson(rng, 0.6 * share * rate, 60.0 * m, 60.0 * (m + 1)) for m, rate in enumerate(day)])


def azure(_: np.random.Generator, traces: Path) -> Iterator[Times]:
    with (traces / AZURE).open() as lines:
        rows = [
            (datetime.fromisoformat(at[:26]).timestamp(), int(n) // 100) for at, n, _ in list(csv.reader(lines))[1:]
        ]
    for kind in sorted({kind for _, kind in rows}):
        yield np.array([at - rows[0][0] for at, one in rows if one == kind])


LOADS: dict[str, Callable[[np.random.Generator], Iterator[Times]]] = {
    "zipf": lambda rng: (poisson(rng, rate) for rate in shares()),
    "drifting": drifting,
    "sessions": sessions,
    "clocked": clocked,
    "cyclic": lambda _: (np.arange(2.0 * n, HOURS_S, 24.0) for n in range(12)),
    "scanned": scanned,
}
RECORDED = {"twitter": (TWITTER, twitter), "azure": (AZURE, azure)}


def models(count: int, rng: np.random.Generator, *, alike: bool) -> list[MonitoredInstance]:
    found = []
    for n in range(count):
        size = 100.0 if alike else float(np.exp(rng.uniform(np.log(50.0), np.log(2000.0))))
        load_s = 4.0 if alike else 0.3 + size / 200.0 * float(np.exp(rng.normal(0.0, 0.7)))
        record = variant(f"v{n}", memory_mb=size)
        record = replace(record, profile=replace(record.profile, load_ms=1000.0 * load_s))
        found.append(MonitoredInstance(f"v{n}.w-1", record, "gpu", "Active", 0.0))
    return found


Missed = Callable[[MonitoredInstance, float, float], object]


def waits(times: Sequence[Times], held: list[MonitoredInstance], room: float, missed: Missed, uses: Uses) -> float:
    """Seconds that a query waits for a load, in the mean. missed: (instance, share of the room that is short, now); the least one leaves."""
    there: dict[int, MonitoredInstance] = {}
    events = sorted((float(at), n) for n, one in enumerate(times) for at in one)[:MOST]
    waited = 0.0
    for now, n in events:
        one = held[n]
        one.last_used = now
        uses.used(one.record.variant, now)
        if n in there:
            continue
        waited += load_seconds(one.record)
        while (short := one.memory_mb + sum(other.memory_mb for other in there.values()) - room) > 1e-6 and there:
            need = Amount(short, 0.0)
            del there[min(there, key=lambda m: missed(there[m], share_of(there[m].takes, need), now))]
        if one.memory_mb <= room:
            there[n] = one
    return waited / len(events)


def compared(name: str, times: Sequence[Times], *, alike: bool) -> tuple[float, float, float]:
    """Mean waits: the least recently used, the rule, who knows the future."""
    found = []
    for policy in ("lru", "cost", "oracle"):
        held = models(len(times), np.random.default_rng(7), alike=alike)
        part = {"cyclic": 0.75, "scanned": 0.06}.get(name, 0.25)
        room = part * sum(one.memory_mb for one in held)
        uses = Uses(recent=policy == "lru")

        def rule(one: MonitoredInstance, share: float, now: float, uses: Uses = uses) -> object:
            return uses.missed(one, share, now, warm=False)

        def known(one: MonitoredInstance, share: float, now: float) -> object:
            of = times[int(one.record.variant[1:])]
            at = bisect_right(of, now)
            return load_seconds(one.record) / min(1.0, share) / (of[at] - now if at < len(of) else 1e9)

        found.append(waits(times, held, room, known if policy == "oracle" else rule, uses))
    return found[0], found[1], found[2]


def main() -> None:
    options = rig.parser(__doc__)
    options.add_argument("--traces", type=Path, default=TRACES, help="folder with recorded loads")
    given = options.parse_args()
    loads = {name: list(make(np.random.default_rng(1))) for name, make in LOADS.items()}
    for name, (file, make) in RECORDED.items():
        if (given.traces / file).exists():
            loads[name] = list(make(np.random.default_rng(1), given.traces))
    print("| load | models | s a query, lru | cost / lru | bound / lru | cost / bound |\n|---|---|---|---|---|---|")
    rows = []
    for name, times in loads.items():
        for alike in (True, False):
            lru, cost, bound = compared(name, times, alike=alike)
            rows.append((cost / lru, bound / lru))
            print(
                f"| {name} | {'alike' if alike else 'differ'} | {lru:.3f} | {cost / lru:.2f} | {bound / lru:.2f} | {cost / bound:.2f} |",
                flush=True,
            )
    means = [geometric_mean(column) for column in zip(*rows, strict=True)]
    print(f"| geometric mean | | | {means[0]:.2f} | {means[1]:.2f} | {means[0] / means[1]:.2f} |")


if __name__ == "__main__":
    main()
