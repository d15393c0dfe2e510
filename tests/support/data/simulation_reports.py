"""Reports of runs that nobody made: load that comes and goes, variants that follow it, for whoever shows reports."""

from math import inf, pi, sin
from typing import Any

import numpy as np

from bus.messages.events import ScalingEvent
from services.simulation.report import RunReport, Sample

KINDS = ("cpu", "gpu", "inferentia")


def document(
    policies: int = 2, variants: int = 6, duration: float = 120.0, every: float = 2.0, qps: float = 40.0
) -> dict[str, Any]:
    """As `infaas simulate --json` prints it."""
    names = [f"network{i % 7}-v1-ort-fp32-t{i}-b{2 ** (i % 5)}" for i in range(variants)]
    runs = [_run(f"policy-{number}", number, names, duration, every, qps) for number in range(policies)]
    return {"scenario": "made-up", "seed": 7, "policies": runs}


def _run(policy: str, number: int, names: list[str], duration: float, every: float, qps: float) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    hardware = {name: KINDS[i % len(KINDS)] for i, name in enumerate(names)}
    one = RunReport(policy, duration, every, base="infaas", hardware=hardware)
    spent, now, step = 0.0, 0.0, 0
    while now < duration:
        load = qps * (1.1 + sin(2 * pi * now / duration))
        present = {name: int(2 + 2 * sin(now / duration * 5 + i) + number) for i, name in enumerate(names)}
        workers = {kind: 1 + int(load / qps) + (number if kind == "cpu" else 0) for kind in KINDS}
        rate = sum(workers.values()) * 0.001
        spent += rate * every
        one.sample(
            Sample(time=now, instances=present, workers=workers, cost_rate=rate, utilisation=0.4 + 0.01 * number)
        )
        for i in range(rng.poisson(load * every)):
            at = now + every * i / (load * every * 2)
            one.offered("faces", at)
            if rng.random() < 0.02 * (number + 1):
                one.refused("faces", at, "overloaded")
            else:
                accuracy = 0.7 + 0.05 * sin(now / duration * 7)
                one.answered(
                    "faces", at, rng.exponential(0.04), 0.15 if number else inf, accuracy, names[i % len(names)]
                )
        step += 1
        if step % 5 == 0:
            reason = f"load is {load:.0f} queries/s"
            one.event(_scaled(now, names[step % len(names)], reason), now)
        now = step * every
    one.decided(2e-6)
    return one.finished(spent, events=1000 * (number + 1), wall_s=0.01, open_queries=0)


def _scaled(now: float, variant: str, reason: str) -> ScalingEvent:
    return ScalingEvent(
        time=now, scaler="model", worker="w", app="faces", model="m", variant=variant, action="replicate", count=1,
        reason=reason, solver="ilp", solve_ms=1.0, objective=1.0,
    )  # fmt: skip
