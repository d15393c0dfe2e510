"""`python -m examples.photos [DIRECTORY] [--stamps DIRECTORY]`: make the files of the photograph family, once.

Looks for the stamps of Tux Paint. If they are not installed, it downloads the Debian package tuxpaint-stamps-default (161 MB) with
`apt-get download` into a temporary directory and unpacks it there. Nothing is installed, and no root is needed. Then it writes the
labelled pictures and three ONNX files (about 60 MB) into DIRECTORY, by default `photos` in the data directory.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

from examples.photos import files, stamps
from infaas.errors import InfaasError


def say(text: str) -> None:
    print(text, flush=True)


def pictures(directory: Path, given: Path | None) -> None:
    """Write pictures.npz from the stamps. Fetches the stamps if they are not installed."""
    if given is not None and not all((given / name).is_file() for name in stamps.labels()):
        raise InfaasError(
            f"--stamps {given}: some pictures of labels.toml are missing there; the directory must hold animals, food, ..."
        )
    source = given or stamps.found()
    with tempfile.TemporaryDirectory(prefix="infaas-stamps-") as temporary:
        if source is None:
            say(f"fetching the photographs: apt-get download {stamps.PACKAGE} (161 MB), unpacked but not installed")
            source = stamps.fetch(Path(temporary))
        say("reading the photographs")
        read = stamps.read(source)
    np.savez_compressed(directory / files.PICTURES, x=read["x"], y=read["y"], part=read["part"])


def make(directory: Path, given: Path | None) -> None:
    """Make all files; raises InfaasError with a remedy."""
    files.require_packages()
    from examples.photos import networks  # noqa: PLC0415  (torch: seconds to import)

    directory.mkdir(parents=True, exist_ok=True)
    pictures(directory, given)
    for name in files.MODELS:
        say(f"exporting {name}")
        networks.export(name, directory / f"{name}.onnx")
    (directory / files.MADE).write_text(files.made_from())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.photos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, default=files.directory())
    parser.add_argument("--stamps", type=Path, help="a directory with the stamps, which holds animals, food, ...")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # the exporter's warnings are for its developers
    try:
        make(options.directory, options.stamps)
    except (InfaasError, OSError) as error:
        print(f"examples.photos: {error}", file=sys.stderr)
        return 1
    say(f"made in {options.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
