"""Requirement classes: queries carry their own needs, and scaling plans for classes of them. Pure.

Needs that are close to each other (latency and cost within a quarter of an octave, accuracy within 0.02) fall into one class, which
asks for the strictest of its members' needs. What names a model, a version or a variant is a class of its own.
"""

from collections import Counter
from collections.abc import Iterable
from math import floor, log2

from msgspec.structs import replace

from bus.messages.scaling import ClassDemand

OCTAVE = 4  # bands an octave of latency and of cost
ACCURACY = 0.02  # width of a band of accuracy
MOST = 32  # classes of one app; with more, bands grow wider

ANY = "*"  # instead of a worker's name: any of them, or any other

Band = tuple[str, int | None, int, int | None, str | None, str | None, str | None]
Counted = tuple[ClassDemand, dict[str, int]]  # needs, and items by the worker that took them ("": nobody could)


def band(row: ClassDemand, coarse: int = 1) -> Band:
    """The class that these needs belong to. coarse: bands so many times as wide."""
    return (
        row.app,
        None if row.latency_ms is None else floor(OCTAVE * log2(max(row.latency_ms, 1e-6)) / coarse),
        floor(row.accuracy / (ACCURACY * coarse) + 1e-9),
        None if row.cost is None else floor(OCTAVE * log2(max(row.cost, 1e-12)) / coarse),
        row.model,
        row.version,
        row.variant,
    )


def merged(one: ClassDemand, other: ClassDemand) -> ClassDemand:
    """Both together, with the stricter of their needs."""
    return replace(
        one,
        items=one.items + other.items,
        latency_ms=_least(one.latency_ms, other.latency_ms),
        accuracy=max(one.accuracy, other.accuracy),
        cost=_least(one.cost, other.cost),
    )


def classes(counted: Iterable[Counted]) -> list[Counted]:
    """One entry for each class; with many classes in an app, in bands wide enough that few are left."""
    rows = list(counted)
    coarse = 1
    while True:
        found: dict[Band, Counted] = {}
        for needs, items in rows:
            of = band(needs, coarse)
            known = found.get(of)
            found[of] = (needs, items) if known is None else (merged(known[0], needs), _added(known[1], items))
        sizes = Counter(of[0] for of in found)
        if coarse >= 64 or all(size <= MOST for size in sizes.values()):
            return list(found.values())
        rows, coarse = list(found.values()), coarse * 2


def _added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    both = dict(one)
    for worker, items in other.items():
        both[worker] = both.get(worker, 0) + items
    return both


def _least(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else min(one, other)
