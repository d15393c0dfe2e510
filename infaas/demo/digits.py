"""The demo's own family: handwritten digits and seven small classifiers. DATA.md says where they come from.

The pipeline's stages are made from the same digits, without training: a cheap model, an accurate one for what that is unsure of, and a
check of what they say.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from infaas.demo.load import HEADROOM, Labelled, ModelFamily, Progress, QueryKind, Variants

HERE = Path(__file__).parent
DIGITS = HERE / "digits.npz"
MODELS = HERE / "models"

# The part that each digit belongs to, as stored in digits.npz. Registration gets "validation". The system never gets the labels of
# "unseen".
TRAIN, VALIDATION, UNSEEN = 0, 1, 2
CLASSES = 10
SIZES = {TRAIN: 3500, VALIDATION: 750, UNSEEN: 750}


def load(part: int) -> Labelled:
    """One part of the data: TRAIN, VALIDATION or UNSEEN; always the same, in the same order. x: FP32 [n, 784], brightness 0..1."""
    with np.load(DIGITS) as stored:
        chosen = stored["part"] == part
        return Labelled(stored["x"][chosen].astype(np.float32) / np.float32(255), stored["y"][chosen].astype(np.int64))


def save_validation(path: Path) -> Path:
    """Write the validation part as a registration takes it: keys x (FP32 [750, 784]) and y (int64 [750])."""
    digits = load(VALIDATION)
    np.savez_compressed(path, x=digits.x, y=digits.y)
    return path


def models() -> dict[str, Path]:
    """The model files by model name, smallest file first."""
    found = sorted(MODELS.glob("*.onnx"), key=lambda path: (path.stat().st_size, path.stem))
    return {path.stem: path for path in found}


def scores_of(model: Path, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n, 10], of one of the models, computed here."""
    import onnxruntime  # noqa: PLC0415  (few of those who take the digits need it)

    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    found: NDArray[np.float32] = session.run(None, {session.get_inputs()[0].name: x})[0]
    return found


def query_kinds(variants: Variants) -> list[QueryKind]:
    """The kinds of query. The cost limit follows from what the variants cost on this machine."""
    cheapest = min(row["cost_per_1000"] for row in variants if (row["accuracy"] or 0.0) >= 0.95)
    # On a busy machine a batch takes and costs several times what it does alone. The limit still excludes expensive variants.
    limit = float(f"{cheapest * HEADROOM:.1g}")
    return [
        QueryKind(name="nothing", needs={}, weight=3),
        QueryKind(name="within 5 ms", needs={"latency_ms": 5.0}, weight=3),
        QueryKind(name="accuracy ≥ 0.97", needs={"accuracy": 0.97}, weight=3),
        QueryKind(name="accuracy ≥ 0.985, within 50 ms", needs={"accuracy": 0.985, "latency_ms": 50.0}, weight=3),
        QueryKind(
            name=f"accuracy ≥ 0.95, at most ${limit:g} per 1,000", needs={"accuracy": 0.95, "cost": limit}, weight=3
        ),
        QueryKind(name="accuracy ≥ 0.999", needs={"accuracy": 0.999}, possible=False, weight=0.4),
        QueryKind(name="within 0.001 ms", needs={"latency_ms": 0.001}, possible=False, weight=0.4),
        QueryKind(
            name="accuracy ≥ 0.97, at most $1e-12 per 1,000",
            needs={"accuracy": 0.97, "cost": 1e-12},
            possible=False,
            weight=0.4,
        ),
    ]


async def family(_progress: Progress) -> ModelFamily:
    """The digits as the demo takes them (`infaas demo --family digits`)."""
    return ModelFamily(
        app="digits",
        things="digits",
        classes=CLASSES,
        models=models(),
        save_validation=save_validation,
        unseen=load(UNSEEN),
        query_kinds=query_kinds,
        validated=SIZES[VALIDATION],
    )


PIPELINE = "digits"
QUICK, EXACT, CHECK = VERTICES = ("quick", "exact", "check")
APPS = {vertex: f"{PIPELINE}-{vertex}" for vertex in VERTICES}
CHEAP, ACCURATE = "mlp-s", "cnn-l"  # models of the family
NEAREST = "nearest"  # the model that checks
LATENCY_MS = 250.0
UNSURE = (
    0.9  # confidence of the cheap model below which the accurate one is asked: both together are then about as accurate
)
COMPONENTS = 40  # of the pictures, by which the check compares them
SCALE = 0.1  # of squared distances, in the exponent
FAR = 1e6  # beyond any squared distance

Scores = NDArray[np.float32]


