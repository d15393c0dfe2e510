"""How many machines there are: more or fewer of a kind, as the plan for all workers (or a rule) wants it, within the limits. Pure.

Machines that are missing are added all at once. A machine that is too much leaves only after as long as another one would take to come: so
it costs at most twice what knowing the future would save (the rule of ski rental). A single plan that wants it, between others that do not,
does not keep it: such a plan is at the edge. One machine leaves at a time.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from msgspec import Struct

from services.autoscaler.vms.commands import ControllerEffects, Turn
from services.autoscaler.vms.drain import MachineDrain
from services.autoscaler.vms.fleet import Fleet
from services.autoscaler.vms.machines import Machines
from services.autoscaler.vms.orders import DryRun, InventoryView
from services.autoscaler.vms.rules import (
    Add,
    Additions,
    Blocked,
    FleetLimits,
    Hardware,
    HardwareNeed,
    PricedKind,
    Remove,
    WorkerSummary,
)
from services.core.actor import Effect


class MachineGrowth(Struct, eq=False):
    """limits: what may be started. drain: removes one machine at a time. dry_run: logs in place of acting. memory_share: of devices, for
    instances.
    """

    fleet: Fleet
    limits: FleetLimits
    effects: ControllerEffects
    machines: Machines
    inventory: InventoryView
    drain: MachineDrain
    dry_run: DryRun | None
    memory_share: float
    _short: set[str] = set()  # kinds below their minimum, as an event has said
    _blocked: dict[Hardware, str] = {}
    _refused: set[str] = set()  # kinds that the plan wants and cannot have, as an event has said
    _surplus: dict[str, float] = {}  # by kind: since when there are too many
    _doubted: set[str] = set()  # kinds of these of which the last plan wants as many as there are

    def forget(self) -> None:
        """A new epoch begins."""
        self._blocked.clear()
        self._refused.clear()
        self._surplus.clear()
        self._doubted.clear()
        self._short.clear()

    # -- single additions

    def add(
        self, hardware: Hardware, chosen: Add | Blocked, turn: Turn, place: Sequence[tuple[str, str]] = ()
    ) -> tuple[str | None, list[Effect]]:
        """The new machine's name, if one is started. An event says once, and not every period, why none is."""
        if isinstance(chosen, Blocked):
            if not chosen.reason or hardware in self._blocked:
                return None, []
            self._blocked[hardware] = chosen.reason
            return None, [self.blocked_event(chosen, turn)]
        if self.dry_run is not None:
            return None, self.dry_run.add(chosen, turn)
        return self.machines.add(chosen, turn, place)

    def still_blocked(self, wanted: Collection[Hardware]) -> None:
        """Forget why other hardware than this could not be added."""
        self._blocked = {hardware: why for hardware, why in self._blocked.items() if hardware in wanted}

    def blocked_event(self, blocked: Blocked, turn: Turn) -> Effect:
        """A count of 0 says that no machine was added."""
        return self.effects.scaling(turn.now, "add_worker", None, f"not added: {blocked.reason}", 0)

    def new_for(
        self, need: HardwareNeed, turn: Turn, place: Sequence[tuple[str, str]] = ()
    ) -> tuple[str | None, list[Effect]]:
        """A machine that is needed, and its name. place: the variants that it takes load from, and an app of each."""
        return self.add(need.hardware, self._additions(turn).for_need(need, self.memory_share), turn, place)

    def for_need(self, need: HardwareNeed, turn: Turn) -> tuple[str | None, list[Effect]]:
        """For an ask: a machine that is being removed and can stay, one that boots already, or a new one."""
        found: list[Effect] = []
        leaving = self.drain.worker
        if leaving:
            stays, found = self.drain.advance({need.hardware}, turn)
            if stays:
                return leaving, found
        booting = (
            one.name for one in self._summaries(turn) if one.state == "Booting" and need.hardware in one.hardware
        )
        name = next(booting, None)
        if name is not None:
            return name, found
        name, effects = self.new_for(need, turn)
        return name, found + effects

    def keep_minimum(self, closed: Collection[str], turn: Turn) -> list[Effect]:
        """A machine for a kind that is below its minimum. closed: workers that must go, which do not count."""
        chosen = self._additions(turn).below_minimum(closed)
        if isinstance(chosen, Add):
            _, found = self.add(("", False), chosen, turn)
            return found
        found = [self.blocked_event(blocked, turn) for blocked in chosen if blocked.kind not in self._short]
        self._short = {blocked.kind for blocked in chosen}
        return found

    def _additions(self, turn: Turn) -> Additions:
        pauses, obstacle = partial(self.machines.pauses, now=turn.now), partial(self.inventory.obstacle, now=turn.now)
        return Additions(self._summaries(turn), self.limits, pauses, obstacle)

    def _summaries(self, turn: Turn) -> list[WorkerSummary]:
        return self.fleet.summaries(turn.now, self.limits.settle_s)

    # -- the plan

    def follow(
        self, wanted: Mapping[str, int], load: float, weight: Callable[[str], tuple[int, float]], turn: Turn
    ) -> list[Effect]:
        """Add or remove machines until there are as many of each kind as wanted.

        load: items/s that they are wanted for. weight: what a worker has to do; of a kind, the one with least leaves first.
        """
        found: list[Effect] = []
        for name, count in wanted.items():
            kind = self.limits.kinds.get(name)
            if kind is None:
                continue
            have = self.fleet.available(name, turn.now)
            why = f"the plan wants {count} {name}, there are {have}, for {load:.4g} items/s in {kind.boot_s:.0f} s"
            if count >= have:
                if count > have or name in self._doubted:
                    self._surplus.pop(name, None)
                self._doubted.add(name)
                found += self._more(kind, count - have, why, turn)
                continue
            self._doubted.discard(name)
            waited = turn.now - self._surplus.setdefault(name, turn.now)
            # One that boots may never come: none that is there leaves for it.
            there = self.fleet.available(name, turn.now, booting=False)
            if count < there and waited >= max(kind.boot_s, self.limits.settings.idle_s):
                found += self._fewer(kind, f"{why}, for {waited:.0f} s", weight, turn)
        return found

    def _more(self, kind: PricedKind, count: int, why: str, turn: Turn) -> list[Effect]:
        """Add so many machines: first one that is being removed and can stay."""
        found: list[Effect] = []
        leaving = self.fleet.workers.get(self.drain.worker)
        if count > 0 and leaving is not None and leaving.kind == kind.name:
            stays, found = self.drain.stay(why, turn)
            count -= stays
        if count <= 0:
            self._refused.discard(kind.name)
        for _ in range(count):
            chosen = self._additions(turn).of(kind, why)
            if isinstance(chosen, Blocked):
                if chosen.reason and kind.name not in self._refused:
                    self._refused.add(kind.name)
                    found.append(self.blocked_event(chosen, turn))
                break
            found += self.add(("", False), chosen, turn)[1]
        return found

    def _fewer(
        self, kind: PricedKind, why: str, weight: Callable[[str], tuple[int, float]], turn: Turn
    ) -> list[Effect]:
        """Remove the machine that has least to do, unless one leaves already."""
        able = [
            worker
            for worker in self._summaries(turn)
            if worker.kind == kind.name and worker.state == "Ready" and not self.drain.spared(worker.name, turn.now)
        ]
        if not able or self.drain.worker:
            return []
        chosen = min(able, key=lambda each: (*weight(each.name), each.name))
        remove = Remove(worker=chosen.name, reason=why, planned=True)
        return self.drain.begin(remove, turn) if self.dry_run is None else self.dry_run.remove(remove, turn)
