"""Pipelines and samples of their traffic for tests and benches."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.messages.catalog import (
    AppRecord,
    EdgeCondition,
    PipelineEdge,
    PipelinePlan,
    PipelineRecord,
    PipelineVertex,
    PlannedStage,
    Signature,
    TensorSpec,
)
from services.core.pipelines.envelope import traffic_envelope
from services.core.pipelines.problem import PipelineProblem, StageOption

Floats = NDArray[np.float64]


def gamma_arrivals(rate: float, cv: float, seconds: float, seed: int) -> Floats:
    """Arrivals whose gaps have this standard deviation over mean. The paper's CV is the square of it."""
    shape = 1.0 / cv**2
    gaps = np.random.default_rng(seed).gamma(shape, 1.0 / (rate * shape), int(rate * seconds * 1.3) + 300)
    times: Floats = np.cumsum(gaps)
    return times[times < seconds]


def app(name: str, inputs: dict[str, str], outputs: dict[str, str], shape: tuple[int, ...] = (1,)) -> AppRecord:
    """An app whose tensors have these datatypes, by name."""
    given = [TensorSpec(name=key, datatype=kind, shape=list(shape)) for key, kind in inputs.items()]
    made = [TensorSpec(name=key, datatype=kind, shape=list(shape)) for key, kind in outputs.items()]
    return AppRecord(app=name, links={}, signature=Signature(inputs=given, outputs=made))


SOCIAL_APPS = {
    one.app: one
    for one in (
        app("language-id", {"text": "BYTES"}, {"label": "INT64", "text": "BYTES"}),
        app("nmt", {"text": "BYTES", "lang": "INT64"}, {"y": "BYTES"}),
    )
}
TRANSLATED = EdgeCondition(output="label", reduce="argmax", op="!=", value=0)
SOCIAL = PipelineRecord(  # of the contract
    vertices=[
        PipelineVertex(name="lang", app="language-id", inputs={"text": "$.text"}),
        PipelineVertex(name="translate", app="nmt", inputs={"text": "$.text", "lang": "lang.label"}, accuracy=0.9),
    ],
    edges=[PipelineEdge(source="lang", target="translate", when=TRANSLATED, probability=0.4)],
    output={"text": "translate.y | lang.text"},
)


# the same as a file
SOCIAL_TOML = """
[pipeline]
name = "social"
latency_ms = 350
[[vertex]]
name = "lang"
app = "language-id"
inputs = { text = "$.text" }
[[vertex]]
name = "translate"
app = "nmt"
inputs = { text = "$.text", lang = "lang.label" }
accuracy = 0.9
[[edge]]
from = "lang"
to = "translate"
when = { output = "label", reduce = "argmax", op = "!=", value = 0 }
probability = 0.4
[output]
text = "translate.y | lang.text"
"""
# with what planning needs
TOML = f"""{SOCIAL_TOML}
[[load]]
rate = 150
arrivals = "gamma"
cv = 1.0
[[option]]
vertex = "lang"
hardware = "cpu"
price_per_hour = 0.1
batch_latency_ms = {{ 1 = 20.0, 8 = 80.0 }}
[[option]]
vertex = "translate"
hardware = "cpu"
price_per_hour = 0.1
batch_latency_ms = {{ 1 = 200.0, 8 = 880.0 }}
[[option]]
vertex = "translate"
hardware = "gpu"
price_per_hour = 1.1
batch_latency_ms = {{ 1 = 20.0, 8 = 40.0 }}
"""


def chain(count: int) -> PipelineRecord:
    """v0 -> v1 -> ..."""
    names = [f"v{i}" for i in range(count)]
    return PipelineRecord(
        vertices=[PipelineVertex(name=name, app="app", inputs={"x": "$.x"}) for name in names],
        edges=[PipelineEdge(source=a, target=b) for a, b in pairwise(names)],
        output={"y": f"{names[-1]}.y"},
    )


def linear(fixed_ms: float, item_ms: float, most: int) -> dict[int, float]:
    """Latencies of batches of 1, 2, 4, ... items."""
    return {1 << i: fixed_ms + item_ms * (1 << i) for i in range(most.bit_length())}


def tiny_problem(seed: int, vertices: int = 2, queries: int = 800) -> PipelineProblem:
    """A chain, some of whose edges are conditional, with two kinds of hardware for each vertex."""
    rng = np.random.default_rng(seed)
    record = chain(vertices)
    edges = [
        PipelineEdge(source=edge.source, target=edge.target, probability=None if rng.random() < 0.5 else 0.3)
        for edge in record.edges
    ]
    options, total = [], 0.0
    for vertex in record.vertices:
        one = float(rng.uniform(5, 60))
        total += one
        options.append(_option(vertex.name, "cpu", 0.1, one, float(rng.uniform(0.0, 0.3))))
        fast = one / float(rng.uniform(2, 12))
        options.append(_option(vertex.name, "gpu", float(rng.uniform(0.2, 1.0)), fast, float(rng.uniform(0.3, 0.95))))
    cv, rate = float(rng.choice([0.5, 1.0, 2.0])), float(rng.uniform(20, 120))
    shape = 1.0 / cv**2
    return PipelineProblem(
        name="tiny",
        pipeline=PipelineRecord(vertices=record.vertices, edges=edges, output=record.output),
        latency_ms=float(rng.uniform(0.4, 3.0)) * total,
        options=tuple(options),
        arrivals=np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), queries)),
    )


def _option(vertex: str, hardware: str, price: float, one_ms: float, fixed: float) -> StageOption:
    latencies = linear(one_ms * fixed, one_ms * (1 - fixed), 4)
    return StageOption(vertex=vertex, hardware=hardware, price_per_hour=price, batch_latency_ms=latencies)


def plan_of(
    replicas: Mapping[str, int],
    variants: Mapping[str, str],
    *,
    hardware: str = "cpu",
    sampled: float = 150.0,
    **more: Any,
) -> PipelinePlan:
    """A plan of "p" with so many replicas of these variants, by vertex. sampled: queries/s at random times that it is for."""
    envelope, dispersion = traffic_envelope(gamma_arrivals(sampled, 1.0, 120.0, seed=9), 0.1)
    stages = {
        name: PlannedStage(
            hardware=hardware, batch=1, replicas=count, scale=1.0, service_ms=20.0, rho=0.8, variant=variants[name]
        )
        for name, count in replicas.items()
    }
    fields: dict[str, Any] = {
        "pipeline": "p", "policy": "inferline", "status": "feasible", "cost_per_s": 1e-5, "p99_ms": 90.0,
        "vertices": stages, "envelope": envelope, "dispersion": dispersion, "steps": [], "rate": sampled, "latency_ms": 200.0,
    }  # fmt: skip
    return PipelinePlan(**(fields | more))


def deployed(replicas: Mapping[str, int], variants: Mapping[str, str], app: str = "app") -> AppRecord:
    """The pipeline "p" with such a plan; its vertices all ask one app."""
    vertices = [PipelineVertex(name=name, app=app) for name in replicas]
    return AppRecord(app="p", links={}, pipeline=PipelineRecord(vertices=vertices), plan=plan_of(replicas, variants))
