"""What this dispatcher was asked for, by requirement class and by the worker that took it: the load that scaling plans for."""

from collections.abc import Callable, Iterable

from bus.messages.scaling import ClassDemand, DemandReport
from bus.subjects import Subjects
from services.core.actor import Publish
from services.core.ask import INFINITE
from services.core.demand import ANY, Counted, classes
from services.dispatcher.query import Query

DISTINCT = 1024  # sets of needs counted apart before they are folded into classes
FADES = 5.0  # s for which a worker that was told something hears that there is no more of it: so far back it looks

Key = tuple[str, float, float, float, str | None, str | None, str | None]


class Demand:
    """Counts items by needs; a report says what came since the last one. Each worker hears of the apps that concern it."""

    def __init__(self, name: str, subjects: Subjects) -> None:
        self._name = name
        self._subjects = subjects
        self._subject = subjects.demand(name)
        self._items: dict[Key, dict[str, int]] = {}
        self._folded: list[Counted] = []
        self._since = 0.0
        self._told = False  # the last report named something: say once that it is over
        self._hearers: dict[str, float] = {}  # workers, and when there was last something to tell them

    def came(self, query: Query) -> None:
        """One query was decided on for the first time."""
        ask, on = query.ask, query.instance
        key = (ask.app, ask.latency_s, ask.accuracy, ask.cost, ask.model, ask.version, ask.variant)
        counts = self._items.get(key)
        if counts is None:
            if len(self._items) >= DISTINCT:
                self._fold()
            counts = self._items[key] = {}
        worker = "" if on is None else on.worker.name
        counts[worker] = counts.get(worker, 0) + ask.items

    def report(self, now: float, responsible: Callable[[str], Iterable[str]]) -> list[Publish]:
        """What came since the last report; nothing while there is nothing to tell.

        responsible: the workers that hear of an app even when they have taken none of its queries.
        """
        self._fold()
        found, since = self._folded, self._since
        self._folded, self._since = [], now
        if not found and not self._told:
            return []
        self._told = bool(found)
        seconds = now - since if since else 0.0
        by_app: dict[str, list[Counted]] = {}
        for one in found:
            by_app.setdefault(one[0].app, []).append(one)
        totals: list[ClassDemand] = []
        rows: dict[str, list[ClassDemand]] = {}
        for app, ours in by_app.items():
            names = dict.fromkeys(responsible(app))
            for _, counts in ours:
                names.update(dict.fromkeys(counts))
            names.pop("", None)
            hearers = [(name, rows.setdefault(name, [])) for name in names]
            for needs, counts in ours:
                refused = counts.get("", 0)
                taken = sum(counts.values()) - refused
                totals.append(_row(needs, ANY, taken, 0, refused))
                for name, its in hearers:
                    own = counts.get(name, 0)
                    its.append(_row(needs, name, own, taken - own, refused))
        for name in rows:
            self._hearers[name] = now
        self._hearers = {name: at for name, at in self._hearers.items() if now - at <= FADES}
        reports = [Publish(self._subject, DemandReport(dispatcher=self._name, at=now, seconds=seconds, rows=totals))]
        for name in self._hearers:
            report = DemandReport(dispatcher=self._name, at=now, seconds=seconds, rows=rows.get(name, []))
            reports.append(Publish(self._subjects.worker(name, "demand"), report))
        if not found:
            self._hearers.clear()
        return reports

    def _fold(self) -> None:
        fresh = [
            (
                ClassDemand(
                    app,
                    "",
                    0,
                    None if latency == INFINITE else latency * 1000.0,
                    accuracy,
                    None if cost == INFINITE else cost,
                    model,
                    version,
                    variant,
                ),
                counts,
            )
            for (app, latency, accuracy, cost, model, version, variant), counts in self._items.items()
        ]
        self._folded = classes([*self._folded, *fresh])
        self._items = {}


def _row(needs: ClassDemand, worker: str, items: int, others: int, refused: int) -> ClassDemand:
    return ClassDemand(
        needs.app, worker, items, needs.latency_ms, needs.accuracy, needs.cost, needs.model, needs.version, needs.variant,
        others, refused,
    )  # fmt: skip
