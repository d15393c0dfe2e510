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
from typing import Annotated, NamedTuple

from msgspec import Struct

from bus.fields import Number
from bus.messages.catalog import Profile, ProfileRow
from services.core.cost import latency_ms
from services.core.emulation import PROVENANCE
from services.simulation.scenario.toml import Location

LARGEST_BATCH = 65536
_TOLERANCE = 1.25  # factor by which a stated saturation_qps may exceed the table's
_LATENCY = Number(above=0, most=1e9)
_PART = Number(most=1e9)
_BATCH = Number(1, LARGEST_BATCH)


class SpeedBlock(Struct, frozen=True, kw_only=True):
    """What a [[variant]] block says of its speed."""

    latency_ms: Annotated[float | None, _LATENCY] = None
    batch_latency_ms: dict[Annotated[int, _BATCH], Annotated[float, _LATENCY]] | None = None
    base_ms: Annotated[float | None, _PART] = None
    per_item_ms: Annotated[float | None, _PART] = None
    max_batch: Annotated[int | None, _BATCH] = None
    saturation_qps: Annotated[float | None, _LATENCY] = None
    load_s: Annotated[float, Number(most=1e6)] = 0.0


class Speed(NamedTuple):
    """A profile, and the variant's largest batch."""

    profile: Profile
    max_batch: int


def speed_of(block: SpeedBlock, at: Location, memory_mb: float) -> Speed:
    """The speed in a [[variant]] block. at: of the block. Raises ScenarioError for what is impossible."""
    stated, points = block.saturation_qps, _points(block, at)
    largest = block.max_batch or max(points)
    rows = [ProfileRow(batch=n, p50_ms=ms, p99_ms=ms, cpu_ms=ms, wall_over_cpu=1.0) for n, ms in sorted(points.items())]
    best = max(1000.0 * n / latency_ms(rows, n) for n in {1, largest, *(n for n in points if n <= largest)})
    if stated is not None and stated >= _TOLERANCE * best:
        at.at("saturation_qps").refuse(
            f"{stated:g} queries/s is more than the best batch can do ({best:.4g}, one batch at a time): "
            "leave it out to have it derived, or correct the latencies or max_batch"
        )
    return Speed(
        Profile(
            rows=rows,
            load_ms=1000.0 * block.load_s,
            memory_mb=memory_mb,
            saturation_qps=best if stated is None else stated,
            provenance=PROVENANCE,
        ),
        largest,
    )


def _points(block: SpeedBlock, at: Location) -> dict[int, float]:
    """Batch size to ms."""
    table, base, flat = block.batch_latency_ms, block.base_ms, block.latency_ms
    if block.per_item_ms is not None and base is None:
        at.at("base_ms").refuse("is missing: per_item_ms comes on top of it")
    if table is not None and base is not None:
        at.at("base_ms").refuse("says the same as batch_latency_ms: leave one of them out")
    if table is not None:
        return _table(table, at.at("batch_latency_ms"))
    if base is not None:
        per_item = block.per_item_ms or 0.0
        if base + per_item <= 0:
            at.at("base_ms").refuse("must be above 0, or per_item_ms must be: no batch takes no time")
        return {n: base + per_item * n for n in (1, block.max_batch or 1)}
    if flat is None:
        at.at("latency_ms").refuse(
            "is missing: say how long a batch takes, by latency_ms, batch_latency_ms, or base_ms and per_item_ms"
        )
    size = 1 if block.saturation_qps is None else ceil(block.saturation_qps * flat / 1000.0 - 1e-6)
    if size > LARGEST_BATCH:
        at.at("saturation_qps").refuse(f"needs batches of {size:.3g}: the most is {LARGEST_BATCH}")
    return dict.fromkeys((1, block.max_batch or max(1, size)), flat)


def _table(points: dict[int, float], at: Location) -> dict[int, float]:
    if not points:
        at.refuse("must name at least one batch size, as { 1 = 15.0, 8 = 22.0 }")
    before = 0
    for size in sorted(points):
        if before and points[size] < points[before]:
            at.at(str(size)).refuse(
                f"{points[size]:g} ms is less than a batch of {before} takes ({points[before]:g} ms): "
                "a larger batch never takes less"
            )
        before = size
    return points
