"""What instances carry in time: how fast one computes, and how many a load needs so that few queries wait too long.

An instance serves an item each 1/Q seconds at its largest batch in time. An item that comes may wait at most for what fits into the
objective L, so n instances hold K = n·L·Q items. Arrivals that find K items would be late. Their share is the blocking probability of
M/M/n/K, which follows from Erlang's B formula (Erlang 1917; Gross and Harris, "Fundamentals of Queueing Theory", section 2.5). Service
is more even than exponential, so the bound is on the safe side. Arrivals that come in bursts count by Hayward's approximation
(Fredericks 1980): with peakedness Z, n instances carry what n/Z instances carry of Poisson arrivals, Z times.
"""

from functools import lru_cache
from math import exp, inf, log, sqrt

from bus.messages.catalog import VariantRecord
from services.core.catalog import variant_key
from services.core.cost import HANDLING_MS, LatencyTable

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # instances for which the load is computed; between them it is linear
STEP = 0.05  # relative step to which places are rounded down, so that few tables suffice
MISS_STEP = 0.1  # the same for shares of misses
LEAST_MISS, MOST_MISS = 1e-6, 0.5
STEPS = 26  # of bisection


def service_rate(table: LatencyTable, limit_s: float) -> float:
    """Items/s that one instance computes in the largest batches that suit an objective of `limit_s` seconds.

    An item waits for the batch under way before its own batch begins, so both must fit into the limit. If not even two single items fit,
    it is the rate of single items.
    """
    handling = HANDLING_MS / 1000.0
    batch = table.max_batch if limit_s == inf else table.largest_batch_within(limit_s / 2)
    return (
        max(n / (table.seconds(n) + handling) for n in _sizes(batch))
        if batch >= 1
        else 1.0 / (table.seconds(1) + handling)
    )


def throughput(table: LatencyTable, limit_s: float) -> float:
    """Items/s that one instance serves by itself if each item must be answered within `limit_s` seconds.

    It is `service_rate`. If not even two single items fit, the instance must idle so much that the mean wait (M/D/1) fits into what
    is left.
    """
    alone = table.seconds(1)
    if limit_s == inf or table.largest_batch_within(limit_s / 2) >= 1:
        return service_rate(table, limit_s)
    wait = max(limit_s - alone, 0.01 * alone)
    return (2 * wait / (2 * wait + alone)) / (alone + HANDLING_MS / 1000.0)


class LatencyTables:
    """The latency tables of variants, until their entries in the catalogue change."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[VariantRecord, LatencyTable]] = {}

    def table(self, record: VariantRecord) -> LatencyTable:
        known = self._of.get(record.variant)
        if known is None or known[0] is not record:
            known = self._of[record.variant] = (record, LatencyTable(record))
        return known[1]

    def changed(self, key: str) -> None:
        """This entry of the catalogue has changed, or is gone."""
        self._of.pop(key.removeprefix(variant_key("")), None)


def _sizes(most: int) -> list[int]:
    return [most] + [1 << i for i in range(most.bit_length()) if 1 << i < most]


def instances_for(load: float, rate: float, limit_s: float, miss: float, peakedness: float = 1.0) -> float:
    """How many instances carry this load so that at most a share `miss` of it waits too long.

    load: items/s. rate: items/s of one instance (`service_rate`). limit_s: the objective, in seconds; inf: none. peakedness: variance over
    mean of the number of arrivals; 1: Poisson. Below what one instance carries, the result is the part of one that is used.
    """
    if load <= 0:
        return 0.0
    places = 64.0 if limit_s == inf else max(1.0, limit_s * rate)
    peak = max(0.05, peakedness)
    offered = load / rate / peak
    loads = _loads(
        round(log(min(places, 1e4)) / STEP - 0.5), round(log(min(max(miss, LEAST_MISS), MOST_MISS)) / MISS_STEP)
    )
    return peak * _needed(offered, loads)


# -- layers: what the first instances carry, what overflows to the next ones, and so on

# a layer ends where this share of the usual (0), or high (1), load overflows
ENDS = ((0, 0.5), (0, 0.1), (1, 0.3), (1, 0.05))
OVERFLOWS = (0.5, 0.3, 0.15, 0.05, 0.01)


def layers(
    loads: tuple[float, float], peak: float, rate: float, limit_s: float, miss: float, peakedness: float, margin: float
) -> tuple[float, ...]:
    """Instances at which each layer ends. loads: the usual and the high one, items/s. peak: what the last layer is for, with its margin.

    The other arguments are those of `instances_for`.
    """
    ends = sorted(instances_for(loads[i], rate, limit_s, share, peakedness) for i, share in ENDS)
    beyond = max(0.0, instances_for(peak, rate, limit_s, miss, peakedness) - ends[-1])
    return (*ends, ends[-1] + margin * beyond)


def carried(count: float, load: float, rate: float, limit_s: float, peakedness: float) -> float:
    """Items/s that the first `count` instances carry in time of a load; the rest overflows."""
    before, found = 0.0, 0.0
    for share in OVERFLOWS:
        here, most = instances_for(load, rate, limit_s, share, peakedness), load * (1.0 - share)
        if count <= here:
            return found + (most - found) * (count - before) / (here - before) if here > before else most
        before, found = here, most
    return load


def _needed(offered: float, loads: tuple[float, ...]) -> float:
    if offered <= loads[0]:
        return offered / loads[0]
    for i in range(1, len(GRID)):
        if offered <= loads[i]:
            part = (offered - loads[i - 1]) / (loads[i] - loads[i - 1])
            return GRID[i - 1] + part * (GRID[i] - GRID[i - 1])
    if (
        loads[-1] >= GRID[-1]
    ):  # so many may miss that all are busy: beyond the table each carries what it carries at its end
        return offered * GRID[-1] / loads[-1]
    # of many instances, the spare ones grow as the root of their number
    spare = (GRID[-1] - loads[-1]) / sqrt(GRID[-1])
    root = (spare + sqrt(max(0.0, spare * spare + 4 * offered))) / 2
    return root * root


@lru_cache(maxsize=4096)
def _loads(places: int, miss: int) -> tuple[float, ...]:
    """By entry of GRID: the offered load, in Erlang, that misses this share. places, miss: numbers of steps on logarithmic scales."""
    each, share = exp(places * STEP), exp(miss * MISS_STEP)
    return tuple(_load(n, int(n * each + 1e-9) - n, share) for n in GRID)


def _load(servers: int, waiting: int, miss: float) -> float:
    low, high = 0.0, 2.0 * servers
    for _ in range(STEPS):
        middle = (low + high) / 2
        if blocking(servers, max(0, waiting), middle) <= miss:
            low = middle
        else:
            high = middle
    return max(low, 1e-6)


def blocking(servers: int, waiting: int, offered: float) -> float:
    """The share of Poisson arrivals that find all servers busy and all waiting places taken. offered: Erlang."""
    inverse = 1.0  # of Erlang B with 0 servers
    for n in range(1, servers + 1):
        inverse = 1.0 + inverse * n / offered if offered > 0 else inf
    if inverse == inf:
        return 0.0
    ratio = offered / servers
    if abs(ratio - 1) < 1e-9:
        return 1.0 / (inverse + waiting)
    if ratio < 1:
        power = ratio**waiting
        return power / (inverse + ratio * (1 - power) / (1 - ratio))
    power = (1 / ratio) ** waiting  # the same, divided by ratio ** waiting, which may be too large
    return 1.0 / (inverse * power + (1 - power) / (1 - 1 / ratio))
