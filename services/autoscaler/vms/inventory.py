"""The machines of a provider that has its own: which are free, closed by the operator, or set to run a worker. Pure.

They are known from inventories, which take time. An inventory says nothing about machines that were ordered since it began.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from math import inf

from msgspec import Struct

from services.autoscaler.vms.commands import Inventory, ListMachines, Node, Turn
from services.autoscaler.vms.fleet import SILENT_S, Fleet
from services.core.actor import NOTHING, Do, Effect

INVENTORY_S = 15.0  # s: several managers may have to be asked, one after the other


class InventoryView(Struct, eq=False):
    """What is known of the provider's machines.

    exists: whether the provider has machines of its own. If it has none, machines are made under new names.
    """

    fleet: Fleet
    exists: bool = False
    _nodes: dict[str, Node] = {}
    _buys: bool = False
    _known: bool = False  # an inventory has succeeded
    _answered: bool = False
    _error: str = ""
    _began: float = -inf  # when the inventory began that is shown
    _asked: float | None = None  # when the inventory began that is under way
    _ordered: dict[str, float] = {}  # when a machine was last ordered to do something; inf: its stop is under way

    @property
    def ready(self) -> bool:
        """Whether decisions can be made: an inventory has ended, well or not."""
        return self._answered or not self.exists

    @property
    def known(self) -> bool:
        """Whether it is known which machines are set to run workers."""
        return self._known

    def forget(self) -> None:
        """A new epoch begins."""
        self._nodes, self._ordered = {}, {}
        self._known = self._answered = False
        self._asked = None

    # -- inventories

    def refresh(self, turn: Turn) -> tuple[Effect, ...]:
        """Begin an inventory, unless one is under way."""
        if not self.exists or self._asked is not None:
            return NOTHING
        self._asked = turn.now
        return (Do(("inventory", str(turn.epoch)), ListMachines(), INVENTORY_S),)

    def listed(self, inventory: Inventory) -> None:
        """The inventory has ended."""
        began, self._asked = self._asked, None
        if began is None:
            return
        self._answered, self._error = True, inventory.error
        if inventory.error:
            return
        self._known, self._began, self._buys = True, began, inventory.buys
        self._nodes = {node.name: node for node in inventory.nodes}
        self._ordered = {name: at for name, at in self._ordered.items() if at >= began}

    def ordered(self, name: str, now: float, *, stops: bool = False) -> None:
        """This machine was ordered to do something, or has done it. stops: its stop begins; the next call ends it."""
        if self.exists:
            self._ordered[name] = inf if stops else now

    # -- machines

    def node(self, name: str) -> Node | None:
        """The machine; None also if the last inventory says nothing about its present state."""
        return self._nodes.get(name) if self._ordered.get(name, -inf) < self._began else None

    def has(self, name: str) -> bool:
        return name in self._nodes

    def order_of(self, name: str) -> str:
        """The order that set this machine to run a worker."""
        node = self._nodes.get(name)
        return node.order if node is not None else ""

    def free(self, kind: str, now: float) -> Iterator[str]:
        """Machines of this kind that run nothing and may run a worker."""
        for name in sorted(self._nodes):
            node = self.node(name)
            if node is not None and node.kind == kind and not _why_not(node) and not self._occupied(name, now):
                yield name

    def obstacle(self, kind: str, now: float) -> str:
        """Why no machine of this kind can be had; empty if one can."""
        if not self.exists:
            return ""
        if self._error and not self._known:
            return f"which machines are there is not known: {self._error}"
        if self._buys or next(self.free(kind, now), None) is not None:
            return ""
        reasons = Counter(_why_not(node) or "about to change" for node in self._nodes.values() if node.kind == kind)
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        return f"no machine of kind {kind} is free ({counts or 'there is none'})"

    def closed(self) -> dict[str, str]:
        """Machines with a worker that the operator wants empty, and what they are set to."""
        nodes = [self.node(name) for name in self._nodes]
        return {n.name: n.availability for n in nodes if n is not None and n.worker and n.availability != "active"}

    def unrecorded(self, kinds: Iterable[str]) -> list[Node]:
        """Machines that are set to run a worker of these kinds and that the fleet does not know."""
        wanted, nodes = set(kinds), [self.node(name) for name in sorted(self._nodes)]
        return [n for n in nodes if n is not None and n.worker in wanted and n.name not in self.fleet.workers]

    def _occupied(self, name: str, now: float) -> bool:
        worker = self.fleet.workers.get(name)
        return worker is not None and (worker.record is not None or now - worker.seen <= SILENT_S)


def _why_not(node: Node) -> str:
    """Why a machine cannot be given a worker; empty if it can."""
    if not node.up:
        return "down"
    if node.availability != "active":
        return f"set to {node.availability}"
    if node.worker:
        return "with a worker"
    return "being emptied" if not node.empty or node.bought else ""
