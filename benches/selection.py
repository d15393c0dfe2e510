"""How long a decision takes: `python benches/selection.py [--seconds S]`.

First among 175 and 10,000 variants, one in five of which has an instance, against the brute-force policy, which examines every variant for every
query: benches/paper/table7.py, once. Then among 10, 100 and 1,000 instances of one variant, each on a worker of its own: idle ones, whose queues the
decisions fill, and full ones.
"""

import sys
import time

import numpy as np
import rig

sys.path.insert(0, str(rig.HERE / "paper"))

import compare
import table7

from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask
from services.core.selection.policy import InfaasPolicy, note
from tests.support.data.events import app_record, beat, device, instance
from tests.support.simulated.fleet import variant

NOW = 1000.0
DECISIONS = 2000  # of each kind among variants


def view_of(count: int, queued: int) -> ClusterView:
    """One variant with so many instances, each on a worker of its own with so many queries waiting."""
    record = variant("v", base_ms=20.0, per_item_ms=12.0)
    view = ClusterView({"cpu": 0.04})
    view.set_app(app_record(app="bench", links={record.model: "1"}), [record])
    for n in range(count):
        there = instance(f"i{n}", "v", queued=queued)
        view.heartbeat(beat(there, devices=[device(cores=4, memory_mb=16_000.0)], worker=f"w{n}", at=NOW), NOW)
    return view


def fill(view: ClusterView, seconds: float) -> list[float]:
    """Microseconds of each decision, its query dispatched each time."""
    policy, taken, clock = InfaasPolicy(), [], time.perf_counter_ns
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
    return taken


def main() -> None:
    options = rig.parser(__doc__, seconds=2.0).parse_args()
    print(compare.table(table7.measured(DECISIONS, 1)))
    print(f"\n{'instances':>9}  {'':10} {'p50 µs':>9} {'p99 µs':>9}  queues at the end")
    for count in (10, 100, 1_000):
        for name, queued in (("idle", 0), ("full", 1_000_000)):
            view = view_of(count, queued)
            p50, p99 = np.percentile(fill(view, options.seconds), (50, 99))
            queues = [one.own for one in view.instances.values()]
            print(f"{count:9}  {name:10} {p50:9.1f} {p99:9.1f}  {min(queues)} to {max(queues)}")


if __name__ == "__main__":
    main()
