"""The removal of a machine: what only it serves is loaded elsewhere, then it is drained, and stopped when it is idle. Pure.

Make before break: it takes queries until every app that only it serves has an instance that serves on another worker. It answers
what is queued. If it is needed after all, the drain is taken back. One machine is removed at a time.
"""

from collections.abc import Collection, Mapping

from msgspec import Struct

from bus.messages.scaling import Drain
from services.autoscaler.vms.commands import ControllerEffects, Turn
from services.autoscaler.vms.fleet import Fleet, FleetWorker
from services.autoscaler.vms.machines import LOST_S, PAUSES, Machines
from services.autoscaler.vms.orders import InventoryView
from services.autoscaler.vms.placement import place
from services.autoscaler.vms.planner import FleetPlanner
from services.autoscaler.vms.rules import Hardware, Remove
from services.core.actor import Effect
from services.core.catalog import Catalog
from services.core.lifecycle import SERVING, needed
from services.core.settings import MonitorSettings

QUIET_S = (
    1.5  # s without work after which a draining worker is stopped; queries that were on their way have arrived by then
)
MOVE_S = 60.0  # s for its last instances to be loaded elsewhere
SPARE_S = 30.0  # s for which a worker that was not removed after all is not tried again


class MachineDrain(Struct, eq=False):
    """At most one machine. monitor: as the workers' monitors admit loads. phase: moving, draining, stopping, or empty.

    planner: knows whether all that the plan wants on other workers serves, and what is reserved for pipelines.
    """

    fleet: Fleet
    catalog: Catalog
    effects: ControllerEffects
    machines: Machines
    inventory: InventoryView
    monitor: MonitorSettings
    planner: FleetPlanner
    worker: str = ""
    phase: str = ""
    _planned: bool = False  # the plan wants it away, though it may still serve
    _reason: str = ""
    _since: float = 0.0
    _quiet_since: float = 0.0
    _next_try: float = 0.0
    _tries: int = 0
    _forced: bool = False  # the operator wants the machine empty
    _spared: dict[str, float] = {}

    def spared(self, worker: str, now: float) -> bool:
        """Whether this worker is not to be removed now."""
        return now < self._spared.get(worker, 0.0)

    def forget(self) -> None:
        """A new epoch begins, or the removal is over."""
        self.worker = self.phase = ""

    def begin(self, chosen: Remove, turn: Turn, closed: Mapping[str, str] = {}) -> list[Effect]:
        """closed: machines that must go, whatever they serve."""
        self.worker, self.phase, self._reason = chosen.worker, "moving", chosen.reason
        self._since = turn.now
        self._forced, self._planned = chosen.worker in closed, chosen.planned
        _, found = self.advance(set(), turn, closed)
        return found

    def adopt(self, turn: Turn) -> None:
        """Go on with a drain that an earlier leader began."""
        if self.worker:
            return
        for worker in self.fleet.workers.values():
            if worker.record is not None and worker.record.state == "Draining":
                self.worker, self.phase, self._reason = worker.name, "draining", worker.record.reason
                self._since = self._quiet_since = turn.now
                return

    def advance(
        self, wanted: Collection[Hardware], turn: Turn, closed: Mapping[str, str] = {}
    ) -> tuple[bool, list[Effect]]:
        """Go on with the removal. True if the machine stays because its hardware is wanted.

        wanted: hardware of which more is needed. closed: as in `begin`.
        """
        if not self.worker and self.phase == "":
            return False, []
        worker = self.fleet.workers.get(self.worker)
        if worker is None:  # it is gone already
            deletion = self.effects.delete(self.worker)
            self.forget()
            return False, [deletion]
        if worker.record is not None and worker.record.state == "Stopping":  # it was given up meanwhile
            self.forget()
            return False, []
        if self.phase == "stopping":
            return False, self._stop(turn) if turn.now >= self._next_try else []
        if self._forced and self.worker not in closed and self.inventory.node(self.worker) is not None:
            return False, self._stay(worker, "the operator has opened its node again", turn)
        self._forced = self.worker in closed
        if not self._forced and any((device.kind, device.simulated) in wanted for device in worker.devices):
            return True, self._stay(worker, "it is needed after all", turn)
        return False, self._move(worker, turn) if self.phase == "moving" else self._drain(worker, turn)

    # -- moving

    def _move(self, worker: FleetWorker, turn: Turn) -> list[Effect]:
        if worker.serves and not (self._forced or self._planned):
            return self._stay(worker, "it serves again", turn)
        rest = [other for other in self.fleet.ready(turn.now) if other is not worker]
        last = self._served_only_here(worker, rest) | self.planner.kept_only_on(worker.name, turn.now)
        late = turn.now - self._since > MOVE_S
        ready = not last and (not self._planned or self.planner.settled(worker.name, turn.now))
        if ready or (self._forced and (late or not worker.alive(turn.now))):
            return self._begin_draining(worker, turn)
        if late:
            return self._stay(worker, "what only it serves was not loaded elsewhere in time", turn)
        found: list[Effect] = []
        for app, variant in () if self._planned else last.items():
            orders = self._load_elsewhere(app, variant, rest, turn)
            if orders is None and not self._forced:
                why = f"no other worker has room for {variant}, which only this one serves of {app}"
                return found + self._stay(worker, why, turn)
            found += orders or ()
        return found

    def _served_only_here(self, worker: FleetWorker, rest: Collection[FleetWorker]) -> dict[str, str]:
        """App to one of its variants here, for each app that has too few instances serving on the others."""
        here = {one.variant: one for one in worker.instances if one.state in SERVING and needed(one)}
        found: dict[str, str] = {}
        for app in self.catalog.apps:
            variants = [record.variant for record in self.catalog.variants_of(app.app)]
            ours = [variant for variant in variants if variant in here]
            if not ours:
                continue
            least = min(max(1, app.min_instances), self.fleet.serving(variants, [worker, *rest]))
            if self.fleet.serving(variants, rest) < least:
                found[app.app] = max(ours, key=lambda variant: (here[variant].load, variant))
        return found

    def _load_elsewhere(self, app: str, variant: str, rest: Collection[FleetWorker], turn: Turn) -> list[Effect] | None:
        """Orders by which one more instance of this variant is loaded on another worker. None: there is no room."""
        record = self.catalog.variant(variant)
        if record is None:
            return None
        if any(one.state == "Loading" for other in rest for one in other.of(variant)):
            return []
        where = place(record, rest, self.monitor.memory_share) or place(
            record, rest, self.monitor.memory_share, self.monitor.cores_overcommit
        )
        if where is None:
            return None
        why = f"{self.worker} is being removed, and only it serves {app}"
        return [self.effects.load(where.name, record, len(where.of(variant)) + 1, app, why, turn)]

    # -- draining

    def _begin_draining(self, worker: FleetWorker, turn: Turn) -> list[Effect]:
        self.phase, self._since, self._quiet_since = "draining", turn.now, turn.now
        return self._change_record(worker, "Draining", self._reason, turn)

    def _change_record(self, worker: FleetWorker, state: str, reason: str, turn: Turn) -> list[Effect]:
        record = worker.record_in(state, turn.epoch, turn.now, reason, self.inventory.order_of(worker.name))
        self.fleet.record_changed(worker.name, record, turn.now)
        return [self.effects.save(record)]

    def saved(self, worker: str, turn: Turn) -> list[Effect]:
        """The record is written, so the drain can be ordered."""
        return [self._order_drain(turn)] if worker == self.worker and self.phase == "draining" else []

    def _order_drain(self, turn: Turn) -> Effect:
        order = Drain(epoch=turn.epoch, reason=self._reason, orderer=self.effects.name)
        return self.effects.send(self.worker, "drain", order)

    def _drain(self, worker: FleetWorker, turn: Turn) -> list[Effect]:
        now = turn.now
        if now - max(worker.seen, self._since) > LOST_S:  # it is gone; its machine may be left
            self.phase, self._tries = "stopping", 0
            return self._stop(turn)
        if not worker.draining:
            self._quiet_since = now
            return [self._order_drain(turn)] if now > self._since else []  # the order was lost, or an earlier leader's
        if worker.serves and worker.alive(now):
            self._quiet_since = now
        elif now - max(self._quiet_since, worker.draining_since) >= QUIET_S:
            self.phase, self._tries = "stopping", 0
            return self._stop(turn)
        return []

    def stay(self, why: str, turn: Turn) -> tuple[bool, list[Effect]]:
        """Take the removal back, if it is not too late. True if the machine stays."""
        worker = self.fleet.workers.get(self.worker)
        if worker is None or self._forced or self.phase not in ("moving", "draining"):
            return False, []
        return True, self._stay(worker, why, turn)

    def _stay(self, worker: FleetWorker, why: str, turn: Turn) -> list[Effect]:
        """The machine is not removed."""
        self._spared[worker.name] = turn.now + SPARE_S
        found: list[Effect] = []
        if self.phase == "draining":
            resume = Drain(epoch=turn.epoch, reason=why, resume=True, orderer=self.effects.name)
            found.append(self.effects.send(worker.name, "drain", resume))
            found += self._change_record(worker, "Ready", why, turn)
        self.forget()
        return found

    # -- stopping

    def _stop(self, turn: Turn) -> list[Effect]:
        self._next_try = float("inf")
        return [self.machines.stop(self.worker, turn)]

    def stopped(self, worker: str, error: str | None, turn: Turn) -> list[Effect]:
        """The provider has answered. error: why it was not stopped; None: unknown."""
        if worker != self.worker or self.phase != "stopping":
            return []
        if error == "":
            self.fleet.forget(worker)
            self._spared.pop(worker, None)
            self.forget()
            return [self.effects.scaling(turn.now, "remove_worker", worker, self._reason), self.effects.delete(worker)]
        self._next_try = turn.now + PAUSES[min(self._tries, len(PAUSES) - 1)]
        self._tries += 1
        if not error or self._tries != 1:
            return []
        why = f"it was not stopped: {error}"
        return [self.effects.worker_state(turn.now, worker, "cpu", "Draining", "Failed", why)]
