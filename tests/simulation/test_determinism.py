"""The same scenario and seed give the same run, byte for byte: again, and in a process that hashes otherwise."""

import json
import os
import subprocess
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.simulation.scenario.model import Scenario
from tests.support.data.random_scenarios import chosen
from tests.support.data.small_scenarios import SMALL, Told, processes

ROOT = Path(__file__).parents[2]
ALL = {
    "failing": SMALL["failing"],
    "several": SMALL["several"],
    "processes": processes,
    **{f"varied-{seed}": partial(chosen, seed, most_apps=6) for seed in (33, 84)},
}


def digest(scenario: Scenario) -> str:
    """Of every event in its order, of every reply to a client, and of the result."""
    run = Told(scenario)
    result = json.dumps(run.result())
    return sha256(f"{run.log}{run.ends}{result}".encode()).hexdigest()


def digests() -> dict[str, str]:
    return {name: digest(make()) for name, make in ALL.items()}


@pytest.fixture(scope="module")
def here() -> dict[str, str]:
    return digests()


@pytest.mark.slow
def test_again_in_this_process(here: dict[str, str]) -> None:
    assert digest(SMALL["failing"]()) == here["failing"]
    assert digest(processes()) == here["processes"]
    assert digest(ALL["varied-84"]()) == here["varied-84"]


@pytest.mark.slow
def test_in_a_process_with_other_hashes(here: dict[str, str]) -> None:
    """Sets of texts are walked in another order there."""
    code = "from tests.simulation.test_determinism import digests; import json; print(json.dumps(digests()))"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environ = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, env=environ, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout.splitlines()[-1]) == here  # the solver may print a line of its own before


def test_another_seed_is_another_run(here: dict[str, str]) -> None:
    assert digest(replace(SMALL["failing"](), seed=8)) != here["failing"]
    assert digest(replace(processes(), seed=8)) != here["processes"]
