"""The pure parts of benches/comparison.py, its generator's open loop, and a short run where the environments are there."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benches"))

from closed_loop import Run
from peers.environments import environment
from peers.systems import PEERS, SERVERS, requests
from peers.table import BEGIN, END, figures, tables, written

ROOT = Path(__file__).parents[3]


def measured(system: str, rate: float, **more: Any) -> dict[str, Any]:
    """One measurement; every figure of it grows with its rate."""
    keys = ("cpu_ms", "p50_ms", "p99_ms", "idle_mb", "loaded_mb", "start_s", "others", "late_ms")
    return {"system": system, "model": "mlp", "rate": rate} | dict.fromkeys(keys, rate / 100) | more


def found(*runs: dict[str, Any], **reasons: str) -> dict[str, Any]:
    names = dict.fromkeys([*(each["system"] for each in runs), *reasons])
    return {
        "when": "Then and there.",
        "models": {"mlp": {"what": "64 numbers", "rate": 100.0}},
        "systems": {name: {"mb": 1234.5, "seconds": 1.0, "reason": reasons.get(name, "")} for name in names},
        "runs": list(runs),
        "alone": [{"model": "mlp", "rate": 80_000.0, "cpu_ms": 0.0125}],
    }


def rows(table: str) -> list[list[str]]:
    """The cells of each line but the rule."""
    lines = [line for line in table.splitlines() if not line.startswith("|--")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# -- the table


def test_the_table_shows_medians_the_fastest_first() -> None:
    all_runs = [measured("fastapi", 900), measured("mosec", 4000), measured("mosec", 1000), measured("mosec", 3000)]
    shown = rows(figures(found(*all_runs), "mlp"))
    assert [row[:2] for row in shown[1:3]] == [["mosec", "3,000"], ["FastAPI, uvicorn", "900"]]
    assert shown[1][2:] == ["30.0", "30.0", "30.0", "30", "30", "30.0"]
    assert shown[3][:3] == ["*the model alone, no server*", "80,000", "0.013"]


def test_what_could_not_be_installed_or_started_says_so() -> None:
    failed = {"system": "ray", "model": "mlp", "failed": "it ended with 1: no | memory\nat all"}
    shown = rows(
        figures(found(failed, measured("mosec", 10), bentoml="pip could not install it: no such version"), "mlp")
    )
    assert {len(row) for row in shown} == {8}
    assert ["Ray Serve", "it ended with 1: no / memory at all"] in [row[:2] for row in shown]
    assert ["BentoML", "pip could not install it: no such version"] in [row[:2] for row in shown]


def test_a_failed_round_is_counted_and_not_averaged() -> None:
    failed = {"system": "mosec", "model": "mlp", "failed": "errors under load"}
    shown = rows(figures(found(measured("mosec", 10), failed), "mlp"))
    assert shown[1][:2] == ["mosec (1 of 2 rounds failed)", "10"]


def test_a_page_gets_the_tables_between_its_marks() -> None:
    made = tables(found(measured("mosec", 10)))
    page = f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe rest.\n"
    once = written(page, made)
    assert "old" not in once
    assert made in once
    assert once.startswith("# Title\n")
    assert once.endswith("The rest.\n")
    assert written(once, made) == once
    with pytest.raises(ValueError, match="needs the lines"):
        written("# Title\n", made)


# -- requests and replies


def test_every_system_has_a_server() -> None:
    assert {path.stem.removesuffix("_server") for path in SERVERS.glob("*_server.py")} == set(PEERS)


@pytest.mark.parametrize("name", PEERS)
def test_requests_are_whole_and_of_one_length(name: str) -> None:
    x = np.array([[0.0, 0.125], [1 / 3, 1e-7]], np.float32)
    made = requests(PEERS[name], "app.model", 8000, x)
    for row, sent in zip(x, made, strict=True):
        head, _, body = sent.tobytes().partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        assert lines[0] == f"POST {PEERS[name].path.format(served='app.model')} HTTP/1.1"
        fields = dict(line.split(": ") for line in lines[1:])
        assert int(fields["Content-Length"]) == len(body)
        if PEERS[name].as_json:
            (numbers,) = [
                value for value in [json.loads(body)] for value in [value.get("x") or value["inputs"][0]["data"]]
            ]
            assert np.array_equal(np.ravel(numbers).astype(np.float32), row)
        else:
            assert body.endswith(row.tobytes())


@pytest.mark.parametrize(
    "body", [b'{"scores": [0.1, 7e-1, 0.2]}', b'{"shape": [1, 3], "data": [0.1,0.7,0.2]}', b"[[0.1, 0.7, 0.2]]"]
)
def test_scores_are_found_in_json(body: bytes) -> None:
    asked = Run([b""], [1], 3, as_json=True)
    asked.check(0, body)
    assert asked.wrong == 0
    asked.check(0, body.replace(b"0.2", b"0.9"))
    assert asked.wrong == 1
    asked.check(0, b'{"error": "none"}')
    assert asked.wrong == 2


def test_the_open_loop_counts_from_the_moment_when_a_request_was_due() -> None:
    """No connection is free while requests fall due: then they go in turn, and their latencies say how long they waited."""
    run = Run([b"x"], [-1], 1, paced=True)
    run.measuring = True
    asyncio.run(run.pace(200.0, 0.2))
    ended = time.perf_counter()
    due: list[float] = []

    def send(began: float) -> None:
        due.append(began)
        run.next()
        run.took(began)

    while run.sent == len(due) and not run._idle:
        run.free(send)
    counted = [each for each in due if each >= run.since]
    assert due == sorted(due)
    assert 0 < len(counted) < len(due)
    assert len(run.latencies) == len(counted)
    assert all(latency >= ended - each for latency, each in zip(run.latencies, counted, strict=True))


# -- a run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_comparison_runs_from_start_to_table(tmp_path: Path) -> None:
    """Both systems start, answer rightly under both loads, and end."""
    for name in ("fastapi", "infaas"):
        if reason := environment(name, install=False).reason:
            pytest.skip(f"{PEERS[name].title}: {reason} (make bench-peers installs it)")
    kept = tmp_path / "figures.json"
    words = ["--seconds", "2", "--rounds", "1", "--peers", "fastapi,infaas", "--models", "mlp", "--no-install"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benches" / "comparison.py"), *words, "--json", str(kept)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads(kept.read_text())["runs"]
    assert [each.get("failed") for each in runs] == [None, None]
    assert all(each["rate"] > 0 and each["cpu_ms"] > 0 and each["idle_mb"] > 0 for each in runs)
    assert "FastAPI, uvicorn" in done.stdout
