"""How fast the simulator is, and how its time and memory grow: `python benches/simulation.py [--full]`.

Without options it measures (1) messages a second of the dispatcher-executor loop at small scale, on one core; (2) CPU time and memory
against workers, variants and load, a simulated minute each. --full: 1,000 workers with 10,000 instances, ten minutes at 20,000 queries/s
on average, and the memory when 10 %, 50 % and 100 % of the queries were sent. Each run is a process of its own.
"""

import argparse
import json
import subprocess
import sys
from time import perf_counter, process_time
from typing import Any

import psutil
import rig

MARKS = (0.1, 0.5, 1.0)  # of the queries
GROWTH: dict[str, list[dict[str, Any]]] = {
    "workers": [{"workers": n} for n in (10, 30, 100, 300)],
    "variants": [{"workers": 30, "apps": n} for n in (10, 40, 160)],  # four variants each
    "load": [{"workers": 30, "per_worker": q} for q in (5.0, 10.0, 20.0)],
}


def resident_mb() -> float:
    return psutil.Process().memory_info().rss / 2**20


def one(options: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process."""
    from scale import fleet, loop

    from services.simulation.report import RunReport
    from services.simulation.run import Run, seldom_collected

    what: dict[str, Any] = json.loads(options.one)
    kind = what.pop("kind", "fleet")
    scenario = loop(**what) if kind == "loop" else fleet(**what)
    policy = scenario.policies[0]
    report = RunReport.of(scenario, policy)
    run = Run(scenario, policy, report)
    expected = sum(share * _queries(scenario) for share in scenario.loads[0].shares)
    marks: list[tuple[float, float]] = []
    began, cpu = perf_counter(), process_time()
    begun: list[float] = []

    def progress(at: float) -> None:
        if not begun:
            begun.extend((process_time(), run.kernel.events))
        sent = run.clients._sent / expected
        while len(marks) < len(MARKS) and sent >= MARKS[len(marks)] * 0.998:
            marks.append((MARKS[len(marks)], resident_mb()))
        if options.progress and round(at) % 10 == 0:
            held = sum(len(d.residents) for m in run.system.machines.values() for d in m.devices.values())
            print(
                f"{at:6.0f} s  {run.clients._sent:>10,} sent  {held:>6,} instances  CPU {process_time() - cpu:7.1f} s  "
                f"wall {perf_counter() - began:7.1f} s  {resident_mb():6.0f} MB",
                file=sys.stderr,
            )

    with seldom_collected():
        result = run(progress)
    spent = process_time() - cpu
    marks.extend((mark, resident_mb()) for mark in MARKS[len(marks) :])
    return {
        "queries": result["queries"],
        "violations": result["slo_violation_ratio"],
        "instances": sum(len(d.residents) for m in run.system.machines.values() for d in m.devices.values()),
        "events": run.kernel.events,
        "events_per_s": (run.kernel.events - begun[1]) / (process_time() - begun[0]),
        "cpu_s": spent,
        "wall_s": perf_counter() - began,
        "memory_mb": dict(marks),
        "end_mb": resident_mb(),
    }


def _queries(scenario: Any) -> float:
    from services.simulation.workload import mean_rate

    return sum(mean_rate(load, scenario.duration_s) for load in scenario.loads) * scenario.duration_s


def apart(what: dict[str, Any], *, progress: bool = False) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps(what), *(["--progress"] if progress else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rows: list[tuple[str, dict[str, Any]]]) -> None:
    print(
        f"{'':34} {'queries':>11} {'CPU s':>8} {'wall s':>8} {'events/s':>10} {'instances':>10} {'MB':>6} {'late, refused':>14}"
    )
    for name, found in rows:
        print(
            f"{name:34} {found['queries']:>11,} {found['cpu_s']:>8.1f} {found['wall_s']:>8.1f} {found['events_per_s']:>10,.0f} "
            f"{found['instances']:>10,} {found['end_mb']:>6.0f} {found['violations']:>14.2%}"
        )


def growth(seconds: float, policy: str, scale: float) -> None:
    for axis, runs in GROWTH.items():
        rows = []
        for run in runs:
            what = run | {"workers": max(1, round(run["workers"] * scale)), "seconds": seconds, "policy": policy}
            at = {
                "workers": what["workers"],
                "variants": 4 * run.get("apps", 10),
                "load": what["workers"] * run.get("per_worker", 20.0),
            }[axis]
            rows.append((f"{axis} {at:,.0f}", apart(what)))
        table(rows)


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--seconds", type=float, help="simulated, of each run: 60, of the large one 600")
    parser.add_argument("--policy", choices=("infaas", "static"), default="infaas")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of workers")
    parser.add_argument("--full", action="store_true", help="the large run alone")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--progress", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options)))
        return
    if options.full:
        seconds = options.seconds or 600.0
        workers = max(1, round(1000 * options.scale))
        result = apart({"workers": workers, "seconds": seconds, "policy": options.policy}, progress=True)
        table([(f"{workers:,} workers, {options.policy}", result)])
        for share, memory in result["memory_mb"].items():
            print(f"memory when {float(share):.0%} of the queries had been sent: {memory:.0f} MB")
        return
    options.seconds = options.seconds or 60.0
    rows = [
        (f"loop, {rate:,.0f} queries/s", apart({"kind": "loop", "rate": rate, "seconds": options.seconds}))
        for rate in (500.0, 2000.0)
    ]
    table(rows)
    growth(options.seconds, options.policy, options.scale)


if __name__ == "__main__":
    main()
