"""Loads on demand that this dispatcher has ordered: once, until the worker's heartbeat shows them or refuses them."""

from bus.messages.fleet import EnsureLoaded
from bus.subjects import Subjects
from services.core.actor import Publish
from services.core.ask import INFINITE, Ask, LoadOrder

AGAIN = 3.0  # s before an order that nothing came of is repeated
REASON = "no instance meets a query's needs"


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
    latency = f"{ask.latency_s * 1000:g} ms" if ask.latency_s < INFINITE else ""
    accuracy = f"accuracy {ask.accuracy:g}" if ask.accuracy > 0 else ""
    cost = f"US$ {ask.cost:g} per 1,000" if ask.cost < INFINITE else ""
    if ask.variant or ask.model:
        return f"{REASON} ({', '.join(filter(None, (ask.variant or ask.model, latency, accuracy, cost)))})"
    needs = ", ".join(filter(None, (latency, accuracy, cost)))
    return f"{REASON}{f' ({needs})' if needs else ''}; of the variants that do, this is ready soonest"
