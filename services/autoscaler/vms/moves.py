"""Instances that move to another worker, because they are slowed down where they are and their worker has no better place. Pure.

The monitor of the worker asks. The worker that gets the order accepts or refuses it. A refusal tries the next worker, and at last a
new machine, if the limits allow one. The old instance goes once the new one serves.
"""

from collections.abc import Callable

from msgspec import Struct

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import EnsureLoaded, LoadReply, Release
from bus.messages.scaling import AskToMove
from services.autoscaler.vms.commands import ControllerEffects, Turn
from services.autoscaler.vms.fleet import Fleet
from services.autoscaler.vms.placement import place
from services.autoscaler.vms.rules import Hardware, HardwareNeed
from services.core.actor import Effect
from services.core.catalog import Catalog
from services.core.cost import load_seconds
from services.core.lifecycle import SERVING
from services.core.settings import MonitorSettings

REPLY_S = 2.0  # s after which a worker that has not answered counts as refusing
PATIENCE_S = 30.0  # s, beside its load time, for an instance to serve
SETTLED_S = 3.0  # s after which all figures show what was moved, so that the same may be asked again
COOL_S = 5.0  # s for which an ask that cannot be met is not tried again

# Has a machine started for a need. Returns its name, None if none may be started, and effects. Asked again, it names the same one.
AddMachine = Callable[[HardwareNeed], tuple[str | None, list[Effect]]]


class _Move(Struct, eq=False):
    """One ask, from the first order until its instance serves.

    there, at_least: where it was accepted, and how many the worker then has.
    """

    ask: AskToMove
    record: VariantRecord
    since: float
    ordered: tuple[str, str, int, float] | None = None  # reply subject, worker, at least, when: not answered yet
    there: str = ""
    at_least: int = 0
    refused: set[str] = set()
    over: float = 0.0  # when it is forgotten; 0: it is under way


class Moves(Struct, eq=False):
    """monitor: as the workers' monitors admit loads. Cores are promised more than once only if no better place is left."""

    fleet: Fleet
    catalog: Catalog
    effects: ControllerEffects
    monitor: MonitorSettings
    _pending: dict[tuple[str, str], _Move] = {}

    def ask(self, ask: AskToMove, now: float) -> None:
        """A worker asks. While the same is pending it is ignored."""
        record = self.catalog.variant(ask.variant)
        if record is not None:
            self._pending.setdefault((ask.worker, ask.variant), _Move(ask, record, now))

    def forget(self) -> None:
        """A new epoch begins."""
        self._pending.clear()

    def hardware(self) -> set[Hardware]:
        """The hardware that pending moves need machines for."""
        waiting = (one for one in self._pending.values() if not one.over and not one.there)
        return {(one.record.hardware, one.record.simulated) for one in waiting}

    def replied(self, subject: str, reply: LoadReply | None) -> None:
        """A worker has answered an order. None: it has not, and counts as refusing."""
        for move in self._pending.values():
            if move.ordered is None or move.ordered[0] != subject:
                continue
            _, worker, at_least, _ = move.ordered
            move.ordered = None
            if reply is None or reply.reason:
                move.refused.add(worker)
            else:
                move.there, move.at_least = worker, at_least

    def advance(self, add_machine: AddMachine, turn: Turn) -> list[Effect]:
        """Go on with all that are pending."""
        found: list[Effect] = []
        for key, move in list(self._pending.items()):
            if not move.over:
                found += self._advance(move, add_machine, turn)
            elif turn.now >= move.over:
                del self._pending[key]
        return found

    def _advance(self, move: _Move, add_machine: AddMachine, turn: Turn) -> list[Effect]:
        if move.ordered is not None and turn.now - move.ordered[3] > REPLY_S:
            self.replied(move.ordered[0], None)
        if move.ordered is not None:
            return []
        if move.there:
            return self._wait(move, turn)
        found = self._order(move, 1.0, turn)
        if found:
            return found
        record = move.record
        reason = f"no worker has room for {record.variant}, which {move.ask.worker} asked to move"
        need = HardwareNeed(hardware=(record.hardware, record.simulated), reason=reason, record=record)
        machine, found = add_machine(need)
        if machine is None:
            orders = self._order(move, self.monitor.cores_overcommit, turn)
            if not orders:
                move.over = turn.now + COOL_S
            found += orders
        return found

    def _order(self, move: _Move, overcommit: float, turn: Turn) -> list[Effect]:
        others = {move.ask.worker, *move.refused}
        workers = [one for one in self.fleet.ready(turn.now) if one.name not in others]
        worker = place(move.record, workers, self.monitor.memory_share, overcommit, idlest=True)
        if worker is None:
            return []
        at_least = len(worker.of(move.record.variant)) + 1
        subject = self.effects.reply_subject()
        move.ordered = subject, worker.name, at_least, turn.now
        order = EnsureLoaded(
            variant=move.record,
            at_least=at_least,
            app=move.ask.app or None,
            orderer=self.effects.name,
            reason=f"{move.ask.worker} asked to move it{': ' + move.ask.reason if move.ask.reason else ''}",
            epoch=turn.epoch,
        )
        return [self.effects.send(worker.name, "load", order, subject)]

    def _wait(self, move: _Move, turn: Turn) -> list[Effect]:
        """Until the new one serves; then the old one is released."""
        there, variant = self.fleet.workers.get(move.there), move.record.variant
        serving = there is None or sum(one.state in SERVING for one in there.of(variant)) >= move.at_least
        if not serving:
            if turn.now - move.since > PATIENCE_S + load_seconds(move.record):
                move.over = turn.now
            return []
        move.over = turn.now + SETTLED_S
        old = self.fleet.workers.get(move.ask.worker)
        if old is None:
            return []
        if not any(one.state == "Interfered" or "Interfered" in one.app_states.values() for one in old.of(variant)):
            return []
        why = f"moved to {move.there}: {move.ask.reason or 'it was slowed down here'}"
        keep = len(old.of(variant)) - 1
        release = Release(variant=variant, keep=keep, orderer=self.effects.name, reason=why, epoch=turn.epoch)
        return [self.effects.send(move.ask.worker, "release", release)]
