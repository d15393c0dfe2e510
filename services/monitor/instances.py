"""One instance of a worker: its state for each app, and what its executor measured lately. Pure."""

from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from bus.fields import filled
from bus.messages.catalog import VariantRecord
from bus.messages.fleet import InstanceSample, InstanceStatus, State, Tier
from services.core.cost import latency_ms, load_seconds, remembered
from services.core.lifecycle import SERVING, Observed, Thresholds, judge, thresholds_for
from services.core.placement import Amount, cores_needed

WINDOW = 1.0  # s over which loads and latencies are averaged (the published code's period)
KEPT = 5.0  # s for which reports are kept: for latencies of instances that serve little, and an app counts as a user so long
GAIN = 0.05  # weight of one full report in the live correction, which so follows the last 10 s or so
BACKLOG_GAIN = 0.3  # weight of a report during which work was always waiting
FULL_REPORT = 8  # batches that make a report count in full
FACTORS = (0.2, 5.0)  # bounds of the live correction

StateChange = tuple[str | None, State, State, str]  # app, from, to, reason


def busy_by_app(sample: InstanceSample) -> dict[str, float]:
    """Seconds that an instance computed for each app, in proportion to the app's items: queries of a batch share its time."""
    return _shared(sample.busy, {app.app: app.items for app in sample.apps})


def busy_by_payer(sample: InstanceSample) -> dict[str, float]:
    """The same by the app that pays: for a visit of a stage, the pipeline that a client asked."""
    items: dict[str, int] = {}
    for app in sample.apps:
        others = sample.payers.get(app.app, {})
        for payer, count in (*others.items(), (app.app, app.items - sum(others.values()))):
            items[payer] = items.get(payer, 0) + count
    return _shared(sample.busy, items)


def _shared(busy: float, items: Mapping[str, int]) -> dict[str, float]:
    whole = sum(items.values())
    return {app: busy * count / whole for app, count in items.items() if count > 0}


class Recent(NamedTuple):
    """Reports of an instance, added up. online: items of queries, without offline work. waiting: mean length of the queue."""

    seconds: float
    items: int
    online: int
    batches: int
    busy: float
    predicted: float
    offline_busy: float
    waiting: float
    computed: float


