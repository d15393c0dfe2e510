"""`infaas restart`: which processes it ends, what it waits for, and what it says where there is nothing to restart."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from infaas.cli import main
from services.shell.host.endpoints import SystemEndpoints, mark_stopped, write_endpoints, write_parts


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_endpoints(tmp_path, SystemEndpoints(nats="nats://n", sql="postgresql://s", writer="w"), {})
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], place: Path, part: str) -> str:
    assert main(["restart", part, "--data-dir", str(place)]) == 1
    return capsys.readouterr().err


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_what_is_no_service_is_refused_with_those_that_there_are(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parts(place, {"dispatcher-0": 1, "registrar": 1})
    there = "there are dispatcher-0, registrar"
    assert refused(capsys, place, "dispacher-0") == (
        f"infaas: no service is called dispacher-0: {there}; did you mean 'dispatcher-0'?\n"
    )
    assert refused(capsys, place, "nats") == f"infaas: no service is called nats: {there}\n"


def test_nothing_runs_there(tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark_stopped(place)
    assert "is stopped: start one with" in refused(capsys, place, "registrar")
    assert "no system runs in" in refused(capsys, tmp_path / "other", "registrar")


def test_all_processes_of_a_service_are_restarted_one_after_the_other(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The supervisor here is a thread that starts nothing: it only sees each end and names the next process."""
    old = {name: sleeper() for name in ("dispatcher-0", "dispatcher-1", "registrar")}
    pids = {name: process.pid for name, process in old.items()}
    write_parts(place, pids)
    left: list[int] = []  # of the others, how many ran when each ended

    def supervise() -> None:
        for number, name in enumerate(("dispatcher-0", "dispatcher-1")):
            old[name].wait()
            left.append(sum(process.poll() is None for process in old.values()))
            pids[name] = number + 10**7  # no process has it
            write_parts(place, pids)

    watching = threading.Thread(target=supervise)
    watching.start()
    try:
        assert main(["restart", "--part", "dispatcher", "--data-dir", str(place)]) == 0
        watching.join()
        assert left == [2, 1]
        assert old["registrar"].poll() is None
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(":")[0] for line in lines] == ["dispatcher-0 was restarted", "dispatcher-1 was restarted"]
    finally:
        for process in old.values():
            process.kill()
            process.wait()


def test_words_of_another_version_are_no_traceback(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "parts.json").write_text(json.dumps({})[:1])
    assert "restart the whole system" in refused(capsys, place, "registrar")
