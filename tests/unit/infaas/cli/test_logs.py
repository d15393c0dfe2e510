"""`infaas logs`: lines of several processes in the order of time, new ones as they come, and what is said where there are none."""

import json
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from infaas.cli import main
from infaas.logfiles import LEVELS, LogFile
from tests.support.clients.commands import ran
from tests.support.servers.processes import environ

INFO = LEVELS["INFO"]


def entry(at: float, message: str, level: str = "INFO", **more: object) -> str:
    return json.dumps({"time": at, "level": level, "logger": "x", "message": message, **more}) + "\n"


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    directory = tmp_path / "logs"
    directory.mkdir()
    return directory


def test_lines_of_all_processes_are_in_the_order_of_time(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (logs / "registrar.log").write_text(entry(1000.0, "first") + entry(3000.0, "third", pid=7))
    (logs / "postgres.log").write_text("1970-01-01 00:33:20.000 UTC [9] LOG:  second\n\tits detail\n")
    (logs / "nats.log").write_text("[1] 1970/01/01 01:06:40.000000 [INF] fourth\n")
    lines = ran(capsys, ["logs", "--data-dir", str(logs.parent)]).out.splitlines()
    assert [line.split()[1] for line in lines] == ["registrar", "postgres", "postgres", "registrar", "nats"]
    words = ["first", "second", "detail", "third", "fourth"]
    assert [word for line in lines for word in words if word in line] == words
    assert "pid=7" in lines[3]
    # one time, a level
    assert [line.split(maxsplit=3)[2:] for line in lines[1:3]] == [["INFO", "second"], ["INFO", "its detail"]]
    assert lines[4].split(maxsplit=3)[2:] == ["INFO", "fourth"]
    assert datetime.fromisoformat(lines[3].split()[0]) == datetime(1970, 1, 1, 0, 50, tzinfo=UTC)
    for last, service in ((["-n", "2"], ["reg"]), (["--lines", "2"], ["--service", "reg"])):
        assert len(ran(capsys, ["logs", *last, "--data-dir", str(logs.parent)]).out.splitlines()) == 2
        assert main(["logs", *service, "--data-dir", str(logs.parent)]) == 0
        assert {line.split()[1] for line in capsys.readouterr().out.splitlines()} == {"registrar"}


def test_following_goes_on_with_new_lines_until_ctrl_c(logs: Path) -> None:
    (logs / "gateway.log").write_text(entry(1.0, "old"))
    words = ("logs", "--follow", "--data-dir", str(logs.parent))
    command = [sys.executable, "-P", "-m", "infaas.cli", *words]
    with subprocess.Popen(command, env=environ(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert "old" in process.stdout.readline()
            (logs / "monitor.log").write_text(entry(2.0, "new"))
            assert "new" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()


def test_a_services_lines_say_that_it_was_killed_and_started_again(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (logs / "executor-w0.log").write_text(entry(1.0, "executor runs"))
    told = (
        "executor-w0 ended (killed by SIGKILL)",
        "executor-w0 was started again (process 7)",
        "nats ended (exit code 1)",
    )
    (logs / "up.log").write_text("".join(entry(2.0 + n, text, "WARNING") for n, text in enumerate(told)))
    shown = ran(capsys, ["logs", "executor", "--data-dir", str(logs.parent)]).out.splitlines()
    assert [line.split(maxsplit=3)[3] for line in shown] == ["executor runs", *told[:2]]


def test_a_level_hides_the_lower_ones_but_no_crash(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = entry(1.0, "quiet") + entry(2.0, "loud", "WARNING", exception="Traceback\n  in it") + "Segmentation fault\n"
    (logs / "executor-w0.log").write_text(text)
    shown = ran(capsys, ["logs", "--level", "warning", "--data-dir", str(logs.parent)]).out
    assert "quiet" not in shown
    assert "loud" in shown
    assert "in it" in shown
    assert "ERROR   Segmentation fault" in shown


def test_servers_lines_have_levels_and_routine_needs_the_lowest(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = (
        "LOG:  checkpoint starting: time",
        "ERROR:  no such table",
        "STATEMENT:  SELECT 1",
        "FATAL:  no room",
        "LOG:  ready",
    )
    (logs / "postgres.log").write_text("".join(f"2026-01-02 03:04:05.006 UTC [9] {each}\n" for each in told))
    where = ["--data-dir", str(logs.parent)]

    def said(*level: str) -> list[list[str]]:
        return [line.split(maxsplit=3)[2:] for line in ran(capsys, ["logs", *level, *where]).out.splitlines()]

    wrong = [["ERROR", "no such table"], ["ERROR", "STATEMENT: SELECT 1"], ["CRITICAL", "no room"]]
    assert said() == [*wrong, ["INFO", "ready"]]
    assert said("--level", "error") == wrong
    assert said("--level", "debug")[0] == ["DEBUG", "checkpoint starting: time"]


def test_new_lines_come_once_and_whole_also_after_the_file_was_begun_anew(logs: Path) -> None:
    path = logs / "gateway.log"
    path.write_text(entry(1.0, "old") + entry(2.0, "half")[:10])
    file = LogFile(path)
    assert [text for _, _, text in file.last(10, INFO)] == ["INFO    old"]
    assert file.new(INFO) == []
    with path.open("a") as more:
        more.write(entry(2.0, "half")[10:] + entry(3.0, "new"))
    assert [text for _, _, text in file.new(INFO)] == ["INFO    half", "INFO    new"]
    assert file.new(INFO) == []
    path.write_text(entry(4.0, "anew"))
    assert [text for _, _, text in file.new(INFO)] == ["INFO    anew"]
    path.unlink()
    assert file.new(INFO) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dispatcher"], "no process is called dispatcher: there are gateway"),
        (["--level", "loud"], "--level loud: is no level: use debug, info, warning or error"),
        (["--lines", "x"], "must be a whole number"),
    ],
)
def test_mistakes_say_what_there_is(
    logs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (logs / "gateway.log").write_text("")
    assert main(["logs", *arguments, "--data-dir", str(logs.parent)]) != 0
    assert said in capsys.readouterr().err


def test_without_logs_it_says_how_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "infaas up" in ran(capsys, ["logs", "--data-dir", str(tmp_path)], 1).err


def test_open_prints_the_address_and_says_when_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROWSER", "true")
    place = {"nats": "nats://h:1", "sql": "postgresql://h/x", "running": True, "gateway": "http://h:8000"}
    (tmp_path / "endpoints.json").write_text(json.dumps(place))
    for page in (["gateway"], ["--page", "gateway"]):
        assert ran(capsys, ["open", *page, "--data-dir", str(tmp_path)]).out == "http://h:8000\n"
    assert "without a dashboard" in ran(capsys, ["open", "--data-dir", str(tmp_path)], 1).err
