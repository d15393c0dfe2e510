"""A fleet on stage with deployed pipelines, whose arrivals a test tells."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from bus.messages.catalog import AppRecord, Expectation, PipelineEdge, PipelinePlan, PipelineRecord, PipelineVertex
from bus.messages.events import PipelineEvent
from bus.messages.fleet import EnsureLoaded, Release
from bus.messages.scaling import PipelineArrivals, PipelineReplicas
from services.autoscaler.vms.actor import families
from services.core.catalog import key_of
from services.core.pipelines.envelope import BIN_S
from tests.support.data.pipelines import Floats, gamma_arrivals, plan_of
from tests.support.simulated.controllers import CloudFleet, PoolFleet
from tests.support.simulated.fleet import SIGNATURE, catalogue, variant

FIRST, SECOND = "first-v1-ort-fp32-t1-b8", "second-v1-ort-fp32-t1-b8"
PIPELINE = PipelineRecord(
    vertices=[
        PipelineVertex(name="a", app="first", inputs={"x": "$.x"}),
        PipelineVertex(name="b", app="second", inputs={"x": "a.y"}),
    ],
    edges=[PipelineEdge(source="a", target="b")],
    output={"y": "b.y"},
)


ONE = replace(PIPELINE, edges=[], vertices=PIPELINE.vertices[:1])


def plan(replicas: dict[str, int], variants: dict[str, str] | None = None, **more: Any) -> PipelinePlan:
    return plan_of(replicas, variants or {"a": FIRST, "b": SECOND}, **more)


class PipelineFleet(CloudFleet):
    """A fleet with two apps and the pipeline "p" of both. What dispatchers would tell of its arrivals is told by `traffic`."""

    def __init__(self, **more: Any) -> None:
        super().__init__(variant(FIRST, model="first"), **({"kinds": (), "workers": 3} | more))
        self.register(*self.app("first", FIRST), *self.app("second", SECOND))
        self.stage.listen("infaas.worker.*.load")
        self.stage.listen("infaas.worker.*.release")

    @staticmethod
    def app(name: str, *variants: str, **fields: Any) -> list[Any]:
        return catalogue(*(variant(each, model=name, **fields) for each in variants), app=name)

    def deploy(
        self,
        deployed: PipelinePlan | None,
        name: str = "p",
        pipeline: PipelineRecord = PIPELINE,
        ended: str = "",
        slo_target: float | None = None,
        seconds: float = 0.0,
        expects: Sequence[Expectation] = (),
    ) -> None:
        """The registrar writes the pipeline's record. None: no plan is deployed any more; ended: why a change has ended it."""
        record = AppRecord(
            app=name, links={}, signature=SIGNATURE, latency_ms=200.0, pipeline=pipeline, plan=deployed,
            plan_ended=ended, slo_target=slo_target, expects=list(expects),
        )  # fmt: skip
        self.records = [one for one in self.records if key_of(one) != key_of(record)]
        self.register(record, seconds=seconds)

    def traffic(self, arrivals: Floats, seconds: float, name: str = "p") -> None:
        """Arrivals from now on, told each 0.1 s."""
        begin = self.stage.now
        counts = np.bincount((arrivals / BIN_S).astype(int), minlength=round(seconds / BIN_S) + 20)
        for i in range(round(seconds * 10)):
            self.stage.run(0.1)
            told = counts[10 * i : 10 * i + 10].tolist()
            if any(told):
                report = PipelineArrivals("d0", name, begin + 0.1 * i, told)
                self.stage.publish(self.subjects.pipeline("arrivals"), report)

    def needed(self, name: str) -> int:
        """Instances that somebody needs."""
        tables = [self.stage.members[worker].actor._table for worker in self.workers]  # type: ignore[attr-defined]
        return sum(not one.reclaimable for table in tables for one in table.of(name))

    @property
    def replicas(self) -> dict[str, int]:
        return {"a": self.needed(FIRST), "b": self.needed(SECOND)}

    def replicas_after(self, seconds: float) -> dict[str, int]:
        self.stage.run(seconds)
        return self.replicas

    def events(self, action: str = "") -> list[PipelineEvent]:
        found = [event for what, event in self.stage.records if what == "pipeline"]
        return [event for event in found if action in ("", event.action)]

    def state(self, name: str = "p") -> PipelineReplicas:
        return msgspec.msgpack.decode(self.bucket[f"pipeline.{name}"], type=PipelineReplicas)

    def orders(self, after: float) -> list[tuple[float, str, EnsureLoaded]]:
        return [
            (at, subject.split(".")[2], msgspec.msgpack.decode(body, type=EnsureLoaded))
            for at, subject, body in self.stage.heard
            if at > after and subject.endswith(".load")
        ]

    def releases(self, after: float) -> list[Release]:
        return [
            msgspec.msgpack.decode(body, type=Release)
            for at, subject, body in self.stage.heard
            if at > after and subject.endswith(".release")
        ]

    def metric(self, name: str) -> dict[str, float]:
        actor = self.stage.members[self.leader].actor
        [family] = [one for one in families(actor) if one.name == name]  # type: ignore[arg-type]
        return {labels["vertex"]: value for labels, value in family.samples}


class PipelinePool(PipelineFleet, PoolFleet):
    """The same on machines of the provider's own."""

    def drains(self, worker: str) -> bool:
        return bool(self.stage.members[worker].actor._table.draining)  # type: ignore[attr-defined]


def steady(rate: float, seconds: float, seed: int = 1) -> Floats:
    return gamma_arrivals(rate, 1.0, seconds, seed)
