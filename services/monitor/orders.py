"""What a worker is told to do: load, release, drain. It alone admits, and refuses with a reason. Pure."""

import msgspec

from bus.messages.fleet import EnsureLoaded, LoadAccepted, LoadRefused, Release
from bus.messages.scaling import Drain, LeaderRecord
from services.monitor.journal import Journal
from services.monitor.loads import Loads
from services.monitor.policy import scaler

LEADER = "controller"  # key of the control bucket
_leader = msgspec.msgpack.Decoder(LeaderRecord)
MOST = 256  # instances of one variant on one worker; an order for more is a mistake


class Orders:
    """One worker's. leaving: it is being stopped; draining: it takes nothing new, so that it can be.

    Orders of the controller carry its epoch, which grows with each leader: one below the largest heard, or written down by who
    leads, comes from a leader that has lost its lease, and is refused. 0: not the controller's.
    """

    def __init__(self, worker: str, loads: Loads, journal: Journal) -> None:
        self.leaving = False
        self._worker = worker
        self._loads = loads
        self._journal = journal
        self._epoch = 0
        self._draining = ""  # why

    @property
    def draining(self) -> bool:
        return self._loads.draining

    @property
    def rest(self) -> str:
        """The state of a worker that works as it should."""
        return "Draining" if self.draining else "Ready"

    def ensure(self, order: EnsureLoaded) -> LoadAccepted | LoadRefused:
        record = order.variant
        have = self._loads.of(record.variant)
        obstacle = self._outdated(order.epoch) or self._closed()
        if order.at_least > MOST:
            obstacle = f"at_least is {order.at_least}; one worker takes at most {MOST} instances of a variant"
        while len(have) < order.at_least and not obstacle:
            found = self._loads.place(record)
            if isinstance(found, str):
                obstacle = found
                break
            why = order.reason or f"ordered by {order.orderer or 'somebody'}"
            action = order.action or ("replicate" if have else "load")
            have.append(self._loads.admit(found, record, order.app, why))
            self._journal.scaling(scaler(order.orderer), action, record, order.app, why, planned=order.planned)
        if obstacle:
            return self._refused(record.variant, obstacle)
        return LoadAccepted(worker=self._worker, variant=record.variant, instances=[i.id for i in have])

    def release(self, order: Release) -> LoadAccepted | LoadRefused:
        obstacle = self._outdated(order.epoch)
        if obstacle:
            return self._refused(order.variant, obstacle)
        why = order.reason or f"ordered by {order.orderer or 'somebody'}"
        going = self._loads.release(order.variant, order.keep, why)
        if going:
            first = going[0]
            by, count = scaler(order.orderer), len(going)
            self._journal.scaling(by, "unload", first.record, first.owner, why, count, order.planned)
        stay = [instance.id for instance in self._loads.of(order.variant)]
        return LoadAccepted(worker=self._worker, variant=order.variant, instances=stay)

    def drain(self, order: Drain) -> LoadAccepted | LoadRefused:
        """Take nothing new; instances stay and answer what is queued. The reply lists them."""
        obstacle = self._outdated(order.epoch) or ("this worker is leaving" if self.leaving else "")
        if obstacle:
            return self._refused("", obstacle)
        if order.resume == self.draining:
            self._loads.draining = not order.resume
            self._draining = order.reason or f"ordered by {order.orderer or 'somebody'}"
            self._journal.told = False
            self._journal.worker_state(self.rest, self._draining)
        return LoadAccepted(worker=self._worker, variant="", instances=list(self._loads.instances))

    def led(self, value: bytes | None) -> None:
        """The leader's record is this now: a monitor that has only just started knows whose orders are late, too."""
        try:
            record = _leader.decode(value) if value else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if record is not None:
            self._epoch = max(self._epoch, record.epoch)

    def _closed(self) -> str:
        if self.leaving:
            return "this worker is leaving"
        return f"this worker is draining: {self._draining}" if self.draining else ""

    def _outdated(self, epoch: int) -> str:
        """Why an order of this epoch is not obeyed; empty when it is."""
        if 0 < epoch < self._epoch:
            return f"the order is of epoch {epoch}, and a later leader has spoken in epoch {self._epoch}"
        self._epoch = max(self._epoch, epoch)
        return ""

    def _refused(self, variant: str, reason: str) -> LoadRefused:
        return LoadRefused(worker=self._worker, variant=variant, reason=reason)
