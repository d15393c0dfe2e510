"""The cost of instances and queries, and the predicted latency of a batch. All code uses these definitions.

Money is US$. `prices` maps a device kind to US$ per hour (services/core/prices.toml, read by services/shell/prices.py). The price is
per core for the kinds in PER_CORE, per instance for a remote engine, and per whole device for all others.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import exp2
from typing import Literal

from bus.messages.catalog import ProfileRow, Signature, VariantRecord
from bus.messages.fleet import DeviceStatus
from services.core.placement import REMOTE, is_container

PER_CORE = frozenset({"cpu", "inferentia"})
OF_CONTAINERS = "cpu"  # the kind whose price, of one core, a user's own process has
# The overhead of a batch and of a load. A profile excludes it, since it measures the model alone, in a process that does nothing else.
# Measured over models of 5 to 60 µs at 50 to 500 queries/s: 0.05 to 0.07 ms for a batch (gathering inputs, splitting outputs,
# cold caches); 30 to 45 ms for a load (orders, fetching the file, the framework's first session).
HANDLING_MS = 0.05
LOADING_S = 0.05
PROMOTING_S = 0.01  # the same for an instance whose model is in host memory: there is no file and no session to make
KNOWN_S = 5.0  # for which a live correction holds without a batch
LENGTHS = 64  # how many tables of other lengths each table keeps


class UnknownPrice(ValueError):
    """A device kind has no price. The text names the setting that is missing."""


def listed_as(kind: str, prices: Mapping[str, float]) -> str:
    """The kind whose price a device of this kind has: that of a core for a user's own process, unless it has one of its own."""
    return OF_CONTAINERS if kind not in prices and is_container(kind) else kind


def price_per_hour(kind: str, prices: Mapping[str, float], cores: int = 1) -> float:
    """US$ per hour of a whole device with `cores` cores. Raises UnknownPrice."""
    kind = listed_as(kind, prices)
    try:
        price = prices[kind]
    except KeyError:
        raise UnknownPrice(f"no price for device kind {kind!r}: set prices.per_hour.{kind}, in US$ per hour") from None
    return price * cores if kind in PER_CORE else price


def cores_of(record: VariantRecord) -> float:
    """How many cores of its device an instance uses while it computes. A GPU runs one batch at a time, so it counts as one core."""
    return float(max(1, record.threads)) if record.hardware in PER_CORE else 1.0


def pays_whole(kind: str) -> bool:
    """Whether each instance on a device of this kind costs the device's whole price."""
    return kind == REMOTE or is_container(kind)


def machine_price(devices: Iterable[DeviceStatus]) -> float:
    """US$ per hour of a machine with these devices, whatever is loaded. A remote engine costs nothing but its instances."""
    return sum(device.price_per_hour for device in devices if device.kind != REMOTE)


def device_share(record: VariantRecord, device_cores: int, device_memory_mb: float) -> float:
    """The share of a device that one instance occupies, 0..1. It is the larger of its share of cores and its share of memory.

    Threads count only on devices that are priced per core. On a GPU, threads run on the host. A user's own process is the whole device. An
    instance of a remote engine pays the whole price, too.
    """
    if pays_whole(record.hardware):
        return 1.0
    memory = record.profile.memory_mb / device_memory_mb if device_memory_mb > 0 else 0.0
    cores = record.threads / device_cores if device_cores > 0 and record.hardware in PER_CORE else 0.0
    return min(1.0, max(memory, cores))


def instance_price_per_s(
    record: VariantRecord, prices: Mapping[str, float], device_cores: int, device_memory_mb: float
) -> float:
    """US$ per second of one loaded instance. It is the price in its record, else its share of the device times the device's price.

    Raises UnknownPrice.
    """
    if record.price_per_s is not None:
        return record.price_per_s
    share = device_share(record, device_cores, device_memory_mb)
    return share * price_per_hour(record.hardware, prices, device_cores) / 3600.0


