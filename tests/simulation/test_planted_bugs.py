"""Ten planted bugs, each of which a search of 60 seeds finds (docs/reliability.md has the number of seeds that each took)."""

import re
from pathlib import Path

import pytest

from services.simulation.fuzz.trial import FaultTrial, scenario_of
from tests.support.simulated.planted_bugs import PLANTED, PlantedBug

SEEDS = range(1, 61)
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
    assert any(broken_by(PLANTED[name], seed) for seed in SEEDS)


def test_the_page_says_how_many_seeds_each_took() -> None:
    rows = dict(re.findall(r"^\| ([^|]+) \| (\d+) \|$", PAGE.read_text(), re.MULTILINE))
    assert set(rows) == set(PLANTED)
    assert all(int(seeds) in SEEDS for seeds in rows.values())
