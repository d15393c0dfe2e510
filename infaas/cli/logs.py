"""`infaas logs`: what the services of a system on this machine say, sorted by time and readable."""

import os
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from infaas.cli.options import DataDir, whole
from infaas.cli.output import Failure, fail
from infaas.connecting import DEFAULT_DATA_DIR
from infaas.logfiles import LEVELS, LOGS, Line, LogFile

OFTEN = 0.2  # s between two looks for new lines


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
        Only processes whose name begins so, as dispatcher, executor, monitor, registrar, gateway, dashboard, nats or postgres. Default: all.
    follow
        Go on with new lines until Ctrl-C.
    lines
        Show so many of the last lines.
    level
        Least level: debug, info, warning or error. What servers and crashed processes print without a level is always shown.

    """
    least = LEVELS.get(level.upper())
    if least is None:
        fail(f"--level {level}: is no level: use debug, info, warning or error", 2)
    directory = Path(data_dir or os.environ.get("INFAAS_DATA_DIR") or DEFAULT_DATA_DIR) / LOGS
    files = {path: LogFile(path) for path in _files(directory, service)}
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
        print(f"{datetime.fromtimestamp(at).astimezone():%H:%M:%S.%f}"[:-3], f"{name:18}", text, flush=True)


def _time_of(line: Line) -> float:
    return line[0]