def latency_ms(profile: VariantRecord | Iterable[ProfileRow], batch: int, length: int | None = None) -> float:
    """The predicted latency of one batch of `batch` items, in milliseconds. It is based on the measured medians.

    Between measured batch sizes it is linear. Below the smallest, it is that of the smallest. Above the largest, it rises from there with the
    slope of the line fitted to all measured sizes (least squares), or in proportion if only one was measured. A larger batch never counts
    as faster than a smaller one.

    length: the length of the variable axis. The next longer measured bucket gives the latency. Above the longest bucket, the latency is
    proportional to the length. Without a length, the longest bucket gives it.
    Raises ValueError if nothing was measured, or if the batch is below 1.
    """
    rows = profile.profile.rows if isinstance(profile, VariantRecord) else list(profile)
    if batch < 1:
        raise ValueError(f"batch must be at least 1, not {batch}")
    points, scale = _points(rows, length)
    return _interpolate(points, _slope(points), batch) * scale


def cost_per_1000(record: VariantRecord, price_per_s: float, batch: int = 1) -> float:
    """US$ for 1,000 items in batches of this size: the cost of their queries (`query_cost`), as the profile predicts it."""
    return price_per_s * (latency_ms(record, batch) + HANDLING_MS) / batch


def load_seconds(record: VariantRecord, *, warm: bool = False) -> float:
    """The predicted time from the order to load a variant until it can answer, in seconds. warm: its model is in host memory."""
    profile = record.profile
    if warm and profile.transfer_ms is not None:
        return profile.transfer_ms / 1000.0 + PROMOTING_S
    return profile.load_ms / 1000.0 + LOADING_S


def query_cost(price_per_s: float, busy_seconds: float, items_in_batch: int, items: int) -> float:
    """The cost of one query in US$. A query pays for its items' share of the time for which its batch kept the instance busy."""
    return price_per_s * busy_seconds * items / items_in_batch


def remembered(factor: float, idle_s: float) -> float:
    """A live correction of the profile, so many seconds after the last batch. One above 1 is halved each second after `KNOWN_S`.

    Queries that would be late by it are refused, and then no batch can show that what slowed them down is over.
    """
    if factor <= 1.0 or idle_s <= KNOWN_S:
        return factor
    return 1.0 + (factor - 1.0) * exp2(KNOWN_S - idle_s)


class LatencyTable:
    """`latency_ms` of one variant, in seconds, precomputed for every batch size up to its largest (for hot paths).

    length: the length of the variable axis; None = the longest measured one. `at` gives the tables for other lengths.
    by_size: seconds of a batch of 0, 1, ... max_batch items. tail_s: that a single item of a cascade may take beyond the mean, which its profile has
    as the median: those of its second part; else 0.
    """

    __slots__ = ("_at", "_dearest", "_record", "by_size", "max_batch", "tail_s")

    def __init__(self, record: VariantRecord, length: int | None = None) -> None:
        """Raises ValueError if nothing was measured."""
        points, scale = _points(record.profile.rows, length)
        slope = _slope(points)
        self._record = record
        self._at: dict[int, LatencyTable] = {}
        self._dearest: list[float] | None = None
        first = min(record.profile.rows, key=lambda row: row.batch)
        self.tail_s = 0.0 if record.cascade is None else (first.p99_ms - first.p50_ms) / 1000.0
        self.max_batch = max(1, record.max_batch)
        seconds = (_interpolate(points, slope, n) * scale / 1000.0 for n in range(1, self.max_batch + 1))
        self.by_size = [0.0, *accumulate(seconds, max)]  # max: bisect needs a sorted list, whatever the rounding

    def seconds(self, n: int) -> float:
        """The predicted time to compute n items, in seconds: as one batch, or in pieces of the largest batch if there are more."""
        if n <= self.max_batch:
            return self.by_size[n]
        return self.by_size[-1] * n / self.max_batch

    def charged_seconds(self, n: int) -> float:
        """Seconds of an instance that a query of n items is charged for at most (`query_cost`): alone in its batch, or in whichever is dearest.

        One of more items than a batch holds runs in pieces. `HANDLING_MS` counts for each batch.
        """
        handling = HANDLING_MS / 1000.0
        if self._dearest is None:  # for each size, the most seconds an item of batches of at least that size
            each = ((self.by_size[size] + handling) / size for size in range(self.max_batch, 0, -1))
            self._dearest = [0.0, *reversed([*accumulate(each, max)])]
        if n <= self.max_batch:
            return n * self._dearest[n]
        full, rest = divmod(n, self.max_batch)
        pieces = full + (rest > 0)
        return full * self.by_size[-1] + self.by_size[rest] + pieces * handling

    def at(self, length: int | None) -> "LatencyTable":
        """The table for inputs of this length. For a model with fixed lengths, it is this table."""
        if length is None:
            return self
        table = self._at.get(length)
        if table is None:
            table = self if self._record.profile.rows[0].length is None else LatencyTable(self._record, length)
            if len(self._at) >= LENGTHS:
                self._at.clear()
            self._at[length] = table
        return table

    def largest_batch_within(self, seconds: float) -> int:
        """The largest batch size, up to max_batch, that is predicted to take no longer than `seconds`. 0 if one item takes longer."""
        return max(0, bisect_right(self.by_size, seconds) - 1)


