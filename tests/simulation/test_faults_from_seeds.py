"""`infaas simulate --faults`: the same run for the same seed anywhere, and what it prints and writes."""

import json
import re
from contextlib import chdir
from hashlib import sha256
from itertools import count
from pathlib import Path

import pytest

from infaas.cli import main
from services.simulation.fuzz.draw import document_of
from services.simulation.fuzz.sequence import CLIENT, as_mermaid, as_text, trace_of
from services.simulation.fuzz.trial import FaultTrial, broken, scenario_of, shrink
from services.simulation.scenario.read import derive
from tests.support.clients.commands import ran
from tests.support.servers.processes import with_other_hashes
from tests.support.simulated.planted_bugs import PLANTED, PlantedBug

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
    assert json.loads(with_other_hashes(code)) == digests()


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ("seven", "--faults 'seven': write a seed, a whole number, as 7, or FIRST-LAST, as 1-1000"),
        ("-3", "--faults '-3': write a seed"),
        ("9-3", "--faults 9-3: the last seed is before the first: write 3-9"),
    ],
)
def test_what_is_no_seed_is_refused(faults: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in ran(capsys, ["simulate", f"--faults={faults}"], 2).err


def test_files_say_that_they_are_checked_and_are_refused_beside_a_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chdir(tmp_path):
        Path("small.toml").write_text(SMALL)
        assert ran(capsys, ["simulate", "small.toml"]).out.startswith("small: sound; ")
        Path("wrong.toml").write_text(SMALL.replace("checked = true", "checked = 1"))
        assert main(["simulate", "wrong.toml"]) == 2
        assert "scenario.checked: must be true or false, not 1" in capsys.readouterr().err
    assert main(["simulate", "small.toml", "--faults", "3"]) == 2
    assert "--faults takes a seed and no file" in capsys.readouterr().err


@pytest.mark.slow
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


# -- Twelve planted bugs, each of which a search of 60 seeds finds (docs/reliability.md has the number of seeds that each took).
SEARCHED = range(1, 61)
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def broken_by(bug: PlantedBug, seed: int) -> set[str]:
    """Which of its invariants the bug breaks with this seed, that hold without it."""
    scenario = scenario_of(seed)
    found = FaultTrial(scenario, bug.wrap).verdict(
        until=lambda found: any(one.invariant in bug.breaks for one in found)
    )
    broken = {one.invariant for one in found.violations} & bug.breaks
    return broken and broken - {one.invariant for one in FaultTrial(scenario).verdict().violations}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    assert any(broken_by(PLANTED[name], seed) for seed in SEARCHED)


def test_the_page_says_how_many_seeds_each_took() -> None:
    rows = dict(re.findall(r"^\| ([^|]+) \| (\d+) \|$", PAGE.read_text(), re.MULTILINE))
    assert set(rows) == set(PLANTED)
    assert all(int(seeds) in SEARCHED for seeds in rows.values())


# -- A run that breaks is shrunk to a small scenario that breaks the same, and what was said about its query is drawn.
BUG = PLANTED["a row ok for a refusal"]
RUNS = 25


@pytest.mark.slow
def test_a_small_scenario_breaks_the_same() -> None:
    document, first = next(
        (document, found)
        for document in map(document_of, count(1))
        if (found := broken(document, "row-as-told", BUG.wrap)) is not None
    )
    runs = []
    smallest, violation = shrink(
        document, first, lambda: len(runs) >= RUNS, lambda number, _: runs.append(number), BUG.wrap
    )
    assert violation.invariant == first.invariant == "row-as-told"
    assert broken(smallest, "row-as-told", BUG.wrap) == violation
    assert len(str(smallest)) < len(str(document))
    assert smallest["scenario"]["duration_s"] < document["scenario"]["duration_s"]

    steps = trace_of(derive(smallest, Path("small.toml")), violation.query, "row-as-told", BUG.wrap)
    assert steps[0].source == CLIENT
    assert any(one.to == CLIENT and one.words == "Refusal deadline" for one in steps)
    assert any(one.source == one.to and one.words == "row: ok" for one in steps)
    drawn = as_text(steps).splitlines()
    assert len(drawn) == 1 + len(steps)
    assert drawn[0].split()[0] == CLIENT
    assert any("<" in line and line.endswith("Refusal deadline") for line in drawn)
    assert as_mermaid(steps).startswith("sequenceDiagram\n    participant p0 as client\n")
    assert as_mermaid(steps).count("->>") + as_mermaid(steps).count("Note over") == len(steps)
