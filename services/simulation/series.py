"""A run's course: one point for each interval of metrics_every_s, however many queries there were."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from msgspec import Struct

from services.simulation.tally import UNITS


class Sample(Struct, frozen=True, kw_only=True, gc=False):
    """The world at a moment, scenario's seconds. instances: loaded ones by variant. workers: that run, by kind of machine.

    cost_rate: US$/s now. utilisation: 0..1, busy share of all devices since the sample before.
    """

    time: float
    instances: dict[str, int]
    workers: dict[str, int]
    cost_rate: float
    utilisation: float


class Flow(Struct, frozen=True, gc=False):
    """Sums at a moment, since the start. violations: late and refused. rated: answers in time whose variant has an accuracy.

    accuracy: sum of these, in tally.UNITS.
    """

    offered: int = 0
    answered: int = 0
    violations: int = 0
    rated: int = 0
    accuracy: int = 0


class Series:
    """Rows of equal length. A point's rates are means over the interval that begins at its time; a query counts where it ended
    (offered: where it was sent). Instances, workers, cost rate and utilisation are the last known at the interval's begin; after the
    duration nothing costs anything.
    """

    def __init__(self, every_s: float, duration_s: float) -> None:
        self._every, self._duration = every_s, duration_s
        self._flows: list[Flow] = []  # of each interval, a difference
        self._before = Flow()
        self._samples: dict[int, Sample] = {}

    @property
    def length(self) -> int:
        """How many intervals are complete."""
        return len(self._flows)

    def close(self, sums: Flow) -> None:
        """An interval has ended, with these sums since the start."""
        before, self._before = self._before, sums
        self._flows.append(
            Flow(
                sums.offered - before.offered,
                sums.answered - before.answered,
                sums.violations - before.violations,
                sums.rated - before.rated,
                sums.accuracy - before.accuracy,
            )
        )

    def sample(self, sample: Sample) -> None:
        """Note the world; of several in one interval the last one counts, of several at one time the first."""
        place = ceil(sample.time / self._every - 1e-6)
        known = self._samples.get(place)
        if known is None or known.time != sample.time:
            self._samples[place] = sample

    def unlike(self, sums: Flow) -> bool:
        """Whether anything happened since the last interval was closed."""
        return sums != self._before

    def variants(self) -> set[str]:
        """Those that had instances."""
        return {name for sample in self._samples.values() for name in sample.instances}

    def mean_utilisation(self) -> float | None:
        """Over all samples but the one at time 0, before which there was nothing."""
        used = [sample.utilisation for sample in self._samples.values() if sample.time > 0]
        return sum(used) / len(used) if used else None

    def document(self) -> dict[str, Any]:
        """All rows, as docs/simulation.md has them."""
        flows, count = self._flows, len(self._flows)
        seen, spans = self._known(count), [self._span(i) for i in range(count)]
        return {
            "time": [round(i * self._every, 9) for i in range(count)],
            "offered_qps": [flow.offered / span for flow, span in zip(flows, spans, strict=True)],
            "answered_qps": [flow.answered / span for flow, span in zip(flows, spans, strict=True)],
            "violations": [flow.violations for flow in flows],
            "effective_accuracy": [flow.accuracy / (UNITS * flow.rated) if flow.rated else None for flow in flows],
            "cost_rate": [
                sample.cost_rate if sample and i * self._every < self._duration else 0.0
                for i, sample in enumerate(seen)
            ],
            "utilisation": [sample.utilisation if sample else 0.0 for sample in seen],
            "instances": _columns([sample.instances if sample else {} for sample in seen]),
            "workers": _columns([sample.workers if sample else {} for sample in seen]),
        }

    def _span(self, i: int) -> float:
        """Seconds of an interval: the duration may end within one."""
        left = self._duration - i * self._every
        return left if 0 < left < self._every else self._every

    def _known(self, count: int) -> list[Sample | None]:
        """For each interval the last sample until its begin; before the first sample that one."""
        last = self._samples[min(self._samples)] if self._samples else None
        found = []
        for i in range(count):
            last = self._samples.get(i, last)
            found.append(last)
        return found


def _columns(rows: list[Mapping[str, int]]) -> dict[str, list[int]]:
    """Rows of name to count as name to counts, zero where a row does not have the name."""
    names = sorted({name for row in rows for name, count in row.items() if count})
    return {name: [row.get(name, 0) for row in rows] for name in names}