def bucket_of(length: int, measured: Sequence[int]) -> int:
    """A length rounded up to a measured length. Above the longest measured length, it is rounded up to a multiple of a quarter of that."""
    found = bisect_left(measured, length)
    if found < len(measured):
        return measured[found]
    step = max(1, measured[-1] // 4)
    return -(-length // step) * step


def open_axis(signature: Signature | None) -> tuple[str, int] | None:
    """The axis whose length selects the profile's bucket: (name of the input, index of the axis). None if all lengths are fixed.

    It is the first variable axis of the first input that has one. The index counts the batch axis.
    """
    for spec in signature.inputs if signature is not None else ():
        if -1 in spec.shape:
            return spec.name, spec.shape.index(-1) + 1
    return None


def _points(rows: list[ProfileRow], length: int | None) -> tuple[list[tuple[int, float]], float]:
    """The rows of the length bucket that is used, as (batch, ms) in rising order of both, and a factor for these latencies."""
    if not rows:
        raise ValueError("the profile has no measured rows")
    buckets = sorted({row.length for row in rows if row.length is not None})
    scale = 1.0
    bucket = None
    if buckets:
        bucket = next((b for b in buckets if length is not None and b >= length), buckets[-1])
        if length is not None and length > bucket > 0:
            scale = length / bucket
    points: list[tuple[int, float]] = []
    slowest = 0.0
    for row in sorted((row for row in rows if row.length == bucket), key=lambda row: row.batch):
        slowest = max(slowest, row.p50_ms)
        points.append((row.batch, slowest))
    return points, scale


def _interpolate(points: list[tuple[int, float]], slope: float, batch: int) -> float:
    """The latency of a batch in ms. slope: beyond the last point, in ms an item."""
    at = bisect_right(points, batch, key=lambda point: point[0])
    if at == 0:
        return points[0][1]
    low, low_ms = points[at - 1]
    if at == len(points):
        return low_ms + slope * (batch - low)
    high, high_ms = points[at]
    return low_ms + (high_ms - low_ms) * (batch - low) / (high - low)


def _slope(points: list[tuple[int, float]]) -> float:
    """The slope in ms an item of the line with the least squared errors, which rises as the points do. Of a single size, its ms for each item."""
    if points[0][0] == points[-1][0]:
        return points[0][1] / points[0][0]
    batch = sum(size for size, _ in points) / len(points)
    mean_ms = sum(ms for _, ms in points) / len(points)
    spread = sum((size - batch) ** 2 for size, _ in points)
    return max(0.0, sum((size - batch) * (ms - mean_ms) for size, ms in points) / spread)


# -- The goal of selection, planning and scaling: the least cost, or the highest accuracy

Goal = Literal["cost", "accuracy"]


def merit(accuracy: float | None) -> float:
    """The value of an accuracy if accuracy is the goal. An accuracy that was not measured counts as 0."""
    return 0.0 if accuracy is None else accuracy
