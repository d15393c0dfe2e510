"""A machine on its way out: what only it serves is loaded elsewhere first, then it is drained, and stopped when nothing is left. Pure.

Make before break: it takes queries until every app that it alone serves has an instance that serves on another worker. What is
queued on it is answered. When it is needed after all, the drain is taken back. One machine at a time.
"""

from collections.abc import Collection, Mapping

from bus.messages.fleet import EnsureLoaded
from bus.messages.scaling import Drain
from services.autoscaler.vms.commands import ControllerEffects
from services.autoscaler.vms.fleet import Fleet, FleetWorker
from services.autoscaler.vms.inventory import InventoryView
from services.autoscaler.vms.machines import LOST_S, PAUSES, Machines
from services.autoscaler.vms.placement import pack
from services.autoscaler.vms.policy import Hardware, Remove
from services.core.catalog import Catalog
from services.core.lifecycle import COUNTED, SERVING

QUIET_S = 1.5  # s for which a draining worker must have had nothing to do; what was under way to it has arrived by then
MOVE_S = 60.0  # s for its last instances to be loaded elsewhere
SPARE_S = 30.0  # s for which a worker that could not go, or was needed after all, is left alone


class MachineDrain:
    """At most one machine. overcommit: how often a worker promises a core of its CPU."""

    def __init__(
        self,
        fleet: Fleet,
        catalog: Catalog,
        turn: ControllerEffects,
        machines: Machines,
        stock: InventoryView,
        memory_share: float,
        overcommit: float,
    ) -> None:
        self.worker = ""
        self.phase = ""  # moving, draining, stopping
        self._fleet = fleet
        self._catalog = catalog
        self._turn = turn
        self._machines = machines
        self._stock = stock
        self._share = memory_share
        self._overcommit = overcommit
        self._reason = ""
        self._since = 0.0
        self._quiet = 0.0
        self._again = 0.0
        self._tries = 0
        self._must = False  # the operator wants it to go
        self._spared: dict[str, float] = {}

    def spared(self, worker: str) -> bool:
        return self._turn.now < self._spared.get(worker, 0.0)

    def forget(self) -> None:
        """Somebody else leads now."""
        self.worker = self.phase = ""

    def begin(self, chosen: Remove, shut: Mapping[str, str] = {}) -> None:
        """shut: machines that must go, whatever they serve."""
        self.worker, self.phase, self._reason = chosen.worker, "moving", chosen.reason
        self._since = self._turn.now
        self._must = chosen.worker in shut
        self.advance(set(), shut)

    def adopt(self) -> None:
        """Go on with what an earlier leader had begun to drain."""
        if self.worker:
            return
        for worker in self._fleet.workers.values():
            if worker.record is not None and worker.record.state == "Draining":
                self.worker, self.phase, self._reason = worker.name, "draining", worker.record.reason
                self._since = self._quiet = self._turn.now
                return

    def advance(self, wanted: Collection[Hardware], shut: Mapping[str, str] = {}) -> bool:
        """Go on; wanted: hardware that more is wanted of. True when the machine stays because of that. shut: as in `begin`."""
        if not self.worker and self.phase == "":
            return False
        worker = self._fleet.workers.get(self.worker)
        if worker is None:  # it has gone by itself
            self._turn.drop(self.worker)
            self.forget()
            return False
        if worker.record is not None and worker.record.state == "Stopping":  # it was given up meanwhile
            self.forget()
            return False
        if self.phase == "stopping":
            if self._turn.now >= self._again:
                self._stop()
            return False
        if self._must and self.worker not in shut and self._stock.node(self.worker) is not None:
            self._stay(worker, "the operator has let it in again")
            return False
        self._must = self.worker in shut
        if not self._must and any((device.kind, device.simulated) in wanted for device in worker.devices):
            self._stay(worker, "it is needed after all")
            return True
        if self.phase == "moving":
            self._move(worker)
        else:
            self._drain(worker)
        return False

    # -- moving

    def _move(self, worker: FleetWorker) -> None:
        turn = self._turn
        if worker.serves and not self._must:
            self._stay(worker, "it serves again")
            return
        rest = [other for other in self._fleet.ready(turn.now) if other is not worker]
        last = self._last(worker, rest)
        late = turn.now - self._since > MOVE_S
        if not last or (self._must and (late or not worker.alive(turn.now))):
            self._begin_draining(worker)
            return
        if late:
            self._stay(worker, "what only it serves does not come up elsewhere")
            return
        for app, variant in last.items():
            if not self._elsewhere(app, variant, rest) and not self._must:
                self._stay(worker, f"nowhere else is room for {variant}, the last of {app}")
                return

    def _last(self, worker: FleetWorker, rest: Collection[FleetWorker]) -> dict[str, str]:
        """App to one of its variants here, for each app that has too few instances serving on the others."""
        here = {one.variant: one for one in worker.instances if one.state in SERVING}
        found: dict[str, str] = {}
        for app in self._catalog.apps:
            variants = [record.variant for record in self._catalog.variants_of(app.app)]
            ours = [variant for variant in variants if variant in here]
            if not ours:
                continue
            least = min(max(1, app.min_instances), self._fleet.serving(variants, [worker, *rest]))
            if self._fleet.serving(variants, rest) < least:
                found[app.app] = max(ours, key=lambda variant: (here[variant].load, variant))
        return found

    def _elsewhere(self, app: str, variant: str, rest: Collection[FleetWorker]) -> bool:
        """See to it that one more instance of this variant is loaded on another worker; False when there is no room."""
        turn, record = self._turn, self._catalog.variant(variant)
        if record is None:
            return False
        if any(one.variant == variant and one.state == "Loading" for other in rest for one in other.instances):
            return True  # on its way
        where = pack(record, 1, rest, self._share) or pack(record, 1, rest, self._share, overcommit=self._overcommit)
        for name in where:
            have = sum(one.variant == variant and one.state in COUNTED for one in self._fleet.workers[name].instances)
            why = f"{self.worker} is to go, and alone serves {app}"
            order = EnsureLoaded(
                variant=record, at_least=have + 1, app=app, orderer=turn.name, reason=why, epoch=turn.epoch
            )
            turn.order(name, "load", order)
        return bool(where)

    # -- draining

    def _begin_draining(self, worker: FleetWorker) -> None:
        turn = self._turn
        self.phase, self._since, self._quiet = "draining", turn.now, turn.now
        record = worker.note("Draining", turn.epoch, turn.now, self._reason, self._stock.order_of(worker.name))
        self._fleet.noted(worker.name, record, turn.now)
        turn.save(record)

    def saved(self, worker: str) -> None:
        """The note is written: act on it."""
        if worker == self.worker and self.phase == "draining":
            self._order_drain()

    def _order_drain(self) -> None:
        turn = self._turn
        turn.order(self.worker, "drain", Drain(epoch=turn.epoch, reason=self._reason, orderer=turn.name))

    def _drain(self, worker: FleetWorker) -> None:
        now = self._turn.now
        if now - max(worker.seen, self._since) > LOST_S:
            self.phase, self._tries = "stopping", 0  # it has gone by itself; what is left of it is to go, too
            self._stop()
        elif not worker.draining:
            if now > self._since:  # the order was lost, or is an earlier leader's
                self._order_drain()
            self._quiet = now
        elif worker.serves and worker.alive(now):
            self._quiet = now
        elif now - max(self._quiet, worker.draining_since) >= QUIET_S:
            self.phase, self._tries = "stopping", 0
            self._stop()

    def _stay(self, worker: FleetWorker, why: str) -> None:
        """It does not go."""
        turn = self._turn
        self._spared[worker.name] = turn.now + SPARE_S
        if self.phase == "draining":
            turn.order(worker.name, "drain", Drain(epoch=turn.epoch, reason=why, resume=True, orderer=turn.name))
            record = worker.note("Ready", turn.epoch, turn.now, why, self._stock.order_of(worker.name))
            self._fleet.noted(worker.name, record, turn.now)
            turn.save(record)
        self.forget()

    # -- stopping

    def _stop(self) -> None:
        self._again = float("inf")
        self._machines.stop(self.worker)

    def stopped(self, worker: str, error: str | None) -> None:
        """The provider has answered. error: why not; None: nobody knows."""
        if worker != self.worker or self.phase != "stopping":
            return
        turn = self._turn
        if error == "":
            turn.scaling("remove_worker", worker, self._reason)
            turn.drop(worker)
            self._fleet.forget(worker)
            self._spared.pop(worker, None)
            self.forget()
            return
        self._again = turn.now + PAUSES[min(self._tries, len(PAUSES) - 1)]
        self._tries += 1
        if error and self._tries == 1:
            turn.worker_state(worker, "cpu", "Draining", "Failed", f"it was not stopped: {error}")
