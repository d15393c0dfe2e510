"""What the demo's pipeline is made of: a cheap digit model, an accurate one for what that is unsure of, and a check of what they say.

All are made from the demo's own digits, without training: the threshold by the validation part, the check from the training part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bus.messages.catalog import PipelinePlan
from infaas.answers import Answer
from infaas.demo.choices import percentiles, refusals
from infaas.demo.digits import CLASSES, TRAIN, VALIDATION, Digits, load, models, scores_of
from infaas.demo.load import DemoReply
from infaas.demo.program import save_picture

PIPELINE = "digits"
QUICK, EXACT, CHECK = "quick", "exact", "check"  # vertices
APPS = {QUICK: "digits-quick", EXACT: "digits-exact", CHECK: "digits-check"}
CHEAP, ACCURATE = "mlp-s", "cnn-l"  # models of the family
NEAREST = "nearest"  # the model that checks
LATENCY_MS = 250.0
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
ALIKE = (
    0.005  # by which the two models together may be less accurate on the validation part than the accurate one alone
)
COMPONENTS = 40  # of the pictures, by which the check compares them
SCALE = 0.1  # of squared distances, in the exponent
FAR = 1e6  # beyond any squared distance

Scores = NDArray[np.float32]


@dataclass(frozen=True)
class DemoStages:
    """files: by app, its model and the file. validation: by app. threshold: confidence of the cheap model below which the accurate one is asked.

    share: of the validation digits, those below.
    """

    files: Mapping[str, tuple[str, Path]]
    validation: Mapping[str, Path]
    threshold: float
    share: float


def make_stages(directory: Path) -> DemoStages:
    """Write the models that there are no files of, and the validation sets."""
    family, validation = models(), load(VALIDATION)
    said = scores_of(family[CHEAP], validation.x)
    threshold, share = unsure_below(said, scores_of(family[ACCURATE], validation.x), validation.y)
    nearest = save_nearest(directory / f"{NEAREST}.onnx", load(TRAIN))
    plain, checked = directory / "validation.npz", directory / "checked.npz"
    np.savez_compressed(plain, x=validation.x, y=validation.y)
    np.savez_compressed(checked, x=validation.x, scores=said, y=(said.argmax(axis=1) == validation.y).astype(np.int64))
    return DemoStages(
        files={
            APPS[QUICK]: (CHEAP, family[CHEAP]),
            APPS[EXACT]: (ACCURATE, family[ACCURATE]),
            APPS[CHECK]: (NEAREST, nearest),
        },
        validation={APPS[QUICK]: plain, APPS[EXACT]: plain, APPS[CHECK]: checked},
        threshold=threshold,
        share=share,
    )


def unsure_below(quick: Scores, exact: Scores, labels: NDArray[np.int64]) -> tuple[float, float]:
    """The least of THRESHOLDS with which both models together are about as accurate as the accurate one alone, and the share below it."""
    confidence = quick.max(axis=1)
    for threshold in THRESHOLDS:
        below = confidence < threshold
        if accuracy(merged(quick, exact, below), labels) >= accuracy(exact, labels) - ALIKE:
            break
    return threshold, float(below.mean())


def merged(quick: Scores, exact: Scores, asked: NDArray[np.bool_]) -> Scores:
    """The scores of `exact` where it is asked."""
    return np.where(asked[:, None], exact, quick)


def accuracy(scores: Scores, labels: NDArray[np.int64]) -> float:
    return float((scores.argmax(axis=1) == labels).mean())


def save_nearest(path: Path, known: Digits) -> Path:
    """Write a model that compares a picture with known ones.

    Inputs: x [n, 784], and scores [n, 10] that say which digit it should be. Output: verdict [n, 2], how likely the most similar known
    picture shows another digit, and how likely this one. Similar are pictures whose principal components are near each other.
    known: as many pictures of each class.
    """
    order = np.argsort(known.y, kind="stable")
    x = known.x[order]
    basis = np.linalg.eigh(np.cov(x, rowvar=False))[1][:, -COMPONENTS:].astype(np.float32)
    points = x @ basis
    each = len(known) // CLASSES
    constants: dict[str, Any] = {
        "basis": basis,
        "points": -2.0 * points.T,
        "norms": (points * points).sum(axis=1),
        "by_class": np.array([0, CLASSES, each], np.int64),
        "classes": np.array(CLASSES, np.int64),
        "off_on": np.array([0.0, 1.0], np.float32),
        "far": np.array(FAR, np.float32),
        "axis": np.array([1], np.int64),
        "scale": np.array(-SCALE, np.float32),
    }
    nodes: list[tuple[str, list[str], str, dict[str, int | list[int]]]] = [
        ("MatMul", ["x", "basis"], "point", {}),
        ("MatMul", ["point", "points"], "products", {}),
        ("Add", ["products", "norms"], "distances", {}),  # squared, but for the picture's own norm
        ("Reshape", ["distances", "by_class"], "grouped", {}),
        ("ReduceMin", ["grouped"], "nearest", {"axes": [2], "keepdims": 0}),
        ("ArgMax", ["scores"], "said", {"axis": 1, "keepdims": 0}),
        ("OneHot", ["said", "classes", "off_on"], "mask", {}),
        ("Mul", ["nearest", "mask"], "masked", {}),
        ("ReduceSum", ["masked", "axis"], "own", {"keepdims": 1}),
        ("Mul", ["mask", "far"], "away", {}),
        ("Add", ["nearest", "away"], "rest", {}),
        ("ReduceMin", ["rest"], "other", {"axes": [1], "keepdims": 1}),
        ("Concat", ["other", "own"], "both", {"axis": 1}),
        ("Mul", ["both", "scale"], "logits", {}),
        ("Softmax", ["logits"], "verdict", {"axis": 1}),
    ]
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, [output], **attributes) for kind, inputs, output, attributes in nodes],
        NEAREST,
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", x.shape[1]]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", CLASSES]),
        ],
        [helper.make_tensor_value_info("verdict", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def pipeline_file(stages: DemoStages, rate: float) -> str:
    """The pipeline as `infaas pipeline` takes it. rate: queries/s that it is planned for."""
    return f"""\
