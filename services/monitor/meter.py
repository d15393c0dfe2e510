"""The cost meter of one device: what each loaded instance owes for a period, and what nobody owes. Pure.

An instance costs its share of the device for the time that it is loaded. Where shares add up to more than the device (cores
may be shared), they shrink in proportion; what is left is booked as idle. So the rows of a period add up to the device's price.
"""

from collections.abc import Mapping
from math import fsum

from bus.messages.catalog import VariantRecord
from bus.messages.events import CostEvent


class Account:
    """One instance in one period."""

    __slots__ = ("busy", "owner", "record", "seconds", "share", "weighted")

    def __init__(self, record: VariantRecord, share: float, owner: str | None) -> None:
        self.record = record
        self.share = share  # of the device, while loaded
        self.owner = owner
        self.seconds = 0.0  # loaded, in this period
        self.weighted = 0.0  # device-seconds owed
        self.busy: dict[str, float] = {}  # app -> seconds computed


class Meter:
    """Integrates over every change of what is loaded. price_per_s: US$ of the whole device; simulated: nobody's money."""

    def __init__(
        self, worker: str, kind: str, price_per_s: float, now: float = 0.0, *, simulated: bool = False
    ) -> None:
        self._simulated = simulated
        self.price_per_s = price_per_s
        self._worker = worker
        self._kind = kind
        self._opened = now
        self._at = now
        self._loaded: dict[str, Account] = {}
        self._left: list[Account] = []

    def open(self, now: float) -> None:
        """The first period begins."""
        self._opened = self._at = now

    def occupy(self, instance: str, record: VariantRecord, share: float, app: str | None, now: float) -> None:
        """An instance takes its share (0..1) from now on; again for one that is there: its share changes."""
        self._advance(now)
        account = self._loaded.get(instance)
        if account is None:
            self._loaded[instance] = Account(record, share, app)
        else:
            account.share = share

    def vacate(self, instance: str, now: float) -> None:
        """An instance is gone; what it owes of this period stays."""
        self._advance(now)
        account = self._loaded.pop(instance, None)
        if account is not None:
            self._left.append(account)

    def used(self, instance: str, busy: Mapping[str, float]) -> None:
        """An instance computed so many seconds for these apps; the last one named owns it from now on."""
        account = self._loaded.get(instance)
        if account is None:
            return
        for app, seconds in busy.items():
            account.busy[app] = account.busy.get(app, 0.0) + seconds
            account.owner = app

    def close(self, now: float) -> list[CostEvent]:
        """The rows of the period that ends now; the next one begins."""
        self._advance(now)
        seconds = self._at - self._opened
        rows = [row for account in (*self._left, *self._loaded.values()) for row in self._rows(account)]
        if seconds > 0:
            idle = seconds * self.price_per_s - fsum(row.cost for row in rows)
            rows.append(self._row(None, None, seconds, 0.0, max(0.0, idle)))
        self._opened = self._at
        self._left.clear()
        for account in self._loaded.values():
            account.seconds = account.weighted = 0.0
            account.busy = {}
        return rows

    def _advance(self, now: float) -> None:
        elapsed = now - self._at
        if elapsed <= 0:
            return
        self._at = now
        crowd = max(1.0, fsum(account.share for account in self._loaded.values()))
        for account in self._loaded.values():
            account.seconds += elapsed
            account.weighted += elapsed * account.share / crowd

    def _rows(self, account: Account) -> list[CostEvent]:
        """An instance's period, split among the apps by the time it computed for them; else its owner's alone."""
        if account.seconds <= 0 and not account.busy:
            return []
        cost = account.weighted * self.price_per_s
        total = fsum(account.busy.values())
        if total <= 0:
            return [self._row(account.record, account.owner, account.seconds, 0.0, cost)]
        # The quotient first: tiny times lose nothing in it.
        parts = {app: busy / total for app, busy in account.busy.items()}
        return [
            self._row(account.record, app, account.seconds * part, account.busy[app], cost * part)
            for app, part in parts.items()
        ]

    def _row(
        self, record: VariantRecord | None, app: str | None, seconds: float, busy: float, cost: float
    ) -> CostEvent:
        return CostEvent(
            time=self._at,
            seconds=seconds,
            worker=self._worker,
            hardware=self._kind,
            app=app,
            model=record.model if record else None,
            variant=record.variant if record else None,
            busy_seconds=busy,
            cost=cost,
            simulated=self._simulated,
        )
