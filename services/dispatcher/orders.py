"""Loads on demand that this dispatcher has ordered: once, until the worker's heartbeat shows them or refuses them."""

from bus.messages.fleet import EnsureLoaded
from bus.subjects import Subjects
from services.core.actor import Publish
from services.core.ask import LoadOrder

AGAIN = 3.0  # s before an order that nothing came of is repeated
REASON = "no instance meets a query's needs"


class Orders:
    """Who was asked to load what, and when."""

    def __init__(self, name: str, subjects: Subjects) -> None:
        self._name = name
        self._subjects = subjects
        self._at: dict[str, float] = {}

    def order(self, app: str, load: LoadOrder, now: float) -> Publish | None:
        """The order; None when the same was given a moment ago."""
        record = load.record
        if now - self._at.get(record.variant, -AGAIN) < AGAIN:
            return None
        self._at[record.variant] = now
        order = EnsureLoaded(variant=record, at_least=1, app=app, orderer=self._name, reason=REASON)
        # The monitor that admits the load records it.
        return Publish(self._subjects.worker(load.worker, "load"), order, self._subjects.loads(self._name))

    def settled(self, variant: str) -> None:
        """The worker has it, or will not have it: it may be ordered anew."""
        self._at.pop(variant, None)
