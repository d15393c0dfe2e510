"""What this dispatcher was asked for, by requirement class and by the worker that took it: the load that scaling plans for."""

from bus.messages.scaling import ClassDemand, DemandReport
from bus.subjects import Subjects
from services.core.actor import Publish
from services.core.ask import INFINITE
from services.core.demand import fold
from services.dispatcher.query import Query

DISTINCT = 1024  # sets of needs counted apart before they are folded into classes

Key = tuple[str, str, float, float, float, str | None, str | None, str | None]


class Demand:
    """Counts items by needs; a report says what came since the last one."""

    def __init__(self, name: str, subjects: Subjects) -> None:
        self._name = name
        self._subject = subjects.demand(name)
        self._items: dict[Key, int] = {}
        self._folded: list[ClassDemand] = []
        self._since = 0.0
        self._told = False  # the last report named something: say once that it is over

    def came(self, query: Query) -> None:
        """One query was decided on for the first time."""
        ask, on = query.ask, query.instance
        key = (
            ask.app, "" if on is None else on.worker.name,
            ask.latency_s, ask.accuracy, ask.cost, ask.model, ask.version, ask.variant,
        )  # fmt: skip
        items = self._items
        items[key] = items.get(key, 0) + ask.items
        if len(items) > DISTINCT:
            self._fold()

    def report(self, now: float) -> tuple[Publish, ...]:
        """What came since the last report; nothing while there is nothing to tell."""
        self._fold()
        rows, since = self._folded, self._since
        self._folded, self._since = [], now
        if not rows and not self._told:
            return ()
        self._told = bool(rows)
        report = DemandReport(dispatcher=self._name, at=now, seconds=now - since if since else 0.0, rows=rows)
        return (Publish(self._subject, report),)

    def _fold(self) -> None:
        rows = [
            ClassDemand(
                app,
                worker,
                items,
                None if latency == INFINITE else latency * 1000.0,
                accuracy,
                None if cost == INFINITE else cost,
                model,
                version,
                variant,
            )
            for (app, worker, latency, accuracy, cost, model, version, variant), items in self._items.items()
        ]
        self._folded = fold([*self._folded, *rows])
        self._items.clear()
