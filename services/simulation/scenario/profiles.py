"""A variant's profile from the speed that a scenario states.

There are three ways to state it, all in ms of one batch:

    batch_latency_ms       by batch size: linear between, constant below the smallest, a fitted line beyond the largest (as measured profiles)
    base_ms, per_item_ms   a batch of n takes base_ms + per_item_ms x n
    latency_ms alone       every batch takes so long. Without max_batch, the largest batch follows from saturation_qps: as many items as
                           an instance needs to serve so much, one batch at a time; else 1

latency_ms beside one of the first two is a planning file's figure, of no particular batch. It has no effect here.
The default of saturation_qps is that of the best batch, one batch at a time.
"""

from math import ceil
from typing import NamedTuple

from bus.messages.catalog import Profile, ProfileRow
from services.core.cost import latency_ms
from services.core.emulation import PROVENANCE
from services.simulation.scenario.toml import Location, TomlTable, number_at, shown

KEYS = ("latency_ms", "batch_latency_ms", "base_ms", "per_item_ms", "max_batch", "saturation_qps", "load_s")
LARGEST_BATCH = 65536
_LONGEST_MS = 1e9
_MOST_QPS = 1e9
_TOLERANCE = 1.25  # factor by which a stated saturation_qps may exceed the table's


class Speed(NamedTuple):
    """A profile, and the variant's largest batch."""

    profile: Profile
    max_batch: int


def speed_of(block: TomlTable, memory_mb: float) -> Speed:
    """The speed in a [[variant]] block. Raises ScenarioError for what is impossible."""
    stated = block.maybe("saturation_qps", most=_MOST_QPS, above=True)
    points = _points(block, stated)
    largest = block.whole("max_batch", max(points), 1, LARGEST_BATCH)
    rows = [ProfileRow(batch=n, p50_ms=ms, p99_ms=ms, cpu_ms=ms, wall_over_cpu=1.0) for n, ms in sorted(points.items())]
    best = max(1000.0 * n / latency_ms(rows, n) for n in {1, largest, *(n for n in points if n <= largest)})
    if stated is not None and stated >= _TOLERANCE * best:
        block.at("saturation_qps").refuse(
            f"{stated:g} queries/s is more than the best batch can do ({best:.4g}, one batch at a time): "
            "leave it out to have it derived, or correct the latencies or max_batch"
        )
    load_ms = 1000.0 * block.number("load_s", 0.0, most=1e6)
    return Speed(
        Profile(
            rows=rows,
            load_ms=load_ms,
            memory_mb=memory_mb,
            saturation_qps=best if stated is None else stated,
            provenance=PROVENANCE,
        ),
        largest,
    )


def _points(block: TomlTable, stated: float | None) -> dict[int, float]:
    """Batch size to ms. stated: saturation_qps, if the block has it."""
    ways = [way for way in ("batch_latency_ms", "base_ms") if way in block]
    if "per_item_ms" in block and "base_ms" not in block:
        block.at("base_ms").refuse("is missing: per_item_ms comes on top of it")
    if len(ways) > 1:
        block.at("base_ms").refuse("says the same as batch_latency_ms: leave one of them out")
    flat = block.maybe("latency_ms", most=_LONGEST_MS, above=True)
    if not ways:
        if flat is None:
            block.at("latency_ms").refuse(
                "is missing: say how long a batch takes, by latency_ms, batch_latency_ms, or base_ms and per_item_ms"
            )
        size = 1 if stated is None else ceil(stated * flat / 1000.0 - 1e-6)
        if size > LARGEST_BATCH:
            block.at("saturation_qps").refuse(f"needs batches of {size:.3g}: the most is {LARGEST_BATCH}")
        largest = block.whole("max_batch", max(1, size), 1, LARGEST_BATCH)
        return dict.fromkeys((1, largest), flat)
    if ways == ["base_ms"]:
        base, per_item = _line(block)
        sizes = (1, block.whole("max_batch", 1, 1, LARGEST_BATCH))
        return {n: base + per_item * n for n in sizes}
    return _table(block)


def _line(block: TomlTable) -> tuple[float, float]:
    base = block.number("base_ms", most=_LONGEST_MS)
    per_item = block.number("per_item_ms", 0.0, most=_LONGEST_MS)
    if base + per_item <= 0:
        block.at("base_ms").refuse("must be above 0, or per_item_ms must be: no batch takes no time")
    return base, per_item


def _table(block: TomlTable) -> dict[int, float]:
    location = block.at("batch_latency_ms")
    points: dict[int, float] = {}
    for key, value in block.table("batch_latency_ms").items():
        size = _size(key, location)
        if size in points:
            location.at(key).refuse(f"batch size {size} occurs twice")
        points[size] = number_at(value, location.at(key), most=_LONGEST_MS, above=True)
    if not points:
        location.refuse("must name at least one batch size, as { 1 = 15.0, 8 = 22.0 }")
    before = 0
    for size in sorted(points):
        if before and points[size] < points[before]:
            location.at(str(size)).refuse(
                f"{points[size]:g} ms is less than a batch of {before} takes ({points[before]:g} ms): "
                "a larger batch never takes less"
            )
        before = size
    return points


def _size(key: str, location: Location) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 5 and 1 <= int(key) <= LARGEST_BATCH):
        location.at(key).refuse(f"must be a batch size from 1 to {LARGEST_BATCH}, not {shown(key)}")
    return int(key)
