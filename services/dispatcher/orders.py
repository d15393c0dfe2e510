"""Loads on demand that this dispatcher has ordered: once, until the worker's heartbeat shows them or refuses them."""

from bus.messages.fleet import EnsureLoaded
from bus.subjects import Subjects
from services.core.actor import Publish
from services.core.ask import INFINITE, Ask, LoadOrder

AGAIN = 3.0  # s before an order that nothing came of is repeated


class Orders:
    """Who was asked to load what, and when."""

    def __init__(self, name: str, subjects: Subjects) -> None:
        self._name = name
        self._subjects = subjects
        self._at: dict[str, float] = {}

    def order(self, ask: Ask, load: LoadOrder, now: float, *, app: str) -> Publish | None:
        """The order, for a query that asks this of an app; None when the same was given a moment ago."""
        record = load.record
        if now - self._at.get(record.variant, -AGAIN) < AGAIN:
            return None
        self._at[record.variant] = now
        order = EnsureLoaded(variant=record, at_least=1, app=app, orderer=self._name, reason=reason_of(ask))
        # The monitor that admits the load records it.
        return Publish(self._subjects.worker(load.worker, "load"), order, self._subjects.loads(self._name))

    def settled(self, variant: str) -> None:
        """The worker has it, or will not have it: it may be ordered anew."""
        self._at.pop(variant, None)


def reason_of(ask: Ask) -> str:
    """Why something is loaded, and why this variant: as SQL and the dashboard show it."""
    needs = [ask.variant or ask.model or ""]
    needs += [f"{ask.latency_s * 1000:g} ms"] * (ask.latency_s < INFINITE)
    needs += [f"accuracy {ask.accuracy:g}"] * (ask.accuracy > 0)
    needs += [f"US$ {ask.cost:g} per 1,000"] * (ask.cost < INFINITE)
    told = ", ".join(filter(None, needs))
    return f"no instance can do {told}; ready soonest" if told else "no instance can take a query; ready soonest"
