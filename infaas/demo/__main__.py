"""`python -m infaas.demo DIRECTORY`: the demo's files, to try the commands with: model.onnx, validation.npz, pictures.npy."""

import shutil
import sys
from pathlib import Path

import numpy as np

from infaas.demo import data

SHOWN = 8  # pictures to ask about


def write(directory: Path) -> list[Path]:
    """Write a model, its validation set and some digits that it has not seen; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    model, validation, pictures = (directory / name for name in ("model.onnx", "validation.npz", "pictures.npy"))
    shutil.copyfile(data.models()["cnn-m"], model)
    data.save_validation(validation)
    unseen = data.load(data.UNSEEN).x
    np.save(pictures, unseen[:: len(unseen) // SHOWN][:SHOWN])
    return [model, validation, pictures]


if __name__ == "__main__":
    try:
        written = write(Path(*sys.argv[1:2]))
    except OSError as error:
        sys.exit(f"infaas.demo: cannot write there: {error}")
    print(*written, sep="\n")
