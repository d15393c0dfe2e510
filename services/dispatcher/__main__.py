"""Wires one dispatcher."""

from time import perf_counter

from bus.port import Bus
from bus.subjects import Subjects
from services.core.settings import Settings
from services.dispatcher.actor import Dispatcher
from services.dispatcher.edge import dispatcher_name, load_policy, uid_maker
from services.dispatcher.feedback import FeedbackActor
from services.dispatcher.metrics import DispatcherMetrics, SampledPolicy
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One dispatcher actor with a name of its own; several share the queries by queue group."""
    subjects = Subjects(settings.prefix)
    ours = settings.dispatcher
    on_demand = settings.autoscaler.policy in ("infaas", "off")
    chosen = load_policy(ours, settings.machines, on_demand=on_demand, goal=settings.goal)
    policy = SampledPolicy(chosen, perf_counter)
    prices = load_prices(settings.prices)

    def make() -> Dispatcher:
        return Dispatcher(
            dispatcher_name(),
            subjects,
            policy,
            prices,
            uid_maker(),
            default_deadline_s=ours.default_deadline_s,
            max_inline=ours.max_inline,
            failure_timeout_s=ours.failure_timeout_s,
            max_attempts=ours.max_attempts,
            max_queue=ours.max_queue,
        )

    return [
        Runtime("dispatcher", make, bus, subjects, insight=DispatcherMetrics(policy.seconds)),
        Runtime("feedback", lambda: FeedbackActor(subjects), bus, subjects),
    ]
