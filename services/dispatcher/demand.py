"""What a dispatcher does for scaling: it reports demand, and orders loads on demand. Pure."""

from collections import Counter

from msgspec import Struct

from bus.messages.fleet import EnsureLoaded
from bus.messages.scaling import ClassDemand, DemandReport, PipelineArrivals
from bus.subjects import Subjects
from services.core.actor import NOTHING, After, Effect, Publish
from services.core.demand import ANY, Counted, classes
from services.core.pipelines.envelope import BIN_S, REPORT_S
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import INFINITE, Ask
from services.core.selection.policy import LoadOrder
from services.dispatcher.query import Query

DISTINCT = 1024  # sets of needs counted apart before they are folded into classes
FADES = 5.0  # s for which a worker goes on to get empty reports: so far back it looks


Key = tuple[str, float, float, float, str | None, str | None, str | None, bool]


class ArrivalsDue(Struct, frozen=True):
    """Timer: report the arrivals at pipelines."""


class ArrivalsCounter:
    """Counts the queries that come to pipelines with a plan, in bins of 10 ms, for the tuner."""

    def __init__(self, name: str, subjects: Subjects) -> None:
        self._name = name
        self._subject = subjects.pipeline("arrivals")
        self._bins: dict[str, Counter[int]] = {}
        self._asked: dict[str, dict[str, tuple[int, int]]] = {}

    def asked(self, pipeline: str, vertex: str, items: int) -> None:
        """A query asks a vertex for so many items. It is told with the next arrivals."""
        stages = self._asked.setdefault(pipeline, {})
        total, squares = stages.get(vertex, (0, 0))
        stages[vertex] = (total + items, squares + items * items)

    def count(self, pipeline: str, arrived: float) -> tuple[Effect, ...]:
        """A query came. arrived: Unix seconds."""
        first = not self._bins
        self._bins.setdefault(pipeline, Counter())[int(arrived / BIN_S)] += 1
        return (After("arrivals", REPORT_S, ArrivalsDue()),) if first else ()

    def report(self) -> list[Effect]:
        """What came since the last report."""
        reports: list[Effect] = []
        for pipeline, bins in self._bins.items():
            start, end = min(bins), max(bins)
            counts = [bins[i] for i in range(start, end + 1)]
            asked = self._asked.pop(pipeline, {})
            reports.append(Publish(self._subject, PipelineArrivals(self._name, pipeline, start * BIN_S, counts, asked)))
        self._bins = {}
        return reports


class DemandCounter:
    """Counts items by needs, and by the worker that took them.

    Each worker gets a report on what it took, and its part of the rest.
    """

    def __init__(self, name: str, subjects: Subjects) -> None:
        self._name = name
        self._subjects = subjects
        self._subject = subjects.demand(name)
        self._items: dict[Key, dict[str, int]] = {}
        self._folded: list[Counted] = []
        self._since = 0.0
        self._reported = False  # the last report named something: the next one says once that it is over
        self._recipients: dict[str, float] = {}  # workers, and when their report last named something

    def count(self, query: Query, view: ClusterView) -> None:
        """One query was decided on for the first time. Plans know what labels say of an app, and not of a context: where those of its context decide,
        it is demand for the variant that it got, or would have got.
        """
        ask, on = query.ask, query.instance
        new = ask.arm is not None and ask.arm.new
        accuracy, variant = ask.accuracy, ask.variant
        if ask.labels is not None and accuracy and variant is None and ask.app in view.apps:
            known = on or next(iter(view.apps[ask.app].eligibility(ask).first), None)
            if known is not None:
                accuracy, variant = 0.0, known.record.variant
        key = (ask.app, ask.latency_s, accuracy, ask.cost, ask.model, ask.version, variant, new)
        counts = self._items.get(key)
        if counts is None:
            if len(self._items) >= DISTINCT:
                self._fold()
            counts = self._items[key] = {}
        worker = "" if on is None else on.worker.name
        counts[worker] = counts.get(worker, 0) + ask.items

    def report(self, now: float, served: dict[str, tuple[int, int]] | None = None) -> list[Publish]:
        """What came since the last report. Nothing if nothing came. served: as in DemandReport."""
        self._fold()
        found, since = self._folded, self._since
        self._folded, self._since = [], now
        if not found and not served and not self._reported:
            return []
        self._reported = bool(found or served)
        seconds = now - since if since else 0.0
        totals: list[ClassDemand] = []
        rows: dict[str, list[ClassDemand]] = {}
        for needs, counts in found:
            refused = counts.get("", 0)
            taken = sum(counts.values()) - refused
            totals.append(_row(needs, ANY, taken, refused))
            for name, items in counts.items():
                if name:
                    rows.setdefault(name, []).append(_row(needs, name, items, round(refused * items / taken)))
        for name in rows:
            self._recipients[name] = now
        self._recipients = {name: at for name, at in self._recipients.items() if now - at <= FADES}
        whole = DemandReport(dispatcher=self._name, at=now, seconds=seconds, rows=totals, served=served or {})
        reports = [Publish(self._subject, whole)]
        for name in self._recipients:
            report = DemandReport(dispatcher=self._name, at=now, seconds=seconds, rows=rows.get(name, []))
            reports.append(Publish(self._subjects.worker(name, "demand"), report))
        if not found:
            self._recipients.clear()
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
                    new=new,
                ),
                counts,
            )
            for (app, latency, accuracy, cost, model, version, variant, new), counts in self._items.items()
        ]
        self._folded = classes([*self._folded, *fresh])
        self._items = {}


def _row(needs: ClassDemand, worker: str, items: int, refused: int) -> ClassDemand:
    return ClassDemand(
        needs.app, worker, items, needs.latency_ms, needs.accuracy, needs.cost, needs.model, needs.version, needs.variant,
        refused, needs.new,
    )  # fmt: skip


# -- loads on demand

AGAIN = 3.0  # s before an order without effect is repeated


class LoadsOnDemand(Struct, eq=False):
    """The loads that this dispatcher has ordered: each once, until the worker has the variant or refuses it."""

    name: str
    subjects: Subjects
    _at: dict[str, float] = {}

    def order(self, query: Query, load: LoadOrder, now: float) -> tuple[Effect, ...]:
        """The order, for this query. Nothing if the same was given a moment ago."""
        record = load.record
        if now - self._at.get(record.variant, -AGAIN) < AGAIN:
            return NOTHING
        self._at[record.variant] = now
        order = EnsureLoaded(variant=record, at_least=1, app=query.app, orderer=self.name, reason=reason_of(query.ask))
        # The monitor that admits the load records the event.
        return (Publish(self.subjects.worker(load.worker, "load"), order, self.subjects.loads(self.name)),)

    def settled(self, variant: str) -> None:
        """The worker has loaded or refused it: it may be ordered again."""
        self._at.pop(variant, None)


def reason_of(ask: Ask) -> str:
    """Why this variant is loaded, as SQL and the dashboard show it."""
    needs = [ask.variant or ask.model or ""]
    needs += [f"{ask.latency_s * 1000:g} ms"] * (ask.latency_s < INFINITE)
    needs += [f"accuracy {ask.accuracy:g}"] * (ask.accuracy > 0)
    needs += [f"US$ {ask.cost:.6g} per 1,000 queries"] * (ask.cost < INFINITE)
    text = ", ".join(filter(None, needs))
    return f"no instance can do {text}; ready soonest" if text else "no instance can take a query; ready soonest"
