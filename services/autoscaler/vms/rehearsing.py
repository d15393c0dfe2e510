"""A dry run: what would be done to machines is told, once for as long as there is a reason, and shown to the provider. Pure."""

from services.autoscaler.vms.commands import Start, Stop
from services.autoscaler.vms.machines import START_S, STOP_S
from services.autoscaler.vms.orders import Orders
from services.autoscaler.vms.policy import Add, Remove
from services.autoscaler.vms.turn import Turn
from services.core.actor import Do

AGAIN_S = 60.0  # s after which a reason that comes back is told again


class Rehearsal:
    """The provider is in a dry run, too: of the orders that it gets here it only says what they would change."""

    def __init__(self, turn: Turn, orders: Orders) -> None:
        self._turn = turn
        self._orders = orders
        self._told: dict[tuple[str, str], float] = {}

    def add(self, chosen: Add) -> None:
        if self._new("add", chosen.kind):
            order = self._orders.new(chosen.kind)
            self._turn.scaling("add_worker", order.worker, f"dry run: not started: {chosen.reason}", 0)
            self._turn.add(Do(("rehearse", order.worker), Start(order=order), START_S))

    def remove(self, chosen: Remove) -> None:
        if self._new("remove", chosen.worker):
            self._turn.scaling("remove_worker", chosen.worker, f"dry run: not removed: {chosen.reason}", 0)
            order = self._orders.stop(chosen.worker)
            self._turn.add(Do(("rehearse", chosen.worker), Stop(order=order), STOP_S))

    def _new(self, what: str, about: str) -> bool:
        now = self._turn.now
        self._told = {told: at for told, at in self._told.items() if now - at <= AGAIN_S}
        new = (what, about) not in self._told
        self._told[what, about] = now
        return new
