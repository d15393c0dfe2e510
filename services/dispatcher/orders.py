"""Loads on demand that this dispatcher has ordered: once, until the worker's heartbeat shows them or refuses them."""

from bus.messages.events import ScalingEvent
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

    def order(self, app: str, load: LoadOrder, now: float) -> tuple[Publish, ScalingEvent] | None:
        """The order and its event; None when the same was ordered a moment ago."""
        record = load.record
        if now - self._at.get(record.variant, -AGAIN) < AGAIN:
            return None
        self._at[record.variant] = now
        order = EnsureLoaded(variant=record, at_least=1, app=app, orderer=self._name, reason=REASON)
        event = ScalingEvent(
            time=now,
            scaler="dispatcher",
            worker=load.worker,
            app=app,
            model=record.model,
            variant=record.variant,
            action="load",
            count=1,
            reason=REASON,
        )
        return Publish(self._subjects.worker(load.worker, "load"), order, self._subjects.loads(self._name)), event

    def settled(self, variant: str) -> None:
        """The worker has it, or will not have it: it may be ordered anew."""
        self._at.pop(variant, None)
