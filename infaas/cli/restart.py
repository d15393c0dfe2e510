"""`infaas restart`: a new process for a part of a system on this machine, which is ready before the old one goes."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from infaas.cli.options import DataDir
from infaas.cli.output import Failure, meant
from infaas.connecting import DEFAULT_DATA_DIR, read_endpoints
from services.shell.host.endpoints import PARTS

LIMIT = 180.0  # s for one part; its supervisor ends what does not end by itself
LOOK = 0.05


def restart(part: str, *, data_dir: DataDir = None) -> int:
    """Restart a service of `infaas up` without losing a query: its successor is ready before it goes. SIGTERM of its process does the same.

    Example: `infaas restart dispatcher`

    Parameters
    ----------
    part
        A process as `infaas status` and `infaas logs` name it, as dispatcher-0, or a service: then all its processes, one after the other.

    """
    place = Path(data_dir or os.environ.get("INFAAS_DATA_DIR") or DEFAULT_DATA_DIR)
    read_endpoints(place)  # it says so when nothing runs
    there = _parts(place)
    chosen = [name for name in there if name == part] or [name for name in there if name.startswith(f"{part}-")]
    if not chosen:
        raise Failure(f"no service is called {part}: there are {', '.join(sorted(there))}{meant(part, there)}")
    for name in chosen:
        old = there[name]
        with suppress(ProcessLookupError):
            os.kill(old, signal.SIGTERM)
        new = _successor(place, name, old)
        print(f"{name} was restarted: process {new} instead of {old}", flush=True)
    return 0


def _successor(place: Path, name: str, old: int) -> int:
    """The process that runs instead, once the old one has ended."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        new = _parts(place).get(name, old)
        if new != old and not _runs(old):
            return new
        time.sleep(LOOK)
    raise Failure(f"{name} was not restarted within {LIMIT:.0f} s: `infaas logs {name}` may say why")


def _parts(place: Path) -> dict[str, int]:
    try:
        found: dict[str, int] = json.loads((place / PARTS).read_text())
    except (OSError, ValueError):
        raise Failure(
            f"{place / PARTS} cannot be read: restart the whole system, it was started by another version"
        ) from None
    return found


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
