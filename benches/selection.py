"""How long selection alone takes: `python benches/selection.py [--seconds S]`.

The first table is for an app with 175 and with 10,000 registered variants, of which every fifth has an Active instance. It compares the
default policy, with needs that were asked for before and with new needs, with the brute-force policy, which examines every
variant for every query (INFaaS, Table 7). It prints medians and ratios of one run. The second table is for one variant with 10, 100 and
1,000 instances: idle ones, whose queues the decisions fill, and full ones.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator

import rig  # noqa: F401  (makes the packages importable)

from bus.messages.catalog import AppRecord, Profile, ProfileRow, Signature, VariantRecord
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask
from services.core.selection.policy import BruteForce, InfaasPolicy, SelectionPolicy, note

SIGNATURE = Signature(inputs=[], outputs=[])
EVERY = 5  # one variant in so many has an instance
NOW = 1000.0


def variant(number: int, rng: random.Random) -> VariantRecord:
    base = rng.uniform(1.0, 80.0)
    rows = [
        ProfileRow(batch=n, p50_ms=base * (1 + 0.6 * (n - 1)), p99_ms=base * n, cpu_ms=base * n, wall_over_cpu=1.0)
        for n in (1, 2, 4, 8, 16)
    ]
    profile = Profile(
        rows=rows, load_ms=rng.uniform(20, 4000), memory_mb=rng.uniform(20, 900), saturation_qps=1000 / base
    )
    return VariantRecord(
        variant=f"m{number // EVERY}-v1-ort-fp32-t1-b{number % EVERY}",
        model=f"m{number // EVERY}",
        version="1",
        framework="ort",
        precision="fp32",
        threads=1,
        max_batch=16,
        hardware="cpu",
        artifact="",
        format="onnx",
        accuracy=min(0.99, 0.6 + base / 220 + rng.uniform(0, 0.05)),
        agreement=1.0,
        profile=profile,
        signature=SIGNATURE,
    )


def view_of(count: int) -> ClusterView:
    rng = random.Random(count)
    records = [variant(number, rng) for number in range(count)]
    view = ClusterView({"cpu": 0.04})
    view.set_app(AppRecord(app="bench", links={record.model: "1" for record in records}), records)
    instances = [
        InstanceStatus(
            instance=f"i{i}", variant=record.variant, device="cpu", state="Active", since=0.0, queued=rng.randrange(3)
        )
        for i, record in enumerate(records[::EVERY])
    ]
    heartbeat(view, "w0", 64, instances)
    return view


def heartbeat(view: ClusterView, worker: str, cores: int, instances: list[InstanceStatus]) -> None:
    """A worker with so many cores and these instances is heard of."""
    device = DeviceStatus(
        device="cpu",
        kind="cpu",
        cores=cores,
        memory_mb=4000 * cores,
        memory_used_mb=0,
        cores_used=1,
        utilisation=0.2,
        price_per_hour=0.04 * cores,
    )
    beat = WorkerHeartbeat(worker=worker, hardware="cpu", incarnation=1, at=NOW, devices=[device], instances=instances)
    view.heartbeat(beat, NOW)


def repeated(rng: random.Random) -> Iterator[Ask]:
    """Clients mostly repeat a few sets of needs."""
    few = [next(unseen(rng)) for _ in range(20)]
    while True:
        yield rng.choice(few)


def unseen(rng: random.Random) -> Iterator[Ask]:
    """Every query with needs of its own."""
    while True:
        latency = rng.uniform(0.05, 0.5)
        yield Ask(app="bench", items=1, deadline=NOW + latency, latency_s=latency, accuracy=rng.uniform(0.6, 0.9))


def view_of_instances(count: int, queued: int) -> ClusterView:
    """One variant with so many instances, each on a worker of its own with so many queries waiting."""
    record = variant(0, random.Random(0))
    view = ClusterView({"cpu": 0.04})
    view.set_app(AppRecord(app="bench", links={record.model: "1"}), [record])
    for n in range(count):
        status = InstanceStatus(
            instance=f"i{n}", variant=record.variant, device="cpu", state="Active", since=0.0, queued=queued
        )
        heartbeat(view, f"w{n}", 4, [status])
    return view


def fill(view: ClusterView, seconds: float) -> tuple[list[float], int, int]:
    """Microseconds of each decision, its query dispatched each time; the emptiest and the fullest queue at the end."""
    policy, taken = InfaasPolicy(), []
    clock: Callable[[], int] = time.perf_counter_ns
    end, at = clock() + int(seconds * 1e9), NOW
    while clock() < end:
        at += 0.0001
        ask = Ask(app="bench", items=1, deadline=at + 1000.0, latency_s=1000.0)
        began = clock()
        decision = policy.select(ask, at, view)
        note(ask, decision, at, view)
        taken.append((clock() - began) / 1000)
        if decision.instance is not None:
            view.instances[decision.instance].take(1, at, ask.deadline)
    queues = [instance.own for instance in view.instances.values()]
    return taken, min(queues), max(queues)


def measure(policy: SelectionPolicy, view: ClusterView, asks: Iterator[Ask], seconds: float) -> tuple[list[float], int]:
    """Microseconds of each decision, and how many of them named an instance."""
    taken, found = [], 0
    clock: Callable[[], int] = time.perf_counter_ns
    end = clock() + int(seconds * 1e9)
    while clock() < end or len(taken) < 50:
        ask = next(asks)
        began = clock()
        decision = policy.select(ask, NOW, view)
        note(ask, decision, NOW, view)
        taken.append((clock() - began) / 1000)
        found += decision.instance is not None
    return taken, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line")
    options = parser.parse_args()
    print(f"{'variants':>8}  {'policy':34} {'p50 µs':>9} {'p99 µs':>9} {'found':>6}  brute force takes")
    for count in (175, 10_000):
        view = view_of(count)
        lines = [
            ("infaas, needs asked before", InfaasPolicy(), repeated(random.Random(1))),
            ("infaas, needs never seen", InfaasPolicy(), unseen(random.Random(2))),
            ("brute-force, needs never seen", BruteForce(), unseen(random.Random(2))),
        ]
        results = [(name, *measure(policy, view, asks, options.seconds)) for name, policy, asks in lines]
        brute = statistics.median(results[-1][1])
        for name, taken, found in results:
            p50, p99 = statistics.median(taken), sorted(taken)[int(len(taken) * 0.99)]
            print(f"{count:8}  {name:34} {p50:9.1f} {p99:9.1f} {found / len(taken):6.1%}  {brute / p50:8.1f} x")
    print(f"{'instances':>9}  {'':10} {'p50 µs':>9} {'p99 µs':>9}  queues at the end")
    for count in (10, 100, 1_000):
        for name, view in (("idle", view_of_instances(count, 0)), ("full", view_of_instances(count, 1_000_000))):
            taken, least, most = fill(view, options.seconds)
            p50, p99 = statistics.median(taken), sorted(taken)[int(len(taken) * 0.99)]
            print(f"{count:9}  {name:10} {p50:9.1f} {p99:9.1f}  {least} to {most}")


if __name__ == "__main__":
    main()
