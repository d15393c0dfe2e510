"""One environment a system, made by venv and pip in a cache directory, once."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from peers.systems import PEERS, Peer

CACHE = Path.home() / ".cache" / "infaas" / "peers"
MARK = "installed.json"
BESIDES = {"pip", "setuptools", "_distutils_hack", "pkg_resources"}  # what venv itself puts there


@dataclass(frozen=True)
class Environment:
    """mb: what the packages take on disk. seconds: pip's time, which depends on its cache. reason: why there is none, "" if there is."""

    python: str = ""
    mb: float = 0.0
    seconds: float = 0.0
    reason: str = ""


def environment(name: str, *, install: bool = True) -> Environment:
    """The system's environment, made if it is not there or its requirements have changed. Failures are a `reason`, not an error."""
    peer = PEERS[name]
    directory = CACHE / name
    mark = directory / MARK
    if mark.exists():
        stored = json.loads(mark.read_text())
        if stored.pop("packages") == list(peer.packages):
            return Environment(**stored)
    if not install:
        return Environment(reason="it is not installed, and nothing was to be installed")
    try:
        found = _install(peer, directory)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        lines = [line for line in said.strip().splitlines() if line.startswith("ERROR")] or said.strip().splitlines()
        return Environment(reason=f"pip could not install it: {lines[-1].removeprefix('ERROR: ')[:200]}")
    mark.write_text(json.dumps(asdict(found) | {"packages": list(peer.packages)}))
    return found


def _install(peer: Peer, directory: Path) -> Environment:
    python = directory / "bin" / "python"
    began = time.monotonic()
    if not python.exists():
        interpreter = peer.python or getattr(sys, "_base_executable", sys.executable)
        _run(interpreter, "-m", "venv", str(directory))
    _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.packages)
    return Environment(str(python), _size(directory), time.monotonic() - began)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=1800)


def _size(directory: Path) -> float:
    """Megabytes (2^20) of the files of all packages but pip and its like."""
    (packages,) = directory.glob("lib/python*/site-packages")
    kept = [each for each in packages.iterdir() if each.name.partition("-")[0] not in BESIDES]
    files = [file for each in kept for file in ([each] if each.is_file() else each.rglob("*"))]
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink()) / 2**20
