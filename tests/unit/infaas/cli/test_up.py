"""The options of `infaas up`, in what it starts: a stack's specification, from which services/shell/host/stack starts processes."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bus.login import SystemAddress
from infaas.cli import build, main
from infaas.cli.up import _plan
from services.shell.host.endpoints import mark_stopped, write_endpoints, write_parts
from services.shell.host.stack import StackSpec
from tests.support.clients.commands import ran


def planned(words: str, place: Path) -> StackSpec:
    """What `infaas up` with these options starts."""
    _, bound, _ = build().parse_args(["up", "--data-dir", str(place), *words.split()], exit_on_error=False)
    bound.apply_defaults()
    given = dict(bound.arguments)
    del given["json"]  # of what is printed
    return _plan(**given)


def test_each_option_is_in_what_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFAAS_WORKER__SIMULATE", "INFAAS_DISPATCHER__COUNT"):
        monkeypatch.delenv(name, raising=False)
    plain = planned("", tmp_path)
    assert (plain.data_dir, plain.workers, plain.dashboard, plain.gateway) == (tmp_path, 1, True, True)
    assert planned("--workers 3", tmp_path).workers == 3
    assert planned("--dispatchers 4", tmp_path).dispatchers == 4 != plain.dispatchers
    (tmp_path / "own.toml").write_text("[dispatcher]\nmax_queue = 7\n")
    assert planned(f"--config {tmp_path / 'own.toml'}", tmp_path).settings.dispatcher.max_queue == 7
    assert planned("--no-dashboard", tmp_path).dashboard is False  # --dashboard
    assert planned("--no-gateway", tmp_path).gateway is False  # --gateway
    assert (plain.fused, planned("--fused", tmp_path).fused) == (False, True)
    assert planned("--fused", tmp_path).environ["INFAAS_MACHINES__PROVIDER"] == "off"  # no further worker is started


def test_one_process_is_for_one_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["up", "--fused", "--data-dir", str(tmp_path), "--max-workers", "2", "--dispatchers", "2"]
    assert "leave out --max-workers, --dispatchers" in ran(capsys, words, 2).err


def test_more_workers_under_load_are_machines_of_the_plain_kind(tmp_path: Path) -> None:
    spec = planned("--workers 2 --max-workers 5", tmp_path)
    assert [(one.minimum, one.maximum) for one in spec.settings.machines.kinds.values()] == [(2, 5)]
    assert spec.environ["INFAAS_MACHINES__KINDS__CPU__MAXIMUM"] == "5"  # for the services


def test_without_its_extra_there_is_no_dashboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "streamlit", None)
    write_endpoints(tmp_path, SystemAddress(nats="nats://n", sql="postgresql://s", writer="w"), {})
    assert planned("", tmp_path).dashboard is False
    for words in (["open", "--data-dir", str(tmp_path)], ["run", "dashboard"]):
        assert "pip install 'infaas[dashboard]'" in ran(capsys, words, 1).err


def test_without_its_extra_there_is_no_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert planned("", tmp_path).environ["INFAAS_GATEWAY__GRPC_PORT"] == "0"
    assert "pip install 'infaas[up]'" in capsys.readouterr().err


# -- `infaas restart`: which processes it ends, what it waits for, and what it says where there is nothing to restart.


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_endpoints(tmp_path, SystemAddress(nats="nats://n", sql="postgresql://s", writer="w"), {})
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], place: Path, part: str) -> str:
    return ran(capsys, ["restart", part, "--data-dir", str(place)], 1).err


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_what_is_no_service_is_refused_with_those_that_there_are(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parts(place, {"dispatcher-0": 1, "registrar": 1})
    there = "there are dispatcher-0, registrar"
    assert refused(capsys, place, "dispacher-0") == (
        f"infaas: no service is called dispacher-0: {there}; did you mean dispatcher-0?\n"
    )
    assert refused(capsys, place, "nats") == f"infaas: no service is called nats: {there}\n"


def test_nothing_runs_there(tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark_stopped(place)
    assert "is stopped: start one with" in refused(capsys, place, "registrar")
    assert "no system runs in" in refused(capsys, tmp_path / "other", "registrar")


def test_words_of_another_version_are_no_traceback(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "parts.json").write_text(json.dumps({})[:1])
    assert "restart the whole system" in refused(capsys, place, "registrar")


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