class MonitoredInstance:
    """One variant loaded, loading or unloading on one device, or in host memory for it (Warm).

    apps: the state for each app that uses it; None: for no app. owner: the app that it was loaded for, or that used it last.
    factor: measured over profiled time of a batch, slowly moving. ordered: when its load was ordered. unlisted: reports in a row
    without it. met: its executor has said that it has it. cores: those that it is pinned to; empty: any. move_after: it may be moved again from then on. replaces: the
    instance that is unloaded once this one serves. reclaimable: nobody needs it; it serves until its place is needed. batching,
    batch_limit: the policy that forms its batches, and their most items now; 0: the variant's largest. contexts: batches at a time.

    on_device, in_host: what it takes, or has been promised, there. goes: where its load or unload ends; None: nowhere. wanted: why it is
    brought from host memory to the device, once it is there and there is room; empty: it is not. host_mb: of host memory while it is Warm;
    None: it cannot be. copied: it is on the device, and host memory has its model, too. dropping: that copy was ordered to go. used: a batch has begun since it is on the device. loaded_at: since when it is there. busy_until: when what it computed at the last report is
    over, by its profile; infinite if more waited then.
    """

    def __init__(
        self, instance: str, record: VariantRecord, device: str, state: State, now: float, app: str | None = None
    ) -> None:
        self.id = instance
        self.record = record
        self.device = device
        self.state: State = state
        self.since = self.loaded_at = now
        self.memory_mb = record.profile.memory_mb
        self.owner = app
        self.apps: dict[str | None, State] = {app: state}
        self.factor = 1.0
        self.queued = 0
        self.levels: dict[int, int] = {}
        self.busy_until = 0.0
        self.last_used = now
        self.ordered: float | None = None
        self.unlisted = 0
        self.met = False
        self.cores: list[int] = []
        self.move_after = 0.0
        self.replaces: str | None = None
        self.reclaimable = False
        self.on_device = state in SERVING
        self.in_host = state == "Warm"
        self.copied = self.dropping = False
        self.goes: Tier | None = "device" if state == "Loading" else None
        self.wanted = ""
        self.host_mb = record.profile.host_mb
        self.used = False
        self.batching = record.batching
        self.batch_limit = 0
        self.contexts = 1
        self._reports: deque[tuple[float, float, InstanceSample]] = deque()
        self._sums: Recent | None = None
        self._computing: float | None = None
        self._app_seen: dict[str, tuple[float, float]] = {}  # app -> time of its last items, its SLO then

    @property
    def takes(self) -> Amount:
        """What it takes of its device: of a CPU's cores what it is measured to use."""
        cores = cores_needed(self.record)
        if self.record.hardware == "cpu":
            cores *= self.computing
        return Amount(self.memory_mb, cores, 1.0)

    @property
    def takes_of_host_mb(self) -> float:
        """Host memory that its model takes or has been promised. A copy that goes still takes its part."""
        return (self.host_mb or 0.0) * (self.in_host + self.copied)

    @property
    def counts(self) -> bool:
        """Whether it serves, or will: its room on the device is promised."""
        return self.state in SERVING or (self.state == "Loading" and self.goes == "device") or bool(self.wanted)

    @property
    def waits(self) -> bool:
        """Whether its load on the device has not been ordered yet."""
        if self.state == "Warm":
            return bool(self.wanted)
        return self.state == "Loading" and self.goes == "device" and self.ordered is None

    # -- state

    def move(self, to: State, reason: str, now: float) -> list[StateChange]:
        """Change the state of the instance for every app. Returns the changes."""
        changes: list[StateChange] = [(app, old, to, reason) for app, old in self.apps.items() if old != to]
        self.apps = dict.fromkeys(self.apps, to)
        if self.state != to:
            if to == "Active" and self.state not in SERVING:
                self.loaded_at, self._computing = now, None
            self.state, self.since = to, now
        return changes

    def observe(self, sample: InstanceSample, seconds: float, now: float) -> list[StateChange]:
        """Add a report. Returns the apps that are new here, as changes from Inactive."""
        self._sums = self._computing = None
        known_at = self.last_used
        self._reports.append((now, seconds, sample))
        while now - self._reports[0][0] >= KEPT:
            self._reports.popleft()
        # One query may be more items than a batch: only if others waited as well, both times, it has worked on.
        backlog = self.busy_until == inf and sample.oldest_wait > 0
        waited = min(self.queued, sample.queued) if backlog else 0
        self.queued, self.levels = sample.queued, sample.levels
        self.batching, self.batch_limit, self.contexts = sample.batching, sample.batch_limit, sample.contexts
        changes: list[StateChange] = []
        for app in sample.apps:
            if app.items <= 0:
                continue
            self._app_seen[app.app] = (now, app.slo_s)
            self.owner = app.app
            if app.app not in self.apps:
                self.apps[app.app] = self.state
                changes.append((app.app, "Inactive", self.state, "this app's first items here"))
        self.used = self.used or sample.items > 0 or sample.begun >= self.since
        self.busy_until = 0.0
        if sample.oldest_wait > 0:
            self.busy_until = inf
        elif sample.queued > 0:
            self.begins(max(now, sample.begun))
        if sample.oldest_wait > 0 or (sample.queued > 0 and not sample.begun):
            self.last_used = now
        elif sample.items > 0 or sample.queued > 0:
            self.last_used = max(self.last_used, sample.begun or now)
        if sample.predicted > 0 and sample.busy > 0 and sample.batches > 0:
            gain, spent = GAIN * min(1.0, sample.batches / FULL_REPORT), sample.busy
            if waited >= max(2, self.batch_limit or self.record.max_batch):
                # More than the batch that is being computed was waiting, so it worked all the time: this is its full speed.
                gain, spent = BACKLOG_GAIN, max(seconds, spent)
            low, high = FACTORS
            self.factor = remembered(self.factor, now - seconds - known_at)
            self.factor += gain * (min(high, max(low, spent / sample.predicted)) - self.factor)
        return changes

    def forget(self, gone: Callable[[str], bool]) -> None:
        """Keep nothing of apps that were deleted: an instance of others may outlive many."""
        self.apps = {app: state for app, state in self.apps.items() if app is None or not gone(app)} or {
            None: self.state
        }
        self._app_seen = {app: seen for app, seen in self._app_seen.items() if not gone(app)}
        self.owner = None if self.owner is None or gone(self.owner) else self.owner

    def begins(self, now: float) -> None:
        """What was queued at the last report is computed from now on."""
        seconds = latency_ms(self.record, self.queued) * max(1.0, self.factor) / 1000.0 if self.queued else 0.0
        self.busy_until = now + seconds

    def moved(self, cores: list[int], now: float, reason: str) -> list[StateChange]:
        """It runs on other cores now, so earlier measurements are dropped. Returns the changes of state."""
        self.cores = cores
        self.factor = 1.0
        self._reports.clear()
        self._sums = self._computing = None
        return self.move("Active", reason, now) if self.state in SERVING else []

    def judge(self, given: Thresholds, instances: int, now: float) -> list[StateChange]:
        """Judge the instance, and for each app that uses it by the app's SLO. Returns the changes.

        instances: instances of its variant on this worker, itself included.
        """
        if self.state not in SERVING or not self._reports:
            return []
        changes: list[StateChange] = []
        seen = self._observed(given)
        limits = thresholds_for(self.record.hardware, seen.profiled_s, instances, given)
        state, reason = judge(self.state, seen, limits)
        if state != self.state:
            self.state, self.since = state, now
        for app, old in self.apps.items():
            seen_at, slo = self._app_seen.get(app or "", (float("-inf"), 0.0))
            if now - seen_at < KEPT:
                new, why = judge(old, seen, limits, slo)
            else:
                new, why = self.state, reason or "this app sends nothing any more"
            if new != old:
                changes.append((app, old, new, why))
                self.apps[app] = new
        return changes

    def _observed(self, limits: Thresholds) -> Observed:
        items, predicted, busy, batches = 0, 0.0, 0.0, 0
        newest = self._reports[-1][0]
        for at, _, sample in reversed(self._reports):
            if newest - at >= WINDOW and items >= limits.least_items:
                break
            items, batches = items + sample.items, batches + sample.batches
            predicted, busy = predicted + sample.predicted, busy + sample.busy
        saturation = self.record.profile.saturation_qps
        slowness = self.factor
        if self.contexts > 1:  # full is when all contexts always compute, at the present speed
            slowness = busy / predicted if predicted > 0 else 1.0
            saturation, slowness = saturation * self.contexts / max(1.0, slowness), min(1.0, slowness)
        backlog = self._recent().waiting
        return Observed(
            load=self.load,
            saturation=saturation,
            backlog_s=backlog * slowness / saturation if saturation > 0 else 0.0,
            latency_s=busy / batches if batches else 0.0,
            profiled_s=predicted / batches if batches else 0.0,
            items=items,
        )

    # -- figures

    def slo_s(self, app: str | None) -> float:
        """The latency objective of an app's last items here, in seconds; 0: unknown."""
        return self._app_seen.get(app or "", (0.0, 0.0))[1]

    def _recent(self) -> Recent:
        """The reports of the last `WINDOW`, added up."""
        found = self._sums
        if found is None:
            seconds = busy = predicted = offline_busy = computed = 0.0
            items = online = batches = queued = count = 0
            newest = self._reports[-1][0] if self._reports else 0.0
            for at, period, sample in reversed(self._reports):
                if newest - at >= WINDOW:
                    break
                count += 1
                seconds += period
                items += sample.items
                online += sample.items - sample.offline
                batches += sample.batches
                busy += sample.busy
                computed += sample.computed
                predicted += sample.predicted
                queued += sample.queued
                if sample.offline and sample.items > 0:
                    offline_busy += sample.busy * sample.offline / sample.items
            waiting = queued / count if count else 0.0  # the mean, since one reading of a queue says little
            found = self._sums = Recent(
                seconds, items, online, batches, busy, predicted, offline_busy, waiting, computed
            )
        return found

    @property
    def load(self) -> float:
        """Items/s served lately, without offline work."""
        recent = self._recent()
        return recent.online / recent.seconds if recent.seconds > 0 else 0.0

    @property
    def utilisation(self) -> float:
        """Share of the time that it computed lately, 0..1."""
        recent = self._recent()
        return min(1.0, recent.busy / recent.seconds) if recent.seconds > 0 else 0.0

    @property
    def computing(self) -> float:
        """Batches that it computes at a time: the mean of the last `KEPT` seconds, or since it is there.

        It is the same time for all instances, so that together they use no more than their device has. A batch counts while it is
        computed, not only when it ends.
        """
        if self._computing is None:
            seconds = busy = computed = 0.0
            for at, period, sample in self._reports:
                if at > self.loaded_at:
                    seconds, busy, computed = seconds + period, busy + sample.busy, computed + sample.computed
            used = computed if computed > 0 and self.contexts == 1 else busy
            self._computing = min(float(self.contexts), used / max(WINDOW, seconds))
        return self._computing

    @property
    def offline_use(self) -> float:
        """Share of the time that it computed offline work lately, 0..1."""
        recent = self._recent()
        return min(1.0, recent.offline_busy / recent.seconds) if recent.seconds > 0 else 0.0

    @property
    def busy_factor(self) -> float:
        """As `factor`, of the time for which an item keeps it busy: the batches of its contexts share that time."""
        recent = self._recent()
        if self.contexts == 1 or recent.computed <= 0:
            return self.factor
        return self.factor / max(1.0, recent.busy / recent.computed)

    @property
    def latency_s(self) -> float:
        """Mean compute seconds of a batch lately; 0: there was none."""
        recent = self._recent()
        return recent.busy / recent.batches if recent.batches else 0.0

    @property
    def profiled_s(self) -> float:
        """The same by its profile, at the batch sizes that ran."""
        recent = self._recent()
        return recent.predicted / recent.batches if recent.batches else 0.0

    @property
    def mean_batch(self) -> float:
        recent = self._recent()
        return recent.items / recent.batches if recent.batches else 0.0

    def by_app(self, after: float) -> list[tuple[str | None, float, float]]:
        """(app, items/s, share of the time that it computed for the app) since then. If idle: the owner alone, with zeros."""
        recent = [(seconds, sample) for at, seconds, sample in self._reports if at > after]
        period = sum(seconds for seconds, _ in recent)
        items: dict[str, int] = {}
        busy: dict[str, float] = {}
        for _, sample in recent:
            for app in sample.apps:
                items[app.app] = items.get(app.app, 0) + app.items
            for name, seconds in busy_by_app(sample).items():
                busy[name] = busy.get(name, 0.0) + seconds
        if period <= 0 or not any(items.values()):
            return [(self.owner, 0.0, 0.0)]
        return [(app, n / period, min(1.0, busy.get(app, 0.0) / period)) for app, n in items.items() if n]

    def status(self, now: float) -> InstanceStatus:
        """As heartbeats carry it."""
        factor = remembered(self.factor, now - self.last_used)
        loads = self.state == "Loading" or self.goes == "host"
        ready = load_seconds(self.record, warm=self.in_host)
        return filled(
            InstanceStatus,
            self,
            instance=self.id,
            variant=self.record.variant,
            factor=factor,
            busy_factor=self.busy_factor * factor / self.factor,
            latency_ms=self.latency_s * 1000.0,
            app_states=self._app_states(),
            ready_at=self.since + ready if loads else 0.0,
        )

    def _app_states(self) -> dict[str, State]:
        """The states for apps that differ from its own; mostly none."""
        own = self.state
        for state in self.apps.values():
            if state != own:
                return {app: state for app, state in self.apps.items() if app is not None and state != own}
        return {}