class DemoStages(NamedTuple):
    """files: app, model, file and validation set. share: of the validation digits, those that the cheap model is unsure of."""

    files: list[tuple[str, str, Path, Path]]
    share: float


def make_stages(directory: Path) -> DemoStages:
    """Write the models that there are no files of, and the validation sets."""
    family, seen = models(), load(VALIDATION)
    said = scores_of(family[CHEAP], seen.x)
    nearest = save_nearest(directory / f"{NEAREST}.onnx", load(TRAIN))
    plain, checked = directory / "validation.npz", directory / "checked.npz"
    np.savez_compressed(plain, x=seen.x, y=seen.y)
    np.savez_compressed(checked, x=seen.x, scores=said, y=(said.argmax(axis=1) == seen.y).astype(np.int64))
    files = [
        (APPS[QUICK], CHEAP, family[CHEAP], plain),
        (APPS[EXACT], ACCURATE, family[ACCURATE], plain),
        (APPS[CHECK], NEAREST, nearest, checked),
    ]
    return DemoStages(files, float(unsure(said).mean()))


def unsure(quick: Scores) -> NDArray[np.bool_]:
    """For which pictures the accurate model is asked."""
    asked: NDArray[np.bool_] = quick.max(axis=1) < UNSURE
    return asked


def save_nearest(path: Path, known: Labelled) -> Path:
    """Write a model that compares a picture with known ones.

    Inputs: x [n, 784], and scores [n, 10] that say which digit it should be. Output: verdict [n, 2], how likely the most similar known
    picture shows another digit, and how likely this one. Similar are pictures whose principal components are near each other.
    known: as many pictures of each class.
    """
    x = known.x[np.argsort(known.y, kind="stable")]
    basis = np.linalg.eigh(np.cov(x, rowvar=False))[1][:, -COMPONENTS:].astype(np.float32)
    points = x @ basis
    constants: dict[str, Any] = {
        "basis": basis,
        "points": -2.0 * points.T,
        "norms": (points * points).sum(axis=1),
        "by_class": np.array([0, CLASSES, len(known) // CLASSES]),
        "classes": np.array(CLASSES),
        "off_on": np.array([0.0, 1.0], np.float32),
        "far": np.array(FAR, np.float32),
        "axis": np.array([1]),
        "scale": np.array(-SCALE, np.float32),
    }
    # Distances are squared, and without the picture's own norm.
    graph = onnx.parser.parse_graph(f"""
        {NEAREST} (float[n, {x.shape[1]}] x, float[n, {CLASSES}] scores) => (float[n, 2] verdict) {{
            point = MatMul(x, basis)
            products = MatMul(point, points)
            distances = Add(products, norms)
            grouped = Reshape(distances, by_class)
            nearest = ReduceMin<axes = [2], keepdims = 0>(grouped)
            said = ArgMax<axis = 1, keepdims = 0>(scores)
            mask = OneHot(said, classes, off_on)
            masked = Mul(nearest, mask)
            own = ReduceSum<keepdims = 1>(masked, axis)
            away = Mul(mask, far)
            rest = Add(nearest, away)
            other = ReduceMin<axes = [1], keepdims = 1>(rest)
            both = Concat<axis = 1>(other, own)
            logits = Mul(both, scale)
            verdict = Softmax<axis = 1>(logits)
        }}""")
    graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def pipeline_file(share: float, rate: float) -> str:
    """The pipeline as `infaas pipeline` takes it. share: of DemoStages. rate: queries/s that it is planned for."""
    unsure_is = f'{{ output = "scores", reduce = "max", op = "<", value = {UNSURE:g} }}'
    best = f"{EXACT}.scores | {QUICK}.scores"
    return f"""\
vertex = [
  {{ name = "{QUICK}", app = "{APPS[QUICK]}", inputs = {{ x = "$.x" }} }},  # cheap
  {{ name = "{EXACT}", app = "{APPS[EXACT]}", inputs = {{ x = "$.x" }} }},  # for what the cheap one is unsure of
  # whether the nearest known picture shows the same digit
  {{ name = "{CHECK}", app = "{APPS[CHECK]}", inputs = {{ x = "$.x", scores = "{best}" }} }},
]
edge = [
  {{ from = "{QUICK}", to = "{EXACT}", probability = {share:.3f}, when = {unsure_is} }},
  {{ from = "{QUICK}", to = "{CHECK}" }},
  {{ from = "{EXACT}", to = "{CHECK}" }},
]
output = {{ scores = "{best}", verdict = "{CHECK}.verdict" }}
load = [{{ rate = {rate:.4g} }}]

[pipeline]
name = "{PIPELINE}"
latency_ms = {LATENCY_MS:g}
"""
