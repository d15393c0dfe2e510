"""`python -m infaas.demo.photos [DIRECTORY] [--stamps DIRECTORY]`: make the files of the demo's photograph family, once.

Looks for the stamps of Tux Paint; where they are not installed, downloads the Debian package tuxpaint-stamps-default (161 MB) by
`apt-get download` into a temporary directory and unpacks it there, without installing anything and without root. Then writes the
labelled pictures and three ONNX files (about 60 MB) into DIRECTORY, by default `photos` in the data directory.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

from infaas.demo.photos import files, stamps
from infaas.errors import InfaasError


def say(text: str) -> None:
    print(text, flush=True)


def pictures(directory: Path, given: Path | None) -> None:
    """Write pictures.npz from the stamps, which are fetched where they are not at hand."""
    if given is not None and not all((given / name).is_file() for name in stamps.labels()):
        raise InfaasError(
            f"--stamps {given}: not every picture of labels.toml is there; it must hold animals, food, ..."
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
    """Make everything; raises InfaasError with a remedy."""
    files.require_packages()
    from infaas.demo.photos import networks  # noqa: PLC0415  (torch: seconds to import)

    directory.mkdir(parents=True, exist_ok=True)
    pictures(directory, given)
    for name in files.MODELS:
        say(f"exporting {name}")
        networks.export(name, directory / f"{name}.onnx")
    (directory / files.MADE).write_text(files.made_from())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m infaas.demo.photos", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("directory", nargs="?", type=Path, default=files.directory())
    parser.add_argument("--stamps", type=Path, help="a directory with the stamps, which holds animals, food, ...")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # of the exporter, to whom exports
    try:
        make(options.directory, options.stamps)
    except (InfaasError, OSError) as error:
        print(f"infaas.demo.photos: {error}", file=sys.stderr)
        return 1
    say(f"made in {options.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
