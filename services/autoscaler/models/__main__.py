"""Wires the model-autoscaler of one worker."""

import asyncio
import time
from math import inf
from typing import Any

from bus.port import Bus
from bus.subjects import Subjects
from services.autoscaler.models import metrics
from services.autoscaler.models.actor import ModelAutoscaler, Solve, Solved
from services.autoscaler.models.baselines import FixedVariant
from services.autoscaler.models.problem import Knobs
from services.core.planning.plan import Solver
from services.core.planning.solvers import make_solver
from services.core.settings import Settings
from services.shell.host.machine import worker_name
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One actor beside the worker's monitor."""
    subjects = Subjects(settings.prefix)
    worker = worker_name(settings.worker)
    ours = settings.autoscaler
    prices = load_prices(settings.prices)
    knobs = knobs_of(settings)

    def make() -> ModelAutoscaler:
        return ModelAutoscaler(
            worker,
            subjects,
            prices,
            knobs,
            policy=ours.policy,
            period_s=ours.period_s,
            choice={app: FixedVariant(choice.variant, choice.instances) for app, choice in ours.choice.items()},
        )

    solver = make_solver(ours.solver, time_limit_s=ours.time_limit_s, clock=time.monotonic)
    return [Runtime(f"model-autoscaler-{worker}", make, bus, subjects, SolverEdge(solver), insight=metrics)]


def knobs_of(settings: Settings) -> Knobs:
    """The settings that planning reads."""
    ours = settings.autoscaler
    return Knobs(
        slack=ours.slack,
        loading_weight=ours.loading_weight,
        objective=ours.objective,
        hold_s=ours.hold_s,
        budget_per_s=ours.budget_per_hour / 3600.0 if ours.budget_per_hour > 0 else inf,
        memory_share=settings.monitor.memory_share,
        goal=settings.goal,
    )


# -- The model-autoscaler's hands: solving takes up to half a second, off the loop, so that nothing waits for it.


class SolverEdge:
    """Solves one problem at a time."""

    def __init__(self, solver: Solver) -> None:
        self._solver = solver

    async def perform(self, command: Any) -> Solved:
        """See services.core.actor.Edge."""
        if not isinstance(command, Solve):
            raise TypeError(f"unknown command {command!r}")
        started = time.perf_counter()
        plan = await asyncio.to_thread(self._solver.solve, command.problem)
        return Solved(plan, (time.perf_counter() - started) * 1000.0)
