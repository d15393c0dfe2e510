"""InferLine (Crankshaw et al., arXiv 1812.01776; paper 004): the four pipelines of its Figure 2, with profiles, and samples of their queries.

Latencies are linear in the batch. MEASURED ones are fits to what the authors measured on an AWS p2.8xlarge in batches up to 32 (their
repository plots-model-comp-paper, results/single_model_profs; the fits leave at most 9 %). The others are assumed, because the paper states
none. Prices are those of the authors' prototype, of a core and of a K80 in US$ per hour. Its clusters had no other hardware.

cv2 is the square of σ/μ of the gaps, which the paper calls CV.
"""

import math

import compare  # noqa: F401  (makes the packages importable)
import numpy as np
from msgspec.structs import replace

from bus.messages.catalog import PipelineEdge, PipelinePlan, PipelineRecord, PipelineVertex
from services.core.pipelines.estimator import LatencyEstimator
from services.core.pipelines.graph import PipelineGraph
from services.core.pipelines.problem import PipelineProblem, StageOption, batch_seconds
from services.core.pipelines.queueing import Floats, StageConfiguration
from tests.support.data.pipelines import gamma_arrivals

PRICES = {"cpu": 0.0665, "k80": 0.634}
SIZES = tuple(1 << i for i in range(6))
Line = tuple[float, float]  # ms of a batch of n: first + second · n
RESNET152: dict[str, Line] = {"cpu": (155.0, 592.0), "k80": (17.6, 14.2)}
INCEPTION: dict[str, Line] = {"cpu": (0.0, 400.0), "k80": (29.5, 12.9)}  # on a core: assumed
MEASURED: dict[str, dict[str, Line]] = {
    "resnet152": RESNET152,
    "slow": RESNET152,
    "detect": INCEPTION,
    "image": INCEPTION,
    "language": {"cpu": (0.0, 12.0), "k80": (2.7, 0.51)},  # on a core: assumed
    "text": {"cpu": (6.9, 8.8)},  # kernel SVM
}
ASSUMED: dict[str, dict[str, Line]] = {
    "preprocess": {"cpu": (0.0, 5.0)},
    "vehicle": {"cpu": (0.0, 120.0), "k80": (12.0, 3.0)},
    "person": {"cpu": (0.0, 120.0), "k80": (12.0, 3.0)},
    "plate": {"cpu": (0.0, 90.0), "k80": (25.0, 6.0)},
    "translate": {
        "cpu": (0.0, 700.0),
        "k80": (30.0, 8.0),
    },  # the measured TF-NMT takes 455 ms, more than most objectives
    "fast": {"cpu": (0.0, 60.0), "k80": (9.0, 1.5)},
}
PROFILES = MEASURED | ASSUMED
GRAPHS: dict[str, list[tuple[str, str, float | None]]] = {
    "Image Processing": [("preprocess", "resnet152", None)],
    "Video Monitoring": [("detect", "vehicle", 0.6), ("detect", "person", 0.4), ("vehicle", "plate", 0.5)],
    "Social Media": [("language", "translate", 0.4), ("language", "image", None), ("translate", "text", None), ("language", "text", None)],
    "TF Cascade": [("fast", "slow", 0.3)],
}  # fmt: skip


def record_of(pipeline: str) -> PipelineRecord:
    names = dict.fromkeys(name for source, target, _ in GRAPHS[pipeline] for name in (source, target))
    sinks = [name for name in names if not any(source == name for source, _, _ in GRAPHS[pipeline])]
    return PipelineRecord(
        vertices=[PipelineVertex(name=name, app=name) for name in names],
        edges=[PipelineEdge(source=a, target=b, probability=share) for a, b, share in GRAPHS[pipeline]],
        output={name: f"{name}.y | {GRAPHS[pipeline][0][0]}.y" for name in sinks},
    )


def option(vertex: str, hardware: str, line: Line, variant: str = "", accuracy: float | None = None) -> StageOption:
    fixed, item = line
    return StageOption(
        vertex=vertex,
        hardware=hardware,
        price_per_hour=PRICES[hardware],
        batch_latency_ms={n: fixed + item * n for n in SIZES},
        variant=variant,
        accuracy=accuracy,
    )


def problem_of(pipeline: str, arrivals: Floats, slo_s: float) -> PipelineProblem:
    """99 % within slo_s seconds."""
    record = record_of(pipeline)
    options = [option(one.name, kind, line) for one in record.vertices for kind, line in PROFILES[one.name].items()]
    return PipelineProblem(
        name=pipeline, pipeline=record, latency_ms=1000.0 * slo_s, options=tuple(options), arrivals=arrivals
    )


def sample(rate: float, cv2: float, seconds: float, seed: int) -> Floats:
    """Arrivals with gamma-distributed gaps (section 6.3)."""
    return gamma_arrivals(rate, math.sqrt(cv2), seconds, seed)


def configuration(problem: PipelineProblem, plan: PipelinePlan) -> dict[str, StageConfiguration]:
    tables = {(one.vertex, one.hardware, one.variant): batch_seconds(one) for one in problem.options}
    return {
        name: StageConfiguration(
            tables[name, stage.hardware, stage.variant][: stage.batch + 1], stage.batch, stage.replicas
        )
        for name, stage in plan.vertices.items()
    }


def latencies(problem: PipelineProblem, plan: PipelinePlan, arrivals: Floats) -> Floats:
    """Seconds of each of these queries under a plan, by the estimator. Draws of branches are others than the planner's."""
    first = len(problem.arrivals)
    return LatencyEstimator(PipelineGraph(problem.pipeline), arrivals, first=first).latencies(
        configuration(problem, plan)
    )


def missed(problem: PipelineProblem, plan: PipelinePlan, arrivals: Floats) -> float:
    """The share of these queries that take longer than the objective."""
    return float(np.mean(1000.0 * latencies(problem, plan, arrivals) > problem.latency_ms))


def chooses_models(arrivals: Floats, slo_s: float, floor: float) -> PipelineProblem:
    """Image Processing where the classifier names an accuracy floor, and a ResNet-50 could answer too (assumed: a third of the time)."""
    posed = problem_of("Image Processing", arrivals, slo_s)
    first, second = posed.pipeline.vertices
    others = [one for one in posed.options if one.vertex == first.name]
    models = [option(second.name, kind, line, "resnet152", 0.783) for kind, line in RESNET152.items()]
    small = [option(second.name, kind, (a / 3, b / 3), "resnet50", 0.761) for kind, (a, b) in RESNET152.items()]
    record = replace(posed.pipeline, vertices=[first, replace(second, accuracy=floor)])
    return replace(posed, pipeline=record, options=(*others, *models, *small))
