"""Batches under way on one device: each takes as many cores as its variant has threads, and no instance runs two at once."""

from collections.abc import Iterable

from bus.messages.jobs import OFFLINE
from services.core.actor import Do
from services.executor.instances import Loaded
from services.executor.work import RunBatch, Work


class Runs:
    """cores: of the device; inline_below_s: a batch predicted to be shorter runs on the loop itself."""

    def __init__(self, cores: int, inline_below_s: float) -> None:
        self.under_way: dict[int, tuple[Loaded, RunBatch]] = {}
        self.starved = False  # an instance waits for cores
        self._cores = cores
        self._busy = 0
        self._inline_below = inline_below_s
        self._number = 0

    def ready(self, instances: Iterable[Loaded]) -> list[Loaded]:
        """Instances that could begin a batch, the one with the most urgent query first."""
        self.starved = False
        found = [loaded for loaded in instances if loaded.ready and not loaded.running and len(loaded.queue)]
        if len(found) > 1:
            found.sort(key=lambda loaded: loaded.queue.most_urgent)
        return found

    def _needed(self, loaded: Loaded) -> int:
        return max(1, min(loaded.record.threads, self._cores))

    def has_room(self, loaded: Loaded) -> bool:
        """Whether enough cores are free for this instance; remembered when not."""
        if self._busy + self._needed(loaded) <= self._cores:
            return True
        self.starved = True
        return False

    def begin(self, loaded: Loaded, batch: list[Work]) -> Do:
        items = sum(work.items for work in batch)
        predicted = loaded.table.at(batch[0].route.length).seconds(items) * loaded.queue.factor
        self._number += 1
        inline = predicted < self._inline_below and not batch[0].route.alone
        if inline and any(work.route.fallback for work in batch):
            inline = False  # a default is due at its time, also when a run takes far longer than it ever did
        run = RunBatch(loaded.id, batch, predicted, inline)
        loaded.running = True
        loaded.running_items = items
        loaded.running_offline = batch[0].route.policy == OFFLINE
        self._busy += self._needed(loaded)
        self.under_way[self._number] = (loaded, run)
        return Do(self._number, run)

    def end(self, number: int) -> tuple[Loaded, RunBatch] | None:
        """Free the cores; None when this batch is not under way."""
        entry = self.under_way.pop(number, None)
        if entry is not None:
            loaded = entry[0]
            loaded.running = False
            loaded.running_items = 0
            self._busy -= self._needed(loaded)
        return entry
