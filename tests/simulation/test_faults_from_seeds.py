"""`infaas simulate --faults`: the same run for the same seed anywhere, and what it prints and writes."""

import json
import os
import subprocess
import sys
from contextlib import chdir
from hashlib import sha256
from pathlib import Path

import pytest

from infaas.cli import main
from services.simulation.fuzz.trial import FaultTrial, scenario_of

ROOT = Path(__file__).parents[2]
SEEDS = (3, 16)


def digests() -> list[str]:
    """Of every reply and row of each seed's run, and of its verdict."""
    found = []
    for seed in SEEDS:
        trial = FaultTrial(scenario_of(seed))
        verdict = trial.verdict()
        rows = [(one.number, one.sent, one.replies, one.row) for one in trial.queries.asked.values()]
        assert rows
        found.append(sha256(f"{verdict}{rows}{trial.kernel.events}".encode()).hexdigest())
    return found


@pytest.mark.slow
def test_the_same_run_in_a_process_with_other_hashes() -> None:
    code = "from tests.simulation.test_faults_from_seeds import digests; import json; print(json.dumps(digests()))"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environ = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, env=environ, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == digests()


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ("seven", "--faults 'seven': write a seed, a whole number, as 7, or FIRST-LAST, as 1-1000"),
        ("-3", "--faults '-3': write a seed"),
        ("9-3", "--faults 9-3: the last seed is before the first: write 3-9"),
    ],
)
def test_what_is_no_seed_is_refused(faults: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", f"--faults={faults}"]) == 2
    assert says in capsys.readouterr().err


def test_a_file_beside_a_seed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "small.toml", "--faults", "3"]) == 2
    assert "--faults takes a seed and no file" in capsys.readouterr().err


def test_a_file_says_that_it_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with chdir(tmp_path):
        Path("small.toml").write_text(SMALL)
        assert main(["simulate", "small.toml"]) == 0
        assert capsys.readouterr().out.startswith("small: sound; ")
        Path("wrong.toml").write_text(SMALL.replace("checked = true", "checked = 1"))
        assert main(["simulate", "wrong.toml"]) == 2
        assert "scenario.checked: must be true or false, not 1" in capsys.readouterr().err


def test_many_seeds_on_all_cores(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["simulate", "--faults", "12-13", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["seeds"] == "12-13" and found["simulated"]
    assert (code == 0) == (found["failing"] == {}) == (found["sound"] == 2)
    assert found["hours"] > 60 / 3600 and found["queries"] > 100


SMALL = """
[scenario]
duration_s = 5
checked = true
[[app]]
name = "a"
latency_ms = 200
[[variant]]
app = "a"
name = "v"
hardware = "cpu"
batch_latency_ms = { 1 = 10.0, 4 = 20.0 }
[[worker]]
kind = "cpu"
devices = { cpu = 2 }
price_per_hour = 0.2
start = 1
[[load]]
app = "a"
rate = 20
"""
