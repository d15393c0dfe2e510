"""What the report says of pipelines: visits, batches and replicas of their vertices, beside their plans. It hears the events that actors record."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict

from bus.messages.catalog import AppRecord, PipelinePlan, PlannedStage
from bus.messages.events import OutcomeEvent, PipelineEvent
from services.core.cost import instance_price_per_s
from services.simulation.scenario.model import PolicySpec, Scenario
from services.simulation.statistics import Quantiles, ratio

KEPT = 20_000  # queries whose parts may still end
LISTED = 1000  # changes of replicas


class VertexCounts:
    """Counts of one vertex. variants: of its app. price: US$/s of one planned replica. replicas: wanted now; None without a plan."""

    def __init__(self, variants: frozenset[str], stage: PlannedStage | None, price: float) -> None:
        self.price = price
        self.replicas = None if stage is None else stage.replicas
        self._variants = variants
        self._stage = stage
        self._visits = 0
        self._answered = 0
        self._batches = 0.0  # each query counts 1/n for its batch of n
        self._latency = Quantiles()  # seconds
        self._series: list[int] = []

    def ended(self, part: OutcomeEvent) -> None:
        """A query's visit has ended."""
        self._visits += 1
        if part.code is None and part.latency_ms is not None:
            self._answered += 1
            self._batches += 1.0 / (part.batch or 1)
            self._latency.fresh.append(part.latency_ms / 1000.0)

    def sample(self, instances: Mapping[str, int]) -> None:
        """instances: loaded now, by variant."""
        self._series.append(sum(instances.get(one, 0) for one in self._variants))

    def document(self, queries: int) -> dict[str, Any]:
        """queries: of the pipeline."""
        stage = self._stage
        p50, p99 = self._latency.quantiles(0.5, 0.99)
        found: dict[str, Any] = {
            "visits": self._visits,
            "share": ratio(self._visits, queries),
            "mean_batch": ratio(self._answered, self._batches),
            "p50_ms": None if p50 is None else 1000.0 * p50,
            "p99_ms": None if p99 is None else 1000.0 * p99,
            "instances": self._series,
        }
        if stage is not None:
            fields = ("variant", "hardware", "batch", "replicas", "scale", "service_ms", "rho")
            found |= {"replicas": self.replicas, "plan": {field: getattr(stage, field) for field in fields}}
        return found


class PipelineCounts:
    """Counts of one pipeline. variants, prices: by app, its variants; by variant, US$/s of an instance."""

    def __init__(
        self,
        app: AppRecord,
        plan: PipelinePlan | None,
        variants: Mapping[str, frozenset[str]],
        prices: Mapping[str, float],
    ) -> None:
        assert app.pipeline is not None, "the app is a pipeline"
        self._plan = plan
        stages = {} if plan is None else plan.vertices
        self._vertices = {
            one.name: VertexCounts(
                variants.get(one.app, frozenset()),
                stage := stages.get(one.name),
                0.0 if stage is None else prices.get(stage.variant, 0.0),
            )
            for one in app.pipeline.vertices
        }
        self._changes: list[dict[str, Any]] = []
        self._queries = 0
        self._cost = 0.0  # US$
        self._at = 0.0

    def ended(self, query: OutcomeEvent) -> None:
        """A query has ended."""
        self._queries += 1
        if self._plan is None:
            self._cost += query.cost

    def visited(self, part: OutcomeEvent) -> None:
        """A visit to a vertex has ended."""
        self._vertices[part.stage or ""].ended(part)

    def changed(self, event: PipelineEvent, now: float) -> None:
        """Other replicas are wanted of a vertex from now on."""
        self._advance(max(0.0, now))
        self._vertices[event.vertex].replicas = event.to_replicas
        if len(self._changes) < LISTED:
            row = asdict(event)
            del row["pipeline"]
            self._changes.append({**row, "time": round(now, 6)})

    def sample(self, instances: Mapping[str, int]) -> None:
        """instances: loaded now, by variant."""
        for vertex in self._vertices.values():
            vertex.sample(instances)

    def _advance(self, now: float) -> None:
        """The planned replicas are paid for until now."""
        if self._plan is not None and now > self._at:
            self._cost += (now - self._at) * sum(one.price * (one.replicas or 0) for one in self._vertices.values())
        self._at = max(self._at, now)

    def document(self, duration_s: float) -> dict[str, Any]:
        """As docs/simulation.md describes it."""
        self._advance(duration_s)
        plan = self._plan
        found: dict[str, Any] = {"cost": self._cost, "plan": None}
        if plan is not None:
            fields = ("policy", "status", "p99_ms", "percentile", "rate", "reason")
            found["plan"] = {field: getattr(plan, field) for field in fields} | {"cost": plan.cost_per_s * duration_s}
        found["changes"] = self._changes
        return {**found, "vertices": {name: one.document(self._queries) for name, one in self._vertices.items()}}


class PipelineReports:
    """The pipelines of one run, by name."""

    def __init__(self, pipelines: Mapping[str, PipelineCounts]) -> None:
        self._pipelines = pipelines
        self._parts: dict[bytes, list[OutcomeEvent]] = {}  # of queries that have not ended
        self._ended: dict[bytes, PipelineCounts] = {}  # whose the last queries were

    @classmethod
    def of(cls, scenario: Scenario, policy: PolicySpec) -> "PipelineReports":
        """Without any counts yet."""
        devices = {device.kind: device for machine in policy.machines for device in machine.devices}
        prices = {
            one.variant: instance_price_per_s(one, scenario.prices, device.cores, device.memory_mb)
            for one in scenario.variants
            if (device := devices.get(one.hardware)) is not None
        }
        variants = {
            app.app: frozenset(one.variant for one in scenario.variants if app.links.get(one.model) == one.version)
            for app in scenario.apps
        }
        return cls(
            {
                app.app: PipelineCounts(app, policy.plans.get(app.app), variants, prices)
                for app in scenario.apps
                if app.pipeline is not None
            }
        )

    def __bool__(self) -> bool:
        return bool(self._pipelines)

    def outcome(self, event: OutcomeEvent) -> None:
        """A query or a part has ended. Parts may end before and after their query."""
        one = self._pipelines.get(event.app)
        if one is not None:
            one.ended(event)
            for part in self._parts.pop(event.uid, ()):
                one.visited(part)
            self._ended[event.uid] = one
            if len(self._ended) > KEPT:
                del self._ended[next(iter(self._ended))]
        if event.parent is None:
            return
        whose = self._ended.get(event.parent)
        if whose is not None:
            whose.visited(event)
        else:
            self._parts.setdefault(event.parent, []).append(event)
            if len(self._parts) > KEPT:
                del self._parts[next(iter(self._parts))]

    def changed(self, event: PipelineEvent, now: float) -> None:
        """See PipelineCounts. now: the scenario's time."""
        if event.pipeline in self._pipelines:
            self._pipelines[event.pipeline].changed(event, now)

    def sample(self, instances: Mapping[str, int]) -> None:
        """See PipelineCounts."""
        for one in self._pipelines.values():
            one.sample(instances)

    def document(self, app: str, duration_s: float) -> dict[str, Any] | None:
        """None for an app that is no pipeline."""
        found = self._pipelines.get(app)
        return None if found is None else found.document(duration_s)
