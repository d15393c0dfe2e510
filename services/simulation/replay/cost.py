"""Recorded cost as a time line. Rows come as meters write them (services/monitor/devices.py): at the end of each period, for each
device one row of its unused part, as long as the period, and the rows of its instances, which may be shorter.
"""

from collections import defaultdict
from collections.abc import Mapping
from math import ceil

from services.simulation.replay.recording import Bin

NOBODY = ""


class RecordedCost:
    """Sums of cost rows. Add rows in the order of their end; those of one end by unit, the unused part first.

    A unit is all devices of a kind on a worker.
    """

    def __init__(self, begins: float, ends: float, every: float) -> None:
        self.rows = 0
        self._begins, self._ends, self._every = begins, ends, every
        count = max(1, ceil((ends - begins) / every - 1e-9))
        self._cost: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(count)]
        self._held: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(count)]
        self._workers: list[set[str]] = [set() for _ in range(count)]
        self._simulated: defaultdict[str, float] = defaultdict(float)
        self._unit = ("", 0.0)
        self._period = 0.0
        self._total: defaultdict[str, float] = defaultdict(float)  # by unit, US$
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by unit, of its devices
        self._imaginary: set[str] = set()

    def add(
        self,
        time: float,
        seconds: float,
        unit: str,
        app: str | None,
        variant: str | None,
        cost: float,
        *,
        simulated: bool,
    ) -> None:
        """Add a row, of the `seconds` until `time`."""
        if (unit, time) != self._unit:
            self._unit, self._period = (unit, time), seconds
        if variant is None:
            self._period = seconds
            self._seconds[unit] += seconds
        if simulated:
            self._imaginary.add(unit)
        self._total[unit] += cost
        self._spread(time, seconds, unit, app or NOBODY, variant, cost, simulated)

    def _spread(
        self, time: float, seconds: float, unit: str, app: str, variant: str | None, cost: float, simulated: bool
    ) -> None:
        """Spread a row's cost evenly over the period."""
        period = max(self._period, seconds, 1e-9)
        start = time - period
        if time <= self._begins or start >= self._ends:
            return
        self.rows += 1
        worker = unit.rpartition("/")[0]
        first = max(0, int((start - self._begins) // self._every))
        last = min(len(self._cost) - 1, int((time - self._begins) // self._every))
        for i in range(first, last + 1):
            low = self._begins + i * self._every
            inside = min(time, low + self._every, self._ends) - max(start, low, self._begins)
            if inside <= 0:
                continue
            part = inside / period
            self._cost[i][app] += cost * part
            if simulated:
                self._simulated[app] += cost * part
            if variant is not None:
                self._held[i][variant] += seconds * part
            self._workers[i].add(worker)

    def bins(self, used: Mapping[int, float]) -> list[Bin]:
        """The time series. used: utilisation, by number of the bin."""
        found = []
        for i, (cost, held, workers) in enumerate(zip(self._cost, self._held, self._workers, strict=True)):
            span = min(self._every, self._ends - self._begins - i * self._every)
            found.append(
                Bin(
                    instances={name: seconds / span for name, seconds in sorted(held.items())},
                    workers=sorted(workers),
                    cost=dict(sorted(cost.items())),
                    utilisation=used.get(i),
                )
            )
        return found

    def simulated(self) -> dict[str, float]:
        """Cost of simulated devices, US$ by app."""
        return dict(sorted(self._simulated.items()))

    def is_simulated(self, unit: str) -> bool:
        """Whether a unit's devices are simulated."""
        return unit in self._imaginary

    def cores(self, unit: str, price: float) -> int | None:
        """Cores of each device of a unit, from their cost; None if unknown. price: US$ per hour of a core, or of a device without priced cores."""
        seconds = self._seconds.get(unit, 0.0)
        if seconds <= 0 or price <= 0:
            return None
        return max(1, round(self._total[unit] * 3600.0 / seconds / price))