[pipeline]
name = "{PIPELINE}"
latency_ms = {LATENCY_MS:g}

[[vertex]]                                # cheap
name = "{QUICK}"
app = "{APPS[QUICK]}"
inputs = {{ x = "$.x" }}

[[vertex]]                                # for what the cheap one is unsure of
name = "{EXACT}"
app = "{APPS[EXACT]}"
inputs = {{ x = "$.x" }}

[[vertex]]                                # whether the nearest known picture shows the same digit
name = "{CHECK}"
app = "{APPS[CHECK]}"
inputs = {{ x = "$.x", scores = "{EXACT}.scores | {QUICK}.scores" }}

[[edge]]
from = "{QUICK}"
to = "{EXACT}"
when = {{ output = "scores", reduce = "max", op = "<", value = {stages.threshold:g} }}
probability = {stages.share:.3f}

[[edge]]
from = "{QUICK}"
to = "{CHECK}"

[[edge]]
from = "{EXACT}"
to = "{CHECK}"

[output]
scores = "{EXACT}.scores | {QUICK}.scores"
verdict = "{CHECK}.verdict"

[[load]]
rate = {rate:.4g}
"""


# -- the figures of `infaas demo --pipeline`, and its picture. Pure, but for what is drawn

TIMES = 3.0  # by which the load grows
# Name, share of the time, and multiple of the lowest rate. The last is long enough for replicas to go: the tuner remembers half a minute.
PHASES = (("before", 0.08, 1.0), ("tripled", 0.12, TIMES), ("after", 0.8, 1.0))
BINS = 60  # points of the series
COLOURS = ("#0072B2", "#D55E00", "#E69F00")  # of the vertices
VERTICES = (QUICK, EXACT, CHECK)
Answers = Sequence[tuple[int, Answer]]  # each with its picture
Served = Sequence[Mapping[str, Any]]
Serving = Sequence[tuple[float, Mapping[str, int]]]  # Unix time, instances by vertex


def asked_exact(answer: Answer) -> bool:
    """Whether the accurate model was asked."""
    return any(member.partition("@")[0] == ACCURATE for member in answer.members or ())


def bounds() -> list[float]:
    """Where the phases begin, and the end, as shares of the time."""
    return [0.0, *np.cumsum([share for _, share, _ in PHASES]).round(9).tolist()]


def phase_at(share: float) -> str:
    """The phase at this share of the time, and its rate."""
    number = min(len(PHASES) - 1, int(np.searchsorted(bounds(), share, side="right")) - 1)
    return PHASES[number][0]


def results(
    replies: Sequence[DemoReply], pictures: Digits, threshold: float, served: Served, seconds: float
) -> dict[str, Any]:
    """phases: of the load. accuracy, cost and check: of its answers.

    served: of each vertex and variant, visits and means of its parts. What begins with `computed` was not measured on the system.
    """
    answers = [(int(one.pictures[0]), one.answer) for one in replies if one.answer is not None]
    paid = sum(answer.cost for _, answer in answers)
    visits = {name: mean(served, name, "cost") for name in VERTICES}
    exact, check = visits[EXACT], visits[CHECK]
    return {
        "answered": len(answers),
        "refused": refusals(replies),
        "phases": _phases(replies, seconds),
        **_latencies(replies),
        "accuracy": _accuracies(answers, pictures, threshold) if answers else None,
        "cost": {
            "paid": paid,
            "per_1000": 1000.0 * paid / len(answers) if answers else None,
            # What the accurate model for each query would cost: nobody asked so, so it is computed from what visits here were paid.
            "computed_exact_per_1000": None if exact is None else 1000.0 * exact,
            "computed_exact_and_check_per_1000": None if exact is None or check is None else 1000.0 * (exact + check),
        },
        "check": _check(answers, pictures),
    }


def vertices(plan: PipelinePlan, served: Served, instances: Serving) -> list[dict[str, Any]]:
    """How each vertex was planned, and how it was visited. instances: by vertex, at several times."""
    found = []
    for name, stage in plan.vertices.items():
        rows = [row for row in served if row["stage"] == name]
        there = [now[name] for _, now in instances if name in now]
        found.append({
            "vertex": name,
            "app": APPS[name],
            "variant": stage.variant,
            "planned": {
                key: getattr(stage, key) for key in ("replicas", "batch", "scale", "service_ms", "rho", "accuracy")
            },
            "visits": sum(row["visits"] for row in rows),
            "variants": {row["variant"]: row["visits"] for row in rows},
            "instances": [min(there, default=0), max(there, default=0)],
            **{key: mean(served, name, key) for key in ("batch", "cost", "p50_ms", "p99_ms")},
        })  # fmt: skip
    return found


def mean(served: Served, vertex: str, key: str) -> float | None:
    """Of all visits, weighted; None without any."""
    rows = [row for row in served if row["stage"] == vertex and row[key] is not None]
    visits = sum(row["visits"] for row in rows)
    return sum(row["visits"] * row[key] for row in rows) / visits if visits else None


def _phases(replies: Sequence[DemoReply], seconds: float) -> list[dict[str, Any]]:
    found = []
    for (name, _, grown), (start, end) in zip(PHASES, pairwise(seconds * at for at in bounds()), strict=True):
        there = [one for one in replies if start <= one.due < end]
        found.append({
            "name": name,
            "times": grown,
            "seconds": end - start,
            "qps": len(there) / (end - start),
            "queries": len(there),
            "refused": sum(one.answer is None for one in there),
            **_latencies(there),
        })  # fmt: skip
    return found


def _in_time(reply: DemoReply) -> bool:
    return reply.answer is not None and reply.took_ms <= LATENCY_MS


def _latencies(replies: Sequence[DemoReply]) -> dict[str, Any]:
    """As the client saw them. attainment: the share answered within the objective."""
    return {"attainment": sum(map(_in_time, replies)) / len(replies) if replies else None, **percentiles(replies)}


def _accuracies(answers: Answers, pictures: Digits, threshold: float) -> dict[str, Any]:
    """Of the answers; and of single models for the same pictures, computed here."""
    shown = [picture for picture, _ in answers]
    labels = pictures.y[shown]
    quick, exact = (scores_of(models()[one], pictures.x) for one in (CHEAP, ACCURATE))
    both = merged(quick, exact, quick.max(axis=1) < threshold)
    return {
        "answers": float((np.array([_said(answer) for _, answer in answers]) == labels).mean()),
        "quick": CHEAP,
        "exact": ACCURATE,
        "computed_quick": accuracy(quick[shown], labels),
        "computed_exact": accuracy(exact[shown], labels),
        "computed_both": accuracy(both[shown], labels),
    }


def _said(answer: Answer) -> int:
    return int(answer.outputs["scores"].argmax())


def _check(answers: Answers, pictures: Digits) -> dict[str, int]:
    """Of right and of wrong answers, how many the check doubts."""
    pairs = [(_said(one) == pictures.y[picture], float(one.outputs["verdict"][0, 1]) < 0.5) for picture, one in answers]
    return {
        "right": sum(right for right, _ in pairs),
        "right_doubted": sum(right and doubted for right, doubted in pairs),
        "wrong": sum(not right for right, _ in pairs),
        "wrong_doubted": sum(doubted and not right for right, doubted in pairs),
    }


def series(
    replies: Sequence[DemoReply], instances: Serving, events: Sequence[Mapping[str, Any]], start: float, seconds: float
) -> dict[str, Any]:
    """Over the load. time: seconds to the end of each interval. attainment: of its queries; None without any.

    wanted: replicas that the tuner wants at the end of each interval, by vertex; serving: instances that there were.
    """
    edges = np.linspace(0.0, seconds, BINS + 1)
    place = np.searchsorted(edges, [one.due for one in replies], side="right") - 1
    sent = np.bincount(place, minlength=BINS)[:BINS]
    in_time = np.bincount(place, [_in_time(one) for one in replies], minlength=BINS)[:BINS]
    ends = start + edges[1:]
    return {
        "time": edges[1:].tolist(),
        "qps": (sent * BINS / seconds).tolist(),
        "attainment": [float(good / n) if n else None for good, n in zip(in_time, sent, strict=True)],
        "wanted": {
            vertex: last_of([(row["time"], row["to_replicas"]) for row in events if row["vertex"] == vertex], ends)
            for vertex in VERTICES
        },
        "serving": {
            vertex: last_of([(at, there.get(vertex, 0)) for at, there in instances], ends) for vertex in VERTICES
        },
    }


def last_of(steps: Sequence[tuple[float, int]], times: NDArray[np.float64]) -> list[int]:
    """The last value at each time; before the first step, that one's. steps: in order."""
    if not steps:
        return [0] * len(times)
    at = np.searchsorted([when for when, _ in steps], times, side="right") - 1
    return [steps[max(0, place)][1] for place in at.tolist()]


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Rate, replicas and attainment over time, as the paper's figures 6 and 7."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)

    shown = found["series"]
    at = np.array([0.0, *shown["time"]])
    figure = Figure(figsize=(9.0, 6.4), dpi=110, layout="constrained")
    rate, replicas, share = figure.subplots(3, 1, sharex=True, height_ratios=(1.0, 1.3, 1.0))
    rate.step(at, [*shown["qps"], shown["qps"][-1]], where="post", color="black", lw=1.2, label="sent")
    rate.set_ylabel("queries/s")
    below = np.zeros(len(at))
    for (vertex, wanted), colour in zip(shown["wanted"].items(), COLOURS, strict=True):
        layer = below + np.array([wanted[0], *wanted])
        replicas.fill_between(at, below, layer, step="post", facecolor=colour, edgecolor="white", lw=0.4, label=vertex)
        below = layer
    serving = np.array(list(shown["serving"].values())).sum(axis=0)
    replicas.step(at, [serving[0], *serving], where="post", color="black", lw=1.0, ls=":", label="instances")
    replicas.set_ylabel("replicas")
    replicas.yaxis.get_major_locator().set_params(integer=True)
    in_time = np.array(shown["attainment"], float)
    share.step(at, [*in_time, in_time[-1]], where="post", color="#009E73", lw=1.5, label="in time")
    share.set_ylabel(f"within {found['objective_ms']:g} ms")
    share.set_ylim(top=1.05)
    for panel in (rate, replicas, share):
        for end in at[-1] * np.array(bounds()[1:-1]):
            panel.axvline(end, color="grey", lw=0.8, ls="--")
    planned = f"planned for {found['plan']['rate']:.3g} queries/s"
    title = f"{found['app']}, {found['load']} digits: {found['attainment'] or 0:.1%} in time, {planned}"
    save_picture(figure, (rate, replicas, share), title, at[-1], path)
