"""Batching policies on one simulated device (Clipper, paper 002, section 4.3; Rafiqi, paper 001, section 3.3):
`python benches/batching.py [--quick]`.

(1) Most queries/s with 99 % of them answered within 20 ms, by policy, against no batching (paper, Fig. 4: at most 26 times). (2) After the
device slows down to half its speed, without a new profile: time until the objective is kept again. (3) The size that is learnt, and what
waiting for more queries brings (Fig. 5). Everything runs in virtual time, on the services' own actors; the same seed gives the same figures.
"""

from collections import defaultdict
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

import rig

from services.simulation.kernel import NETWORK
from services.simulation.report import RunReport
from services.simulation.run import Run
from services.simulation.scenario.read import derive
from tests.support.simulated.batch_clients import BatchClients, linear

OBJECTIVE_MS = 20.0
# scikit-learn's linear SVM in Fig. 4: 1,921 queries/s one by one, 49,700 in batches of 20 ms
FIXED_MS, ITEM_MS = 0.5, 0.0196
ALLOWED_MS = OBJECTIVE_MS + 2000.0 * NETWORK + 0.01  # the client measures the way there and back, too
LEARNT_S = 1.0  # before it, policies still learn
WINDOW_S = 0.25
POLICIES: dict[str, Any] = {
    "fixed 1": {"policy": "fixed", "batch": 1},
    "edf": "edf",
    "aimd": "aimd",
    "quantile": "quantile",
    "delayed 1 ms": {"policy": "delayed", "wait_ms": 1.0},
    "threshold 5 ms": {"policy": "threshold", "quantum_ms": 5.0},
}


