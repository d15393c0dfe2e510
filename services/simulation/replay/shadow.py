"""A policy beside the running system: what has come since it began is replayed under it, again and again, from the beginning.

So it meets what a replay meets, and both sides are counted as a replay counts them (docs/scaling.md, "Try another policy"; ADR 8).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from bus.messages.events import Event, ScalingEvent, ShadowEvent
from services.core.cost import UnknownPrice, instance_price_per_s
from services.simulation.replay.build import Replay, ReplayOptions, build
from services.simulation.replay.database import TimeRange, database
from services.simulation.report import RunReport
from services.simulation.run import simulate
from services.simulation.scenario.model import Scenario
from services.simulation.scenario.planning import UNPLANNED

SAMPLE = 10.0  # s between two rows that tell the cost, as a meter's
SAMPLER = "shadow"
_TOLD = tuple(name for name in ScalingEvent.__struct_fields__ if name in ShadowEvent.__struct_fields__)


class ShadowReport(RunReport):
    """A report that keeps all that was scaled, by the scenario's time."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.scaled: list[tuple[float, ScalingEvent]] = []

    def event(self, event: Event, now: float) -> None:
        super().event(event, now)
        if isinstance(event, ScalingEvent):
            self.scaled.append((now, event))


class ShadowRun:
    """What the policy would have done with what came in a range of time. began: of the range, Unix seconds. result: of the simulation."""

    def __init__(self, name: str, found: Replay, began: float) -> None:
        self._name, self._began, self._found = name, began, found
        self._every = found.scenario.metrics_every_s
        policy = found.scenario.policies[0]
        report = ShadowReport.of(found.scenario, policy)
        assert isinstance(report, ShadowReport)
        self.result = simulate(found.scenario, policy, report)
        self._scaled = report.scaled

    def events(self, since: float) -> Iterator[ShadowEvent]:
        """Its actions after this moment (Unix seconds), and every 10 s a row that tells the cost."""
        for at, event in self._scaled:
            if self._began + at > since:
                told = {name: getattr(event, name) for name in _TOLD if name != "time"}
                yield self._row(at, **told)
        times = self._times
        for place in sorted({*(place for place, at in enumerate(times) if at % SAMPLE < self._every), len(times) - 1}):
            if self._began + times[place] > since:
                yield self._row(
                    times[place], scaler=SAMPLER, worker=None, app=None, variant=None, action="sample", count=0, reason=self._said(place)
                )  # fmt: skip

    def document(self) -> dict[str, Any]:
        """Both sides, as `infaas shadow --json` prints them. Rates are means, in US$ per hour."""
        found, result = self._found, self.result
        paid = found.recorded if found.cost["comparable"] else {**found.recorded, "cost": None}
        notes = [*found.notes] if found.cost["comparable"] else [*found.notes, f"cost: {found.cost['text']}"]
        return {"policy": self._name, "shadow": self._side(result), "real": self._side(paid), "notes": notes}

    def _side(self, run: Mapping[str, Any]) -> dict[str, Any]:
        workers, instances = (
            {name: counts[-1] for name, counts in run["series"][key].items() if counts and counts[-1]}
            for key in ("workers", "instances")
        )
        missed, cost = run["slo_violation_ratio"], run["cost"]
        return {
            "queries": run["queries"],
            "in_time": None if missed is None else 1.0 - missed,
            "cost_rate": None if cost is None else 3600.0 * cost / run["duration_s"],
            "actions": run["scale_actions"],
            "machines": workers,
            "instances": sum(instances.values()),
        }

    @property
    def _times(self) -> list[float]:
        """Of the intervals that the range has. What ends later has another, in which nothing costs anything."""
        return [at for at in self.result["series"]["time"] if at < self._found.scenario.duration_s]

    def _row(self, at: float, **told: Any) -> ShadowEvent:
        """at: seconds of the scenario, whose state afterwards counts."""
        series = self.result["series"]
        place = min(len(self._times) - 1, int(at / self._every) + 1)
        loaded = {name: counts[place] for name, counts in series["instances"].items()}
        return ShadowEvent(
            time=self._began + at,
            policy=self._name,
            cost_rate=3600.0 * series["cost_rate"][place],
            apps_cost_rate=3600.0 * _price_per_s(loaded, self._found.scenario),
            **told,
        )

    def _said(self, place: int) -> str:
        ours, real = (self._in_time(run["series"], place) for run in (self.result, self._found.recorded))
        series = self.result["series"]
        machines = [f"{counts[place]} {kind}" for kind, counts in series["workers"].items() if counts[place]]
        count = sum(counts[place] for counts in series["instances"].values())
        return f"{ours} in time (the system: {real}); {', '.join(machines) or 'no machine'}, {count} instance{'s' * (count != 1)}"

    def _in_time(self, series: Mapping[str, Any], place: int) -> str:
        """The share of the queries until the end of this interval, and their number."""
        left = self._found.scenario.duration_s
        rates = zip(series["time"], series["offered_qps"][: place + 1], strict=False)
        asked = round(sum(min(self._every, left - at) * rate for at, rate in rates))
        return f"{1 - sum(series['violations'][: place + 1]) / asked:.2%} of {asked} queries" if asked else "no queries"


def _price_per_s(loaded: Mapping[str, int], scenario: Scenario) -> float:
    """US$ per second of these instances, by variant."""
    total = 0.0
    for record in scenario.variants:
        count = loaded.get(record.variant, 0)
        devices = [
            one for machine in scenario.policies[0].machines for one in machine.devices if one.kind == record.hardware
        ]
        if count and devices:
            try:
                price = instance_price_per_s(record, scenario.prices, devices[0].cores, devices[0].memory_mb)
            except UnknownPrice:
                continue
            total += count * price
    return total


def shadow_run(dsn: str, began: float, ended: float, options: ReplayOptions) -> ShadowRun:
    """What has come in this range (Unix seconds), under the policy `options.own`. Raises ReplayError, ActorHalted, psycopg.Error."""
    assert options.own is not None, "a shadow has one policy"
    with database(dsn, TimeRange(began, ended)) as source:
        head = source.head
        stages = {vertex.app for app in head.apps if app.pipeline is not None for vertex in app.pipeline.vertices}
        if stages and options.own.base in UNPLANNED:  # it says nothing of pipelines
            plain = [app.app for app in head.apps if app.pipeline is None and app.app not in stages]
            options = msgspec.structs.replace(options, apps=tuple(plain))
        found = build(source, options)
    return ShadowRun(found.scenario.policies[0].name, found, source.head.begins)
