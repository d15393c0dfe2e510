"""Every program of benches/ still imports what it measures, and says how it is used. The short forms of the cache's and the ensembles' benches."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from bus.messages.catalog import Ensemble
from tests.support.servers.processes import ROOT, environ
from tests.support.simulated.fleet import variant
from tests.unit.dispatcher.test_equal_queries import fleet_of, inputs

sys.path.insert(0, str(ROOT / "benches"))

from cache import memory
from ensemble import OBJECTIVE_MS, of_failure, of_turns, regret, stragglers

READS = re.compile(r"ArgumentParser|rig\.parser\(|compare\.main\(")  # options
PROGRAMS = sorted(
    path for path in (ROOT / "benches").rglob("*.py") if "__main__" in (text := path.read_text()) and READS.search(text)
)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_says_how_it_is_used(program: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(program), "--help"], env=environ(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {program.name}")


def test_the_shipped_day_is_what_the_program_writes_for_its_seed() -> None:
    from paper.lookalike import OUT, text

    assert OUT.read_text() == text(1, 10)
    assert OUT.stat().st_size < 100_000


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("size", [40, 4_000])
def test_the_process_grows_by_about_the_bound(size: int) -> None:
    grown, counted, _ = memory(size, 16_000_000)
    assert 0.97 < counted <= 1.0
    assert 0.8 < grown < 1.2  # other memory of the process counts too; the bench measures it in a process of its own


def test_half_of_the_queries_repeated_gives_at_least_1_6_times_the_throughput() -> None:
    """One executor, a model of 5 ms without batches; 400 queries at once."""
    seconds = {}
    for cache_mb in (0, 1):
        slow = variant(base_ms=5.0, per_item_ms=0.0, max_batch=1)
        fleet = fleet_of(slow, selection=Ensemble(policy="majority", cache_mb=cache_mb))
        fleet.change(latency_ms=None)
        began = fleet.stage.now
        labels = [fleet.ask(inputs=inputs(number // 2)) for number in range(400)]
        fleet.stage.run(10.0)
        assert [len(fleet.replies(label)) for label in labels] == [1] * 400
        assert not any("error" in fleet.replies(label)[0] for label in labels)
        seconds[cache_mb] = max(at for at, subject, _ in fleet.stage.heard if subject.startswith("_INBOX")) - began
    assert seconds[0] > 1.6 * seconds[1]


@pytest.mark.slow
def test_after_a_failure_and_after_it_ends_both_policies_are_near_the_best_model() -> None:
    found = regret(partial(of_failure, queries=12_000), 1, eta=0.1)
    for phase in found.phases:
        assert phase.exp3 <= 1.2 * phase.best
        assert phase.exp4 <= 1.01 * phase.best
    before, during, after = found.failed
    assert during < 0.05
    assert min(before, after) > 0.8
    assert max(found.exp3, found.exp4) < found.single


def test_without_weights_that_follow_the_same_measure_fails() -> None:
    """With so small an eta that nothing is learnt, exp3 draws evenly: the measure can fail."""
    phase = regret(partial(of_turns, queries=2500), 1, eta=1e-9).phases[0]
    assert phase.exp3 > 2.0 * phase.best


@pytest.mark.slow
def test_a_slow_member_costs_confidence_and_not_latency() -> None:
    found = stragglers(seconds=10.0)
    full, late, patient = (found[way] for way in ("all in time", "answered at the objective", "wait for all"))
    assert (full["missing"], late["missing"], patient["missing"]) == (0.0, 1.0, 0.0)
    assert late["lost"] == 0
    assert late["p99_ms"] <= OBJECTIVE_MS + 10.0 < patient["p99_ms"]
    assert late["error"] <= full["error"] + 0.01
