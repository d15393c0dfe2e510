"""The digits that the demo registers, asks and checks with (what they are and whose: DATA.md), and its model files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
DIGITS = HERE / "digits.npz"
MODELS = HERE / "models"

# The part each digit belongs to, as stored in digits.npz. The system sees "validation" when a model is registered and never
# learns the labels of "unseen".
TRAIN, VALIDATION, UNSEEN = 0, 1, 2
SIZES = {TRAIN: 3500, VALIDATION: 750, UNSEEN: 750}


@dataclass(frozen=True)
class Digits:
    """x: FP32 [n, 784], brightness 0..1, rows of 28 pixels. y: int64 [n], the digit."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)


def load(part: int) -> Digits:
    """One part of the data: TRAIN, VALIDATION or UNSEEN; always the same digits in the same order."""
    with np.load(DIGITS) as stored:
        chosen = stored["part"] == part
        return Digits(stored["x"][chosen].astype(np.float32) / np.float32(255), stored["y"][chosen].astype(np.int64))


def save_validation(path: Path) -> Path:
    """Write the validation part as registration wants it: keys x (FP32 [750, 784]) and y (int64 [750])."""
    digits = load(VALIDATION)
    np.savez_compressed(path, x=digits.x, y=digits.y)
    return path


def models() -> dict[str, Path]:
    """The demo's model files by model name, smallest file first."""
    found = sorted(MODELS.glob("*.onnx"), key=lambda path: (path.stat().st_size, path.stem))
    return {path.stem: path for path in found}


def compose(x: NDArray[Any], y: NDArray[Any], seed: int = 0) -> dict[str, NDArray[Any]]:
    """Split 5,000 digits, class by class, into the three parts; returns what digits.npz holds (uint8 throughout)."""
    order = np.random.default_rng(seed)
    part = np.empty(len(y), np.uint8)
    shares = np.repeat(list(SIZES), [size // 10 for size in SIZES.values()]).astype(np.uint8)
    for digit in range(10):
        part[y == digit] = order.permutation(shares)
    return {"x": x.astype(np.uint8), "y": y.astype(np.uint8), "part": part}
