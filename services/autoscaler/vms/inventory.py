"""The machines that a provider has, where it has any of its own: which are free, shut by the operator, told to carry a worker. Pure.

Known from surveys, which take their time: what was ordered since one began is not judged by it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from math import inf

from services.autoscaler.vms.commands import ControllerEffects, Inventory, ListMachines, Node
from services.autoscaler.vms.fleet import SILENT_S, Fleet
from services.core.actor import Do

SURVEY_S = 15.0  # s: several managers may have to be asked, one after the other


class InventoryView:
    """surveyed: whether the provider has an inventory; without, machines are made under names of their own."""

    def __init__(self, fleet: Fleet, turn: ControllerEffects, *, surveyed: bool = False) -> None:
        self.surveyed = surveyed
        self._fleet = fleet
        self._turn = turn
        self._nodes: dict[str, Node] = {}
        self._buys = False
        self._known = False  # a survey has succeeded
        self._answered = False
        self._error = ""
        self._began = -inf  # when the survey began that we go by
        self._asked: float | None = None  # when the one began that is under way
        self._acts: dict[str, float] = {}  # when something was last ordered of a machine; inf: its stop is under way

    @property
    def ready(self) -> bool:
        """Whether there is something to go by; a provider that does not answer is something, too."""
        return self._answered or not self.surveyed

    @property
    def known(self) -> bool:
        """Whether it is known which machines are told to carry workers."""
        return self._known

    def forget(self) -> None:
        """Somebody else leads now."""
        self._nodes, self._acts = {}, {}
        self._known = self._answered = False
        self._asked = None

    # -- surveys

    def look(self) -> None:
        """Begin a survey, unless one is under way."""
        if self.surveyed and self._asked is None:
            self._asked = self._turn.now
            self._turn.add(Do(("survey", str(self._turn.epoch)), ListMachines(), SURVEY_S))

    def found(self, inventory: Inventory) -> None:
        """What came of it."""
        began, self._asked = self._asked, None
        if began is None:
            return
        self._answered, self._error = True, inventory.error
        if inventory.error:
            return
        self._known, self._began, self._buys = True, began, inventory.buys
        self._nodes = {node.name: node for node in inventory.nodes}
        self._acts = {name: at for name, at in self._acts.items() if at >= began}

    def act(self, name: str, *, stops: bool = False) -> None:
        """Something is ordered of this machine, or was carried out. stops: its stop begins, and ends with the next call."""
        if self.surveyed:
            self._acts[name] = inf if stops else self._turn.now

    # -- what there is

    def node(self, name: str) -> Node | None:
        """The machine; None also when the last survey says nothing about how it is now."""
        return self._nodes.get(name) if self._acts.get(name, -inf) < self._began else None

    def exists(self, name: str) -> bool:
        return name in self._nodes

    def order_of(self, name: str) -> str:
        """Whose order it was that it carries a worker."""
        node = self._nodes.get(name)
        return node.order if node is not None else ""

    def free(self, kind: str) -> Iterator[str]:
        """Machines of this kind that carry nothing and may."""
        for name in sorted(self._nodes):
            node = self.node(name)
            if node is not None and node.kind == kind and not _why_not(node) and not self._occupied(name):
                yield name

    def lacking(self, kind: str) -> str:
        """Why no machine of this kind can be had; empty when one can."""
        if not self.surveyed:
            return ""
        if self._error and not self._known:
            return f"which machines are there is not known: {self._error}"
        if self._buys or next(self.free(kind), None) is not None:
            return ""
        reasons = Counter(_why_not(node) or "about to change" for node in self._nodes.values() if node.kind == kind)
        told = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        return f"no machine of kind {kind} is free ({told or 'there is none'})"

    def shut(self) -> dict[str, str]:
        """Machines with a worker that the operator wants empty, and what they are set to."""
        nodes = [self.node(name) for name in self._nodes]
        return {n.name: n.availability for n in nodes if n is not None and n.worker and n.availability != "active"}

    def unnoted(self, kinds: Iterable[str]) -> list[Node]:
        """Machines that are told to carry a worker of these kinds of which nobody has heard or noted anything."""
        wanted, nodes = set(kinds), [self.node(name) for name in sorted(self._nodes)]
        return [n for n in nodes if n is not None and n.worker in wanted and n.name not in self._fleet.workers]

    def _occupied(self, name: str) -> bool:
        worker = self._fleet.workers.get(name)
        return worker is not None and (worker.record is not None or self._turn.now - worker.seen <= SILENT_S)


def _why_not(node: Node) -> str:
    """Why a machine cannot be given a worker."""
    if not node.up:
        return "down"
    if node.availability != "active":
        return f"set to {node.availability}"
    if node.worker:
        return "with a worker"
    return "being emptied" if not node.empty or node.bought else ""
