"""`infaas simulate`: from a file to a table, a document and a picture; what is refused and how."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from infaas.cli import main
from infaas.cli.simulate import by_line, print_runs, progress_shown
from services.simulation.report import MEASURED
from tests.support.clients.commands import ran, refused
from tests.support.data.simulation_reports import document
from tests.support.servers.processes import environ, infaas

SCENARIO = """
[scenario]
name = "small"
duration_s = 20
seed = 3
policies = ["infaas", "clipper+"]
[[variant]]
app = "faces"
model = "net"
name = "light"
hardware = "cpu"
batch_latency_ms = { 1 = 10.0, 8 = 40.0 }
max_batch = 8
accuracy = 0.7
load_s = 0.5
memory_gb = 0.5
[[app]]
name = "faces"
latency_ms = 200
[[worker]]
kind = "cpu"
devices = { cpu = 4 }
resources = { cpu_memory_gb = 16.0 }
price_per_hour = 0.2
boot_s = 5.0
start = 1
max = 2
[[load]]
app = "faces"
arrivals = "poisson"
rate = 30
"""
HEAVY = SCENARIO.replace("rate = 30", "rate = 300").replace("duration_s = 20", "duration_s = 20000")


def less_progress(said: str) -> str:
    """Without the lines that only a run of more than a few seconds prints, as on a busy machine."""
    return "".join(line for line in said.splitlines(keepends=True) if not re.match(r"\d+ %: ", line))


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return path


def heavy(tmp_path: Path) -> Path:
    path = tmp_path / "heavy.toml"
    path.write_text(HEAVY)
    return path


def strip(document: dict[str, Any]) -> str:
    runs = [{key: value for key, value in run.items() if key not in MEASURED} for run in document["policies"]]
    return json.dumps(document | {"policies": runs})


def test_who_knows_the_load_is_the_measure(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(ran(capsys, ["simulate", str(scenario), "--oracle", "--json"]).out)
    best = found["oracle"]
    assert best["cost"] == pytest.approx(0.2 * 20 / 3600), "one machine carries it"
    assert best["accuracy"] == pytest.approx(0.7)
    for run in found["policies"]:
        assert run["to_oracle"]["cost"] == pytest.approx(run["cost"] / best["cost"])
        assert run["to_oracle"]["cost"] >= 1
        assert run["to_oracle"]["accuracy"] == pytest.approx(1.0)
    assert (
        "Who knows the load pays at least US$ 0.00111"
        in ran(capsys, ["simulate", str(scenario), "--oracle", "--policy", "infaas"]).out
    )
    kept = SCENARIO.replace("latency_ms = 200", 'latency_ms = 200\nselection = { policy = "majority", cache_mb = 1 }')
    (tmp_path / "kept.toml").write_text(kept)
    said = ran(capsys, ["simulate", str(tmp_path / "kept.toml"), "--oracle", "--policy", "infaas"]).out
    assert "app faces is left out: it keeps answers, and what has one takes no work." in said


def test_the_document_has_what_the_contract_names_and_repeats_itself(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.json"
    said = ran(capsys, ["simulate", str(scenario), "--json", "--out", str(kept)])
    document = json.loads(said.out)
    assert said.out == kept.read_text()
    assert (document["scenario"], document["seed"]) == ("small", 3)
    assert [run["policy"] for run in document["policies"]] == ["infaas", "clipper+"]
    for run in document["policies"]:
        assert run["simulated"] is True
        assert run["queries"] == pytest.approx(600, rel=0.2)
        assert run["answered"] == run["queries"] - run["refused"] - run["failed"]
        assert run["effective_accuracy"] == pytest.approx(0.7)
        assert 10 <= run["p50_ms"] <= run["p99_ms"]
        assert run["cost"] == pytest.approx(20 * 0.2 / 3600, rel=0.2)
        assert run["cost_per_1000"] == pytest.approx(1000 * run["cost"] / run["answered"])
        assert 0 < run["mean_utilisation"] < 1
        assert run["decisions"].keys() >= {"p50_us", "p99_us"}
        assert run["events_per_s"] > 0
        series = run["series"]
        assert {"offered_qps", "answered_qps", "violations", "cost_rate"} < series.keys()
        lengths = {len(row) for row in series.values() if isinstance(row, list)}
        lengths |= {len(row) for of in ("instances", "workers") for row in series[of].values()}
        assert lengths == {len(series["time"])}
        assert max(series["instances"]["light"]) >= 1
        assert series["workers"]["cpu"][0] == 1
    assert strip(json.loads(ran(capsys, ["simulate", str(scenario), "--json"]).out)) == strip(document)
    assert main(["simulate", str(scenario), "--json", "--seed", "4"]) == 0
    assert strip(json.loads(capsys.readouterr().out)) != strip(document)


def test_policies_by_name_take_the_place_of_the_file_s(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario.write_text(SCENARIO.replace("duration_s = 20", "duration_s = 1"))
    for arguments in (
        [str(scenario), "--policy", "sm+", "infaas"],
        [str(scenario), "--policy", "sm+", "--policy", "infaas"],
        ["--policy", "sm+", "infaas", str(scenario)],
    ):
        said = ran(capsys, ["simulate", *arguments, "--wide"])
        assert [line.split()[0] for line in said.out.splitlines()[1:4]] == ["policy", "sm+", "infaas"]
        assert less_progress(said.err) == ""


def test_what_a_policy_prints_is_not_among_the_results(scenario: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scenario.with_name("chatty.py").write_text(
        "import os\n"
        "from services.core.selection.policy import InfaasPolicy\n"
        "print('imported')\n"
        "class Chatty(InfaasPolicy):\n"
        "    def select(self, ask, now, view):\n"
        "        print('asked')\n"
        "        os.write(1, b'deeper\\n')\n"  # as C code does, HiGHS for one
        "        return super().select(ask, now, view)\n"
    )
    assert main(["simulate", str(scenario), "--policy", "chatty:Chatty", "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["policies"][0]["policy"] == "chatty:Chatty"
    assert said.err.startswith("imported\n")
    assert said.err.count("asked\n") > 100
    assert said.err.count("deeper\n") > 100


def test_a_picture(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.png"
    scenario.write_text(SCENARIO.replace("duration_s = 20", "duration_s = 1"))
    code = main(["simulate", str(scenario), "--policy", "infaas", "--wide", "--plot", str(path)])
    said = capsys.readouterr()
    if find_spec("matplotlib") is None:
        assert code == 2
        assert "infaas[plot]" in said.err
        return
    assert code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert less_progress(said.err) == f"wrote {path}\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rate = 30", "rate = -4", "load[0].rate: must be at least 0 and at most 1e+07, not -4"),
        ("seed = 3", "sede = 3", "scenario.sede: there is no such key; did you mean seed?"),
        (
            'arrivals = "poisson"\nrate = 30',
            'arrivals = "trace"\nfile = "gone.txt"',
            "load[0].file: cannot read the trace ",
        ),
    ],
)
def test_bad_files_exit_2_with_file_key_and_reason(
    old: str, new: str, said: str, scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in SCENARIO
    scenario.write_text(SCENARIO.replace(old, new))
    assert refused(capsys, ["simulate", str(scenario), "--json"]).startswith(f"infaas: {scenario}: {said}")


def _hears_ctrl_c() -> None:
    """As in a terminal, also where these tests run in the background, whose processes ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    """As on a terminal, whose bar says when the run is under way."""
    ours, theirs = pty.openpty()
    said = b""
    command = [sys.executable, "-m", "infaas.cli", "simulate", str(heavy(tmp_path)), "--policy", "infaas"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environ(TERM="xterm"),
        preexec_fn=_hears_ctrl_c,  # noqa: PLW1509
    ) as process:
        os.close(theirs)
        try:
            while b"%" not in said:
                said += os.read(ours, 4096)
            process.send_signal(signal.SIGINT)
            try:
                while True:
                    said += os.read(ours, 4096)
            except OSError:  # the other end is closed
                pass
            assert process.wait(30) == 130
            assert process.stdout.read() == b""
        finally:
            process.kill()
            os.close(ours)
    assert b"infaas" in said
    assert b"Traceback" not in said
    assert said.rfind(b"\x1b[?25h") > said.rfind(b"\x1b[?25l")  # the cursor is back


