"""What would serve a class of needs on devices that nobody has: a machine with one might be added for it. Pure."""

from collections.abc import Collection, Mapping
from math import inf

from bus.messages.catalog import VariantRecord
from services.autoscaler.models.supply import Facts
from services.autoscaler.models.wanted import Wanted
from services.core.cost import UnknownPrice, price_per_hour
from services.core.planning.problem import Demand


def absent(
    one: Wanted, demand: Demand, there: Collection[str], facts: Facts, prices: Mapping[str, float]
) -> tuple[str, ...]:
    """Names of its variants that meet latency and accuracy and are not `there` to plan with, cheapest first.

    By what an item costs at saturation where one instance has a device for itself, since nobody knows how large theirs would be.
    """
    found = []
    for record in one.scope:
        if record.variant in there:
            continue
        accuracy = record.accuracy is None or record.accuracy >= demand.accuracy
        if accuracy and facts.table(record).seconds(1) * 1000.0 <= demand.latency_ms:
            rate = facts.rate(record, demand.latency_ms / 1000.0)
            found.append((_price(record, prices) / rate if rate > 0 else inf, record.variant))
    return tuple(name for _, name in sorted(found))


def _price(record: VariantRecord, prices: Mapping[str, float]) -> float:
    """US$ per second."""
    if record.price_per_s is not None:
        return record.price_per_s
    try:
        return price_per_hour(record.hardware, prices, max(1, record.threads)) / 3600.0
    except UnknownPrice:
        return inf
