"""The photographs: stamps of the drawing program Tux Paint, labelled in labels.toml, read as square pictures."""

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infaas.errors import InfaasError

LABELS = Path(__file__).with_name("labels.toml")
PACKAGE = "tuxpaint-stamps-default"
INSTALLED = Path("usr/share/tuxpaint/stamps")  # below /, or below where the package was unpacked
REMEDY = f"apt-get install {PACKAGE} (after apt-get update), or give a directory with its stamps: python -m examples.photos --stamps DIRECTORY"
FETCHING = 600.0  # s, at most

SIDE = 260  # pixels; what the largest of the networks takes
VALIDATION, UNSEEN = 1, 2  # the parts, numbered like those of the digits
VIEWS = ((255, 0.06, False), (160, 0.14, True))  # each picture twice: brightness around it, margin, whether mirrored


def labels() -> dict[str, int]:
    """ImageNet-1k class by file name below the stamps' directory, in order of name."""
    with LABELS.open("rb") as file:
        return dict(sorted(tomllib.load(file)["labels"].items()))


def part(number: int) -> int:
    """The part that the picture at this place in order of name belongs to: every third one stays unseen."""
    return UNSEEN if number % 3 == 2 else VALIDATION


def found(root: Path = Path("/")) -> Path | None:
    """The stamps' directory below a root, or None if a labelled picture is missing there."""
    directory = root / INSTALLED
    return directory if all((directory / name).is_file() for name in labels()) else None


def fetch(directory: Path, search: str | None = None) -> Path:
    """Download the Debian package into the directory and unpack it there, without installing it. Raises InfaasError with a remedy.

    search: directories for the programs, as in PATH; None: PATH.
    """
    tools = {}
    for program in ("apt-get", "dpkg-deb"):
        found_at = shutil.which(program, path=search)
        if found_at is None:
            raise InfaasError(
                f"the photographs are not installed, and they cannot be fetched without {program}: {REMEDY}"
            )
        tools[program] = found_at
    _call(directory, tools["apt-get"], "download", PACKAGE)
    for package in directory.glob(f"{PACKAGE}_*.deb"):
        _call(directory, tools["dpkg-deb"], "-x", package.name, ".")
        package.unlink()
    unpacked = found(directory)
    if unpacked is None:
        raise InfaasError(
            f"the package {PACKAGE} does not hold every picture of labels.toml: another version? {REMEDY}"
        )
    return unpacked


def _call(directory: Path, program: str, *arguments: str) -> None:
    what = " ".join((Path(program).name, *arguments))
    try:
        done = subprocess.run(
            (program, *arguments), cwd=directory, capture_output=True, text=True, check=False, timeout=FETCHING
        )
    except subprocess.TimeoutExpired as error:
        raise InfaasError(f"{what} took more than {FETCHING:.0f} s: {REMEDY}") from error
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        raise InfaasError(f"{what} failed: {said}: {REMEDY}")


def read(directory: Path) -> dict[str, NDArray[Any]]:
    """Every labelled picture in every view: x uint8 [n, 260, 260, 3], y int64 [n], part uint8 [n]; views side by side."""
    pictures, classes, parts = [], [], []
    for number, (name, label) in enumerate(labels().items()):
        for view in VIEWS:
            pictures.append(_picture(directory / name, *view))
            classes.append(label)
            parts.append(part(number))
    return {"x": np.stack(pictures), "y": np.array(classes, np.int64), "part": np.array(parts, np.uint8)}


def _picture(path: Path, around: int, margin: float, mirrored: bool) -> NDArray[np.uint8]:
    from PIL import Image, ImageOps  # noqa: PLC0415  (of the extra `photos`)

    inside = round(SIDE * (1 - 2 * margin))
    with Image.open(path) as file:
        stamp = ImageOps.contain(file.convert("RGBA"), (inside, inside), Image.Resampling.BICUBIC)
    if mirrored:
        stamp = ImageOps.mirror(stamp)
    square = Image.new("RGB", (SIDE, SIDE), (around, around, around))
    square.paste(stamp, ((SIDE - stamp.width) // 2, (SIDE - stamp.height) // 2), stamp)
    return np.asarray(square, np.uint8)