def test_help_is_quick(scenario: Path) -> None:
    done = infaas("simulate", "--help", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    assert "SCENARIO" in done.stdout
    for heavy_one in ("numpy", "matplotlib", "nats", "services.simulation.run"):
        assert f" {heavy_one}\n" not in done.stderr


# -- What `infaas simulate` shows of a document, and of its progress.


def rows(text: str) -> list[dict[str, str]]:
    """The table's lines by title, by the columns' ends."""
    lines = text.splitlines()
    titles = [
        *("policy", "queries", "answered", "late", "refused", "failed", "violations", "accuracy", "worst drop"),
        *("answers/s", "p50 ms", "p99 ms", "US$ ", "US$/1,000", "utilisation"),
    ]
    head = lines[1] + " "
    ends = [head.index(title) + len(title.strip()) + 1 for title in titles[1:]]
    found = []
    for line in lines[2 : lines.index("")]:
        bounds = [0, len("policy-0"), *ends]
        cells = [line.ljust(len(head))[a:b].strip() for a, b in pairwise(bounds)]
        found.append(dict(zip(titles, cells, strict=True)))
    return found


def test_a_line_for_each_policy_with_the_best_marked(capsys: pytest.CaptureFixture[str]) -> None:
    of = document(3, 4)
    print_runs(of, wide=True)
    said = capsys.readouterr().out
    assert said.startswith("made-up, seed 7, 120 s, simulated\n")
    table = rows(said)
    assert [row["policy"] for row in table] == ["policy-0", "policy-1", "policy-2"]
    run = of["policies"][0]
    assert table[0]["violations"] == f"{100 * run['slo_violation_ratio']:.2f} %*"
    assert table[0]["US$ "] == f"{run['cost']:.4g}*"
    assert not table[0]["queries"].endswith("*")  # no more is no better
    for title in ("violations", "accuracy", "answers/s", "US$ ", "US$/1,000"):
        assert sum(row[title].endswith("*") for row in table) >= 1
    best = max(range(3), key=lambda i: of["policies"][i]["effective_accuracy"])
    assert table[best]["accuracy"].endswith("*")
    assert "* the best of these policies" in said
    assert "replicate" in said
    assert "overloaded" in said


def test_tables_mark_what_differs_and_tell_offline_jobs_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    of = document(2, 2)
    same: dict[str, Any] = {"effective_accuracy": None, "p50_ms": 12.0, "cost": 0.5}
    for run in of["policies"]:
        run |= same
    print_runs(of, wide=True)
    table = rows(capsys.readouterr().out)
    assert [(row["accuracy"], row["p50 ms"], row["US$ "]) for row in table] == [("-", "12", "0.5")] * 2
    of = document(1, 2)
    of["policies"][0]["jobs"] = [
        {"app": "faces", "inputs": 500, "done": 500, "finished_s": 83.5},
        {"app": "faces", "inputs": 1000, "done": 10, "finished_s": None},
    ]
    print_runs(of, wide=True)
    assert "offline: 1 of 2 jobs, 510 of 1,500 items" in capsys.readouterr().out


def test_only_missed_targets_are_told_the_worst_first(capsys: pytest.CaptureFixture[str]) -> None:
    of = document(1, 2)
    of["policies"][0]["apps"] = {
        "met": {"slo_target": 0.99, "attainment": 0.99},
        "near": {"slo_target": 0.99, "attainment": 0.98996},
        "unasked": {"slo_target": 0.99, "attainment": None},
        "far": {"slo_target": 0.999, "attainment": 0.5},
    }
    print_runs(of, wide=True)
    assert "targets missed: far 50 % of 99.9 %, near 98.996 % of 99 %;" in capsys.readouterr().out
    of["policies"][0]["apps"] = {f"a{i}": {"slo_target": 0.99, "attainment": 0.9} for i in range(8)}
    print_runs(of, wide=True)
    assert "a4 90 % of 99 %, and 3 more;" in capsys.readouterr().out
    of["policies"][0]["apps"] = {"met": {"slo_target": 0.99, "attainment": 1.0}}
    print_runs(of, wide=True)
    assert "targets" not in capsys.readouterr().out


def test_short_runs_are_quiet_and_one_policy_is_not_the_best_of_anything(capsys: pytest.CaptureFixture[str]) -> None:
    print_runs(document(1, 2), wide=True)
    assert "*" not in capsys.readouterr().out
    with progress_shown(["a"], 10.0) as told:
        for second in range(11):
            told("a", float(second))
    assert capsys.readouterr() == ("", "")


def test_lines_of_progress_begin_after_a_while_and_come_once_a_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    told = by_line(["a", "b"], 100.0, lambda: now)
    for policy in ("a", "b"):
        for second in range(1, 101):
            now += 0.1
            told(policy, float(second))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["20 %", "30 %", "40 %", "50 %", "60 %", "70 %", "80 %", "90 %"]
    assert lines[0] == "20 %: a, 40 of 100 s, after 4 s"
    assert lines[4] == "60 %: b, 20 of 100 s, after 12 s"
