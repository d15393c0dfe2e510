"""Wires the model-autoscaler of one worker."""

import time
from math import inf

from bus.port import Bus
from bus.subjects import Subjects
from services.autoscaler.models import metrics
from services.autoscaler.models.actor import ModelAutoscaler
from services.autoscaler.models.baselines import Chosen
from services.autoscaler.models.edge import SolverEdge
from services.autoscaler.models.situation import Knobs
from services.core.planning.solvers import make_solver
from services.core.settings import Settings
from services.shell.machine import worker_name
from services.shell.prices import load_prices
from services.shell.runtime import Runtime


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
            choice={app: Chosen(choice.variant, choice.instances) for app, choice in ours.choice.items()},
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
