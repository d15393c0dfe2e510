"""What `infaas simulate` shows of a document, and of its progress."""

from itertools import pairwise
from typing import Any

import pytest

from infaas.cli.simulated import print_runs
from infaas.cli.watching import by_line, watched
from tests.support.data.simulation_reports import document


def rows(text: str) -> list[dict[str, str]]:
    """The table's lines by title, by the columns' ends."""
    lines = text.splitlines()
    titles = [
        *("policy", "queries", "answered", "late", "refused", "failed", "violations", "accuracy", "worst drop"),
        *("answers/s", "p50 ms", "p99 ms", "US$ ", "US$ per 1,000", "utilisation"),
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
    print_runs(of)
    said = capsys.readouterr().out
    assert said.startswith("made-up, seed 7, 120 s, simulated\n")
    table = rows(said)
    assert [row["policy"] for row in table] == ["policy-0", "policy-1", "policy-2"]
    run = of["policies"][0]
    assert table[0]["violations"] == f"{100 * run['slo_violation_ratio']:.2f} %*"
    assert table[0]["US$ "] == f"{run['cost']:.4g}*"
    assert not table[0]["queries"].endswith("*")  # no more is no better
    for title in ("violations", "accuracy", "answers/s", "US$ ", "US$ per 1,000"):
        assert sum(row[title].endswith("*") for row in table) >= 1
    best = max(range(3), key=lambda i: of["policies"][i]["effective_accuracy"])
    assert table[best]["accuracy"].endswith("*")
    assert "* the best of these policies" in said
    assert "replicate" in said
    assert "overloaded" in said


def test_what_is_the_same_is_not_marked_and_what_is_unknown_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    of = document(2, 2)
    same: dict[str, Any] = {"effective_accuracy": None, "p50_ms": 12.0, "cost": 0.5}
    for run in of["policies"]:
        run |= same
    print_runs(of)
    table = rows(capsys.readouterr().out)
    assert [(row["accuracy"], row["p50 ms"], row["US$ "]) for row in table] == [("-", "12", "0.5")] * 2


def test_offline_jobs_are_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    of = document(1, 2)
    of["policies"][0]["jobs"] = [
        {"app": "faces", "inputs": 500, "done": 500, "finished_s": 83.5},
        {"app": "faces", "inputs": 1000, "done": 10, "finished_s": None},
    ]
    print_runs(of)
    assert "offline: 1 of 2 jobs, 510 of 1,500 items" in capsys.readouterr().out


def test_one_policy_is_not_the_best_of_anything(capsys: pytest.CaptureFixture[str]) -> None:
    print_runs(document(1, 2))
    assert "*" not in capsys.readouterr().out


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


def test_a_short_run_is_quiet_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with watched(["a"], 10.0) as told:
        for second in range(11):
            told("a", float(second))
    assert capsys.readouterr() == ("", "")
