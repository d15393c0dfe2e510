"""The lease of the leader: a record that is changed by compare-and-set and must be renewed. Pure.

Clocks are not compared. A challenger waits until it has seen no change of the record for the length of the lease. A leader counts
its lease from the moment before it asked for the renewal, and stops acting a little before the end. So two never act at once,
however late messages are. Orders carry the leader's epoch, in case its machine was suspended in between.
"""

from bus.messages.scaling import LeaderRecord
from services.autoscaler.vms.commands import ClaimLease, LeaseClaimed

RENEWALS = 3  # in the time of one lease
MARGIN = 0.1  # part of the lease, at its end, in which its holder does not act


class Lease:
    """One candidate's view. holder: its name, which no other candidate has or had."""

    def __init__(self, holder: str, lease_s: float) -> None:
        self.epoch = 0
        self._holder = holder
        self._lease_s = lease_s
        self._until = 0.0  # we lead until then
        self._asked = float("-inf")
        self._asking: LeaderRecord | None = None
        self._present: LeaderRecord | None = None
        self._changed: float | None = None  # None: the present record is not known yet

    @property
    def period(self) -> float:
        """Seconds between two calls of `due`."""
        return self._lease_s / RENEWALS / 2

    def leads(self, now: float) -> bool:
        """Whether this candidate may act now."""
        return self.epoch > 0 and now < self._until - MARGIN * self._lease_s

    def known(self, now: float) -> None:
        """All records of the bucket are known."""
        if self._changed is None:
            self._changed = now

    def changed(self, record: LeaderRecord | None, now: float) -> None:
        """The record has this value now; None: there is none."""
        self._present, self._changed = record, now
        if record is None or record.holder != self._holder:
            self.epoch = 0

    def due(self, now: float) -> ClaimLease | None:
        """What to claim now: a renewal, or the lead if nobody seems to have it."""
        if self._asking is not None or self._changed is None:
            return None
        if self.epoch:
            if now - self._asked < self._lease_s / RENEWALS:
                return None
            epoch = self.epoch
        else:
            present = self._present
            free = present is None or not present.holder or present.holder == self._holder
            if not free and now - self._changed < self._lease_s:
                return None
            epoch = (present.epoch if present is not None else 0) + 1
        self._asked = now
        self._asking = LeaderRecord(holder=self._holder, epoch=epoch, until=now + self._lease_s)
        return ClaimLease(record=self._asking, expected=self._present, by=self._holder)

    def claimed(self, result: LeaseClaimed | None, now: float) -> None:
        """The last claim has ended. None: the result is unknown, and the next claim finds out."""
        asked, self._asking = self._asking, None
        if asked is None or result is None:
            return
        if result.ok:
            self.epoch, self._until = asked.epoch, self._asked + self._lease_s
            self._present, self._changed = asked, now
        elif result.present != self._present:
            self.changed(result.present, now)

    def give_up(self, now: float) -> ClaimLease | None:
        """Let another candidate lead at once. None: this one does not lead."""
        if not self.epoch or self._present is None:
            return None
        free = LeaderRecord(holder="", epoch=self.epoch, until=now)
        claim = ClaimLease(record=free, expected=self._present, by=self._holder)
        self.epoch = 0
        return claim
