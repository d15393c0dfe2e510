"""`python -m infaas.demo DIRECTORY` writes files to try the commands with: model.onnx, validation.npz, pictures.npy."""

import shutil
import sys
from pathlib import Path

import numpy as np

from infaas.demo import digits

SHOWN = 8  # pictures in pictures.npy


def write(directory: Path) -> list[Path]:
    """Write a model, its validation set and some digits that the model has not seen. Returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    model, validation, pictures = (directory / name for name in ("model.onnx", "validation.npz", "pictures.npy"))
    shutil.copyfile(digits.models()["cnn-m"], model)
    digits.save_validation(validation)
    unseen = digits.load(digits.UNSEEN).x
    np.save(pictures, unseen[:: len(unseen) // SHOWN][:SHOWN])
    return [model, validation, pictures]


if __name__ == "__main__":
    try:
        written = write(Path(*sys.argv[1:2]))
    except OSError as error:
        sys.exit(f"infaas.demo: cannot write the files: {error}")
    print(*written, sep="\n")
