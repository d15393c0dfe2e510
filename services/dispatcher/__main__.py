"""Wires one dispatcher."""

from time import perf_counter

from bus.port import Bus
from bus.subjects import Subjects
from services.core.metric import MICROSECONDS, Histogram
from services.core.settings import Settings
from services.dispatcher.actor import Dispatcher, make_dispatcher
from services.dispatcher.edge import DispatcherEdge, dispatcher_name, uid_maker
from services.dispatcher.metrics import DispatcherMetrics, SampledPolicy
from services.shell.policies import load_policy
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One dispatcher actor with a name of its own; several share the queries by queue group."""
    subjects = Subjects(settings.prefix)
    seconds = Histogram(MICROSECONDS)
    policy = SampledPolicy(load_policy(settings), perf_counter, seconds.observe)
    prices = load_prices(settings.prices)

    def make() -> Dispatcher:
        return make_dispatcher(settings, subjects, dispatcher_name(), policy, prices, uid_maker())

    edge = DispatcherEdge(bus, subjects)
    return [Runtime("dispatcher", make, bus, subjects, edge, insight=DispatcherMetrics(seconds))]
