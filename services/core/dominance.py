"""Variants that are worse than another in every respect: kept, but marked, so that nobody chooses them by mistake.

Only variants on the same hardware kind are compared: machines of different kinds differ in price and may be full at different
times. On one kind, threads and memory decide an instance's price, so they stand for it here.
"""

from collections.abc import Iterable, Sequence
from math import inf

from msgspec.structs import replace

from bus.messages.catalog import VariantRecord


def mark(variants: Iterable[VariantRecord]) -> tuple[VariantRecord, ...]:
    """The same variants in the same order, each with `dominated` as it is among them."""
    pool = list(variants)
    return tuple(
        replace(variant, dominated=any(dominates(other, variant) for other in pool if other is not variant))
        for variant in pool
    )


def dominates(better: VariantRecord, worse: VariantRecord) -> bool:
    """Whether `better` is at least as good in every respect and better in one.

    Respects: accuracy, latency in every cell that was measured of `worse`, load latency, memory, threads, saturation
    throughput and largest batch. An unknown accuracy is worse than any known one.
    """
    if better.hardware != worse.hardware or better.simulated != worse.simulated:
        return False
    mine, theirs = _figures(better, worse), _figures(worse, worse)
    return len(mine) == len(theirs) and all(a <= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs


def _figures(variant: VariantRecord, cells_of: VariantRecord) -> Sequence[float]:
    """All respects as numbers that are better when smaller; a cell that was not measured is infinitely slow."""
    profile = variant.profile
    measured = {(row.length, row.batch): row.p50_ms for row in profile.rows}
    return (
        inf if variant.accuracy is None else -variant.accuracy,
        profile.load_ms,
        profile.memory_mb,
        variant.threads,
        -profile.saturation_qps,
        -variant.max_batch,
        *(measured.get((row.length, row.batch), inf) for row in cells_of.profile.rows),
    )
