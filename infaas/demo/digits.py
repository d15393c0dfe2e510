"""The demo's own family: handwritten digits and seven small classifiers. DATA.md says where they come from."""

from pathlib import Path

import numpy as np
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
