"""What tests of processes need: who lives, what is left of a directory's system, scripts of their own."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from services.shell.host.process import PLAIN, launched

ROOT = Path(__file__).resolve().parents[3]


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def fetched(url: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """The status and text of a reply; 0 and the reason where there is none. body: posted, as JSON unless it is bytes."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def certified(directory: Path, *more: str, who: str = "DNS:localhost", name: str = "own") -> tuple[str, str]:
    """Files of a certificate for this name or address, and of its key. more: how the key is kept, in place of openly."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    own, key = str(directory / f"{name}.pem"), str(directory / f"{name}.key")
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2")
    says = ("-subj", f"/CN={who.partition(':')[2]}", "-addext", f"subjectAltName={who}", "-keyout", key, "-out", own)
    subprocess.run([*made, *says, *(more or ("-nodes",))], check=True, capture_output=True)
    return own, key


def living_of(directory: Path) -> list[int]:
    """Processes that have the directory in their command line or environment: everything a system in it has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid() or not alive(int(process.name)):
            continue
        try:
            said = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(directory).encode() in said:
            found.append(int(process.name))
    return found


def pids_of(directory: Path, service: str, worker: str = "") -> list[int]:
    """Processes of the directory's system that run this service; the one of a worker. Those that stand by do not run it yet."""
    return [
        pid
        for pid in living_of(directory)
        if f"infaas.cli.run\0{service}" in about(pid, "cmdline")
        and (not worker or f"INFAAS_WORKER__NAME={worker}\0" in about(pid, "environ"))
        and not stands_by(pid)
    ]


def stands_by(pid: int) -> bool:
    """Whether it is a copy of the process that it takes over from, which has started it."""
    parent = re.search(r"PPid:\s*(\d+)", about(pid, "status"))
    ours = about(pid, "cmdline")
    return parent is not None and len(ours) > 1 and about(int(parent[1]), "cmdline") == ours


def about(pid: int, what: str) -> str:
    """A file of the process in /proc."""
    try:
        return Path(f"/proc/{pid}/{what}").read_text() + "\0"
    except OSError:
        return ""


def eventually(what: Callable[[], bool], seconds: float = 180.0) -> bool:
    """Whether it becomes true within the time, which is only there to end a failing test: it is long, for busy machines."""
    give_up = time.monotonic() + seconds
    while not what():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def environ(**more: str) -> dict[str, str]:
    """This process's environment without any system's, with our source on the path of its Pythons."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("INFAAS_")}
    return {**ours, "PYTHONPATH": str(ROOT), **more}


def with_other_hashes(code: str) -> str:
    """What this code prints in a process where sets of texts are walked in another order."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, env=environ(PYTHONHASHSEED=seed), capture_output=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@contextmanager
def script(text: str, *arguments: str, identity: tuple[str, int, int] = PLAIN) -> Iterator[subprocess.Popen[str]]:
    """Run Python source in a process of its own, killed at the end; read its stdout by line."""
    with subprocess.Popen(
        launched([sys.executable, "-c", text, *arguments], identity),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environ(),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def program(
    *words: str, errors: Path | None = None, cwd: Path | None = None, patience: float = 60.0, **more: str
) -> Iterator[subprocess.Popen[str]]:
    """`python -m` of these words and with these variables, its stdout to be read by line, its stderr in a file.

    At the end it is asked to end, and killed once it has had `patience` s for it.
    """
    with (errors or Path(os.devnull)).open("a") as log:
        command = [sys.executable, "-P", "-m", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ(**more), cwd=cwd)
    with process:
        try:
            yield process
        finally:
            if patience:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
            process.kill()


@contextmanager
def container(place: Path, named: str, *options: str, **more: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """`infaas container` of a class of this directory, and what it says once it serves; killed at the end."""
    errors = place / f"container-{time.monotonic_ns()}.err"
    words = ("infaas.cli", "container", named, "--json", *options)
    with program(*words, errors=errors, cwd=place, patience=0.0, **more) as process:
        line = read_line(process)
        assert line, errors.read_text()
        yield process, json.loads(line)


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line of its stdout."""
    return process.stdout.readline().rstrip("\n")


def infaas(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run one command of ours to its end."""
    return python("-P", "-m", "infaas.cli", *arguments, **more)


def python(
    *arguments: str, cwd: Path | None = None, input: str | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with these variables besides those that any has."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environ(**more),
        cwd=cwd,
        input=input,
        timeout=480,
        check=False,
    )