class Timed(RunReport):
    """A report that keeps when each query was sent, and how long its answer took; infinite without one."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.ended: list[tuple[float, float]] = []

    def answered(self, app: str, now: float, seconds: float, *rest: Any) -> None:
        super().answered(app, now, seconds, *rest)
        self.ended.append((now - seconds, 1000.0 * seconds))

    def refused(self, app: str, now: float, code: str) -> None:
        super().refused(app, now, code)
        self.ended.append((now, float("inf")))


def simulated(
    batching: Any, rate: float, seconds: float, base_ms: float, item_ms: float, slow_at: float | None = None
) -> list[tuple[float, float]]:
    """(second, ms) of every query of a Poisson stream that asks for OBJECTIVE_MS. slow_at: the device takes twice as long from then on."""
    content: dict[str, Any] = {
        "scenario": {"duration_s": seconds, "metrics_every_s": seconds},
        "app": [{"name": "a", "latency_ms": OBJECTIVE_MS, "batching": batching}],
        "variant": [
            {"app": "a", "name": "v", "hardware": "gpu", "base_ms": base_ms, "per_item_ms": item_ms, "max_batch": 1024}
        ],
        "worker": [{"kind": "gpu", "devices": {"gpu": 1}, "price_per_hour": 1.0, "start": 1}],
        "load": [{"app": "a", "rate": rate}],
    }
    if slow_at is not None:
        content["fault"] = [{"kind": "device-slow", "at_s": slow_at, "factor": 2.0}]
    scenario = derive(content, Path("batching.toml"))
    report = Timed.of(scenario, scenario.policies[0])
    assert isinstance(report, Timed)
    Run(scenario, scenario.policies[0], report)()
    return report.ended


def in_time(times: list[float]) -> bool:
    """Whether 99 % were answered within the objective."""
    return sum(ms <= ALLOWED_MS for ms in times) >= 0.99 * len(times)


def highest_rate(batching: Any, steps: int, seconds: float) -> float:
    low, high = 500.0, 60_000.0
    for _ in range(steps):
        middle = (low * high) ** 0.5
        if in_time([ms for at, ms in simulated(batching, middle, seconds, FIXED_MS, ITEM_MS) if at >= LEARNT_S]):
            low = middle
        else:
            high = middle
    return low


def figure4(quick: bool) -> None:
    print(f"queries/s with 99 % within {OBJECTIVE_MS:g} ms; a batch of n takes {FIXED_MS:g} + {ITEM_MS:g} n ms")
    found = {name: highest_rate(rule, 5 if quick else 8, 2.0 if quick else 4.0) for name, rule in POLICIES.items()}
    for name, rate in found.items():
        print(f"  {name:<16}{rate:>10,.0f}{rate / found['fixed 1']:>8.1f} x fixed 1{rate / found['edf']:>8.2f} x edf")


def slower() -> None:
    rate, at, seconds = 6000.0, 4.0, 12.0
    print(
        f"\ndevice half as fast from second {at:g} on, {rate:,.0f} queries/s, of which it can then serve 4,000; a batch of n took 1 + 0.1 n ms"
    )
    for name in ("edf", "aimd", "quantile", "delayed 1 ms", "threshold 5 ms"):
        windows: defaultdict[int, list[float]] = defaultdict(list)
        for sent, ms in simulated(POLICIES[name], rate, seconds, 1.0, 0.1, at):
            if sent >= at and isfinite(ms):
                windows[int((sent - at) // WINDOW_S)].append(ms)
        missed = [n for n, times in windows.items() if not in_time(times)]
        after = (max(missed) + 1) * WINDOW_S if missed else 0.0
        first = [ms for n, times in windows.items() if n < 1.0 / WINDOW_S for ms in times]
        late = mean(ms > ALLOWED_MS for ms in first)
        print(
            f"  {name:<16}99 % of answers within it again after {after:5.2f} s; late of the first second's: {late:.3f}"
        )
    print(f"the same with a full queue: batches within {OBJECTIVE_MS:g} ms again")
    for policy in ("aimd", "quantile"):
        clients = saturated(policy)
        clients.devices[0].slow = 2.0
        since = clients.now
        clients.run(6.0)
        batches = defaultdict(list)
        for one in clients.answers:
            if one.at - one.compute_ms / 1000.0 >= since:
                batches[one.at] = [one.compute_ms]
        late = [at for at, [ms] in batches.items() if ms > 1.05 * OBJECTIVE_MS]
        print(f"  {policy:<16}after {max(late, default=since) - since:5.2f} s, {len(late)} batches later")


def saturated(policy: str) -> BatchClients:
    clients = BatchClients(linear(1.0, 0.1))
    clients.rule("model", "m", policy=policy, slo_ms=OBJECTIVE_MS)
    clients.closed_loop(2000)
    clients.run(3.0)
    return clients


def learnt() -> None:
    print(
        f"\nmean batch with a full queue, within {OBJECTIVE_MS:g} ms: 190 where a batch takes 1 + 0.1 n ms, then 90 and 190"
    )
    for policy in ("aimd", "quantile"):
        clients = saturated(policy)
        sizes = []
        for slow in (1.0, 2.0, 1.0):
            clients.devices[0].slow = slow
            clients.run(3.0)
            since = clients.now
            clients.run(2.0)
            sizes.append(mean(clients.batches(since)))
        print(f"  {policy:<16}" + "".join(f"{size:8.1f}" for size in sizes))


def waiting() -> None:
    print("\nanswers/s of 64 clients, each with one query under way, by wait_ms (batch 64)")
    waits = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
    print(f"  {'':<20}" + "".join(f"{wait:>9g}" for wait in waits))
    for name, base_ms, item_ms in (("8 + 0.02 n ms", 8.0, 0.02), ("0.1 + 0.2 n ms", 0.1, 0.2)):
        print(f"  {name:<20}" + "".join(f"{answers(base_ms, item_ms, wait):>9,.0f}" for wait in waits))


def answers(base_ms: float, item_ms: float, wait_ms: float) -> float:
    clients = BatchClients(linear(base_ms, item_ms))
    clients.rule("model", "m", policy="delayed", wait_ms=wait_ms, batch=64)
    clients.closed_loop(64)
    clients.run(1.0)
    before = len(clients.answers)
    clients.run(4.0)
    return (len(clients.answers) - before) / 4.0


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="coarser and shorter")
    options = parser.parse_args()
    learnt()
    waiting()
    slower()
    figure4(options.quick)


if __name__ == "__main__":
    main()
