"""`infaas logs`, `infaas restart` and `infaas prune`: what the processes of a system say, new ones in place of old ones, and room on its disks."""

import json as jsonlib
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from bus.fields import meant
from infaas.cli.options import DataDir, Json, whole
from infaas.cli.output import Failure, fail, render_done, show
from infaas.connecting import data_place, read_endpoints, with_client
from infaas.logfiles import LEVELS, LOGS, Line, LogFile
from services.shell.host.endpoints import PARTS

OFTEN = 0.2  # s between two looks for new lines
LIMIT = 180.0  # s for one part; its supervisor ends what does not end by itself
LOOK = 0.05


def logs(
    service: str | None = None,
    *,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative="")] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], converter=whole, validator=Number(gte=0))] = 100,
    level: str = "info",
    data_dir: DataDir = None,
) -> int:
    """Show the last lines that the services of `infaas up` have logged, also after it was stopped.

    Example: `infaas logs dispatcher -f`

    Parameters
    ----------
    service
        Only processes whose name begins so, as dispatcher, executor, monitor, registrar, gateway, dashboard, nats or postgres, and when and why
        they ended and were started again. Default: all.
    follow
        Go on with new lines until Ctrl-C.
    lines
        Show so many of the last lines.
    level
        Least level: debug, info, warning or error. What crashed processes print without a level is always shown, PostgreSQL's checkpoints at debug.

    """
    least = LEVELS.get(level.upper())
    if least is None:
        fail(f"--level {level}: is no level: use debug, info, warning or error", 2)
    directory = data_place(data_dir) / LOGS
    supervisors = [*directory.glob("up.log"), *directory.glob("worker-*.log")] if service else []
    told = {path: LogFile(path, about=service or "") for path in supervisors}
    files = told | {path: LogFile(path) for path in _files(directory, service)}
    found = sorted((line for file in files.values() for line in file.last(lines, least)), key=_time_of)
    _print(found[-lines:] if lines else [])
    while follow:
        time.sleep(OFTEN)
        for path in _files(directory, service):
            if path not in files:
                files[path] = LogFile(path, new=True)
        _print(sorted((line for file in files.values() for line in file.new(least)), key=_time_of))
    return 0


def _files(directory: Path, service: str | None) -> list[Path]:
    """The logs of these processes. Raises Failure if there are none."""
    there = sorted(directory.glob("*.log"))
    if not there:
        raise Failure(f"there are no logs in {directory}: start a system with `infaas up`, or name its --data-dir")
    chosen = [path for path in there if service is None or path.stem.startswith(service)]
    if not chosen:
        raise Failure(f"no process is called {service}: there are {', '.join(path.stem for path in there)}")
    return chosen


def _print(found: Iterable[Line]) -> None:
    for at, name, text in found:
        when = datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")
        print(when, f"{name:18}", text, flush=True)


def _time_of(line: Line) -> float:
    return line[0]


def restart(part: str, *, data_dir: DataDir = None) -> int:
    """Restart a service of `infaas up` without losing a query: its successor is ready before it goes. SIGTERM of its process does the same.

    Example: `infaas restart dispatcher`

    Parameters
    ----------
    part
        A process as `infaas status` and `infaas logs` name it, as dispatcher-0, or a service: then all its processes, one after the other.

    """
    place = data_place(data_dir)
    read_endpoints(place)  # it says so when nothing runs
    there = processes_of(place)
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


def prune(
    *, dry_run: Annotated[bool, Parameter(negative="")] = False, data_dir: DataDir = None, json: Json = False
) -> int:
    """Delete the files that no registered version has, on NATS and on the workers. It is done after each deletion of a version and every night, too.

    Parameters
    ----------
    dry_run
        Only say how much that would be.

    """
    show(with_client(data_dir, lambda client: client.admin("prune", dry_run=dry_run)), json, render_done)
    return 0


def _successor(place: Path, name: str, old: int) -> int:
    """The process that runs instead, once the old one has ended."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        new = processes_of(place).get(name, old)
        if new != old and not _runs(old):
            return new
        time.sleep(LOOK)
    raise Failure(f"{name} was not restarted within {LIMIT:.0f} s: `infaas logs {name}` may say why")


def processes_of(place: Path) -> dict[str, int]:
    """The ids of the processes of the system with this data directory, by name. Raises Failure."""
    try:
        found: dict[str, int] = jsonlib.loads((place / PARTS).read_text())
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
