"""One loaded model as the executor's actor sees it: its queue, what it is doing, and what it has measured since the last report."""

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import AppSample, InstanceSample
from bus.messages.flow import Route
from bus.messages.jobs import OFFLINE
from services.core.cost import LatencyTable
from services.executor.policy import EdfQueue
from services.executor.tally import BatchTally


class Loaded:
    """An instance. ready: its model is loaded; running: a batch is being computed; leaving: it unloads once empty."""

    __slots__ = (
        "_apps", "_batches", "_busy", "_items", "_offline", "_predicted", "id", "leaving", "price_per_s", "queue", "ready", "record",
        "running", "running_items", "running_offline", "table", "tally",
    )  # fmt: skip

    def __init__(
        self, instance: str, record: VariantRecord, price_per_s: float, tally: BatchTally | None = None
    ) -> None:
        self.id = instance
        self.record = record
        self.price_per_s = price_per_s
        self.table = LatencyTable(record)
        self.queue = EdfQueue(self.table, max(1, record.max_batch))
        self.ready = False
        self.running = False
        self.running_items = 0
        self.running_offline = False
        self.leaving = False
        self.tally = tally or BatchTally()
        self._reset()

    def _reset(self) -> None:
        self._items = 0
        self._offline = 0
        self._batches = 0
        self._busy = 0.0
        self._predicted = 0.0
        self._apps: dict[str, list[float]] = {}

    @property
    def queued(self) -> int:
        """Items that a query which comes now may have to wait for: waiting or running, without waiting offline work."""
        return self.queue.items - self.queue.offline + self.running_items

    def measured(self, items: int, seconds: float, length: int | None = None) -> None:
        """One batch was computed; the live factor follows slowly (it also corrects this queue's own predictions)."""
        predicted = self.table.at(length).seconds(items)
        self._items += items
        self._batches += 1
        self.tally.add(items, seconds)
        self._busy += seconds
        self._predicted += predicted
        if predicted > 0:
            ratio = min(5.0, max(0.2, seconds / predicted))
            self.queue.factor += 0.02 * (ratio - self.queue.factor)

    def served(self, route: Route, items: int, latency: float, *, error: bool) -> None:
        """One query ended after `latency` seconds."""
        slo = route.deadline - route.arrived
        if route.policy == OFFLINE:  # it has time, and says nothing of what the app's queries need
            self._offline += items
            slo = 0.0
        sample = self._apps.get(route.app)
        if sample is None:
            sample = self._apps[route.app] = [0.0, 0.0, 0.0, 0.0, slo]
        sample[4] = sample[4] or slo
        sample[0] += items
        sample[1] += latency * items
        if latency > sample[2]:
            sample[2] = latency
        if error:
            sample[3] += 1

    def sample(self, now: float) -> InstanceSample:
        """What was measured since the last call."""
        oldest = self.queue.oldest()
        apps = [
            AppSample(app, int(n), total, worst, int(bad), slo)
            for app, (n, total, worst, bad, slo) in self._apps.items()
        ]
        sample = InstanceSample(
            self.id,
            self.record.variant,
            self.queued - (self.running_items if self.running_offline else 0),
            now - oldest if oldest is not None else 0.0,
            self._items,
            self._batches,
            self._busy,
            self._predicted,
            apps,
            self._offline,
        )
        self._reset()
        return sample
